"""The share of an engine that chats may take: a step's time is divided among those for whom it worked, and what chats
have of it is bounded by a bucket.

    a step's seconds and tokens by purpose --EngineClock--> seconds by purpose --ChatShare--> may chats be in a step?

The bucket fills with `service.share` seconds in each second. A step in which chats have tokens takes from it; while it
is empty, the engine's scheduler leaves chats out of its steps (`inference.sharing`). So in t seconds they get
`share * t + BURST_S` at most, and one step more, however many ask and however long their answers are. They are never
starved: the bucket fills whatever the run does, and the first step afterwards has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, cast

from trireme.core.engine_use import EngineUse, EngineUses, Purpose

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import SchedulerStats

SHARE = "TRIREME_CHAT_SHARE"
"""Variable of the engine's process: `service.share` where clients may chat beside a run. (vLLM's configuration has no
place for it that does not also name its compiled kernels.)"""
BURST_S = 0.25
"""What the bucket holds, in seconds of the engine: chats that come after a pause need not wait at once."""


class EngineClock:
    """Divides the time of an engine. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.uses: dict[Purpose, EngineUse] = {"run": EngineUse(), "chat": EngineUse()}
        self._busy_since: float | None = None

    def begin(self, now: float) -> None:
        """Notes that a step begins. Where the one before it is not over, or the engine did not wait since, the time
        counts from its end."""
        if self._busy_since is None:
            self._busy_since = now

    def stand_still(self) -> None:
        """Notes that the engine waits, or does something else than steps, until the next step begins."""
        self._busy_since = None

    def end(self, now: float, tokens: Mapping[Purpose, int], *, busy: bool) -> dict[Purpose, EngineUse]:
        """Divides the time since the step began, or the one before it ended, by the tokens of the step; a step without
        any counts for none. `busy`: the engine has more to do at once. Returns what each purpose has of it."""
        began, total = self._busy_since, sum(tokens.values())
        self._busy_since = now if busy else None
        if began is None or not total:
            return {}
        parts = {purpose: EngineUse((now - began) * n / total, n) for purpose, n in tokens.items() if n}
        for purpose, use in parts.items():
            self.uses[purpose] += use
        return parts


class ChatShare:
    """A bucket of engine seconds for chats."""

    def __init__(self, share: float, now: float) -> None:
        """`share`: the seconds that it gains in a second; from 1 on nothing is bounded."""
        self._share = share if share < 1 else inf
        self._seconds, self._filled = BURST_S, now

    def wait_s(self, now: float) -> float:
        """Returns in how many seconds chats may be in a step: 0 if they may now."""
        if self._share == inf:
            return 0.0
        self._seconds, self._filled = min(self._seconds + self._share * (now - self._filled), BURST_S), now
        return max(-self._seconds / self._share, 0.0)

    def charge(self, seconds: float) -> None:
        """Takes `seconds` from the bucket, also more than it has: chats then wait until it has gained them."""
        self._seconds -= seconds


@dataclass(frozen=True)
class EngineReport:
    """An engine's scheduler says this beside vLLM's statistics."""

    uses: EngineUses
    preemptions: int
    """The sequences of the run so far that lost their place for lack of space. (vLLM counts those whose KV cache an
    update of the weights dropped as well, and it counts any with the next token of the sequence.)"""
    chats_waiting: int = 0
    """Chats without a place."""


def with_report(stats: SchedulerStats, report: EngineReport) -> SchedulerStats:
    """Returns a step's statistics with `report`: in the field for those of a connector, which this engine does not
    have, and which vLLM passes on as it is."""
    uses = {purpose: (use.seconds, use.tokens) for purpose, use in report.uses.items()}
    return replace(stats, kv_connector_stats={"uses": uses, "counts": (report.preemptions, report.chats_waiting)})


def report_in(stats: SchedulerStats) -> EngineReport | None:
    """Returns what `with_report` put there; None if it did not."""
    if (found := stats.kv_connector_stats) is None:
        return None
    uses = {cast(Purpose, purpose): EngineUse(*use) for purpose, use in found["uses"].items()}
    return EngineReport(uses, *found["counts"])
