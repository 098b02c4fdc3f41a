"""The devices of these tests. On CPUs they run in every suite, so that they do not fall behind the source."""

from collections.abc import Iterator

import pytest
import torch

from gpu_check.shapes import end_shard

ABSENT = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and PyTorch's CUDA build")


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=[pytest.mark.gpu, ABSENT])])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    end_shard()
