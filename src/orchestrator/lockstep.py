"""The pace of rollouts: each at its own, or all in lockstep, so that a run can be repeated bit for bit.

Lockstep. The set of requests that an engine works on together decides the last bits of its answers, and the order in
which groups end decides which problem replaces a filtered one. So nothing may depend on speed: each party waits until
all wait, and then they continue in order.

    rollouts  --before_sample-->  wait  --all wait, none to end--->  all requests at once, in order of
                                   ^                                   (group, sample)
    groups    --before_end----->  wait  --all wait------------------>  settled in order of dispatch; groups that are
                                                                       dispatched into their slots join the wait

A party is a rollout, or its group once all its rollouts are over. A group is settled when the ledger has recorded how
it ended. "All" are the parties of the groups that have been dispatched and are not settled. While the ledger has slots
to fill, another party is still to come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

END = -1
"""Stands for the number of a rollout where the group itself waits to be settled."""


class OwnPace:
    """The pace without lockstep: no rollout waits for another."""

    def enter(self, index: int, rollouts: int) -> None:
        """Records that group `index` has been dispatched, with `rollouts` rollouts."""

    def rollout_over(self, index: int) -> None:
        """Records that a rollout of group `index` has ended, after all retries."""

    def leave(self, index: int) -> None:
        """Records that group `index` is settled: the ledger has recorded how it ended."""

    async def before_sample(self, index: int, sample: int, deadline: asyncio.Timeout) -> None:
        """Waits until rollout `sample` of group `index` may send its request. Extends `deadline`, the deadline of the
        rollout, by the length of the wait."""

    async def before_end(self, index: int) -> None:
        """Waits until group `index` may be settled; called once all its rollouts are over."""


class Lockstep(OwnPace):
    """The pace in deterministic mode: rollouts and groups wait for each other and continue in a fixed order (see the
    module's docstring). `more_to_come()` returns True while the ledger has slots that are about to be filled."""

    def __init__(self, more_to_come: Callable[[], bool]) -> None:
        self._more_to_come = more_to_come
        self._rollouts: dict[int, int] = {}
        self._waiting: dict[tuple[int, int], asyncio.Future[None]] = {}

    def enter(self, index: int, rollouts: int) -> None:
        self._rollouts[index] = rollouts

    def rollout_over(self, index: int) -> None:
        self._rollouts[index] -= 1
        self._advance()

    def leave(self, index: int) -> None:
        del self._rollouts[index]
        self._advance()

    async def before_sample(self, index: int, sample: int, deadline: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        due = deadline.when()
        assert due is not None
        remaining = due - loop.time()
        _move(deadline, None)
        try:
            await self._turn(index, sample)
        finally:  # the request of an agent may end alone: its rollout continues, and has a deadline
            _move(deadline, loop.time() + remaining)

    async def before_end(self, index: int) -> None:
        await self._turn(index, END)

    async def _turn(self, index: int, sample: int) -> None:
        loop = asyncio.get_running_loop()
        turn = self._waiting[index, sample] = loop.create_future()
        loop.call_soon(self._advance)  # later: else the last one to come would be the first, without waiting
        try:
            await turn
        finally:
            self._waiting.pop((index, sample), None)

    def _advance(self) -> None:
        parties = sum(max(rollouts, 1) for rollouts in self._rollouts.values())
        if len(self._waiting) < parties or self._more_to_come():
            return
        ends = [place for place in self._waiting if place[1] == END]
        for place in sorted(ends or self._waiting):
            turn = self._waiting.pop(place)
            if not turn.done():  # else its rollout was cancelled
                turn.set_result(None)


def _move(deadline: asyncio.Timeout, due: float | None) -> None:
    """Sets `deadline` to the time `due` of the event loop's clock (None: never). Does nothing if the deadline has
    passed."""
    with suppress(RuntimeError):
        deadline.reschedule(due)
