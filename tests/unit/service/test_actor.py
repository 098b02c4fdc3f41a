"""The service's actor without Ray."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from service import actor
from service.actor import ServiceActor
from service.requests import ServedModels
from trireme.core.errors import RoomFailed


class Starting:
    """As a router whose replica set has none that serves yet."""

    async def stats(self) -> Any:
        return await asyncio.Future()


async def test_without_a_replica_that_serves_a_session_is_to_be_opened_later(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = None
    service = ServiceActor(config, Starting, ServedModels(("policy",), 99, 99), [], True, Path(), None)  # type: ignore[arg-type]
    service._sampler = Starting()  # type: ignore[assignment]
    monkeypatch.setattr(actor, "LOOK_S", 0.01)
    with pytest.raises(RoomFailed, match=r"within 0.01 s .* none serves yet"):
        await service._floor()
