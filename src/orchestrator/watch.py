"""The loops that look at a run from time to time, to adapt its load and for its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from orchestrator.admission import Backpressure
from trireme.core.sampler import Sampler

LAG_TICK_S = 0.25
LOAD_TICK_S = 1.0


async def watch_load(sampler: Sampler, pressure: Backpressure) -> None:
    """Passes the replicas' load to `pressure` every LOAD_TICK_S seconds, so that `pressure` can adapt its limit on
    the number of rollouts in flight."""
    while True:
        pressure.look(await sampler.stats())
        await asyncio.sleep(LOAD_TICK_S)


async def watch_lag(note: Callable[[float], object]) -> None:
    """Calls `note` every LAG_TICK_S seconds with the seconds by which the event loop was late."""
    now = asyncio.get_running_loop().time
    while True:
        started = now()
        await asyncio.sleep(LAG_TICK_S)
        note(now() - started - LAG_TICK_S)
