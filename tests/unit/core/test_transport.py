"""A new transport is one module, here this one, and one line in the table."""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from trireme.core.errors import TriremeError, WeightsRefused
from trireme.core.transport import DEFAULT, TRANSPORTS, Sender, TransportKind, join_parts, load_transport
from trireme.core.types import WeightIdentity
from trireme.core.weights import EXACT, Canary, PublishedWeights, WeightsManifest, check_received, weights_digest
from trireme.transports.packing import Packer, fill, hash_tensor, lay_out, tensor_of


def to_file(_: int, bucket: npt.NDArray[np.uint8]) -> str:
    with tempfile.NamedTemporaryFile(prefix="bucket", delete=False) as file:
        file.write(bucket.tobytes())
    return file.name


def make_sender(rank: int, size: int, ports: Sequence[int] = (), *, delta: bool = False) -> Sender:
    return Packer(to_file, rank, size)


def join(parts_R: Sequence[dict[int, str]]) -> tuple[str, ...]:
    return join_parts(parts_R)


async def open(source: Sequence[str]) -> list[npt.NDArray[np.uint8]]:
    return [np.fromfile(path, np.uint8) for path in source]


@pytest.fixture
def file_transport(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setitem(TRANSPORTS, "file", TransportKind(__name__))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return "file"


def layers() -> list[list[tuple[str, torch.Tensor]]]:
    names = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.down_proj.weight", "norm.weight")
    return [
        [(f"layers.{i}.{name}", torch.randn(17, 3 + i).to(dtype)) for name in names]
        for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
    ]


def published(name: str, units: list[list[tuple[str, torch.Tensor]]]) -> PublishedWeights:
    """Sends by two ranks, whose senders go through the same units here."""
    transport, layout = load_transport(name), lay_out(units, bucket_bytes=400)
    source = transport.join([transport.make_sender(rank, 2).send(0, layout, units, None) for rank in range(2)])
    entries = layout.with_hashes({name: hash_tensor(tensor) for unit in units for name, tensor in unit})
    canary = Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), EXACT)
    return PublishedWeights(WeightsManifest(WeightIdentity(1, 0, weights_digest(entries)), entries, canary), source)


def test_tensors_arrive_through_a_transport_that_copies_through_files(file_transport: str) -> None:
    units = layers()
    weights = published(file_transport, units)
    assert all(Path(path).is_file() for path in weights.source)
    buckets = asyncio.run(load_transport(file_transport).open(weights.source))
    check_received(weights.manifest, buckets)
    arrived = {entry.name: tensor_of(entry, buckets) for entry in weights.manifest.entries}
    sent = dict(pair for unit in units for pair in unit)
    assert arrived.keys() == sent.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in sent.items())


def test_known_sums_stand_for_the_bytes_at_their_place_alone(file_transport: str) -> None:
    weights = published(file_transport, layers())
    buckets = asyncio.run(load_transport(file_transport).open(weights.source))
    first, second, *_ = weights.manifest.entries
    check_received(weights.manifest, buckets, {first.place: first.hash})
    with pytest.raises(WeightsRefused, match=rf"{first.name} of version 0 arrived with hash {second.hash}"):
        check_received(weights.manifest, buckets, {first.place: second.hash})
    buckets[second.bucket][second.offset] ^= 1
    with pytest.raises(WeightsRefused, match=rf"{second.name} of version 0 arrived with hash"):
        check_received(weights.manifest, buckets, {first.place: first.hash})


def test_buckets_are_full_in_the_order_of_their_numbers_in_which_receivers_expect_them() -> None:
    """Whatever comes between tensors that are fused; a later bucket would wait with its memory, and be taken for an
    earlier one."""
    names = ("k_proj.weight", "o_proj.weight", "q_proj.weight", "norm.weight", "v_proj.weight", "down_proj.weight")
    units = [[(f"layers.{i}.{name}", torch.randn(17, 3)) for name in names] for i in range(3)]
    layout, full = lay_out(units, bucket_bytes=300), list[int]()
    assert len(layout.sizes) > 5
    fill(layout, units, range(len(layout.sizes)), lambda _: np.zeros(1024, np.uint8), lambda n, _: full.append(n))
    assert full == list(range(len(layout.sizes)))


def other_dtype(units: list[list[tuple[str, torch.Tensor]]]) -> None:
    units[0][0] = (units[0][0][0], units[0][0][1].double())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_dtype, r"tensor layers.0.self_attn.q_proj.weight, torch.float64 \(17, 3\), is not in the layout"),
        (list.pop, "4 tensors of the layout were not gathered, layers.2.self_attn.q_proj.weight among them"),
    ],
)
def test_tensors_that_are_not_those_of_the_layout_are_refused(change: Callable[..., object], message: str) -> None:
    units = layers()
    layout = lay_out(units)
    change(units)
    with pytest.raises(TriremeError, match=message):
        Packer(lambda _, bucket: bucket.copy()).send(0, layout, units, None)


def test_a_sender_whose_store_was_full_sends_the_next_version() -> None:
    fails = [True, True, True]

    def put(_: int, bucket: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        if fails:
            fails.pop()
            raise OSError("the store is full")
        return bucket.copy()

    layout, packer = lay_out(layers(), bucket_bytes=400), Packer(put)
    with pytest.raises(OSError, match="the store is full"):
        packer.send(0, layout, layers(), None)
    assert len(packer.send(1, layout, layers(), None)) == len(layout.sizes)


def test_the_memory_of_a_sender_is_for_the_largest_bucket_of_its_share() -> None:
    """The embeddings are the first bucket here, and much larger than all others."""
    units = [[("embed_tokens.weight", torch.zeros(100, 100))], *layers()]
    layout = lay_out(units, bucket_bytes=400)
    senders = [Packer(lambda _, bucket: bucket.copy(), rank, 2) for rank in range(2)]
    for version in range(2):
        for sender in senders:
            sender.send(version, layout, units, None)
    largest = [{len(buffer) for buffer in sender._buffers} for sender in senders]
    assert largest == [{max(layout.sizes)}, {max(layout.sizes[1::2])}]
    assert max(layout.sizes) > 10 * max(layout.sizes[1::2])


def test_the_configuration_accepts_the_names_in_the_table_and_no_others() -> None:
    code = """
from trireme.core.transport import TRANSPORTS
TRANSPORTS["file"] = TRANSPORTS["broadcast"]
from pydantic import ValidationError
from trireme.config.schema import InferenceConfig
sampling = {"max_tokens": 1}
for name in ("auto", "object_store", "broadcast", "ipc", "file"):
    assert InferenceConfig(sampling=sampling, transport=name).transport == name
try:
    InferenceConfig(sampling=sampling, transport="carrier_pigeon")
except ValidationError as error:
    print(error)
"""
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "Input should be 'auto', 'object_store', 'broadcast', 'ipc' or 'file'" in output


def test_all_transports_have_both_ends_and_auto_is_one_of_them() -> None:
    for name in TRANSPORTS:
        module = vars(load_transport(name))
        assert module.keys() >= {"make_sender", "join", "open", "with_changes", "lease", "release"}, name
    assert load_transport("auto") is load_transport(DEFAULT)
