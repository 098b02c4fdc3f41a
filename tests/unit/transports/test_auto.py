"""A broadcast is tried once, and what is fetched may come from either transport."""

import asyncio
from typing import Any

import numpy as np
import pytest

from trireme.core.transport import Session
from trireme.core.weights import Layout
from trireme.transports import auto, broadcast, object_store
from trireme.transports.auto import AutoSender, Trial
from trireme.transports.broadcast import KeptPart, Source

SESSION = Session(1, 0, {0: 0})


def parts(*failures: str) -> list[KeptPart]:
    return [KeptPart(3, SESSION, 2, f"holder {rank}", failure) for rank, failure in enumerate(failures)]


def test_the_first_broadcast_decides(caplog: pytest.LogCaptureFixture) -> None:
    trial = Trial()
    trial.note([{0: "reference"}, {1: "reference"}])
    assert not trial.failed, "a version that was sent to nobody says nothing"
    trial.note(parts("", "version 3 was not sent to all of inference replica 1: the group broke"))
    assert trial.failed
    assert "the first broadcast failed: version 3 was not sent to all of inference replica 1" in caplog.text


def test_later_failures_are_those_of_single_replicas() -> None:
    trial = Trial()
    trial.note(parts("", ""))
    trial.note(parts("the group broke"))
    assert not trial.failed


class Sender:
    def __init__(self, name: str) -> None:
        self.endpoint, self.kept, self.name = f"where {name} is", f"kept by {name}", name

    def send(self, version: int, layout: Layout, units: Any, session: Session | None) -> str:
        return f"{self.name} {version}"


def test_a_version_without_a_session_goes_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "make_sender", lambda rank, size, ports: Sender("broadcast"))
    monkeypatch.setattr(object_store, "make_sender", lambda rank, size, ports: Sender("store"))
    sender = auto.make_sender(0, 2)
    assert isinstance(sender, AutoSender)
    assert (sender.endpoint, sender.kept) == ("where broadcast is", "kept by broadcast")
    assert [sender.send(3, Layout(()), [], each) for each in (SESSION, None)] == ["broadcast 3", "store 3"]


def test_each_source_is_opened_leased_and_released_by_its_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    for transport in (broadcast, object_store):
        name = transport.__name__.rpartition(".")[2]
        for verb in ("lease", "release"):
            monkeypatch.setattr(transport, verb, lambda _, did=f"{verb} by {name}": done.append(did))
    sent = auto.join(parts("", ""))
    assert isinstance(sent, Source)

    async def put(number: int) -> Any:
        return np.full(2, number, np.uint8)

    async def opened() -> list[Any]:
        return list(await auto.make_receiver().open((put(0), put(1))))

    assert auto.join([{0: "a"}, {1: "b"}]) == ("a", "b")
    assert [bucket.tolist() for bucket in asyncio.run(opened())] == [[0, 0], [1, 1]]
    for source in (sent, ("a", "b")):
        auto.lease(source)
        auto.release(source)
    assert done == ["lease by broadcast", "release by broadcast", "lease by object_store", "release by object_store"]
