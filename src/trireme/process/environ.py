"""Reads the resources of machines, and prepares a process: environment variables that Ray reads when it is imported,
log files, CPU time."""

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
"""The signal at which a process writes the stacks of all its threads to its log (`redirect_output`)."""
STACKS_S = 0.5
"""Time for a process to write its stacks before it is killed."""
LOG_LINES = 20
"""Lines of a log that travel with an error."""
DRIVER_MARK = "HEAD"
"""File that the driver writes into the directory of an attempt's logs (`RunDir.nonce`)."""


@dataclass(frozen=True)
class Resources:
    """The machines of a run, with their cores, memory and GPUs."""

    nodes: tuple[Node, ...]
    """The machines."""
    source: str
    """Where the machines are, as part of a sentence ("this machine", "the Ray cluster")."""

    @classmethod
    def of_this_machine(cls) -> Resources:
        """Returns the resources of this machine that this process may use."""
        return cls((this_machine(),), "this machine")

    @property
    def cpus(self) -> int:
        """Number of CPU cores that the run may use, on all machines together."""
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> int:
        """Number of GPUs that the run may use, on all machines together."""
        return sum(node.num_gpus for node in self.nodes)

    @property
    def memory_bytes(self) -> int:
        """Host memory of all machines, in bytes."""
        return sum(node.memory_bytes for node in self.nodes)

    @property
    def emptied(self) -> Resources:
        """Returns a copy of these resources in which all memory of hosts and GPUs is free."""
        emptied = [
            replace(
                node, free_bytes=node.memory_bytes, gpus=tuple(replace(g, free_bytes=g.memory_bytes) for g in node.gpus)
            )
            for node in self.nodes
        ]
        return replace(self, nodes=tuple(emptied))

    def compute_on_gpus(self, config: CommonConfig) -> bool:
        """Returns True if the models of a run with `config` compute on GPUs on these machines."""
        return choose_device(config.cluster.device, self.gpus, deterministic=config.deterministic) == "gpu"


def cluster_address(config: CommonConfig) -> str | None:
    """Returns the address of the Ray cluster to join: `cluster.address`, or the variable RAY_ADDRESS, which Ray sets in
    a submitted job. None: Ray has to be started on this machine."""
    return config.cluster.address or os.environ.get("RAY_ADDRESS")


def user_cache() -> Path:
    """Returns this user's directory for files that outlive a run; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trireme"


def keep_compiled_code() -> None:
    """Makes torch.compile and Triton keep compiled code in the user's cache, unless TORCHINDUCTOR_CACHE_DIR is set.
    Call it before anything imports `torch._inductor`, which otherwise chooses a directory in TMPDIR for the life of
    the process."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache() / "torchinductor"))


def prepare_ray_environment(address: str | None, threads: int, deterministic: bool) -> None:
    """Sets the environment variables that Ray reads when it is imported. `address`: the cluster to join; None: Ray will
    be started on this machine, with `threads` threads for each process.

    If Ray is started here, all processes of the cluster inherit the variables. They set the number of threads (an
    existing OMP_NUM_THREADS is kept, except with `deterministic`). They give workers the usual CPU priority. Ray's
    default for workers is nice 15, which leaves hardly any lower priority for work that can wait. The variables also
    give Ray an authentication token: otherwise Ray writes a token into the home directory and prints a line on it at
    every start. They make all processes listen at 127.0.0.1 only, also the trainer's store and Ray's metrics. (Ray does
    this by default on Windows and macOS only; so the name of the variable contains WINDOWS_OR_OSX.)

    If a cluster is joined, sets only RAY_AUTH_MODE, and only if the driver has an authentication token (in
    RAY_AUTH_TOKEN or in ~/.ray/auth_token). Clusters ask for a token by default, but a driver sends its token only if
    this variable says so.
    """
    if address is not None:
        if "RAY_AUTH_TOKEN" in os.environ or (Path.home() / ".ray" / "auth_token").is_file():
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        return
    if deterministic or "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_preload_python_modules", ENTRY)  # before a user's modules
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def redirect_output(log_dir: Path | None, name: str) -> None:
    """Sends stdout and stderr of this process and its children to `log_dir/name.log`, and makes the signal STACKS write
    the stacks of all threads there. Does nothing if `log_dir` is None."""
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
    """Returns the last LOG_LINES lines of `log_dir/name.log`, with the file's path and this node's name, for an error
    that people read on another node. Returns "" if there is no log, or if the driver sees the log itself (the file
    DRIVER_MARK is in `log_dir`)."""
    if log_dir is None or (log_dir / DRIVER_MARK).is_file():
        return ""
    log = log_dir / f"{name}.log"
    if not log.is_file():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"its log: {log} on {os.uname().nodename}, which ends with", *lines])


def write_stacks_on_signal() -> None:
    """Makes the signal STACKS write the stacks of all threads to stderr, also when the process hangs."""
    faulthandler.register(STACKS)


def yield_to_others() -> None:
    """Permanently gives the calling thread only the CPU time that other threads leave. Call it only in a thread that
    hardly ever holds the GIL: if the thread is preempted while it holds the GIL, no other thread can run Python.

    Uses SCHED_IDLE, not a high nice value. With SCHED_IDLE any other thread that wakes up takes the core immediately,
    not only at the end of a time slice. (The threads of training wake up often: they wait briefly for another shard or
    for a message.)
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: this thread
