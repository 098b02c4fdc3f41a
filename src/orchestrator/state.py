"""The orchestrator's part of a commit: its state at a boundary, as files.

    state.json          cursor, ledger, limits, metrics, evaluation; of each group all that is no array, turn by turn
    groups.safetensors  all turns of all groups one after the other, finished groups first: `observation`, `action`,
                        `versions` int32, `logprobs` float32, `mixed` bool (these are as long as `action`), and where
                        each turn ends, `observation_ends`, `action_ends` int64

Nothing is pickled. Logs of environments are kept as JSON; values that JSON does not know become text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from orchestrator.advantages import ScoredGroup
from orchestrator.env import Trajectory, Transition
from orchestrator.ledger import Group
from trireme.checkpoint.files import FileRecord, write_bytes
from trireme.core.errors import CheckpointInvalid
from trireme.core.finite_json import to_json
from trireme.core.types import WeightIdentity

STATE, ARRAYS = "state.json", "groups.safetensors"
OBSERVED = {"observation": np.int32}
SAMPLED = {"action": np.int32, "logprobs": np.float32, "versions": np.int32, "mixed": np.bool_}
GROUPS = ("finished", "filtered")
"""The fields that hold groups, in the order in which their turns are written."""


@dataclass(frozen=True)
class OrchestratorState:
    """The state of an orchestrator at a boundary."""

    cursor: Mapping[str, Any]
    """`state_dict` of the problem mix."""
    ledger: Mapping[str, Any]
    """`state_dict` of the ledger."""
    limits: Mapping[str, Any]
    """`state_dict` of the run limits."""
    finished: tuple[ScoredGroup, ...]
    """Groups that wait to be taken."""
    filtered: tuple[ScoredGroup, ...]
    """Groups for the next row of metrics."""
    errors: Mapping[str, int]
    """For the next row of metrics."""
    counts: Mapping[str, int]
    """The ledger's at the last row."""
    evaluation: Mapping[str, Any]
    """`state_dict` of the evaluator."""

    def write(self, directory: Path) -> list[FileRecord]:
        """Writes both files; they are on the disk when it returns. Raises StorageFailed."""
        state = vars(self) | {name: [_group_to_json(scored) for scored in getattr(self, name)] for name in GROUPS}
        turns = [turn for scored in (*self.finished, *self.filtered) for turn in scored.turns]
        return [
            write_bytes(directory, STATE, to_json(state).encode()),
            write_bytes(directory, ARRAYS, save(_columns(turns))),
        ]

    @classmethod
    def read(cls, directory: Path) -> OrchestratorState:
        """Reads what `write` wrote; its contents must be verified. Raises OSError for a missing file, CheckpointInvalid
        for one that is no safetensors file."""
        state = json.loads((directory / STATE).read_text())
        try:
            turns = _turns(load_file(directory / ARRAYS))
        except SafetensorError as error:
            raise CheckpointInvalid(f"{directory / ARRAYS} is no safetensors file: {error}") from None
        return cls(
            **(state | {name: tuple(_group_from_json(values, turns) for values in state[name]) for name in GROUPS})
        )


def _columns(turns: Sequence[Transition]) -> dict[str, npt.NDArray[Any]]:
    columns = {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(turn, name) for turn in turns)]).astype(dtype)
        for name, dtype in (OBSERVED | SAMPLED).items()
    }
    for name in ("observation", "action"):
        columns[f"{name}_ends"] = np.cumsum([len(getattr(turn, name)) for turn in turns], dtype=np.int64)
    return columns


def _turns(columns: Mapping[str, npt.NDArray[Any]]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yields the arrays of each turn."""
    parts = {name: np.split(columns[name], columns["observation_ends"]) for name in OBSERVED}
    parts |= {name: np.split(columns[name], columns["action_ends"]) for name in SAMPLED}
    for turn in range(len(columns["action_ends"])):
        yield {name: part[turn] for name, part in parts.items()}


def _group_to_json(scored: ScoredGroup) -> dict[str, Any]:
    return {
        "group": vars(scored.group),
        "temperature": scored.temperature,
        "rewards": scored.rewards_G,
        "metrics": [_floats(metrics) for metrics in scored.metrics_G],
        "tags": scored.tags,
        "rollouts": [
            {"stop_reason": t.stop_reason, "turns": [_turn_to_json(turn) for turn in t.transitions]}
            for t in scored.trajectories_G
        ],
    }


def _turn_to_json(turn: Transition) -> dict[str, Any]:
    return {
        "identities": list(map(str, turn.identities)),
        "stop_reason": turn.stop_reason,
        "reward": turn.reward,
        "in_loss": turn.in_loss,
        "metrics": _floats(turn.metrics),
        "logs": readable(turn.logs),
    }


def _group_from_json(values: Mapping[str, Any], turns: Iterator[dict[str, npt.NDArray[Any]]]) -> ScoredGroup:
    return ScoredGroup(
        group=Group(**values["group"]),
        trajectories_G=tuple(
            Trajectory(tuple(_turn_from_json(turn, next(turns)) for turn in rollout["turns"]), rollout["stop_reason"])
            for rollout in values["rollouts"]
        ),
        rewards_G=tuple(values["rewards"]),
        metrics_G=tuple(map(_from_null, values["metrics"])),
        tags=tuple(values["tags"]),
        temperature=values["temperature"],
    )


def _turn_from_json(values: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Transition:
    identities = tuple(WeightIdentity.parse(label) for label in values["identities"])
    metrics = _from_null(values["metrics"])
    return Transition(**(dict(values) | dict(arrays) | {"identities": identities, "metrics": metrics}))


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _from_null(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Returns metrics as they were before `to_json` wrote null for what is no finite number."""
    return {name: nan if value is None else value for name, value in metrics.items()}


def readable(logged: Any) -> Any:
    """Returns logs of an environment as JSON values."""
    if isinstance(logged, Mapping):
        return {str(name): readable(value) for name, value in logged.items()}
    if isinstance(logged, list | tuple):
        return [readable(value) for value in logged]
    return logged if isinstance(logged, str | bool | int | float | None) else str(logged)
