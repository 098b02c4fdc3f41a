"""Trajectories: the tokens of a rollout, each of them once, however many turns it has.

    tokens      prompt | answer | hint | answer | prompt | answer |
    logprobs    0 .. 0 | -.5 -1 | 0  0 | -.2 -3 | 0 .. 0 | -.7    |
    turn 0      start           end
    turn 1      start                           end
    turn 2                                      start             end

A prompt that begins with all tokens of its segment so far extends the segment; any other prompt begins a new segment
after it. So a turn's prompt and answer are `tokens[start:end]`, and the trainer gets each segment as one datum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from trireme.core.types import StopReason, VersionSpan, WeightIdentity

RolloutEnd = Literal["stop", "length", "max_seq_len"]
"""How a rollout ended: the stop reason of its last action, or `max_seq_len` if the next prompt was too long."""

Scalar = TypeVar("Scalar", bound=np.generic)
GROWTH = 1.5
"""A buffer that is full becomes larger by this factor."""


@dataclass(frozen=True)
class Transition:
    """One turn, as environments see it: a prompt and the answer that was sampled."""

    observation: npt.NDArray[np.int32]
    """[T_ob], the token ids of the whole prompt."""
    action: npt.NDArray[np.int32]
    """[T_ac], the token ids of the answer."""
    logprobs: npt.NDArray[np.float32]
    """[T_ac], log-probabilities of the answer's tokens, as sampled."""
    versions: npt.NDArray[np.int32]
    """[T_ac], the version that sampled each token."""
    mixed: npt.NDArray[np.bool_]
    """[T_ac], True where the token was sampled with entries of the KV cache that an older version had computed."""
    identities: tuple[WeightIdentity, ...]
    """The weights that sampled the answer, in order; `versions` has their versions."""
    stop_reason: StopReason
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    logs: Mapping[str, object] = field(default_factory=dict)
    in_loss: bool = True
    """False: the action's tokens are masked out of the loss."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a trajectory: where its tokens are in the trajectory, which weights sampled its answer, why the
    answer ended, and the environment's result for the answer."""

    start: int
    """The index of the first token of its prompt, which is also the first token of its segment."""
    prompt_end: int
    """The index after the prompt, where the answer begins."""
    end: int
    """The index after the answer."""
    spans: tuple[VersionSpan, ...]
    """The weights that sampled each part of the answer, in order; indices count from the answer's first token."""
    stop_reason: StopReason
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    logs: Mapping[str, object] = field(default_factory=dict)
    in_loss: bool = True
    """False: the answer's tokens are masked out of the loss."""

    @property
    def observed(self) -> int:
        """The number of tokens of the prompt."""
        return self.prompt_end - self.start

    @property
    def sampled(self) -> int:
        """The number of tokens of the answer."""
        return self.end - self.prompt_end


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The tokens, log-probabilities and turns of one rollout. If the rollout is unfinished, they cover its completed
    turns only."""

    tokens: npt.NDArray[np.int32]
    """[T], segment after segment; the last turn ends with the last token."""
    logprobs: npt.NDArray[np.float32]
    """[T], log-probabilities as sampled for tokens of answers, 0 for tokens of prompts."""
    turns: tuple[Turn, ...]
    stop_reason: RolloutEnd

    @property
    def transitions(self) -> tuple[Transition, ...]:
        """The trajectory's turns, each with its whole prompt and its answer as views of `tokens`, not copies."""
        return tuple(map(self._view, self.turns))

    @property
    def reward(self) -> float:
        """The sum of the rewards of the trajectory's steps, without a reward from `compute_group_rewards`."""
        return sum(turn.reward for turn in self.turns)

    @property
    def identities(self) -> set[WeightIdentity]:
        """The weights that sampled its tokens."""
        return {span.identity for turn in self.turns for span in turn.spans}

    @property
    def versions(self) -> set[int]:
        """The versions that sampled its tokens."""
        return {span.identity.version for turn in self.turns for span in turn.spans}

    @property
    def num_segments(self) -> int:
        """The number of segments (see the module's docstring); each becomes a datum."""
        return len({turn.start for turn in self.turns})

    def _view(self, turn: Turn) -> Transition:
        lengths = [span.end - span.start for span in turn.spans]
        return Transition(
            observation=self.tokens[turn.start : turn.prompt_end],
            action=self.tokens[turn.prompt_end : turn.end],
            logprobs=self.logprobs[turn.prompt_end : turn.end],
            versions=np.repeat(np.asarray([span.identity.version for span in turn.spans], np.int32), lengths),
            mixed=np.repeat(np.asarray([span.mixed for span in turn.spans], np.bool_), lengths),
            identities=tuple(span.identity for span in turn.spans),
            stop_reason=turn.stop_reason,
            reward=turn.reward,
            metrics=turn.metrics,
            logs=turn.logs,
            in_loss=turn.in_loss,
        )


class TrajectoryBuilder:
    """A trajectory that grows, turn by turn: `ask` takes a prompt, `answer` takes the answer to it.

    The contents of a returned array never change later. The builder only appends tokens; when its buffer is full, it
    copies all tokens to a larger buffer.
    """

    def __init__(self, begun: Trajectory | None = None) -> None:
        self.turns: list[Turn] = list(begun.turns) if begun else []
        """The answered turns."""
        if begun:
            self._tokens = begun.tokens.copy()
        else:
            self._tokens = np.empty(0, np.int32)
        if begun:
            self._logprobs = begun.logprobs.copy()
        else:
            self._logprobs = np.empty(0, np.float32)
        self._start = self.turns[-1].start if self.turns else 0
        self._first = next((n for n, turn in enumerate(self.turns) if turn.start == self._start), 0)
        self._prompt_end = self._answered

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        """The whole prompt that waits for its answer."""
        return _read_only(self._tokens[self._start : self._prompt_end])

    @property
    def first_weights(self) -> WeightIdentity | None:
        """The weights that sampled the first token of the present segment (see `ask`); None before the segment's first
        answer."""
        if self._first < len(self.turns):
            return self.turns[self._first].spans[0].identity
        return None

    @property
    def _answered(self) -> int:
        if self.turns:
            return self.turns[-1].end
        return 0

    def ask(self, tokens: npt.NDArray[np.int32], *, follows: bool = False) -> None:
        """Takes the next prompt. `tokens`: the whole prompt; with `follows` only the part of the prompt after all
        tokens of the present segment. (A segment is a run of turns in which each prompt continues the turn before.) A
        prompt without an answer does not become part of the trajectory."""
        if not follows:
            earlier = self._tokens[self._start : self._answered]
            if np.array_equal(tokens[: len(earlier)], earlier):
                tokens = tokens[len(earlier) :]
            else:
                self._start, self._first = self._answered, len(self.turns)
        self._prompt_end = self._answered + len(tokens)
        self._make_room(self._prompt_end)
        self._tokens[self._answered : self._prompt_end] = tokens
        self._logprobs[self._answered : self._prompt_end] = 0

    def answer(
        self,
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        spans: tuple[VersionSpan, ...],
        stop_reason: StopReason,
        reward: float,
        metrics: Mapping[str, float],
        logs: Mapping[str, object],
        in_loss: bool,
    ) -> None:
        """Takes the answer to the last prompt (the parameters `tokens`, `logprobs`, `spans` and `stop_reason`), and the
        environment's result for that answer (the other parameters)."""
        start = self._prompt_end
        end = self._prompt_end + len(tokens)
        self._make_room(end)
        self._tokens[start:end] = tokens
        self._logprobs[start:end] = logprobs
        self.turns.append(Turn(self._start, start, end, spans, stop_reason, reward, metrics, logs, in_loss))
        self._prompt_end = end

    def so_far(self) -> Trajectory:
        """Returns the trajectory of the turns answered so far; call it after the first answer. Its arrays are views,
        not copies."""
        end = self._answered
        tokens = _read_only(self._tokens[:end])
        logprobs = _read_only(self._logprobs[:end])
        return Trajectory(tokens, logprobs, tuple(self.turns), self.turns[-1].stop_reason)

    def finish(self, stop_reason: RolloutEnd) -> Trajectory:
        """Returns the whole trajectory, with arrays that are copies and have exactly its length."""
        end = self._answered
        tokens = _read_only(self._tokens[:end].copy())
        logprobs = _read_only(self._logprobs[:end].copy())
        return Trajectory(tokens, logprobs, tuple(self.turns), stop_reason)

    def _make_room(self, length: int) -> None:
        if length <= len(self._tokens):
            return
        room = max(length, int(len(self._tokens) * GROWTH))
        tokens = np.empty(room, np.int32)
        logprobs = np.empty(room, np.float32)
        tokens[: len(self._tokens)] = self._tokens
        logprobs[: len(self._logprobs)] = self._logprobs
        self._tokens = tokens
        self._logprobs = logprobs


def _read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    array.flags.writeable = False
    return array
