"""Shared by benchmarks of whole runs: runs of the counting task, with a core for each room."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from _common import room_of
from counting import ENV_ID, LONGEST

CORES = {"replica actor": 0, "engine core": 0, "trainer shard": 1}
OTHERS_CORE = 0
"""The core of all that holds no model: driver, orchestrator, Ray's services."""
PIN_S = 10.0


@dataclass(frozen=True)
class Task:
    """Sizes of the model, of a step, and of prompts and answers (`counting`). A replica
    decodes `sequences` at once."""

    hidden: int
    layers: int
    batch_size: int
    group_size: int
    sequences: int
    prompt: int
    median: float
    sigma: float

    def config(self, model: Path) -> dict[str, object]:
        """One shard, one replica, and a learning rate at which nothing is learned."""
        return {
            "model": {"name": str(model), "max_seq_len": self.prompt + LONGEST},
            "env": {"id": ENV_ID, "args": {"prompt": self.prompt, "median": self.median, "sigma": self.sigma}},
            "orchestrator": {"batch_size": self.batch_size, "group_size": self.group_size},
            "trainer": {"shards": 1, "loss_fn": "ppo", "learning_rate": 1e-9, "micro_batch_tokens": 4096},
            "inference": {
                "replicas": 1,
                "max_num_seqs": self.sequences,
                "memory_gb": 0.5,
                "sampling": {"max_tokens": LONGEST},
            },
            "cluster": {"device": "cpu"},
            "checkpoint": {"every": 0},
        }


def let_actors_import_benchmarks() -> None:
    """Actors inherit the environment of the process that starts Ray."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent) + (os.pathsep + path if path else "")


def pin(driver: psutil.Process) -> None:
    """Binds every thread of a driver, and of all processes below it, to its core. What they start later inherits it,
    so this is repeated until nothing is left that was started meanwhile."""
    deadline = time.monotonic() + PIN_S
    while strays := astray(driver):
        if time.monotonic() > deadline:
            raise RuntimeError(f"these threads do not stay on their cores: {strays}")
        for thread, core, _ in strays:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, {core})


def astray(driver: psutil.Process) -> list[tuple[int, int, str]]:
    """Returns threads that may run elsewhere than on their core: id, that core, and the owner."""
    return [
        (thread, core, room)
        for process, room in all_processes(driver)
        for thread, core in ((thread, CORES.get(room, OTHERS_CORE)) for thread in threads_of(process))
        if affinity(thread) not in (None, {core})
    ]


def all_processes(driver: psutil.Process) -> Iterator[tuple[psutil.Process, str]]:
    """A driver and all processes below it, with who each is."""
    yield driver, "driver"
    for process in driver.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            yield process, room_of(process)


def threads_of(process: psutil.Process) -> list[int]:
    try:
        return [thread.id for thread in process.threads()]
    except psutil.NoSuchProcess:
        return []


def affinity(thread: int) -> set[int] | None:
    """The cores that a thread may use; None when it has ended."""
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:
        return None


@dataclass(frozen=True)
class Rate:
    """Finished rollouts and the tokens of their answers within some seconds."""

    seconds: float
    rollouts: float
    tokens: float

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, float]], first: int, last: int) -> Rate:
        """Counts the steps `first` to `last` of a run."""
        steps = rows[first : last + 1]
        seconds = steps[-1]["time/unix"] - rows[first - 1]["time/unix"]
        return cls(seconds, sum(r["perf/rollouts"] for r in steps), sum(r["perf/tokens"] for r in steps))

    @property
    def rollouts_per_s(self) -> float:
        return self.rollouts / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean_length(self) -> float:
        return self.tokens / self.rollouts
