"""Published weights as a Hugging Face directory."""

import json
import os
import stat
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

# The tiny models are the end-to-end tests' too.
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.export import write_weights
from trireme.checkpoint.files import checksum_of
from trireme.core.errors import StorageFailed
from trireme.transports.packing import pack


def export(one, path, **options):
    published = one.publish_weights(0)
    return published, one.save_weights(path, published.manifest.entries, published.source, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_exported_model_opens_and_is_what_was_published(shard, model, tmp_path, dtype):
    published, records = export(shard(model__dtype=dtype), tmp_path / "inference")
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "inference")
    assert reopened.dtype == getattr(torch, dtype)
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=reopened.dtype)
    assert all(torch.equal(reopened.get_parameter(name), p) for name, p in expected.named_parameters())
    assert len(published.manifest.entries) == len(list(expected.named_parameters()))
    assert AutoTokenizer.from_pretrained(tmp_path / "inference").encode("0129")[-1] == 9
    files = {f"inference/{f.name}" for f in (tmp_path / "inference").iterdir()}
    assert {r.path for r in records} == files
    assert "inference/generation_config.json" in files
    for record in records:
        file = tmp_path / record.path
        assert (record.size, record.checksum) == (file.stat().st_size, checksum_of(file))


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_write_all_tensors_into_files_of_their_own(shard, tmp_path, size):
    units = [[(entry.name, torch.randn(entry.shape))] for entry in shard().layout.entries]
    entries, buckets = pack(units, np.copy, bucket_bytes=10_000)
    written = []
    for rank in range(size):
        share = {number: bucket for number, bucket in enumerate(buckets) if number % size == rank}
        records = write_weights(tmp_path / "inference", entries, share, {}, False, 20_000, rank, size)
        written += [record.path for record in records]
    assert sorted(written) == sorted(f"inference/{file.name}" for file in (tmp_path / "inference").iterdir())
    index = json.loads((tmp_path / "inference" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3
    tensors = {name: load_file(tmp_path / "inference" / file) for name, file in index["weight_map"].items()}
    for [(name, tensor)] in units:
        assert torch.equal(tensors[name][name], tensor)
    sizes = [sum(e.nbytes for e in entries if index["weight_map"][e.name] == file) for file in files]
    assert sum(a + b <= 20_000 for a, b in pairwise(sizes)) < size, "the files of a rank are filled"
    assert index["metadata"]["total_size"] == sum(sizes)


def test_an_export_to_a_full_disk_is_said(shard, tmp_path):
    (tmp_path / "inference").mkdir()
    if os.getuid() != 0:
        pytest.skip("needs root")  # reason: only root may make a device that is always full
    full = stat.S_IFCHR | 0o600
    os.mknod(tmp_path / "inference" / "model-00001.safetensors", full, os.stat("/dev/full").st_rdev)
    with pytest.raises(StorageFailed, match=r"inference/model-00001.safetensors: No space left"):
        export(shard(), tmp_path / "inference")
