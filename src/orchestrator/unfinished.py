"""Keeps the progress of running groups, for checkpoints: finished rollouts, and others between two turns.

    run_rollout  --asks, steps-->  RolloutProgress  --take-->  UnfinishedRollout --+
    group runner --ends--------->  GroupProgress    --take-->  UnfinishedGroup  <--+--> a checkpoint, another process

A rollout is between two turns while it waits for an answer. If a checkpoint is taken then, its environment returns its
state. A step may take minutes, and the environment gets no other call meanwhile: so its state is taken before each step
and held until the step has ended. A checkpoint lacks only the answer, or the step, that is in progress.

After a resume a rollout starts again if it has no turn yet, or if its environment returned no state
(`Env.state_dict`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.env import Env, StopCondition
from orchestrator.ledger import Group
from orchestrator.trajectory import Trajectory, TrajectoryBuilder

log = logging.getLogger(__name__)
SPECIAL = "__trireme__"
"""The only key of an object that stands for a value that JSON does not have: an array (by its number), or a float that
is not finite."""
KINDS = "biuf"
LARGEST_ITEM = 8
"""The dtypes of arrays in a state: bool, integers and floats, of at most LARGEST_ITEM bytes."""


class BadState(Exception):
    """An environment's `state_dict` returned a value that a checkpoint cannot hold; the message names the place."""


@dataclass(frozen=True, eq=False)
class UnfinishedRollout:
    """A rollout between two turns."""

    trajectory: Trajectory
    """The trajectory of its turns so far, at least one."""
    prompt: npt.NDArray[np.int32]
    """The token ids of the next prompt, which the environment has returned already."""
    follows: bool
    """True: `prompt` is the part after all tokens so far; False: it is the whole prompt."""
    stop: StopCondition
    """The stop condition of the next answer."""
    env_state: Mapping[str, object]
    """The result of `state_dict` of its environment, as `plain` returns it."""
    retry: int
    """The number of failed tries before this one."""


@dataclass(frozen=True, eq=False)
class UnfinishedGroup:
    """A running group in a checkpoint."""

    group: Group
    rollouts_G: tuple[Trajectory | UnfinishedRollout | None, ...]
    """For each rollout: its trajectory if it has finished, its progress if it continues after a resume, or None if it
    starts again."""
    temperature: float
    """The temperature at which all its tokens were sampled."""

    @property
    def trajectories_G(self) -> list[Trajectory]:
        """The trajectories of all rollouts that need not start over after a resume, in order. For an unfinished
        rollout, this is the trajectory so far."""
        rollouts = [rollout for rollout in self.rollouts_G if rollout is not None]
        return [rollout.trajectory if isinstance(rollout, UnfinishedRollout) else rollout for rollout in rollouts]


class RolloutProgress:
    """The progress of one try of a rollout, which `run_rollout` updates. `begun`: the rollout of a checkpoint that this
    try continues (None: the try starts anew)."""

    __slots__ = ("_between", "_retry", "_snapshot", "begun")

    def __init__(self, retry: int = 0, begun: UnfinishedRollout | None = None) -> None:
        self.begun = begun
        self._retry = retry
        self._snapshot = begun
        self._between: tuple[Env, TrajectoryBuilder, npt.NDArray[np.int32], bool, StopCondition] | None = None

    def asks(
        self,
        env: Env,
        builder: TrajectoryBuilder,
        prompt: npt.NDArray[np.int32],
        follows: bool,
        stop: StopCondition,
    ) -> None:
        """Records that the rollout waits for the answer to `prompt`: it is before its first turn or between two turns.
        `follows`: True if `prompt` holds only the tokens after the last turn. `stop`: the stop condition of the
        answer."""
        self._snapshot = None
        self._between = (env, builder, prompt, follows, stop)

    def steps(self) -> None:
        """Saves the rollout with the environment's present state, and records that a step of the environment begins.
        Raises BadState, and errors of the environment."""
        self._snapshot = self._now()
        self._between = None

    def take(self) -> UnfinishedRollout | None:
        """Returns the state of the rollout at its last boundary between two turns, for a checkpoint; None if the
        rollout has to start again after a resume."""
        if self._between is None:
            return self._snapshot
        try:
            return self._now()
        except Exception as error:  # of the environment: it costs this rollout, not the checkpoint
            log.warning("a rollout starts again after a resume: %s: %s", type(error).__name__, error)
            return None

    def _now(self) -> UnfinishedRollout | None:
        assert self._between is not None, "a step begins only after a prompt"
        env, builder, prompt, follows, stop = self._between
        if not builder.turns or (state := env.state_dict()) is None:
            return None
        place = f"{type(env).__name__}.state_dict()"
        if not isinstance(state, Mapping):
            raise BadState(f"{place} gave {str(state)[:100]!r}; expected a mapping, or None")
        return UnfinishedRollout(builder.so_far(), prompt, follows, stop, plain(state, place), self._retry)


@dataclass(eq=False)
class GroupProgress:
    """The progress of a running group."""

    keeps_finished: bool
    """True: a checkpoint holds finished rollouts too, because another process may compute the group's rewards."""
    finished: dict[int, Trajectory] = field(default_factory=dict)
    """Finished rollouts, by number."""
    waiting: dict[int, UnfinishedRollout] = field(default_factory=dict)
    """Rollouts of a checkpoint that continue as soon as the group is started, by number."""
    running: dict[int, RolloutProgress] = field(default_factory=dict)
    """The last try of each rollout that was started and has not finished, by number."""

    @classmethod
    def of(cls, group: UnfinishedGroup, size: int) -> GroupProgress:
        """Returns the progress with which `group`, a group of a checkpoint, continues. Uses only the group's first
        `size` rollouts."""
        rollouts = dict(enumerate(group.rollouts_G[:size]))
        return cls(
            keeps_finished=True,
            finished={number: rollout for number, rollout in rollouts.items() if isinstance(rollout, Trajectory)},
            waiting={number: rollout for number, rollout in rollouts.items() if isinstance(rollout, UnfinishedRollout)},
        )

    def begin(self, sample: int, retry: int) -> RolloutProgress:
        """Begins try number `retry` (from 0) of rollout `sample`, and returns its progress. The first try continues the
        rollout in the checkpoint, if there is one."""
        progress = self.running[sample] = RolloutProgress(retry, self.waiting.pop(sample, None))
        return progress

    def end(self, sample: int, outcome: Trajectory | Exception) -> None:
        """Records the end of a try of rollout `sample`. If `outcome` is a trajectory, the rollout is finished; if it is
        an exception, the progress of the try is dropped."""
        del self.running[sample]
        if isinstance(outcome, Trajectory):
            self.finished[sample] = outcome

    def take(self, group: Group, size: int, temperature: float) -> UnfinishedGroup:
        """Returns the progress of `group`, with `size` rollouts sampled at `temperature`, for a checkpoint."""
        return UnfinishedGroup(replace(group), tuple(map(self._rollout, range(size))), temperature)

    def _rollout(self, sample: int) -> Trajectory | UnfinishedRollout | None:
        if sample in self.finished:
            if self.keeps_finished:
                return self.finished[sample]
            return None
        if sample in self.running:
            return self.running[sample].take()
        return self.waiting.get(sample)


def plain(value: object, place: str) -> Any:
    """Returns a copy of `value`, a part of an environment's state, that consists only of dicts, lists, texts, numbers,
    bools, None and arrays. `place` names the part in messages. Raises BadState for a value of any other type."""
    if isinstance(value, str | bool | int | float | None):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) and key != SPECIAL for key in value):
        return {key: plain(part, f"{place}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, f"{place}[{number}]") for number, part in enumerate(value)]
    if isinstance(value, np.generic):
        return plain(value.item(), place)
    if isinstance(value, np.ndarray) and value.dtype.kind in KINDS and value.dtype.itemsize <= LARGEST_ITEM:
        return np.array(value, value.dtype.newbyteorder("="), order="C")
    raise BadState(
        f"{place} is {str(value)[:100]!r} of type {type(value).__name__}; expected JSON values (the keys of a mapping "
        "are texts) and numpy arrays of numbers or bools"
    )


def to_json(value: object, arrays: list[npt.NDArray[np.generic]]) -> object:
    """Converts `value`, a result of `plain`, to JSON values. Appends each array to `arrays`; in the JSON, the array is
    replaced by its index in `arrays` (see SPECIAL)."""
    if isinstance(value, dict):
        return {key: to_json(part, arrays) for key, part in value.items()}
    if isinstance(value, list):
        return [to_json(part, arrays) for part in value]
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {SPECIAL: ["array", len(arrays) - 1]}
    if isinstance(value, float) and not isfinite(value):
        return {SPECIAL: ["float", repr(value)]}
    return value


def from_json(value: Any, arrays: Mapping[str, npt.NDArray[np.generic]]) -> Any:
    """Restores the plain value that `to_json` converted to `value`. `arrays`: {index of an array, as text: the
    array}."""
    if isinstance(value, list):
        return [from_json(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    if SPECIAL not in value:
        return {key: from_json(part, arrays) for key, part in value.items()}
    kind, content = value[SPECIAL]
    if kind == "array":
        return arrays[str(content)]
    return float(content)
