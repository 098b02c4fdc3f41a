"""Groups of GPUs, by a stand-in for NCCL's library: in which order it is called, and what ends a wait. (Groups over TCP
are tested with real ones in test_broadcast.py, and NCCL itself by scripts/gpu_check.)"""

import ctypes
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, Store

from trireme.core.errors import RoomFailed
from trireme.transports import collective
from trireme.transports.collective import GlooCollective, Nccl, NcclCollective


class Library:
    """Stands for NCCL: `errors` are the answers about a call in progress, of which the last one stays."""

    def __init__(self, *errors: int) -> None:
        self.errors, self.calls = list(errors), list[Any]()

    def unique_id(self) -> bytes:
        return b"\xff" * 128

    def init_rank(self, comm: ctypes.c_void_p, size: int, unique_id: bytes, rank: int) -> None:
        comm.value = 7
        self.calls.append(("init", size, unique_id[:1], rank))

    def broadcast(self, address: int, nbytes: int, root: int, comm: ctypes.c_void_p, stream: int) -> None:
        self.calls.append(("broadcast", nbytes, root))

    def async_error(self, comm: ctypes.c_void_p) -> int:
        return self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]

    def abort(self, comm: ctypes.c_void_p) -> None:
        self.calls.append(("abort", comm.value))

    def describe(self, error: int) -> str:
        return f"NCCL: error {error}"


@pytest.fixture
def ready() -> Iterator[list[bool]]:
    """What the event after a broadcast answers; the last answer stays."""
    answers = [True]
    stream = SimpleNamespace(wait_stream=lambda _: None, cuda_stream=0)
    event = SimpleNamespace(record=lambda _: None, query=lambda: answers.pop(0) if len(answers) > 1 else answers[0])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            collective.torch,
            "cuda",
            SimpleNamespace(Stream=lambda: stream, Event=lambda: event, current_stream=lambda: stream),
        )
        yield answers


def joined(library: Any, rank: int = 0, timeout_s: float = 5.0) -> NcclCollective:
    store = HashStore()
    store.set("nccl", ("ff" * 128))
    return NcclCollective(store, rank, 3, timeout_s, library)


BUFFER = torch.zeros(10, dtype=torch.uint8)


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("rank", [0, 2])
def test_a_group_is_joined_used_and_given_up(rank: int) -> None:
    library = Library(Nccl.IN_PROGRESS, Nccl.SUCCESS)
    group = joined(library, rank)
    group.broadcast(BUFFER, 5.0)
    group.finish(5.0)
    group.abort()
    group.abort()
    assert library.calls == [("init", 3, b"\xff", rank), ("broadcast", 10, 0), ("abort", 7)]
    with pytest.raises(RoomFailed, match="the group was given up"):
        group.broadcast(BUFFER, 5.0)


def test_a_member_that_does_not_join_is_waited_for_until_the_deadline(ready: list[bool]) -> None:
    with pytest.raises(RoomFailed, match="waited for the members of a group of 3 GPUs to connect until its deadline"):
        joined(Library(Nccl.IN_PROGRESS), timeout_s=0.05)


def test_a_broadcast_ends_by_its_deadline_and_by_a_lost_peer(ready: list[bool]) -> None:
    group = joined(Library(Nccl.SUCCESS))
    ready[:] = [False]
    with pytest.raises(RoomFailed, match="waited for a broadcast of 10 bytes until its deadline"):
        group.broadcast(BUFFER, 0.05)
    group = joined(Library(*[Nccl.SUCCESS] * 4, 6))
    with pytest.raises(RoomFailed, match="waited for a broadcast of 10 bytes: NCCL: error 6"):
        group.broadcast(BUFFER, 20.0)


def test_a_short_call_is_looked_at_often_and_a_long_one_seldom(
    ready: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no bucket is late by more than an eighth of the time that it takes, or a thousandth of a second."""
    clock = [0.0]
    pauses: list[tuple[float, float]] = []

    def sleep(seconds: float) -> None:
        pauses.append((clock[0], seconds))
        clock[0] += seconds

    monkeypatch.setattr(collective, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    ready[:] = [*[False] * 100, True]
    joined(Library(Nccl.SUCCESS)).broadcast(BUFFER, 5.0)
    assert len(pauses) == 100
    for waited, pause in pauses:
        assert pause == pytest.approx(min(max(waited / 8, 2e-5), 1e-3))
    assert pauses[-1][1] == 1e-3


def test_another_thread_may_give_it_up(ready: list[bool]) -> None:
    group = joined(Library(Nccl.SUCCESS))

    def given_up() -> bool:
        group.abort()
        return False

    with pytest.raises(RoomFailed, match="the group was given up"):
        group._await(given_up, 1e12, "a broadcast")


def test_what_is_written_out_here_is_what_the_installed_header_says() -> None:
    """The first fields of ncclConfig_t, and numbers; the installed library has the functions."""
    nccl = pytest.importorskip("nvidia.nccl", reason="this PyTorch is not for CUDA")
    header = (Path(next(iter(nccl.__path__))) / "include" / "nccl.h").read_text()
    fields = header.partition("typedef struct ncclConfig_")[2].partition("}")[0]
    assert re.findall(r"(\w[\w ]*) (\w+);", fields)[:4] == [
        *(("size_t", "size"), ("unsigned int", "magic"), ("unsigned int", "version"), ("int", "blocking"))
    ]
    assert f"#define NCCL_API_MAGIC {Nccl.MAGIC:#x}" in header
    numbers = {name: int(value) for name, value in re.findall(r"(nccl\w+) += +(\d+)", header)}
    assert (numbers["ncclSuccess"], numbers["ncclInProgress"]) == (Nccl.SUCCESS, Nccl.IN_PROGRESS)
    assert numbers["ncclUint8"] == Nccl.UINT8
    assert "remote process" in Nccl().describe(numbers["ncclRemoteError"])
    names = ("ncclGetUniqueId", "ncclCommInitRankConfig", "ncclBroadcast", "ncclCommGetAsyncError", "ncclCommAbort")
    assert all(hasattr(Nccl()._library, name) for name in names)


class Addresses(Store):
    """A store in this process whose values can be read, and set before a group meets at it."""

    def __init__(self, addresses: dict[str, bytes]) -> None:
        super().__init__()
        self.addresses = addresses

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self.addresses.setdefault(key, value)

    def get(self, key: str) -> bytes:
        return self.addresses[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.addresses for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:  # type: ignore[override]
        while not self.check(keys):
            time.sleep(0.01)


def address_of_a_lost_member() -> bytes:
    """Returns what rank 1 of a group says of itself, with the highest port: rank 0 then waits for it to connect."""
    store = Addresses({})
    with ThreadPoolExecutor(2) as threads:  # which keep both groups until both are there
        list(threads.map(lambda rank: GlooCollective(store, rank, 2, 60.0, "lo"), range(2)))
    address = store.addresses["0/1"]
    host = address.index(bytes([127, 0, 0, 1]))
    return address[: host - 2] + (65535).to_bytes(2, "big") + address[host:]


def test_gloo_waits_longer_than_its_timeout_for_a_member_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, `collective.CONNECTING` is no longer needed."""
    lost = address_of_a_lost_member()
    waited_s = {}
    for times in (1, collective.CONNECTING):
        monkeypatch.setattr(collective, "CONNECTING", times)
        started = time.monotonic()
        with pytest.raises(RoomFailed, match="did not all connect"):
            GlooCollective(Addresses({"0/1": lost}), 0, 2, 0.2, "lo")
        waited_s[times] = time.monotonic() - started
    assert waited_s[1] >= 5 * 0.2
    assert waited_s[5] >= 0.2
