"""One small Ray cluster for the end-to-end tests that need no cluster of their own."""

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[str]:
    """A cluster of eight logical CPUs on this machine, for one test module; the value is its address."""
    import ray

    with tempfile.TemporaryDirectory(prefix="tr-") as directory, pytest.MonkeyPatch.context() as environ:
        environ.setenv("TMPDIR", directory)  # for what actors leave there when they are killed (vLLM's sockets)
        context = ray.init(
            address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=directory
        )
        yield context.address_info["address"]
        ray.shutdown()
