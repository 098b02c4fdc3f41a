"""Reads the resources of this machine, and sets the surroundings of a process: variables that Ray reads when it is
imported, output files, CPU time."""

from __future__ import annotations

import faulthandler
import logging
import os
import secrets
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from trireme.config import CommonConfig
from trireme.core.own_packages import ENTRY
from trireme.process.device import choose_device
from trireme.process.machine import Node, this_machine

STACKS = signal.SIGUSR1
"""Makes a process write the stacks of all its threads to its log (`redirect_output`)."""
STACKS_S = 0.5
"""Time for a process to write its stacks before it is killed."""
LOG_LINES = 20
"""Lines of a log that travel with an error."""
DRIVER_MARK = "HEAD"
"""File that the driver writes into the directory of an attempt's logs (`RunDir.nonce`)."""
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Makes the C library (glibc from 2.35 on) ask for huge pages, where Linux leaves that to programs. On CPUs tensors get
new memory all the time, and a page of 4 KiB costs almost as much as a page of 2 MiB."""


@dataclass(frozen=True)
class Resources:
    """The machines of a run."""

    nodes: tuple[Node, ...]
    """Each machine."""
    source: str
    """Where they are, as part of a sentence ("this machine")."""

    @classmethod
    def of_this_machine(cls) -> Resources:
        """Returns the resources of this machine that this process may use."""
        return cls((this_machine(),), "this machine")

    @property
    def cpus(self) -> int:
        """Cores of all machines."""
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> int:
        """GPUs of all machines."""
        return sum(node.num_gpus for node in self.nodes)

    @property
    def memory_bytes(self) -> int:
        """Memory of all machines."""
        return sum(node.memory_bytes for node in self.nodes)

    @property
    def emptied(self) -> Resources:
        """The machines with all their memory free."""
        emptied = [
            replace(
                node, free_bytes=node.memory_bytes, gpus=tuple(replace(g, free_bytes=g.memory_bytes) for g in node.gpus)
            )
            for node in self.nodes
        ]
        return replace(self, nodes=tuple(emptied))

    def compute_on_gpus(self, config: CommonConfig) -> bool:
        """Returns True if the models of a run compute on GPUs here."""
        return choose_device(config.cluster.device, self.gpus, deterministic=config.deterministic) == "gpu"


def cluster_address(config: CommonConfig) -> str | None:
    """Returns the address of the cluster to join (`ray job submit` sets `RAY_ADDRESS`); None: start one here."""
    return config.cluster.address or os.environ.get("RAY_ADDRESS")


def user_cache() -> Path:
    """Returns the directory of this user for files that outlive a run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trireme"


def keep_compiled_code() -> None:
    """Sets where torch.compile and Triton keep compiled code: in the user's cache, unless a place is set. Call it
    before anything imports `torch._inductor`, which chooses a directory in TMPDIR otherwise, and keeps it."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache() / "torchinductor"))


def prepare_ray_environment(address: str | None, threads: int, deterministic: bool, *, huge_pages: bool = True) -> None:
    """Sets the variables that Ray reads when it is imported, for the cluster at `address` or one started here (None).

    All processes of a cluster started here inherit this environment: `threads` for each (unless OMP_NUM_THREADS is set;
    `deterministic` overrides it); `huge_pages` for their memory (unless GLIBC_TUNABLES is set); the usual CPU priority
    (Ray's default for workers, nice 15, leaves no room below it for work that can wait); an authentication token of its
    own (else Ray writes one into the home directory and prints that at every start); and no address but 127.0.0.1,
    where all of them listen, the trainer's store and Ray's metrics too (the variable's name is for the systems on which
    this is Ray's default). Other clusters ask for a token by default, but a driver only sends it if told to.
    """
    if address is not None:
        if "RAY_AUTH_TOKEN" in os.environ or (Path.home() / ".ray" / "auth_token").is_file():
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        return
    if deterministic or "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    for name, value in HUGE_PAGES.items() if huge_pages else ():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_preload_python_modules", ENTRY)  # before a user's modules
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def redirect_output(log_dir: Path | None, name: str) -> None:
    """Sends stdout and stderr of this process and its children (the descriptors) to `log_dir/name.log`, and makes
    STACKS write the stacks of all threads there. Does nothing if `log_dir` is None."""
    if log_dir is None:
        return
    log_dir.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log_dir / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    write_stacks_on_signal()
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=line, stream=sys.stderr, force=True)


def end_of_far_log(log_dir: Path | None, name: str) -> str:
    """Returns the last lines of `log_dir/name.log` with the file's place, for an error that is read on another node;
    empty where the driver sees the log itself, as its file DRIVER_MARK shows, and without a log."""
    if log_dir is None or (log_dir / DRIVER_MARK).is_file():
        return ""
    log = log_dir / f"{name}.log"
    if not log.is_file():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"its log: {log} on {os.uname().nodename}, which ends with", *lines])


def write_stacks_on_signal() -> None:
    """Makes STACKS write the stacks of all threads to stderr, also in a process that answers nothing."""
    faulthandler.register(STACKS)


def yield_to_others() -> None:
    """Permanently gives this thread only CPU time that others leave. Call it in a thread of its own that hardly ever
    holds Python's lock: while it waits for a core with the lock, no other thread runs Python.

    SCHED_IDLE, not a high nice value: any thread that wakes up takes the core immediately, not at the end of a turn.
    (Training waits often and briefly: for another shard, for a message.)
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: this thread
