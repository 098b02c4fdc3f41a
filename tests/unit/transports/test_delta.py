"""Changes of a version: the codec, and the way of 200 updates from a sender's buckets to a replica's memory."""

import asyncio
import pickle
import time
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from inference.session import Arrived, Broadcasts
from inference.worker import WorkerExtension
from trireme.core import weights
from trireme.core.digest import sums_of
from trireme.core.errors import WeightsRefused
from trireme.core.transport import Epochs, Offer, Session
from trireme.core.types import WeightIdentity
from trireme.core.weights import EXACT, Canary, PublishedWeights, WeightsManifest, weights_digest
from trireme.transports import delta, object_store
from trireme.transports.packing import Packer, hash_tensor, lay_out
from trireme.transports.sending import BroadcastSender

Bytes = npt.NDArray[np.uint8]
LIMIT_S = 60.0
SPECIAL = [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF, 0x7F7F, 0x3F80]
"""Zeros, the smallest subnormals, infinities, NaNs with payloads and the largest number, as words of bfloat16."""
WORDS = st.sampled_from(SPECIAL) | st.integers(0, 0xFFFF)
BLOCKS = 64


@given(
    st.lists(WORDS, min_size=4, max_size=4 * BLOCKS).map(lambda words: words[: len(words) // 4 * 4]),
    st.dictionaries(st.integers(0, 4 * BLOCKS), WORDS),
    st.lists(st.integers(0, 4 * BLOCKS), unique=True),
)
@example([0x7FC0, 0x8000, 0x0000, 0xFFFF] * 8, {0: 0x7FC1, 1: 0x0000, 2: 0xFFFF, 3: 0x0000}, [])
def test_changes_make_the_new_words_and_sums_of_the_old(
    words: list[int], changed: dict[int, int], starts: list[int]
) -> None:
    """Whatever the words mean as numbers. A bucket without changes has no tokens."""
    old = np.array([*words, *[0] * 16 * BLOCKS], np.uint16)
    new = old.copy()
    for place, word in changed.items():
        new[place % len(words)] = word
    changes = delta.encode(old.view(np.uint8), new.view(np.uint8))
    if changes is None:
        assert 3 * (old != new).sum() > old.nbytes * delta.LARGEST_SHARE - 4 * 12
        return
    assert (len(changes) == 0) == bool((old == new).all())
    offsets = sorted({0, *(2 * (start % len(old)) for start in starts)})
    memory = old.copy()
    added = delta.apply(changes, memory.view(np.uint8), offsets)
    assert memory.tolist() == new.tolist()
    for begin, end, more in zip(offsets, [*offsets[1:], old.nbytes], added, strict=True):
        old_sums = sums_of(old.view(np.uint8)[begin:end])
        assert old_sums + more == sums_of(new.view(np.uint8)[begin:end])


@pytest.mark.parametrize("gap", [0, 30, 31, 32, 4095, 4096, 2**17, 2**20 - 1])
@pytest.mark.parametrize("difference", [1, 0xFFFF, 2, 0x8000])
def test_a_word_is_found_however_far_it_is(gap: int, difference: int) -> None:
    old = np.zeros(2**20, np.uint16)
    new = old.copy()
    new[[gap, 2**20 - 1]] += np.uint16(difference)
    memory = old.view(np.uint8).copy()
    delta.apply(delta.encode(old.view(np.uint8), new.view(np.uint8)), memory, [0])
    assert np.array_equal(memory.view(np.uint16), new)


def test_a_bucket_in_which_all_changes_travels_whole_and_fewer_changes_have_a_byte_or_two_each() -> None:
    old = np.zeros(2**16, np.uint16)
    assert delta.encode(old.view(np.uint8), (old + np.uint16(7)).view(np.uint8)) is None
    new = old.copy()
    new[::100] += np.uint16(1)
    assert len(delta.encode(old.view(np.uint8), new.view(np.uint8))) <= 2 * 656


@pytest.mark.parametrize("difference", [1, 0xFFFF])
def test_every_word_there_is_may_change(difference: int) -> None:
    """Each by one: NaNs with payloads, zeros of both signs, subnormals, infinities."""
    old = np.arange(2**16).astype(np.uint16)
    new = old + np.uint16(difference)
    memory = old.view(np.uint8).copy()
    (added,) = delta.apply(delta.encode(old.view(np.uint8), new.view(np.uint8)), memory, [0])
    assert np.array_equal(memory, new.view(np.uint8))
    assert sums_of(old.view(np.uint8)) + added == sums_of(new.view(np.uint8))


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda changes: changes[:-1],
        lambda changes: np.append(changes, np.uint8(0x82)),
        lambda changes: np.full(20, 0xFF, np.uint8),
        lambda changes: np.append(changes, np.uint8(3)),
        lambda changes: np.tile(changes, 300),
    ],
    ids=["cut", "unfinished", "too long", "unknown kind", "beyond the end"],
)
def test_changes_that_do_not_fit_are_refused(corrupt: Any) -> None:
    old = np.zeros(1024, np.uint16)
    new = old.copy()
    new[1000] = 77
    changes = delta.encode(old.view(np.uint8), new.view(np.uint8))
    with pytest.raises(WeightsRefused, match="cannot be applied to a part of 2048 bytes"):
        delta.apply(corrupt(changes), old.view(np.uint8), [0])


class Reference:
    """Is awaited as a reference in Ray's store is."""

    def __init__(self, array: Bytes) -> None:
        self.array = array.copy()

    def __await__(self) -> Generator[Any, None, Bytes]:
        yield from asyncio.sleep(0).__await__()
        return self.array


MODEL = {f"t{n}": shape for n, shape in enumerate([(40, 50), (37,), (3, 5, 7), (200, 11), (1,)])} | {"B": (50, 4)}


class Trainer:
    """Two ranks that publish a model in bfloat16, of masters in float32 that AdamW trains. The tensor B begins at zero,
    as an adapter's does, so a step changes nearly all its values and their bucket travels whole."""

    def __init__(self, learning_rate: float) -> None:
        torch.manual_seed(0)
        start = {name: torch.randn(shape) / 50 * (name != "B") for name, shape in MODEL.items()}
        self.masters = {name: torch.nn.Parameter(tensor) for name, tensor in start.items()}
        self.counts = torch.arange(7, dtype=torch.uint8)  # a buffer of an odd size
        self.optimizer = torch.optim.AdamW(self.masters.values(), learning_rate)
        self.layout = lay_out([self.tensors()], bucket_bytes=4400)
        self.packers = []
        for rank in range(2):
            store = object_store.ChangesStore(Reference, lambda reference: reference.array)  # type: ignore[arg-type]
            self.packers.append(Packer(store.put, rank, 2))
        self.base: WeightIdentity | None = None

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [*((name, p.detach().bfloat16()) for name, p in self.masters.items()), ("counts", self.counts)]

    def step(self) -> None:
        for parameter in self.masters.values():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.counts[-1] += 1

    def publish(self, version: int) -> PublishedWeights:
        tensors = self.tensors()
        source = object_store.join([packer.send(version, self.layout, [tensors], None) for packer in self.packers])
        return self.described(version, tensors, source)

    def described(
        self, version: int, tensors: list[tuple[str, torch.Tensor]], source: object, session: Session | None = None
    ) -> PublishedWeights:
        entries = self.layout.with_hashes({name: hash_tensor(tensor) for name, tensor in tensors})
        identity = WeightIdentity(1, version, weights_digest(entries))
        canary = Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), EXACT)
        manifest = WeightsManifest(identity, entries, canary, None, self.base)
        self.base = identity
        return PublishedWeights(manifest, source, session)


class Replica:
    """A replica's memory, and rank 0 of its engine. `refused` counts changes that it refused."""

    def __init__(self) -> None:
        self.rank = WorkerExtension()
        self.rank.rank = 0
        self.rank.second_buffer = False
        self.rank.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))  # type: ignore[assignment]
        self.broadcasts = Broadcasts(object_store, None, delta=True)  # type: ignore[arg-type]
        self.refused = self.received = 0

    async def take(self, published: PublishedWeights) -> list[Bytes]:
        """Takes a version as `inference.actor.ReplicaActor` does; returns its buckets."""
        for whole in (False, True):
            async with self.broadcasts.fetched(0, published, whole=whole) as arrived:
                refusal = await self._refusal(published.manifest, arrived)
                self.received = arrived.nbytes
                if not refusal:
                    self.broadcasts.base = published.identity
                    self.rank.base_entries = published.manifest.entries  # as once they are loaded
                    return [region.map() for region in arrived.regions]
                assert arrived.has_changes, refusal
                self.refused += 1
        raise AssertionError(refusal)

    async def _refusal(self, manifest: WeightsManifest, arrived: Arrived) -> str:
        self.broadcasts.base = None
        self.rank.receive_weights(pickle.dumps((manifest, arrived.regions, arrived.steps)))
        deadline = time.monotonic() + LIMIT_S
        while (refusal := self.rank.checked()) is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.0005)
        return refusal


@pytest.mark.parametrize("learning_rate", [1e-6, 1e-5])
def test_200_updates_are_those_of_whole_weights(learning_rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica takes all versions, with changes that are corrupted twice, one joins at version 50, and one misses
    versions. After the first version of each, only changes are read, and the bucket in which most changes."""
    summed: list[int] = []
    plain = weights.sums_of
    monkeypatch.setattr(weights, "sums_of", lambda data, first=0: (summed.append(len(data)), plain(data, first))[1])
    trainer = Trainer(learning_rate)
    total = sum(trainer.layout.sizes)
    replicas = [Replica(), Replica(), Replica()]

    def takes(replica: int, version: int) -> bool:
        return replica == 0 or (replica == 1 and version >= 50) or (replica == 2 and version % 40 < 35)

    async def run() -> None:
        for version in range(201):
            published = trainer.publish(version)
            if version:
                assert {change is None for change in published.source.changes} == {True, False}
            if version in (100, 150):
                (changed, *_) = [c for c in published.source.changes if c is not None and len(c.array)]
                changed.array[0] ^= 4 if version == 100 else 255
            dense = [bucket.tolist() for bucket in await object_store.open(published.source)]
            for number, replica in enumerate(replicas):
                if takes(number, version):
                    summed.clear()
                    buckets = await replica.take(published)
                    assert [bucket.tolist() for bucket in buckets] == dense, f"replica {number}, version {version}"
                    follows = takes(number, version - 1) and version not in (0, 100, 150)
                    assert (sum(summed) < total * 0.2) == follows, f"replica {number}, version {version}"
                    if follows and version > 20:
                        assert replica.received < total * 0.2
            trainer.step()

    asyncio.run(run())
    assert [replica.refused for replica in replicas] == [2, 2, 2]


class OnDemand:
    """Stands for the transport `broadcast`, whose buckets a replica fetches from the sender in this process. `fetched`
    counts the versions."""

    def __init__(self, sender: BroadcastSender) -> None:
        self.sender = sender
        self.fetched = 0

    async def open(self, version: int) -> list[Bytes]:
        self.fetched += 1
        return list(self.sender.versions._versions[version].values())

    def with_changes(self, source: object) -> None: ...


class BroadcastReplica(Replica):
    """A replica that receives broadcasts as number `number`."""

    def __init__(self, number: int, sender: BroadcastSender) -> None:
        super().__init__()
        self.number = number
        self.on_demand = OnDemand(sender)
        self.broadcasts = Broadcasts(self.on_demand, self.start, delta=True)  # type: ignore[arg-type]

    async def start(self, offer: Offer, serial: int, pipe: str) -> None:
        self.rank.receiving.start(offer, self.number, serial, pipe)

    async def take(self, published: PublishedWeights) -> list[Bytes]:
        buckets = await super().take(published)
        self.rank.receiving.forget(published.identity.version, [], copied=True)
        return buckets


def test_100_broadcasts_of_changes_are_whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica takes all versions, one joins at version 25, and one misses versions. Version 40 is not sent in time;
    the changes of version 70 are of other bytes than the replicas have."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    trainer = Trainer(1e-6)
    sender = BroadcastSender(0, 1, "127.0.0.1", None, delta=True)
    replicas = [BroadcastReplica(number, sender) for number in range(3)]
    epochs = Epochs()

    def takes(replica: int, version: int) -> bool:
        return replica == 0 or (replica == 1 and version >= 25) or (replica == 2 and version % 20 < 17)

    async def run() -> None:
        for version in range(101):
            offer = Offer(1, version, trainer.layout.sizes, (sender.endpoint,), LIMIT_S)
            ready = [
                replica.number
                for replica in replicas
                if version == 0 or (trainer.base is not None and replica.broadcasts.base == trainer.base)
            ]
            await asyncio.gather(*(replicas[number].broadcasts.offer(offer) for number in ready))
            epochs.begins(ready)
            left_s = 0.0 if version == 40 else LIMIT_S
            session = Session(1, epochs.number, dict.fromkeys(ready, 0), left_s)
            if version == 70:
                sender._encoder._before[0][0] ^= 1
            tensors = trainer.tensors()
            await asyncio.to_thread(sender.send, version, trainer.layout, [tensors], session)
            if version == 40:
                for replica in replicas:
                    replica.broadcasts.lose_engine()
            published = trainer.described(version, tensors, version, session)
            dense = [sender.versions.bucket(version, number).tolist() for number in range(len(trainer.layout.sizes))]
            for replica in replicas:
                if not takes(replica.number, version):
                    continue
                fetched = replica.on_demand.fetched
                assert [bucket.tolist() for bucket in await replica.take(published)] == dense, f"version {version}"
                broadcast = replica.number in ready and version not in (40, 70)
                assert replica.on_demand.fetched - fetched == (not broadcast), f"{replica.number}, version {version}"
                follows = broadcast and version not in (0, 41)
                whole = sum(trainer.layout.sizes)
                if follows and version > 20:
                    assert replica.received < whole * 0.2
            trainer.step()
        for replica in replicas:
            replica.broadcasts.close()

    asyncio.run(run())
    assert [replica.refused for replica in replicas] == [1, 1, 1]
