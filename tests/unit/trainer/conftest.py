"""Fixtures of the tests that build a real shard in this process."""

import pytest
import torch.distributed as dist

# The tiny models are the end-to-end tests' too.
from trainer_support import make_config, make_model

from trainer.shard import Shard
from trireme.transports.packing import Packer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", True)


@pytest.fixture
def shard(model):
    """Returns a function that makes a fresh shard, in a process group of one, in place of the one before."""

    def make(source=model, attempt=1, offloads=False, **options):
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
        sender = Packer(lambda _, bucket: bucket.copy())
        return Shard(make_config(source, **options), 0, store, sender, attempt, offloads=offloads)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()
