"""What end-to-end tests of several modules share: a small Ray cluster, and a run to which nothing happens."""

import tempfile
from collections.abc import Iterator

import pytest
from resume_support import DETERMINISTIC
from run_support import Ended, run_rl

from trireme.errors import EXIT_OK


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


@pytest.fixture(scope="session")
def deterministic(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A deterministic run that nothing happens to."""
    ended = run_rl(tmp_path_factory.mktemp("r"), *DETERMINISTIC)
    assert ended.code == EXIT_OK, ended.out
    ended.assert_nothing_left()
    return ended
