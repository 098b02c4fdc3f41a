"""The last update of a run's replicas, and how long it may take."""

from __future__ import annotations

import asyncio
import math

from trireme.config import Config
from trireme.core.errors import RoomFailed
from trireme.core.sampler import Sampler

ANSWER_S = 60.0
"""Added to the replicas' own deadlines for an update, so that their message, which says what was late, comes first."""


def update_deadline_s(config: Config, replicas: int) -> float:
    """Returns how long an update of so many replicas may take: `inference.max_updating` at a time, each with its own
    deadline, one of them while it still takes the version before, and with a wait for a successor of the last one."""
    turns = math.ceil(replicas / (config.inference.max_updating or replicas)) + 1
    return config.timeouts.update_s * turns + config.patience_s + ANSWER_S


async def update_ended(update: asyncio.Task[None], sampler: Sampler, config: Config) -> None:
    """Waits until an update has ended. Raises its error, and RoomFailed when it is late."""
    limit = update_deadline_s(config, len(sampler.acknowledged()) or config.inference.replicas)
    ended, _ = await asyncio.wait([update], timeout=limit)
    if not ended:
        raise RoomFailed(
            f"waited {limit:g} s (timeouts.update_s for each replica, the start of a successor, and {ANSWER_S:g}) "
            f"for the {update.get_name()}; versions acknowledged by replicas: {sampler.acknowledged()}"
        )
    update.result()
