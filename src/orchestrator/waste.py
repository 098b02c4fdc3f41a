"""Counts the sampled tokens that are wasted, by their cause.

    WastedTokens --begin--> GroupTokens <--respond, fail-- the rollouts of the group

A replica reports how many tokens an answer has when it is whole; an answer that is stopped before is not counted. The
counts are part of a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypedDict

from orchestrator.advantages import ScoredGroup

CAUSES = ("expired_running", "expired_finished", "failed")
"""Why tokens are not trained on; `metrics.py` adds the tokens of filtered groups."""


class WasteState(TypedDict):
    """The counts of wasted tokens in a checkpoint."""

    wasted: dict[str, int]


@dataclass
class GroupTokens:
    """Counts the sampled tokens of a group."""

    sampled_G: list[int]
    """For each rollout the tokens that its present try has sampled since the start or the resume of the run."""
    failed: int = 0
    """The tokens of tries that failed."""

    def respond(self, sample: int, tokens: int) -> None:
        """Records an answer of `tokens` tokens in rollout `sample`."""
        self.sampled_G[sample] += tokens

    def fail(self, sample: int) -> None:
        """Records that the present try of rollout `sample` has failed."""
        self.failed += self.sampled_G[sample]
        self.sampled_G[sample] = 0


class WastedTokens:
    """Counts the wasted tokens of all groups of a run. The tokens of failed tries count when their group ends."""

    def __init__(self) -> None:
        self._groups: dict[int, GroupTokens] = {}
        self._wasted: Counter[str] = Counter()

    def begin(self, index: int, rollouts: int) -> GroupTokens:
        """Begins to count a group with this number of rollouts."""
        group = self._groups[index] = GroupTokens([0] * rollouts)
        return group

    def settle(self, index: int, scored: ScoredGroup | None) -> None:
        """Ends the count of group `index` after its rollouts. If the group failed (`scored` is None), all its tokens
        are wasted."""
        self._end(index, "failed" if scored is None else None)

    def drop(self, index: int, scored: ScoredGroup | None) -> None:
        """Ends the count of group `index`, which the ledger dropped, and counts its tokens as wasted. `scored` is None
        for a group that was running."""
        if scored:
            self._wasted["expired_finished"] += scored.tokens
        elif index in self._groups:  # one that was restored may not have been started yet
            self._end(index, "expired_running")

    def _end(self, index: int, cause: str | None) -> None:
        group = self._groups.pop(index)
        self._wasted["failed"] += group.failed
        if cause:
            self._wasted[cause] += sum(group.sampled_G)

    def state_dict(self) -> WasteState:
        """Returns the counts for the next row of metrics, as JSON values, without the tokens of running groups."""
        return {"wasted": dict(self._wasted)}

    def load_state_dict(self, state: WasteState) -> None:
        """Continues from `state`, the result of another object's `state_dict`; call it before any group begins."""
        self._wasted = Counter(state["wasted"])

    def take(self) -> dict[str, float]:
        """Returns the metrics of the time since the last call."""
        row = {f"waste/{cause}": float(self._wasted[cause]) for cause in CAUSES}
        self._wasted = Counter()
        return row
