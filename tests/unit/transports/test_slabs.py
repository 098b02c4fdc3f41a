"""Weights through memory that sender and receivers map: who writes to a slab when, and what ends a wait. Real memory of
this machine; that real processes die, also while they copy, is in test_broadcast.py."""

import gc
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trireme.core.errors import RoomFailed
from trireme.transports import host_slabs, slabs
from trireme.transports.slabs import SlabReceiver, SlabSender, device_key

PIECE = 1000
LONG_S = 600.0


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(slabs, "SLAB_BYTES", PIECE)
    yield
    slabs._opened.clear()


@pytest.fixture
def sender() -> SlabSender:
    return SlabSender()


def numbered(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def received(receiver: SlabReceiver, sizes: list[int], timeout_s: float = LONG_S) -> list[Tensor]:
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    for buffer in buffers:
        receiver.broadcast(buffer, timeout_s)
    return buffers


def beginning(receiver: SlabReceiver) -> tuple[int, int]:
    """Reads the next piece's message, and acknowledges nothing: returns the slab and the number of bytes."""
    if not receiver._slabs:
        receiver._open(time.monotonic() + LONG_S)
    number, nbytes = receiver._next(time.monotonic() + LONG_S)
    return number, nbytes


def test_all_bytes_reach_all_receivers_and_slabs_are_opened_once(
    sender: SlabSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(
        slabs,
        "slab_memory",
        lambda: SimpleNamespace(
            **{**vars(host_slabs), "open": lambda *args: opened.append(args[0]) or host_slabs.open(*args)}
        ),
    )
    receivers = [SlabReceiver(sender.address, number) for number in (3, 5)]
    sizes = [10, 2 * PIECE, 3 * PIECE + 7, PIECE]
    with ThreadPoolExecutor(2) as pool:
        for version in range(3):
            assert sender.begin((3, 5), LONG_S) == (3, 5)
            arriving = [pool.submit(received, receiver, sizes) for receiver in receivers]
            buckets = [numbered(size, version + size) for size in sizes]
            for bucket in buckets:
                sender.broadcast(bucket, LONG_S)
            for outcome in arriving:
                assert all(map(torch.equal, outcome.result(), buckets))
    assert len(opened) == slabs.SLABS, "both receivers are of one process"
    receivers[0].abort()
    again = SlabReceiver(sender.address, 3)
    assert sender.begin((3,), LONG_S) == (3,)
    sender.broadcast(buckets[0], LONG_S)
    assert torch.equal(received(again, sizes[:1])[0], buckets[0])
    assert len(opened) == slabs.SLABS, "a new connection takes what is open"


def test_only_those_that_are_asked_receive(sender: SlabSender) -> None:
    first, second = (SlabReceiver(sender.address, number) for number in (0, 1))
    assert sender.begin((1, 7), LONG_S) == (1,)
    sender.broadcast(numbered(PIECE), LONG_S)
    assert torch.equal(received(second, [PIECE])[0], numbered(PIECE))
    with pytest.raises(RoomFailed, match="next piece of the weights did not come from the trainer shard"):
        received(first, [PIECE], timeout_s=0.1)


def test_a_slab_is_not_written_to_before_it_is_acknowledged(sender: SlabSender) -> None:
    receiver = SlabReceiver(sender.address, 4)
    sender.begin((4,), LONG_S)
    bucket = numbered(4 * PIECE)
    with pytest.raises(RoomFailed, match=r"was not copied out of shared memory.* Late inference replicas: 4$"):
        sender.broadcast(bucket, 0.2)
    pieces = [beginning(receiver) for _ in range(slabs.SLABS)]
    assert pieces == [(0, PIECE), (1, PIECE)]
    for at, (number, _) in enumerate(pieces):
        assert torch.equal(receiver._slabs[number], bucket[at * PIECE : (at + 1) * PIECE]), "as it was written"
    assert sender.begin((4,), LONG_S) == (), "it may still read both"
    receiver._acknowledge(1)
    assert sender.begin((4,), LONG_S) == (4,)
    sender.broadcast(numbered(PIECE, 9), LONG_S)
    assert beginning(receiver) == (1, PIECE)
    assert torch.equal(receiver._slabs[0], bucket[:PIECE]), "the other one is not acknowledged yet"


def test_the_end_of_a_receiver_frees_its_slabs_and_stops_no_other(sender: SlabSender) -> None:
    lost, other = (SlabReceiver(sender.address, number) for number in (0, 1))
    sender.begin((0, 1), LONG_S)
    bucket = numbered(5 * PIECE)
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(sender.broadcast, bucket, LONG_S)
        arriving = pool.submit(received, other, [len(bucket)])
        beginning(lost)
        beginning(lost)
        assert not sending.done()
        lost.abort()
        sending.result(LONG_S)
        assert torch.equal(arriving.result(LONG_S)[0], bucket)
    assert sender.begin((0, 1), LONG_S) == (1,)
    other.abort()
    with pytest.raises(RoomFailed, match="all replicas that receive through shared memory have ended"):
        sender.broadcast(bucket, LONG_S)


def test_the_successor_of_a_lost_replica_takes_its_number(sender: SlabSender) -> None:
    stopped = SlabReceiver(sender.address, 2)
    sender.begin((2,), LONG_S)
    sender.broadcast(numbered(PIECE), LONG_S)
    beginning(stopped)
    successor = SlabReceiver(sender.address, 2)
    assert sender.begin((2,), LONG_S) == (2,)
    bucket = numbered(3 * PIECE, 1)
    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(received, successor, [len(bucket)])
        sender.broadcast(bucket, LONG_S)
        assert torch.equal(arriving.result(LONG_S)[0], bucket), "through the other slab"
    assert torch.equal(stopped._slabs[0], numbered(PIECE))


def test_a_receiver_knows_that_its_sender_has_ended() -> None:
    sender = SlabSender()
    receiver = SlabReceiver(sender.address, 0)
    sender.begin((0,), LONG_S)
    sender.broadcast(numbered(PIECE), LONG_S)
    assert torch.equal(received(receiver, [PIECE])[0], numbered(PIECE))
    second = SlabReceiver(sender.address, 1)
    sender.begin((0, 1), LONG_S)
    sender.broadcast(numbered(PIECE), LONG_S)
    address = sender.address
    del sender
    gc.collect()
    for late in (receiver, second):  # the second one has opened nothing yet
        with pytest.raises(RoomFailed, match="the trainer shard that sends through shared memory has ended"):
            received(late, [2 * PIECE])
    with pytest.raises(OSError, match="refused"):
        SlabReceiver(address, 0)


def test_a_receiver_stops_waiting_when_a_later_version_is_offered(sender: SlabSender) -> None:
    receiver = SlabReceiver(sender.address, 0)
    sender.begin((0,), LONG_S)
    given_up = threading.Event()
    receiver.given_up = given_up.is_set
    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(received, receiver, [PIECE])
        given_up.set()
        with pytest.raises(RoomFailed, match="a later version was offered"):
            arriving.result(LONG_S)


def test_another_users_process_is_no_receiver_and_no_sender(
    sender: SlabSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(f"\0{sender.address}")
    stranger.send(b"0")
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.connect(f"\0{sender.address}")
    with monkeypatch.context() as patched:
        patched.setattr(slabs.os, "getuid", lambda: 12345)
        assert sender.begin((0,), LONG_S) == ()
        with pytest.raises(ConnectionResetError):  # what it said is not even read
            stranger.recv(10)
        assert silent.recv(10) == b""
        with pytest.raises(PermissionError, match="is another user's"):
            SlabReceiver(sender.address, 0)
    stranger.close()
    silent.close()


def test_an_older_thread_is_waited_for_until_the_deadline(sender: SlabSender) -> None:
    """One that was given up may hang in a copy."""
    with sender._lock, pytest.raises(RoomFailed, match="this trainer shard was still sending an earlier version"):
        sender.begin((0,), 0.05)


class Slow:
    """Memory whose copies end when a test says so, and a log of what was sent meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends = True
        self.log: list[str] = []
        monkeypatch.setattr(slabs, "slab_memory", lambda: self)
        for side, name in ((SlabSender, "_send"), (SlabReceiver, "_acknowledge")):
            plain = getattr(side, name)
            monkeypatch.setattr(
                side, name, lambda *args, plain=plain, name=name: (self.log.append(name), plain(*args))[1]
            )

    make = staticmethod(host_slabs.make)
    open = staticmethod(host_slabs.open)
    on_stream = staticmethod(nullcontext)

    def copy(self, source: Tensor, target: Tensor, timeout_s: float) -> bool:
        target.copy_(source)
        self.log.append("copied" if self.ends else "late")
        return self.ends


def test_both_sides_speak_only_once_their_copy_has_ended(sender: SlabSender, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Slow(monkeypatch)
    receiver = SlabReceiver(sender.address, 0)
    sender.begin((0,), LONG_S)
    sender.broadcast(numbered(PIECE), LONG_S)
    received(receiver, [PIECE])
    assert memory.log == ["_send", "copied", "_send", "copied", "_acknowledge"], "the first message has the handles"
    memory.log.clear()
    sender.broadcast(numbered(PIECE), LONG_S)
    memory.ends = False
    with pytest.raises(RoomFailed, match="device of this replica did not copy 1000 bytes out of shared memory"):
        received(receiver, [PIECE])
    with pytest.raises(RoomFailed, match="device of this trainer shard did not copy 1000 bytes into shared memory"):
        sender.broadcast(numbered(PIECE), LONG_S)
    assert memory.log == ["copied", "_send", "late", "late"]


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4 * PIECE), min_size=1, max_size=4),
    ends=st.dictionaries(st.integers(0, 2), st.integers(0, 6), max_size=2),
)
def test_whoever_ends_the_others_have_all_bytes(sizes: list[int], ends: dict[int, int]) -> None:
    """`ends`: {receiver: after which number of pieces it ends}."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slabs, "SLAB_BYTES", PIECE)
        sender = SlabSender()
        receivers = [SlabReceiver(sender.address, number) for number in range(3)]
        assert sender.begin(range(3), LONG_S) == (0, 1, 2)
        buckets = [numbered(size, size) for size in sizes]

        def run(receiver: SlabReceiver, number: int) -> list[Tensor] | None:
            pieces = 0
            plain = receiver._next

            def counted(deadline: float) -> list[Any]:
                nonlocal pieces
                if pieces == ends.get(number, -1):
                    raise RoomFailed("it ends")
                pieces += 1
                return plain(deadline)

            receiver._next = counted  # type: ignore[method-assign]
            try:
                return received(receiver, sizes)
            except RoomFailed:
                receiver.abort()
                return None

        with ThreadPoolExecutor(3) as pool:
            outcomes = [pool.submit(run, receiver, number) for number, receiver in enumerate(receivers)]
            for bucket in buckets:
                sender.broadcast(bucket, LONG_S)
            results = [outcome.result(LONG_S) for outcome in outcomes]
        for number, result in enumerate(results):
            assert (result is None) <= (number in ends)
            assert result is None or all(map(torch.equal, result, buckets))


def test_a_device_is_this_machine_and_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    key = device_key()
    assert key == device_key()
    monkeypatch.setattr(slabs, "own_gpu", lambda: "GPU-1")
    assert device_key() == f"GPU-1{key}"
