"""Counts the tokens that rollouts sample, and the wasted tokens by their cause.

    TokenCounts --begin--> GroupTokens --one for each rollout--> RolloutTokens

A replica reports how many tokens a response has when it is whole. The tokens of a response that is stopped before are
estimated from its seconds, at the mean pace of the last responses. Counts are part of a checkpoint; the pace is not,
since a resumed run may have other machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from orchestrator.advantages import ScoredGroup

CAUSES = ("expired_running", "expired_finished", "failed")
"""Why tokens are not trained on; `metrics.py` adds the tokens of filtered groups."""
FADING = 0.999
"""The weight of a response in the mean pace (tokens per second), relative to the weight of the next response."""


class WasteState(TypedDict):
    """The counts of sampled tokens in a checkpoint."""

    wasted: dict[str, int]
    sampled: int
    rollouts: int


class RolloutTokens:
    """Counts the sampled tokens of one rollout."""

    __slots__ = ("_counts", "_requested_at", "_sampled")

    def __init__(self, counts: TokenCounts, restored: int) -> None:
        """`restored`: the number of tokens of the rollout that come from a checkpoint."""
        self._counts = counts
        self._sampled = restored
        self._requested_at: float | None = None

    @property
    def total(self) -> int:
        """The number of tokens of the present try, with an estimate for a response in flight."""
        if self._requested_at is None:
            return self._sampled
        return self._sampled + self._counts.tokens_within(self._counts.now() - self._requested_at)

    def request(self) -> None:
        """Records that a response has been requested."""
        self._requested_at = self._counts.now()

    def respond(self, tokens: int) -> None:
        """Records that the requested response has ended, with `tokens` tokens."""
        assert self._requested_at is not None
        self._counts.note_pace(tokens, self._counts.now() - self._requested_at)
        self._sampled += tokens
        self._requested_at = None

    def fail(self) -> None:
        """Records that the present try has failed: counts all its tokens as wasted, with an estimate for a response in
        flight."""
        self._counts.waste("failed", self.total)
        self._sampled = 0
        self._requested_at = None

    def stop(self) -> None:
        """Records that the rollout is stopped or over: adds an estimate of the tokens of a response in flight, if there
        is one."""
        self._sampled = self.total
        self._requested_at = None


@dataclass(frozen=True)
class GroupTokens:
    """Counts the tokens of a group."""

    rollouts_G: Sequence[RolloutTokens]

    @property
    def total(self) -> int:
        return sum(rollout.total for rollout in self.rollouts_G)

    def close(self) -> None:
        """Ends all responses in flight."""
        for rollout in self.rollouts_G:
            rollout.stop()


class TokenCounts:
    """Counts the tokens of all groups of a run."""

    def __init__(self, now: Callable[[], float], *, repeatable: bool = False) -> None:
        """`now` returns the time of the event loop's clock, in seconds. `repeatable`: True if no metric may depend on
        seconds."""
        self.now = now
        self._repeatable = repeatable
        self._groups: dict[int, GroupTokens] = {}
        self._pace_tokens = 0.0
        self._pace_s = 0.0
        self._wasted: Counter[str] = Counter()
        self._sampled = 0
        self._rollouts = 0

    def begin(self, index: int, restored_G: Sequence[int]) -> GroupTokens:
        """Begins to count a group. `restored_G`: the number of tokens that each rollout has from a checkpoint."""
        group = GroupTokens([RolloutTokens(self, restored) for restored in restored_G])
        self._groups[index] = group
        return group

    def note_pace(self, tokens: int, seconds: float) -> None:
        """Updates the mean pace (tokens per second) with a complete response that had `tokens` tokens and took
        `seconds` seconds."""
        self._pace_tokens = FADING * self._pace_tokens + tokens
        self._pace_s = FADING * self._pace_s + seconds

    def tokens_within(self, seconds: float) -> int:
        """Estimates how many tokens one response gets in `seconds` seconds at the mean pace. Returns 0 before the first
        complete response, and if metrics must be repeatable."""
        if self._repeatable or not self._pace_s:
            return 0
        return int(seconds * self._pace_tokens / self._pace_s)

    def waste(self, cause: str, tokens: int) -> None:
        """Adds `tokens` to the wasted tokens of `cause`, one of CAUSES."""
        self._wasted[cause] += tokens

    def settle(self, index: int, scored: ScoredGroup | None, filtered: bool) -> None:
        """Ends the count of group `index` after its rollouts. If the group failed (`scored` is None), counts all its
        tokens as wasted. If it neither failed nor was filtered, adds its lengths to `length/sampled`."""
        group = self._groups.pop(index)
        if scored is None:
            self.waste("failed", group.total)
        elif not filtered:
            self._add(scored.tokens, len(scored.trajectories_G))

    def drop(self, index: int, scored: ScoredGroup | None) -> None:
        """Ends the count of group `index`, which the ledger dropped, and counts its tokens as wasted. `scored` is None
        for a group that was running."""
        if scored:
            self.waste("expired_finished", scored.tokens)  # its length was counted when it was settled
        elif group := self._groups.pop(index, None):  # one that was restored may not have been started yet
            group.close()
            self.waste("expired_running", group.total)
            self._add(group.total, len(group.rollouts_G))

    def _add(self, tokens: int, rollouts: int) -> None:
        self._sampled += tokens
        self._rollouts += rollouts

    def state_dict(self) -> WasteState:
        """Returns the counts for the next row of metrics, as JSON values, without the tokens of running groups."""
        return {"wasted": dict(self._wasted), "sampled": self._sampled, "rollouts": self._rollouts}

    def load_state_dict(self, state: WasteState) -> None:
        """Continues from `state`, the result of another object's `state_dict`; call it before any group begins."""
        self._wasted = Counter(state["wasted"])
        self._sampled = state["sampled"]
        self._rollouts = state["rollouts"]

    def take(self) -> dict[str, float]:
        """Returns the metrics of the time since the last call. `length/sampled` is the mean number of tokens of a
        rollout, over the groups that neither failed nor were filtered; it is missing if there were no such groups."""
        row = {f"waste/{cause}": float(self._wasted[cause]) for cause in CAUSES}
        if self._rollouts and not self._repeatable:
            row["length/sampled"] = self._sampled / self._rollouts
        self._wasted = Counter()
        self._sampled = 0
        self._rollouts = 0
        return row
