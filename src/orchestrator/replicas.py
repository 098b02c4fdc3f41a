"""The replicas of a run: waits for their updates, makes one session of all, and passes on which join and leave."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from trireme.config import Config
from trireme.core.errors import RoomFailed
from trireme.core.sampler import Sampler
from trireme.core.transport import Epochs, Offer, Session

ANSWER_S = 60.0
"""Added to the replicas' own deadlines for an update, so that their message, which says what was late, comes first."""


def update_deadline_s(config: Config, replicas: int) -> float:
    """Returns how long an update of so many replicas may take: `inference.max_updating` at a time, each with its own
    deadline, one of them while it still takes the version before, and with a wait for a successor of the last one."""
    turns = math.ceil(replicas / (config.inference.max_updating or replicas)) + 1
    return config.timeouts.update_s * turns + config.patience_s + ANSWER_S


class Replicas:
    """Replicas that sample for training, and `reserved` ones for evaluations alone. `changed` is called after each
    change of either."""

    def __init__(self, config: Config, sampler: Sampler, reserved: Sampler | None, changed: Callable[[], None]) -> None:
        self._config, self._changed = config, changed
        self._samplers = [sampler, *([reserved] if reserved else [])]
        self.update: asyncio.Task[None] | None = None
        """The last update of the training replicas that was begun."""
        self._failures: dict[int, asyncio.Task[tuple[int, str]]] = {}
        self._epochs = Epochs()

    async def update_ended(self) -> None:
        """Waits until no update is in progress. Raises the error of the last one, and RoomFailed when it is late."""
        if self.update is None:
            return
        versions = self._samplers[0].acknowledged()
        limit = update_deadline_s(self._config, len(versions) or self._config.inference.replicas)
        ended, _ = await asyncio.wait([self.update], timeout=limit)
        if not ended:
            raise RoomFailed(
                f"waited {limit:g} s (timeouts.update_s for each replica, the start of a successor, and {ANSWER_S:g}) "
                f"for the {self.update.get_name()}; versions acknowledged by replicas: "
                f"{self._samplers[0].acknowledged()}"
            )
        self.update.result()

    async def offer(self, offer: Offer) -> Session:
        """Asks all replicas to receive a version while the trainer sends it. Returns those that are ready in time, of
        training and reserved ones together: no two have the same number. A new epoch of either is one of both.

        While an update is in progress reserved replicas are not asked. They may be next to take it, for an evaluation,
        and would receive the next version beside it.
        """
        updating = self.update is not None and not self.update.done()
        asked = self._samplers[:1] if updating else self._samplers
        parts = await asyncio.gather(*(sampler.offer(offer) for sampler in asked))
        self._epochs.begins([(part.epoch, part.members) for part in parts if part.members])
        servers = {replica: rank for part in parts for replica, rank in part.servers.items()}
        return Session(offer.attempt, self._epochs.number, servers)

    async def join(self, index: int, client: Any, *, reserved: bool) -> None:
        """Lets a replica serve once it has the newest weights; `reserved`: for evaluations alone. Raises its error."""
        await self._samplers[reserved].join(index, client)
        self._changed()

    def leave(self, index: int, reason: str) -> None:
        """Removes a dead replica."""
        for sampler in self._samplers:
            sampler.leave(index, reason)
        self._changed()

    async def drain(self, index: int, timeout_s: float) -> None:
        """Gives a replica no new requests, and returns when it has left: its requests are finished, or after
        `timeout_s` handed over."""
        await asyncio.gather(*(sampler.drain(index, timeout_s) for sampler in self._samplers))
        self._changed()

    async def next_failure(self) -> tuple[int, str]:
        """Waits for the next replica that a sampler finds to have failed. Returns its number and the reason."""
        for i, sampler in enumerate(self._samplers):
            if i not in self._failures:
                self._failures[i] = asyncio.create_task(sampler.next_failure())
        await asyncio.wait(self._failures.values(), return_when=asyncio.FIRST_COMPLETED)
        found = next(i for i, task in self._failures.items() if task.done())
        self._changed()
        return self._failures.pop(found).result()

    async def stop(self) -> None:
        """Stops waiting for failures."""
        for task in self._failures.values():
            task.cancel()
        await asyncio.gather(*self._failures.values(), return_exceptions=True)
