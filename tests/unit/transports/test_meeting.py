"""The store at which the members of a broadcast meet: what becomes of those that wait for one that does not answer."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from broadcast_support import HOST, importing_once, what_is_held

from trireme.core.errors import RoomFailed
from trireme.transports.meeting import GroupMember, answering, open_store

SHORT_S = 0.5


def host_a_store(end: Any) -> None:
    """Hosts a store and says where, until the process is killed."""
    import socket

    listening = socket.create_server((HOST, 0))
    store = open_store(HOST, listening.getsockname()[1], listening.detach())
    end.send(store.port)
    time.sleep(600)


@pytest.fixture
def stoppable() -> Iterator[tuple[int, int]]:
    """A store in a process of its own: its port, and the id of the process."""
    here, there = multiprocessing.Pipe()
    process = importing_once().Process(target=host_a_store, args=(there,), daemon=True)
    process.start()
    assert process.pid is not None
    assert here.poll(120)
    yield here.recv(), process.pid
    process.kill()
    process.join()


def test_one_that_is_stopped_is_waited_for_until_the_deadline_and_its_connection_is_closed(
    stoppable: tuple[int, int],
) -> None:
    port, pid = stoppable
    sockets = what_is_held()["sockets"]
    store = open_store(HOST, port)
    member = GroupMember(store, HOST, 0, 1, 0, lambda: False)
    os.kill(pid, signal.SIGSTOP)
    silent = f"the store of the trainer shard at {HOST} does not answer"
    with pytest.raises(RoomFailed, match=silent), answering(HOST, port, SHORT_S):
        member.meet(None, time.monotonic() + 600)
    with pytest.raises(RoomFailed, match=silent), answering(HOST, port, SHORT_S):
        open_store(HOST, port, timeout_s=SHORT_S)
    del store, member
    assert what_is_held()["sockets"] == sockets


def test_an_answer_in_time_leaves_the_connection_as_it_is(stoppable: tuple[int, int]) -> None:
    port, _ = stoppable
    with answering(HOST, port, 60):
        store = open_store(HOST, port)
    with answering(HOST, port, 60):
        store.set("key", "value")
    assert store.get("key") == b"value"
