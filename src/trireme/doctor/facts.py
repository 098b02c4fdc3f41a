"""Collects what one node reports of itself. Needs neither Ray nor a GPU library, so that it takes a second."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import resource
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import xxhash

from trireme.config.installed import package_versions
from trireme.core.errors import RoomFailed
from trireme.core.model_files import ModelFiles, lacks_weights, model_directory
from trireme.core.redaction import is_secret
from trireme.process.device import DRIVER
from trireme.process.interfaces import GLOO, NCCL, interface_towards
from trireme.process.machine import Node, this_machine

ROOMS = ("trireme", "trainer", "orchestrator", "inference", "service")
"""This project's packages."""
ALSO = ("numpy", "pydantic", "safetensors", "peft")
"""Packages beside those of a plan whose versions have to agree, as objects travel between nodes."""
VARIABLES = re.compile(
    r"(HF|HUGGINGFACE|TRANSFORMERS|NCCL|GLOO|TORCH|PYTORCH|VLLM|UCX|FI|TP)_\w+|PYTHONPATH|LD_LIBRARY_PATH|(https?|no)_proxy"
    r"|(HTTPS?|NO)_PROXY|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
)
"""Environment variables that change what a process of a run does, so that nodes have to agree on them."""
SECRET = "(secret"
"""The beginning of what stands in place of a secret."""
STOP_WAIT, STOP_WAIT_S = "RAY_JOB_STOP_WAIT_TIME_S", 3
"""The variable of a head node by which `ray job stop` waits until it kills, and its default (Ray 2.60)."""
UNLIMITED = 2**40
"""Stands for a limit that there is not."""
UNPACKED = "/runtime_resources/"
"""Part of the path of each directory where Ray unpacks code for its workers."""
SHM = Path("/dev/shm")
KERNEL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Questions:
    """Questions that all nodes are asked."""

    output_dir: str = ""
    """The directory of runs, run.output_dir; "" if there is none to look at."""
    nonce: str = ""
    """The name of a file that the asking process has written there, and its contents; each node writes one of its own
    with these contents beside it."""
    model: str = ""
    """The model, a directory or a name on the hub; "" if there is none to look at."""
    model_cache: str = ""
    """cluster.model_cache, where a node keeps model files that it is sent; "" if there is no model to look at."""
    model_digest: str = ""
    """The digest of the model's files where the asking process runs; "" if it has none that can be sent."""
    peers: Sequence[str] = ()
    """The addresses that the nodes have in the cluster, the head's first."""
    salt: str = ""
    """A random text, so that digests of secrets say only whether these are equal."""


@dataclass(frozen=True)
class NodeFacts:
    """The report of a node about itself."""

    host: str
    """The name that the machine has for itself."""
    versions: Mapping[str, str]
    """Versions of Python, of packages and of the NVIDIA driver ("" without one), and a digest of this project's
    source ("source")."""
    machine: Node
    """Cores, memory, /dev/shm and the GPUs that its driver shows."""
    available_bytes: int
    """Memory that is free, or can be freed at once."""
    shm_free: int
    """Free bytes in /dev/shm."""
    open_files: int
    """How many files a process of a run may open."""
    processes: int
    """How many more processes and threads may be started."""
    disk_free: int
    """Free bytes where run.output_dir is, or would be made; -1 if nothing was asked."""
    nonce_seen: str
    """What the nonce's file contains here; "" if it is not here."""
    model: Mapping[str, str] | None
    """The model's files with a digest of each; None if it is not here."""
    variables: Mapping[str, str]
    """Environment variables that matter. A secret's value is a digest."""
    routes: Mapping[str, str]
    """By which interface the node reaches each peer; "" where there is no route."""
    interfaces: Mapping[str, Sequence[str]]
    """The addresses of each interface."""
    kernel_ports: tuple[int, int]
    """The first and the last port that the kernel gives to those that do not ask for one, as gloo and NCCL do."""
    stop_wait_s: int
    """Seconds that `ray job stop` waits here until it kills."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """The interfaces that a user has chosen for gloo and NCCL, by variable."""
    model_bytes: int = 0
    """Bytes of the model's files that can be sent to another node; 0 if it is not here, or not whole."""
    model_cached: bool = False
    """True: the files that the asking process would send are here already, from an earlier run."""
    model_room: int = UNLIMITED
    """Free bytes where the node would keep the model's files."""


def collect(asked: Questions) -> NodeFacts:
    """Returns what this node reports of itself."""
    directory = model_directory(asked.model) if asked.model else None
    files = ModelFiles.of(directory) if directory else None
    cache = Path(asked.model_cache).expanduser()
    return NodeFacts(
        host=os.uname().nodename,
        versions=_versions(),
        machine=this_machine(),
        available_bytes=psutil.virtual_memory().available,
        shm_free=shutil.disk_usage(SHM).free if SHM.is_dir() else 0,
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=min(_limit(resource.RLIMIT_NPROC), _left_in_group()),
        disk_free=_disk_free(Path(asked.output_dir)) if asked.output_dir else -1,
        nonce_seen=_see_nonce(asked) if asked.nonce else "",
        model=files.digests if files else None,
        variables=_variables(asked.salt),
        routes={peer: _route(peer) for peer in asked.peers},
        interfaces={name: [each.address for each in found] for name, found in psutil.net_if_addrs().items()},
        kernel_ports=_kernel_ports(),
        stop_wait_s=int(os.environ.get(STOP_WAIT, STOP_WAIT_S)),
        chosen={name: os.environ[name] for name in (GLOO, NCCL) if os.environ.get(name)},
        model_bytes=files.total_bytes if files and directory and not lacks_weights(directory) else 0,
        model_cached=bool(asked.model_digest) and (cache / asked.model_digest).is_dir(),
        model_room=_disk_free(cache) if asked.model_cache else UNLIMITED,
    )


def sendable_digest(model: str) -> str:
    """Returns the digest of the files of a model that this machine can send to other nodes; "" if it has it not whole,
    or has none."""
    directory = model_directory(model) if model else None
    return "" if directory is None or lacks_weights(directory) else ModelFiles.of(directory).digest


def _versions() -> dict[str, str]:
    found = package_versions()
    for name in ALSO:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    driver = ""
    with suppress(OSError):
        driver = (re.findall(r"\d+(?:\.\d+)+", DRIVER.read_text()) or [""])[0]
    return {**found, "driver": driver, "source": source_digest()}


@cache
def source_digest() -> str:
    """Returns a digest of the source of this project's packages. Each is looked up by itself: where Ray brought them,
    they do not lie in one directory."""
    digest = xxhash.xxh3_64()
    for room in ROOMS:
        spec = PathFinder.find_spec(room)
        for place in map(Path, (spec and spec.submodule_search_locations) or ()):
            for file in sorted(place.rglob("*.py")):
                digest.update(f"{file.relative_to(place.parent)}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _left_in_group(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns how many more tasks the control group allows (a container's own is the root of its mount)."""
    with suppress(OSError, ValueError):
        return int((group / "pids.max").read_text()) - int((group / "pids.current").read_text())
    return UNLIMITED


def _disk_free(directory: Path) -> int:
    there = next(place for place in (directory, *directory.parents) if place.is_dir())
    return shutil.disk_usage(there).free


def _see_nonce(asked: Questions) -> str:
    with suppress(OSError):
        return Path(asked.output_dir, asked.nonce).read_text()
    return ""


def write_answer(asked: Questions, number: int) -> None:
    """Writes this node's own file beside the nonce, so that the asking process can look for it."""
    with suppress(OSError):
        answer_file(asked, number).write_text(asked.nonce)


def remove_answer(asked: Questions, number: int) -> None:
    """Removes this node's own file: a node that does not share the directory has it on its own disk."""
    with suppress(OSError):
        answer_file(asked, number).unlink(missing_ok=True)


def answer_file(asked: Questions, number: int) -> Path:
    """Returns the file of the node with this number beside the nonce."""
    return Path(asked.output_dir, f"{asked.nonce}.{number}")


def _variables(salt: str) -> dict[str, str]:
    wanted = {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)}
    if paths := _given_paths(wanted.pop("PYTHONPATH", "")):
        wanted["PYTHONPATH"] = paths
    return {name: _shown(name, value, salt) for name, value in wanted.items()}


def _given_paths(value: str) -> str:
    """Returns a PYTHONPATH without what Ray puts into those of its workers: the directories where it unpacked code, and
    what the driver and the node both have a second time. Entries become absolute, as those that travel are."""
    paths = (os.path.abspath(path) for path in value.split(os.pathsep) if path and UNPACKED not in path)
    return os.pathsep.join(dict.fromkeys(paths))


def _shown(name: str, value: str, salt: str) -> str:
    if not is_secret(name, value):
        return value
    return f"{SECRET}, digest {hmac.new(salt.encode(), value.encode(), hashlib.sha256).hexdigest()[:8]})"


def _route(peer: str) -> str:
    with suppress(RoomFailed):
        return interface_towards(peer)
    return ""


def _kernel_ports() -> tuple[int, int]:
    first, last = map(int, KERNEL_PORTS.read_text().split())
    return first, last
