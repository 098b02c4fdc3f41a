"""A new transport is one module, here this one, and one line in the table."""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from trireme.core.errors import WeightsRefused
from trireme.core.transport import TRANSPORTS, Receiver, Sender, load_transport
from trireme.core.types import WeightIdentity
from trireme.core.weights import EXACT, Canary, PublishedWeights, WeightsManifest, check_received, weights_digest
from trireme.transports.packing import Packer, tensor_of


def to_file(bucket: npt.NDArray[np.uint8]) -> str:
    with tempfile.NamedTemporaryFile(prefix="bucket", delete=False) as file:
        file.write(bucket.tobytes())
    return file.name


class FileReceiver:
    async def open(self, source: Sequence[str]) -> list[npt.NDArray[np.uint8]]:
        return [np.fromfile(path, np.uint8) for path in source]


def make_sender(rank: int) -> Sender:
    return Packer(to_file, rank, bucket_bytes=4096)


def make_receiver() -> Receiver:
    return FileReceiver()


@pytest.fixture
def file_transport(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setitem(TRANSPORTS, "file", __name__)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return "file"


def layers() -> list[list[tuple[str, torch.Tensor]]]:
    names = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.down_proj.weight", "norm.weight")
    return [
        [(f"layers.{i}.{name}", torch.randn(17, 3 + i).to(dtype)) for name in names]
        for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
    ]


def published(name: str, units: list[list[tuple[str, torch.Tensor]]]) -> PublishedWeights:
    entries, source = load_transport(name).make_sender(0).send(units)
    canary = Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), EXACT)
    return PublishedWeights(WeightsManifest(WeightIdentity(1, 0, weights_digest(entries)), entries, canary), source)


def test_tensors_arrive_through_a_transport_that_copies_through_files(file_transport: str) -> None:
    units = layers()
    weights = published(file_transport, units)
    assert all(Path(path).is_file() for path in weights.source)
    buckets = asyncio.run(load_transport(file_transport).make_receiver().open(weights.source))
    check_received(weights.manifest, buckets)
    arrived = {entry.name: tensor_of(entry, buckets) for entry in weights.manifest.entries}
    sent = dict(pair for unit in units for pair in unit)
    assert arrived.keys() == sent.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in sent.items())


def test_bytes_that_a_transport_changes_are_refused(file_transport: str) -> None:
    weights = published(file_transport, layers())
    buckets = asyncio.run(load_transport(file_transport).make_receiver().open(weights.source))
    buckets[0][weights.manifest.entries[1].offset] ^= 1
    with pytest.raises(WeightsRefused, match=r"layers\.0\.self_attn\.k_proj\.weight of version 0 arrived with hash"):
        check_received(weights.manifest, buckets)


def test_other_ranks_take_part_in_gathering_each_unit_and_send_nothing(file_transport: str) -> None:
    units = iter(layers())
    assert load_transport(file_transport).make_sender(1).send(units) == ((), None)
    assert next(units, None) is None


def test_the_configuration_accepts_the_names_in_the_table_and_no_others() -> None:
    code = """
from trireme.core.transport import TRANSPORTS
TRANSPORTS["file"] = "some.module"
from pydantic import ValidationError
from trireme.config.schema import InferenceConfig
sampling = {"max_tokens": 1}
for name in ("auto", "object_store", "file"):
    assert InferenceConfig(sampling=sampling, transport=name).transport == name
try:
    InferenceConfig(sampling=sampling, transport="carrier_pigeon")
except ValidationError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "Input should be 'auto', 'object_store' or 'file'" in told
