"""The driver's side of the service, without Ray."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from service import handle
from service.handle import ServiceHandle
from trireme.core.errors import RoomFailed
from trireme.core.sampler import Heartbeat
from trireme.supervision.roster import Roster


def test_a_service_that_is_lost_as_the_run_ends_has_no_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Mock()
    monkeypatch.setattr(handle.ray, "kill", lambda _actor: service._ending.set())  # `stop` begins in this moment
    with monkeypatch.context() as first:
        first.setattr(ServiceHandle, "_keep", lambda _self: None)
        config: Any = SimpleNamespace(cluster=SimpleNamespace(max_restarts=3, restart_window_s=60.0))
        service = ServiceHandle(config, make, None, print, [], Roster(lambda: 0.0))

    def lost(_self: ServiceHandle, again: bool) -> None:
        raise RoomFailed("it died")

    monkeypatch.setattr(ServiceHandle, "_serve", lost)
    service._keep()
    make.assert_called_once()


def test_a_service_is_a_part_of_the_run_whose_health_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found at first, then lost once more often than it may be."""
    failure = RoomFailed("the server has ended")
    outcomes: Iterator[Any] = iter(["its url", Heartbeat((7,), "here"), failure, "its url", failure])
    healths: list[tuple[str, tuple[int, ...], int]] = []
    roster = Roster(lambda: 0.0)

    def note(_roster: Roster, _incident: object) -> None:
        (part,) = roster.parts
        healths.append((part.health, part.pids, part.restarts))

    def get(_ref: None, **_arguments: Any) -> Any:
        outcome = next(outcomes)
        if isinstance(outcome, RoomFailed):
            raise outcome
        return outcome

    roster.listen(note)

    monkeypatch.setattr(handle, "LOOK_S", 0.0)
    monkeypatch.setattr(handle.waits, "get", get)
    monkeypatch.setattr(handle.ray, "kill", lambda _actor: None)
    cluster = SimpleNamespace(max_restarts=1, restart_window_s=60.0)
    config: Any = SimpleNamespace(cluster=cluster, timeouts=SimpleNamespace(start_s=1.0))
    service = ServiceHandle(config, Mock(), None, print, [], roster)
    service._thread.join(10)
    assert [health for health, _, _ in healths] == ["starting", "healthy", "dead", "starting", "dead"]
    assert healths[1][1:] == ((7,), 0)
    assert healths[-1][2] == 1
    assert roster.parts[0].why == "the server has ended"
    with pytest.raises(RoomFailed, match="was given up: the service failed 2 times within"):
        service.check()


def test_losses_that_are_far_apart_do_not_end_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten losses, an hour apart, with one restart allowed in a minute."""
    losses = itertools.count(1)
    config: Any = SimpleNamespace(cluster=SimpleNamespace(max_restarts=1, restart_window_s=60.0))
    with monkeypatch.context() as first:
        first.setattr(ServiceHandle, "_keep", lambda _self: None)
        service = ServiceHandle(config, Mock(), None, print, [], Roster(lambda: 0.0))

    def lost(_self: ServiceHandle, again: bool) -> None:
        now = 3600.0 * next(losses)
        monkeypatch.setattr(handle.time, "monotonic", lambda: now)
        if now > 36_000:
            service._ending.set()
        raise RoomFailed("it died")

    monkeypatch.setattr(handle.ray, "kill", lambda _actor: None)
    monkeypatch.setattr(ServiceHandle, "_serve", lost)
    service._keep()
    assert next(losses) == 12
    service.check()


def test_a_service_and_its_successor_learn_of_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServiceHandle, "_keep", lambda _self: None)
    actor, starts, config = Mock(), [(1, 0)], Any
    service = ServiceHandle(config, lambda: actor, None, print, starts, Roster(lambda: 0.0))  # type: ignore[arg-type]
    service.attempt_begins(2, 10)
    assert actor.mock_calls == [call.attempt_begins.remote(2, 10)]
    assert starts == [(1, 0), (2, 10)], "with which another one is made"
