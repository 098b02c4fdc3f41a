"""The service's actor without Ray."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from service import actor
from service.actor import ServiceActor
from service.keys import ServiceKeys
from service.requests import ServedModels
from trireme.config.load import load
from trireme.core.errors import RoomFailed


@pytest.mark.parametrize(("trains", "longest"), [(True, 10), (False, None)])
async def test_the_longest_answer_of_a_run_bounds_its_sessions_and_no_others(
    tmp_path: Path, trains: bool, longest: int | None
) -> None:
    """The command `inference` trains on nothing, and its configuration has 1 where a run has its longest answer."""
    config = load(["@", "configs/quickstart.toml"], {}).config
    service = ServiceActor(config, Starting, ServedModels(("policy",), 99, 99), [], trains, tmp_path, None)  # type: ignore[arg-type]
    turns: Any = None
    gateway = service._make_gateway(turns, ServiceKeys([]))
    assert gateway.registry._sampling.max_tokens == longest


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
