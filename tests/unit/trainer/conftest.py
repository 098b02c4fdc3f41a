"""Fixtures of the tests that build a real shard in this process."""

import pytest
import torch.distributed as dist
from shard_support import make_rank

# The tiny models are the end-to-end tests' too.
from trainer_support import make_config, make_model


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
        return make_rank(make_config(source, **options), 0, 1, store, attempt, offloads=offloads)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()
