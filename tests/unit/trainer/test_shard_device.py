"""A shard computes on the device of `cluster.device`, and on no other."""

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

# The tiny models and batches are the end-to-end tests' too.
from trainer_support import make_batch

from trireme.core.errors import BadInput

LENGTHS = (5, 9, 1, 7, 9)


def test_on_cpus_a_shard_touches_no_gpu_of_the_machine(shard, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    one = shard(cluster__device="cpu")
    assert {p.device.type for p in one._parameters} == {"cpu"}
    assert np.isfinite(one.forward(make_batch(LENGTHS)).logprobs).all()
    one.begin_save(tmp_path / "trainer")
    one.finish_save(tmp_path / "trainer")
    assert {
        name
        for name in _load_state_dict_from_keys(storage_reader=dcp.FileSystemReader(tmp_path / "trainer"))
        if name.startswith("random.")
    } == {*("random.0.torch", "random.0.numpy", "random.0.python")}


def test_a_shard_that_shall_compute_on_a_gpu_computes_nowhere_else(shard, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        BadInput, match=r"cluster\.device = gpu.*CUDA_VISIBLE_DEVICES is '3'(.|\n)*--cluster\.device cpu"
    ):
        shard(cluster__device="gpu")
