"""What several modules of end-to-end tests share: their order, and a small Ray cluster."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_support import DECLARED_GPUS

LONGEST = ("resume", "inference", "run", "examples", "trainer", "tinker_adapters", "kl_run", "recipes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the longest files, so that no worker has one of them left when the other is at its end."""
    end_to_end = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        if item.path.parent != end_to_end:
            return -1
        name = item.path.stem.removeprefix("test_")
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A cluster of eight logical CPUs and four declared GPUs on this machine, for all modules that a worker runs; the
    value is its address. A module ends the actors that it starts."""
    import ray

    with tempfile.TemporaryDirectory(prefix="tr-") as directory:
        with pytest.MonkeyPatch.context() as environ:
            environ.setenv("TMPDIR", directory)  # for what actors leave there when they are killed (vLLM's sockets)
            environ.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            environ.setenv("RAY_prestart_worker_first_driver", "0")  # few actors could use what it would import
            resources = {"num_cpus": 8, "num_gpus": DECLARED_GPUS}
            context = ray.init(
                address="local", **resources, include_dashboard=False, log_to_driver=False, _temp_dir=directory
            )
        yield context.address_info["address"]
        ray.shutdown()
