"""The part of a replica in the engine's process, as far as it needs no model: what arrived is checked."""

import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from broadcast_support import HOST, laid_out, tensors_of

from inference import worker
from inference.carrier import Carrier
from inference.mapping import ON_DEVICE, Landing, Region, paged
from inference.receiving import DeviceLanding, Receiving
from inference.session import BucketStep
from inference.worker import WorkerExtension
from trireme.core import weights
from trireme.core.transport import Offer, Session
from trireme.core.types import WeightIdentity
from trireme.core.weights import EXACT, Canary, WeightsManifest, weights_digest
from trireme.transports.collective import GlooCollective, NcclCollective
from trireme.transports.packing import hash_tensor, tensor_of
from trireme.transports.sending import BroadcastSender

LIMIT_S = 60.0
Tensors = list[tuple[str, torch.Tensor]]


def manifest_of(version: int, tensors: Tensors) -> WeightsManifest:
    entries = laid_out(tensors).with_hashes({name: hash_tensor(tensor) for name, tensor in tensors})
    canary = Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), EXACT)
    return WeightsManifest(WeightIdentity(1, version, weights_digest(entries)), entries, canary)


class Engine:
    """Rank 0 of an engine, and the trainer's rank that sends to it. `device`: where versions stay that come through
    memory of this device."""

    def __init__(self, device: str | None = None) -> None:
        self.rank = WorkerExtension()
        self.rank.rank = 0
        self.rank.receiving = Receiving(device)
        self.sender = BroadcastSender(0, 1, HOST, None, shares_device=device is not None)
        read, self._write = os.pipe()
        self._messages = os.fdopen(read)

    def receive(self, version: int, tensors: Tensors) -> list[Region]:
        """Sends a version; returns where it has arrived."""
        layout = laid_out(tensors)
        assert self.sender.endpoint
        offer = Offer(1, version, layout.sizes, (self.sender.endpoint,), LIMIT_S)
        self.rank.receive_broadcast(pickle.dumps((offer, 0, version, f"/proc/self/fd/{self._write}")))
        assert json.loads(self._messages.readline())["ready"]
        self.sender.send(version, layout, [tensors], Session(1, 0, {0: 0}, LIMIT_S))
        regions, _ = paged(json.loads(self._messages.readline())["arrived"], layout.sizes)
        return regions

    def refusal(self, manifest: WeightsManifest, regions: list[Region]) -> str:
        self.rank.receive_weights(pickle.dumps((manifest, regions, ())))
        deadline = time.monotonic() + LIMIT_S
        while (problem := self.rank.checked()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return problem

    def close(self) -> None:
        self._messages.close()
        os.close(self._write)

    def loaded(self, manifest: WeightsManifest) -> None:
        places = [entry.place for entry in manifest.entries]
        self.rank.receiving.forget(manifest.identity.version, places, copied=True)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    started = Engine()
    yield started
    started.close()


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """One whose versions stay on the device. Here that is the CPU; all else is the code for GPUs."""
    started = Engine("cpu")
    yield started
    started.close()


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the tensors that a check has summed itself."""
    sizes: list[int] = []
    plain = weights.sums_of

    def sums_of(data: npt.NDArray[np.uint8], first_word: int = 0) -> Any:
        sizes.append(len(data))
        return plain(data, first_word)

    monkeypatch.setattr(weights, "sums_of", sums_of)
    return sizes


def test_from_the_second_broadcast_on_a_check_reads_nothing_again(
    engine: Engine, summed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(3):
        tensors = tensors_of(version)
        manifest = manifest_of(version, tensors)
        regions = engine.receive(version, tensors)
        assert engine.refusal(manifest, regions) == ""
        assert len(summed) == len(tensors), "those of the first version"
        engine.loaded(manifest)
    manifest = manifest_of(3, tensors)
    regions = engine.receive(3, tensors)
    monkeypatch.setattr(worker, "fault_point", lambda _: "corrupt")
    assert "arrived with hash" in engine.refusal(manifest, regions), "what is planted after the arrival is found"


def test_other_values_are_refused_whoever_sums_them(engine: Engine) -> None:
    for version in range(2):
        tensors = tensors_of(version)
        wrong = [(name, tensor + (name == "t7")) for name, tensor in tensors]
        manifest = manifest_of(version, wrong)
        refusal = engine.refusal(manifest, engine.receive(version, tensors))
        assert f"tensor t7 of version {version} arrived with hash" in refusal
        engine.loaded(manifest)


def test_sums_of_a_broadcast_do_not_stand_for_bytes_that_came_otherwise(engine: Engine, summed: list[int]) -> None:
    """The same version, at the same places, but in other memory: of a replica that takes it on demand."""
    for version in range(2):
        tensors = tensors_of(version)
        manifest = manifest_of(version, tensors)
        regions = engine.receive(version, tensors)
        if version == 0:
            engine.refusal(manifest, regions)
            engine.loaded(manifest)
    file = os.memfd_create("copies")
    for region in regions:
        os.pwrite(file, region.map(), region.offset)
    copies = [Region(f"/proc/self/fd/{file}", region.offset, region.nbytes) for region in regions]
    summed.clear()
    assert engine.refusal(manifest, copies) == ""
    assert len(summed) == len(tensors)
    entry = manifest.entries[0]
    os.pwrite(file, b"\xff", copies[entry.bucket].offset + entry.offset)
    assert f"tensor {entry.name} of version 1 arrived with hash" in engine.refusal(manifest, copies)
    os.close(file)


def test_a_version_that_stays_on_the_device_is_summed_there(on_device: Engine, summed: list[int]) -> None:
    for version in range(3):
        tensors = [*tensors_of(version), ("empty", torch.zeros(0)), ("scalar", torch.tensor(2.5))]
        manifest = manifest_of(version, tensors)
        regions = on_device.receive(version, tensors)
        assert {region.path for region in regions} == {ON_DEVICE}
        assert on_device.refusal(manifest, regions) == ""
        buckets = on_device.rank.received[1]
        arrived = {entry.name: tensor_of(entry, buckets) for entry in manifest.entries}
        assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors)
        on_device.loaded(manifest)
    assert summed == [], "the host reads nothing"


def test_other_values_on_the_device_are_refused(on_device: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(0)
    wrong = [(name, tensor + (name == "t7")) for name, tensor in tensors]
    manifest = manifest_of(0, wrong)
    assert "tensor t7 of version 0 arrived with hash" in on_device.refusal(manifest, on_device.receive(0, tensors))
    on_device.loaded(manifest)
    regions = on_device.receive(1, tensors)
    monkeypatch.setattr(worker, "fault_point", lambda _: "corrupt")
    assert "arrived with hash" in on_device.refusal(manifest_of(1, tensors), regions)


def test_memory_that_vllm_took_a_part_of_is_not_for_the_next_version() -> None:
    landing = torch.zeros(64, dtype=torch.uint8)
    buckets: worker.Buckets = [landing[:32], landing[32:]]
    model = torch.nn.Linear(2, 2)
    assert not worker.keeps_part(model, buckets)
    model.bias.data = landing[32:40].view(torch.float32)
    assert worker.keeps_part(model, buckets)
    assert not worker.keeps_part(model, [landing.numpy()]), "host memory is looked at in another way"


@pytest.fixture
def in_host_memory(on_device: Engine) -> Callable[[int], list[Region]]:
    """Returns a function that puts a version into host memory, as one that was fetched. Carriers have plain memory."""
    on_device.rank.carrier = Carrier(2, pinned=False)
    landings = []

    def put(version: int) -> list[Region]:
        layout = laid_out(tensors_of(version))
        landings.append(Landing())
        buckets = [np.zeros(size, np.uint8) for size in layout.sizes]
        for entry, (_, tensor) in zip(layout.entries, tensors_of(version), strict=True):
            buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes] = tensor.view(torch.uint8).numpy()
        return landings[-1].copy(buckets)

    return put


def test_a_version_in_host_memory_is_copied_to_the_second_buffer_and_checked_there(
    on_device: Engine, in_host_memory: Callable[[int], list[Region]], summed: list[int]
) -> None:
    for version in range(3):
        tensors = tensors_of(version)
        manifest = manifest_of(version, tensors)
        for _ in range(2):  # again, as after a refusal
            assert on_device.refusal(manifest, in_host_memory(version)) == ""
        assert on_device.rank.received is not None
        buckets = on_device.rank.received[1]
        assert all(isinstance(bucket, torch.Tensor) for bucket in buckets)
        arrived = {entry.name: tensor_of(entry, buckets) for entry in manifest.entries}
        assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors)
        on_device.loaded(manifest)
    assert summed == [], "the host sums nothing"
    wrong = [(name, tensor + (name == "t7")) for name, tensor in tensors_of(3)]
    manifest = manifest_of(3, wrong)
    assert "tensor t7 of version 3 arrived with hash" in on_device.refusal(manifest, in_host_memory(3))


def test_one_second_buffer_serves_all_ways(on_device: Engine, in_host_memory: Callable[[int], list[Region]]) -> None:
    """A version is broadcast, the next one is fetched, and another one arrives while the fetched one is loaded."""
    memory = set()
    for version, fetched in [(0, False), (1, False), (2, True), (3, True), (4, False)]:
        tensors = tensors_of(version)
        manifest = manifest_of(version, tensors)
        regions = in_host_memory(version) if fetched else on_device.receive(version, tensors)
        assert on_device.refusal(manifest, regions) == ""
        assert on_device.rank.received is not None
        memory.add(on_device.rank.received[1][0].data_ptr())  # type: ignore[union-attr]
        on_device.loaded(manifest)
    assert len(memory) == 1
    manifest = manifest_of(5, tensors_of(5))
    assert on_device.refusal(manifest, in_host_memory(5)) == ""
    assert {region.path for region in on_device.receive(6, tensors_of(6))} != {ON_DEVICE}, "the buffer is in use"


def test_a_version_that_arrives_on_the_device_leaves_none_of_it_for_a_fetched_one(
    on_device: Engine, in_host_memory: Callable[[int], list[Region]]
) -> None:
    on_device.receive(0, tensors_of(0))
    manifest = manifest_of(1, tensors_of(1))
    assert on_device.refusal(manifest, in_host_memory(1)) == ""
    assert on_device.rank.received is not None
    assert all(isinstance(bucket, np.ndarray) for bucket in on_device.rank.received[1]), "the pause copies it"


def test_other_ranks_do_not_copy_what_rank_0_may_still_write(
    on_device: Engine, in_host_memory: Callable[[int], list[Region]]
) -> None:
    manifest = manifest_of(0, tensors_of(0))
    regions = in_host_memory(0)
    steps = [BucketStep(region, changes=False) for region in in_host_memory(0)]
    for rank, kind in [(1, np.ndarray), (0, torch.Tensor)]:
        on_device.rank.rank = rank
        on_device.rank.receive_weights(pickle.dumps((manifest, regions, steps)))
        assert on_device.rank._checking.result(LIMIT_S) == ""
        assert on_device.rank.received is not None
        assert all(isinstance(bucket, kind) for bucket in on_device.rank.received[1])


@pytest.mark.parametrize(("buffer", "size", "stays"), [(True, 1, True), (True, 2, False), (False, 1, False)])
def test_bytes_stay_on_a_gpu_with_room_if_no_other_rank_has_to_map_them(
    monkeypatch: pytest.MonkeyPatch, buffer: bool, size: int, stays: bool
) -> None:
    rank: Any = WorkerExtension()
    monkeypatch.setattr(worker, "current_platform", SimpleNamespace(device_type="cuda"))
    rank.second_buffer = buffer
    rank.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=size))
    by_nccl: Any = SimpleNamespace(collective=object.__new__(NcclCollective))
    by_gloo: Any = SimpleNamespace(collective=object.__new__(GlooCollective))
    assert isinstance(rank.receiving._memory_for(by_nccl), DeviceLanding if stays else Landing)
    assert isinstance(rank.receiving._memory_for(by_gloo), Landing)
