"""The service's actor without Ray: which replicas get chats, and when they join again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for_tasks

from service import actor
from service.actor import ServiceActor
from service.asked import ServedModels
from trireme.core.errors import RoomFailed


class Replicas:
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.failures: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self.looks = 0

    async def join(self, index: int, client: Any) -> None:
        self.told.append(("join", index, client))

    def leave(self, index: int, reason: str) -> None:
        self.told.append(("leave", index))

    async def drain(self, index: int, timeout_s: float) -> None:
        self.told.append(("drain", index, timeout_s))

    async def next_failure(self) -> tuple[int, str]:
        self.looks += 1
        return await self.failures.get()


def started(replicas: Replicas) -> ServiceActor:
    config: Any = None
    own = ServiceActor(config, lambda: replicas, ServedModels(("policy",), 99, 99), [], None, Path(), None)  # type: ignore[arg-type, return-value]
    own._sampler = replicas  # type: ignore[assignment]
    own._started.set()
    return own


async def test_a_replica_that_joins_again_gives_up_the_chats_that_it_has() -> None:
    """Else they would be sampled to their end in its engine, beside those that take their places."""
    replicas = Replicas()
    own = started(replicas)
    await own.join(0, "first", [])
    await own.join(0, "again", [])
    assert replicas.told == [("join", 0, "first"), ("drain", 0, 0.0), ("join", 0, "again")]
    await own.leave(0, "dead")
    await own.join(0, "successor", [])
    assert replicas.told[3:] == [("leave", 0), ("join", 0, "successor")]


async def test_a_replica_that_failed_comes_back_unless_another_client_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas()
    own = started(replicas)
    monkeypatch.setattr(actor, "AGAIN_S", 0.01)
    await own.join(0, "first", [])
    task = asyncio.create_task(own._bring_back())
    replicas.failures.put_nowait((0, "it failed"))
    await wait_for_tasks(lambda: replicas.looks >= 2, "a second look")
    assert replicas.told == [("join", 0, "first")] * 2
    replicas.failures.put_nowait((0, "it died"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await own.leave(0, "dead")
    await own.join(0, "successor", [])
    await wait_for_tasks(lambda: replicas.looks >= 3, "a third look")
    assert replicas.told[2:] == [("leave", 0), ("join", 0, "successor")]
    task.cancel()


async def test_without_a_replica_that_serves_a_session_is_to_be_opened_later(monkeypatch: pytest.MonkeyPatch) -> None:
    class Starting(Replicas):
        async def stats(self) -> Any:
            return await asyncio.Future()  # as a router does until one serves

    monkeypatch.setattr(actor, "LOOK_S", 0.01)
    with pytest.raises(RoomFailed, match=r"within 0.01 s .* none serves yet"):
        await started(Starting())._floor()
