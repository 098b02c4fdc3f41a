"""Fixtures of several modules of end-to-end tests: a small Ray cluster, and an undisturbed run."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from cluster_support import DECLARED_GPUS
from resume_support import DETERMINISTIC
from run_support import Ended, run_rl

from trireme.core.errors import EXIT_OK


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A cluster of eight logical CPUs and four declared GPUs on this machine, for all modules that a worker runs; the
    value is its address. A module ends the actors that it starts."""
    import ray

    with tempfile.TemporaryDirectory(prefix="tr-") as directory:
        with pytest.MonkeyPatch.context() as environ:
            environ.setenv("TMPDIR", directory)  # for what actors leave there when they are killed (vLLM's sockets)
            environ.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            resources = {"num_cpus": 8, "num_gpus": DECLARED_GPUS}
            context = ray.init(
                address="local", **resources, include_dashboard=False, log_to_driver=False, _temp_dir=directory
            )
        yield context.address_info["address"]
        ray.shutdown()


@pytest.fixture(scope="session")
def deterministic(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A deterministic run that nothing happens to: one for all workers of pytest-xdist, who have one parent."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "deterministic"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "whole").exists():
            shutil.rmtree(shared / "run", ignore_errors=True)  # of a worker that failed
            ended = run_rl(shared, *DETERMINISTIC)
            assert ended.code == EXIT_OK, ended.out
            ended.assert_nothing_left()
            (shared / "whole").touch()
    return Ended(EXIT_OK, "", shared / "run", [], set(), set())
