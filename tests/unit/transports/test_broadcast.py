"""Broadcasts between real processes, over the loopback or through memory that they share: what arrives, and who waits
for whom when one of them dies."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from broadcast_support import (
    BUCKET_BYTES,
    DEADLINE_S,
    HOST,
    Fleet,
    Parts,
    digest,
    importing_once,
    laid_out,
    of_groups,
    receivers,
    soon,
    tensors_of,
    what_is_held,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.core.digest import sums_of
from trireme.core.transport import TRIALS, Session
from trireme.core.weights import TensorPlace
from trireme.transports import broadcast, slabs
from trireme.transports.meeting import BroadcastGroup, GroupRoot, Receivers
from trireme.transports.packing import tensor_of
from trireme.transports.sending import BroadcastSender


def short_s() -> float:
    """A deadline that tests wait for, a quarter of which members have to answer: longer on a busy machine."""
    return 4.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(params=["broadcast", "ipc"])
def sender(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BroadcastSender:
    """That of a transport; of `ipc` with slabs that take several pieces for most buckets."""
    monkeypatch.setattr(slabs, "SLAB_BYTES", BUCKET_BYTES // 2)
    return BroadcastSender(0, 1, HOST, None, shares_device=request.param == "ipc")


def sharing(sender: BroadcastSender) -> tuple[int, ...]:
    """Returns the replicas to which the last version went through slabs."""
    return sender._last.sharing


def published(sender: BroadcastSender, fleet: Fleet, version: int) -> list[str]:
    """Offers and sends a version; returns the digests of its buckets."""
    tensors = tensors_of(version)
    layout = laid_out(tensors)
    session = fleet.offer(version, layout)
    sender.send(version, layout, [tensors[:5], tensors[5:]], session)
    assert len(layout.sizes) > 3
    return [digest(sender.versions.bucket(version, number)) for number in range(len(layout.sizes))]


def test_a_version_arrives_in_the_memory_of_the_one_before_that_was_copied(sender: BroadcastSender) -> None:
    with receivers(1) as members:
        fleet = Fleet(members, (sender.endpoint,))
        files = []
        for version in range(4):
            expected = published(sender, fleet, version)
            assert members[0].outcome() == "arrived"
            files.append(members[0].file())
            assert members[0].digests(copied=version < 2) == expected
        assert files[0] == files[1] == files[2], "the first two were copied"
        assert files[3] != files[2], "vLLM may keep a part of the third"
        assert members[0].resources() == {"files": 0}


def test_tensors_are_summed_as_they_arrive_at_the_places_of_the_version_before(sender: BroadcastSender) -> None:
    with receivers(1) as members:
        fleet, layout = Fleet(members, (sender.endpoint,)), laid_out(tensors_of(0))
        places = [entry.place for entry in layout.entries]
        moved = places[0]._replace(offset=64)
        expected: list[Sequence[TensorPlace]] = [[], places, [moved, *places[2:]], places]
        for version, (names, after) in enumerate(pairwise(expected)):
            published(sender, fleet, version)
            assert members[0].outcome() == "arrived"
            sums = members[0].sums(after)
            assert set(sums) == set(names)
            for place, total in sums.items():
                bucket = sender.versions.bucket(version, place.bucket)
                assert total == str(sums_of(bucket[place.offset : place.offset + place.nbytes]))
            members[0].digests(copied=True)
            assert members[0].sums(after) == {}, "once it is loaded, the memory is the next version's"


def test_all_receive_the_same_bytes_version_after_version_by_one_group(sender: BroadcastSender) -> None:
    with receivers(3) as members:
        fleet = Fleet(members, (sender.endpoint,))
        groups = []
        for version in range(3):
            sent = published(sender, fleet, version)
            assert [member.outcome() for member in members] == ["arrived"] * 3
            assert [member.digests() for member in members] == [sent] * 3
            groups.append(sender._group.name if sender._group else sharing(sender))
            assert [member.resources() for member in members] == [{"files": 0}] * 3, "the memory was given back"
        assert groups == [(0, 1, 2) if sender._slabs else "1.0.0"] * 3
        fleet.epoch, fleet.members = 1, (0, 2)
        sent = published(sender, fleet, 3)
        assert [members[number].outcome() for number in (0, 2)] == ["arrived"] * 2
        assert (sender._group.name if sender._group else sharing(sender)) == ((0, 2) if sender._slabs else "1.1.3")
    assert what_is_held()["threads"] == 0


POINTS = ["transport.ready", "transport.bucket@1", "transport.bucket@3", "transport.finish"]


LOST = [*((point, 1) for point in POINTS), ("transport.bucket@2", 0)]


@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize(
    ("sender", "point", "lost"),
    [*((transport, *lost) for transport in ("broadcast", "ipc") for lost in LOST), ("ipc", "transport.slab@2", 1)],
    indirect=["sender"],
)
def test_a_receiver_that_is_lost_holds_nobody_up(
    sender: BroadcastSender, point: str, lost: int, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is doing: the sender comes back, the others have the bytes or know that they have not, and take
    part again in the next session. All sockets and threads are then those of the new group, while the lost one may
    still be stopped."""
    nothing, among_four = {"sockets": 0, "threads": 0}, {"sockets": 3, "threads": 1}
    before = Parts.current()  # other tests of this process may have left groups that are not collected yet
    name, _, passage = point.partition("@")
    fault = f"{name}[{lost}]@{passage or 1}={action}"
    with receivers(4, fault) as members:
        fleet = Fleet(members, (sender.endpoint,), timeout_s=short_s())
        sent = published(sender, fleet, 0)
        survivors = [member for member in members if member.number != lost]
        outcomes = {survivor.number: survivor.outcome() for survivor in survivors}
        arrived = [number for number, outcome in outcomes.items() if outcome == "arrived"]
        assert [members[number].digests() for number in arrived] == [sent] * len(arrived)
        if name == "transport.ready":
            assert arrived == [0, 2, 3], "it was left out before anything was sent"
            assert "inference replica 1 did not connect though ready" in caplog.text
        elif sender._slabs and (action == "kill" or name == "transport.finish"):
            assert len(arrived) == 3, "nobody passes anything on to others"
        elif sender._slabs:
            assert arrived == []
            assert f"before the deadline. Late inference replicas: {lost};" in caplog.text
        elif name == "transport.finish":
            assert set(arrived) >= {0}, outcomes
        elif lost == 1:
            assert arrived == [0], "those behind it in the chain know that they lack something"
            assert "dead" not in outcomes.values()
        else:
            assert arrived == []
            assert "not sent to all of inference replica 0, 1, 2, 3" in caplog.text
        fleet.epoch, fleet.timeout_s = 1, 60.0
        fleet.members = tuple(survivor.number for survivor in survivors)
        sent = published(sender, fleet, 1)
        assert [survivor.outcome() for survivor in survivors] == ["arrived"] * 3
        assert [survivor.digests() for survivor in survivors] == [sent] * 3
        assert what_is_held()["threads"] == 0, threading.enumerate()
        stops = name in ("transport.bucket", "transport.slab") and action == "stop"
        if sender._slabs and not stops:
            assert sharing(sender) == fleet.members
            among_four = nothing
        elif sender._slabs:
            assert sharing(sender) == (), "the one that is stopped may still read both slabs"
        assert soon(lambda: of_groups(sender.endpoint, before), among_four) == among_four
        for survivor in survivors:
            assert soon(survivor.groups, among_four) == among_four
    sender._group = sender._last = None
    assert soon(lambda: of_groups(sender.endpoint, before), nothing) == nothing


def test_a_group_that_broke_behind_the_senders_back_is_made_anew_in_the_same_epoch(sender: BroadcastSender) -> None:
    """The last member of the chain is lost, so the sender has sent all and knows nothing."""
    with receivers(2, "transport.bucket[1]@2=raise") as members:
        fleet = Fleet(members, (sender.endpoint,))
        published(sender, fleet, 0)
        outcomes = [member.outcome() for member in members]
        assert outcomes[0] == "arrived"
        assert "fault injected" in outcomes[1]
        sent = published(sender, fleet, 1)
        assert [member.outcome() for member in members] == ["arrived"] * 2
        assert [member.digests() for member in members] == [sent] * 2
        assert (sender._group.name if sender._group else sharing(sender)) == ((0, 1) if sender._slabs else "1.0.1")


def test_a_version_goes_several_ways_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To replicas on the sender's device and to others; each way goes on without the other."""
    monkeypatch.setattr(slabs, "SLAB_BYTES", BUCKET_BYTES // 2)
    sender = BroadcastSender(0, 1, HOST, None, shares_device=True)
    with receivers(4, "transport.bucket[0]@2=kill,transport.bucket[2]@2=kill", elsewhere=(2, 3)) as members:
        fleet = Fleet(members, (sender.endpoint,))
        sent = published(sender, fleet, 0)
        assert sharing(sender) == (0, 1)
        outcomes = [member.outcome() for member in members]
        assert outcomes[1] == "arrived", "a broken group does not stop the slabs"
        assert members[1].digests() == sent
        assert [outcomes[0], outcomes[2]] == ["dead"] * 2
        fleet.epoch, fleet.members = 1, (1, 3)
        sent = published(sender, fleet, 1)
        assert [sharing(sender), sender._group and sender._group.members] == [(1,), (3,)]
        assert [members[number].outcome() for number in (1, 3)] == ["arrived"] * 2
        assert [members[number].digests() for number in (1, 3)] == [sent] * 2


@pytest.mark.parametrize(("lost_at", "sends"), [(0, False), (2, True)])
def test_between_gpus_the_first_versions_are_trials(
    caplog: pytest.LogCaptureFixture, lost_at: int, sends: bool
) -> None:
    """If one of them fails, no further version is sent. Here gloo stands for NCCL."""
    sender = BroadcastSender(0, 1, HOST, None)
    sender._trials = TRIALS
    count = len(laid_out(tensors_of(0)).sizes)
    with receivers(1, f"transport.bucket@{2 + count * lost_at}=kill") as members:
        fleet = Fleet(members, (sender.endpoint,), timeout_s=short_s())
        for version in range(lost_at + 1):
            sent = published(sender, fleet, version)
            assert members[0].outcome() == ("arrived" if version < lost_at else "dead")
    assert (sender.endpoint is not None) == sends
    assert ("as this was a trial" in caplog.text) != sends
    assert sent == [digest(sender.versions.bucket(lost_at, number)) for number in range(count)], "it can be fetched"


def test_a_later_offer_ends_what_is_still_received(sender: BroadcastSender) -> None:
    with receivers(2) as members:
        fleet = Fleet(members, (sender.endpoint,))
        fleet.offer(0, laid_out(tensors_of(0)))  # which is never sent
        sent = published(sender, fleet, 1)
        for member in members:
            outcomes = [member.outcome(), member.outcome()]
            assert sorted(outcomes) == ["a later version was offered", "arrived"]
            assert member.digests() == sent


def test_a_sender_that_is_stopped_holds_up_no_later_version(sender: BroadcastSender) -> None:
    """Its store takes connections, since the system does that for it, and never answers."""
    context = importing_once()
    parent, child = context.Pipe()
    process = context.Process(target=host_a_store, args=(child,), daemon=True)
    process.start()
    assert parent.poll(DEADLINE_S)
    endpoint = parent.recv()
    os.kill(process.pid, signal.SIGSTOP)
    with receivers(1) as members:
        Fleet(members, (endpoint,)).offer(0, laid_out(tensors_of(0)))
        sent = published(sender, Fleet(members, (sender.endpoint,)), 1)
        assert members[0].outcome() == "arrived"
        assert members[0].digests() == sent
    process.kill()
    process.join(DEADLINE_S)


def host_a_store(end: Any) -> None:
    """Says where its store is, and waits."""
    end.send(BroadcastSender(0, 1, HOST, None).endpoint)
    threading.Event().wait()


@pytest.mark.parametrize("shares_device", [False, True], ids=["broadcast", "ipc"])
def test_when_the_sender_dies_its_receivers_know(shares_device: bool) -> None:
    context = importing_once()
    parent, child = context.Pipe()
    process = context.Process(target=send_and_die, args=(child, shares_device), daemon=True)
    process.start()
    assert parent.poll(DEADLINE_S)
    endpoint, timeout_s = parent.recv(), 30.0
    with receivers(3) as members:
        fleet = Fleet(members, (endpoint,), timeout_s=timeout_s)
        parent.send(fleet.offer(0, laid_out(tensors_of(0))))
        outcomes = [member.outcome() for member in members]
        assert not {"arrived", "dead"} & set(outcomes), outcomes
        process.join(60)
        for member in members:
            assert member.resources(sockets=True) == {"files": 0, "sockets": 0, "threads": 0}


def send_and_die(end: Any, shares_device: bool) -> None:
    """Gathers half of the tensors while it sends, and is killed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sender, tensors = BroadcastSender(0, 1, HOST, None, shares_device=shares_device), tensors_of(0)
    end.send(sender.endpoint)

    def half() -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield tensors[:6]
        os.kill(os.getpid(), signal.SIGKILL)

    sender.send(0, laid_out(tensors), half(), end.recv())


OF_SEVERAL = (BUCKET_BYTES // 4,), (BUCKET_BYTES // 2 + 5,)
SHAPES = st.lists(st.sampled_from([(0,), (1,), (3, 0), (), (7,), (17, 3), *OF_SEVERAL]), max_size=12)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64])
BITS = (0x7FC1, 0xFFC1, 0x7F81, 0x8000, 0x0001, 0x8001, 0x7F80)
"""Of bfloat16: NaNs with payloads, quiet and signalling, -0.0, subnormals, infinity. In other dtypes similar ones."""


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Returns a tensor of random bits, every third number special."""
    size = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.arange(size).view(shape) % 3 == seed % 3
    words = np.random.default_rng(seed).integers(0, 2**16, (size, dtype.itemsize // 2)).astype(np.uint16)
    if size:  # the last word of a number has its sign and exponent
        words[::3, -1] = np.resize(np.asarray(BITS, np.uint16), len(words[::3]))
    return torch.from_numpy(words.reshape(-1)).view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class Recorded:
    """A collective that keeps a copy of what is broadcast."""

    def __init__(self) -> None:
        self.sent: list[np.ndarray] = []

    def broadcast(self, buffer: torch.Tensor, timeout_s: float) -> None:
        self.sent.append(buffer.numpy().copy())

    def finish(self, timeout_s: float) -> None: ...

    def abort(self) -> None: ...


@settings(max_examples=30)
@given(shapes=SHAPES, dtype=DTYPES, size=st.integers(1, 3), served=st.booleans())
def test_tensors_are_kept_and_sent(shapes: list[tuple[int, ...]], dtype: torch.dtype, size: int, served: bool) -> None:
    """Bit for bit: NaNs with payloads, -0.0, subnormals. Empty ones, single elements, and some larger than a bucket; by
    one to three ranks, with members or without."""
    tensors = [(f"t{n}", any_bits(shape, dtype, n)) for n, shape in enumerate(shapes)]
    layout, parts, retained, recorded = laid_out(tensors), [], {}, []
    for rank in range(size):
        sender, collective = BroadcastSender(rank, size, HOST, f"holder {rank}"), Recorded()
        group = BroadcastGroup("1.0.0", 0, (rank,), "gloo", collective)
        session = Session(1, 0, {rank: rank for rank in range(size)}, 30.0) if served else None
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(GroupRoot, "meet", lambda *_, group=group: Receivers(group, (), ()))
            patched.setattr(GroupRoot, "clear", lambda _: None)
            parts.append(sender.send(3, layout, [tensors], session))
        retained.update({n: sender.versions.bucket(3, n) for n in range(rank, len(layout.sizes), size)})
        recorded.append(collective.sent)
    source = broadcast.join(parts)
    assert (source.buckets, source.holders_R) == (len(layout.sizes), tuple(f"holder {rank}" for rank in range(size)))
    numbers = [n for n, nbytes in enumerate(layout.sizes) if nbytes]
    sent = [dict(zip(numbers, of_rank, strict=True)) for of_rank in recorded if served]
    for buckets in (retained, *sent):  # all but what lies between tensors
        arrived = {entry.name: tensor_of(entry, buckets) for entry in layout.entries}
        for name, tensor in tensors:
            assert (arrived[name].shape, arrived[name].dtype) == (tensor.shape, tensor.dtype)
            assert bytes_of(arrived[name]) == bytes_of(tensor)
    assert served or recorded == [[]] * size
