"""Waits across processes: each way in which the other side can fail ends the wait with its name."""

import os
import signal
import time
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from trireme.core.errors import LimitReached, RoomFailed
from trireme.process import waits
from trireme.process.ray_cluster import OBITUARY

pytestmark = pytest.mark.usefixtures("ray_cluster")


@ray.remote(num_cpus=0)
class Room:
    def pid(self) -> int:
        return os.getpid()

    def hang(self, begun: Path = Path(os.devnull)) -> None:
        begun.touch()
        time.sleep(3600)

    def crash(self) -> None:
        raise ValueError("a wrong value")

    def stop_by_limit(self) -> None:
        raise LimitReached("enough")

    def fail(self, reason: str) -> None:
        raise RoomFailed(reason)

    def store(self) -> list[Any]:
        return [ray.put(np.zeros(1_000_000))]


def test_a_hanging_room_is_named_at_the_deadline() -> None:
    room = Room.remote()
    with pytest.raises(RoomFailed, match=r"waited 1 s for trainer shard 0.*its log: logs/x"):
        waits.get(room.hang.remote(), owner="trainer shard 0", timeout_s=1, log=Path("logs/x"))
    ray.kill(room)


def test_a_raising_room_shows_its_traceback() -> None:
    room = Room.remote()
    with pytest.raises(RoomFailed, match=r"(?s)shard 1 raised ValueError: a wrong value.*in crash"):
        waits.get(room.crash.remote(), owner="shard 1", timeout_s=60)


def test_errors_of_ours_cross_unchanged() -> None:
    room = Room.remote()
    with pytest.raises(LimitReached, match="enough"):
        waits.get(room.stop_by_limit.remote(), owner="orchestrator", timeout_s=60)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("no answer", "no answer; its log: logs/x"), ("no answer; its log: logs/y", "no answer; its log: logs/y")],
)
def test_a_room_that_says_itself_what_failed_is_shown_with_its_log(reason: str, expected: str) -> None:
    with pytest.raises(RoomFailed) as raised:
        waits.get(Room.remote().fail.remote(reason), owner="replica 0", timeout_s=60, log=Path("logs/x"))
    assert str(raised.value) == expected


def test_one_dead_room_ends_the_wait_for_the_others() -> None:
    """The others may hang in a collective for ever: the first failure is the answer."""
    healthy, dying = Room.remote(), Room.remote()
    pid = waits.get(dying.pid.remote(), owner="dying", timeout_s=60)
    refs = [healthy.hang.remote(), dying.hang.remote()]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RoomFailed, match=f"^shard 1 died: process {pid} was killed or crashed, or ran out of memory$"):
        waits.get_all(refs, owners=["shard 0", "shard 1"], timeout_s=60)
    ray.kill(healthy)


def test_a_value_that_is_lost_with_its_process_is_named() -> None:
    """As a part of a batch is, which the orchestrator stores and a shard fetches."""
    room, deadline = Room.remote(), time.monotonic() + 60
    (stored,) = waits.get(room.store.remote(), owner="room", timeout_s=60)
    ray.kill(room)

    def fetch_until_it_fails() -> None:  # Ray takes a moment to drop what the dead process owned
        while time.monotonic() < deadline:
            waits.get(stored, owner="orchestrator (a part of a batch)", timeout_s=30)

    with pytest.raises(RoomFailed, match=r"orchestrator \(a part of a batch\): \w*(Owner|Lost)"):
        fetch_until_it_fails()


@ray.remote(num_cpus=0)
class Unmade:
    def __init__(self) -> None:
        raise ValueError("no such file")

    def pid(self) -> int:
        return os.getpid()


def test_an_actor_whose_making_raises_has_not_died() -> None:
    """Making it again would raise the same again."""
    with pytest.raises(RoomFailed, match="ValueError: no such file") as raised:
        waits.get(Unmade.remote().pid.remote(), owner="shard 0", timeout_s=60)
    assert not waits.died(raised.value)
    assert "\x1b" not in str(raised.value)


def test_ray_would_print_a_page_for_a_process_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray prints this, and begins it with these words; `trireme.process.ray_cluster` keeps it from the console."""
    printed: Queue[dict[str, Any]] = Queue()
    monkeypatch.setattr(ray._private.worker, "print_to_stdstream", lambda data, ignore_prefix: printed.put(data))
    room = Room.remote()
    pid = waits.get(room.pid.remote(), owner="room", timeout_s=60)
    room.hang.remote(tmp_path / "at work")
    while not (tmp_path / "at work").exists():  # Ray prints of those only that are
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    while not any(line.startswith(OBITUARY) for line in printed.get(timeout=60)["lines"]):
        pass


def test_services_of_ray_are_in_the_group_of_whoever_starts_them() -> None:
    """When they are not, `trireme.process.ray_cluster._start_ray` needs no process groups any more."""
    services = [child for child in psutil.Process().children() if child.name() in ("gcs_server", "raylet")]
    assert [os.getpgid(service.pid) for service in services] == [os.getpgid(0)] * 2
