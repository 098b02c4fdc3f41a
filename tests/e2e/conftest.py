"""Fixtures of several modules of end-to-end tests: a small Ray cluster, and an undisturbed run."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from cluster_support import DECLARED_GPUS
from resume_support import DETERMINISTIC
from run_support import DEADLINE_S, Ended, run_rl

from trireme.core.errors import EXIT_OK

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


def lock_within(file: IO[str], limit_s: float, owner: str) -> None:
    """Locks a file, for which it waits for `owner`."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            assert time.monotonic() < deadline, f"waited {limit_s:g} s for {owner}"
            time.sleep(0.1)


@pytest.fixture(scope="session")
def deterministic(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A deterministic run that nothing happens to: one for all workers of pytest-xdist, who have one parent."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "deterministic"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        lock_within(lock, 2 * DEADLINE_S, "the other worker's deterministic run")
        if not (shared / "whole").exists():
            shutil.rmtree(shared / "run", ignore_errors=True)  # of a worker that failed
            outcome = run_rl(shared, *DETERMINISTIC)
            assert outcome.code == EXIT_OK, outcome.out
            outcome.assert_nothing_left()
            (shared / "whole").touch()
    return Ended(EXIT_OK, "", shared / "run", [], set(), set())
