"""The devices of these tests. On CPUs they run in every suite, so that they do not fall behind the source."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from gpu_check.shapes import end_shard

NONE = not torch.cuda.is_available()
ABSENT = pytest.mark.skipif(NONE, reason="needs an NVIDIA GPU and the CUDA builds")  # reason: no CPU can run them


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Has each test that is marked gpu need one."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(ABSENT)


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    end_shard()
