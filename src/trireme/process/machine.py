"""Reads the resources of one machine for a run: cores, memory and GPUs. Imports nothing heavy, because the start of a
run calls it, and so does a short task on each node of a cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 2**20
VISIBLE = "CUDA_VISIBLE_DEVICES"
SMI = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
SMI_S = 20.0
"""Time limit for the answer of nvidia-smi. Without persistence mode NVIDIA's driver first initialises each GPU, which
takes seconds."""
STORE_SHARE = 0.3
STORE_BYTES = 200 * 10**9
STORE_ON_DISK = 10**10
"""Ray's object store takes the share STORE_SHARE of a machine's memory, at most STORE_BYTES. Where /dev/shm is too
small for the store, the store is a file in Ray's temporary directory, of at most STORE_ON_DISK bytes
(`ray._private.utils.resolve_object_store_memory`)."""


@dataclass(frozen=True)
class Gpu:
    """The memory of one GPU, in bytes."""

    memory_bytes: int
    """All of its memory."""
    free_bytes: int
    """The memory that no process has taken."""


@dataclass(frozen=True)
class Node:
    """A machine of a run, with its resources."""

    name: str
    """The machine's name in sentences: "this machine", or its address in the cluster."""
    cpus: int
    """Cores that the run may use."""
    num_gpus: int
    """GPUs that the run may use."""
    memory_bytes: int
    """Memory of the machine, or the limit of its control group if that is less."""
    free_bytes: int
    """Memory that no process has taken: what the system has left, or what the control group has left if that is
    less."""
    shm_bytes: int
    """Size of /dev/shm."""
    store_bytes: int
    """Size of Ray's object store."""
    gpus: tuple[Gpu, ...] = ()
    """The memory of each GPU; fewer entries than `num_gpus` where NVIDIA's driver does not report the memory. On a
    cluster's node the GPU with most free memory comes first: Ray assigns GPUs that no actor has."""
    id: str = ""
    """Ray's id of the machine; "" for a machine that is in no cluster."""

    @property
    def smallest_gpu(self) -> Gpu | None:
        """The GPU with the least free memory; None if NVIDIA's driver reported no GPU."""
        return min(self.gpus, key=lambda gpu: gpu.free_bytes, default=None)


def this_machine() -> Node:
    """Returns the cores and GPUs of this machine that this process may use, and the machine's memory. Starts nvidia-smi
    if the machine has GPUs, else no process."""
    visible = os.environ.get(VISIBLE)
    count = sum(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev"))
    gpus = _ask_driver(visible) if count else ()
    if visible is not None:
        count = min(count, len(_chosen(visible)))
    system = psutil.virtual_memory()
    groups = list(_group_memory())
    memory = min([system.total, *(limit for limit, _ in groups)])
    if Path("/dev/shm").is_dir():
        shm = shutil.disk_usage("/dev/shm").total
    else:
        shm = 0
    return Node(
        name="this machine",
        cpus=len(os.sched_getaffinity(0)),
        num_gpus=count,
        memory_bytes=memory,
        free_bytes=max(0, min([system.available, *(remaining for _, remaining in groups)])),
        shm_bytes=shm,
        store_bytes=min(int(STORE_SHARE * memory), STORE_BYTES, max(STORE_ON_DISK, int(0.95 * shm))),
        gpus=gpus[:count],
    )


def _chosen(visible: str) -> list[str]:
    return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]


def _ask_driver(visible: str | None) -> tuple[Gpu, ...]:
    """Returns the memory of each GPU in `visible`, the value of CUDA_VISIBLE_DEVICES (indices, or beginnings of UUIDs;
    None: all GPUs). Asks nvidia-smi, which comes with NVIDIA's driver. Returns () if nvidia-smi does not answer."""
    try:
        answer = subprocess.run(SMI, capture_output=True, text=True, timeout=SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    lines = [[part.strip() for part in line.split(",")] for line in answer.splitlines() if line.count(",") == 3]
    chosen_names = None if visible is None else _chosen(visible)
    gpus = []
    for index, uuid, total, free in lines:
        chosen = chosen_names is None or any(index == name or uuid.startswith(name) for name in chosen_names)
        if chosen and total.isdigit() and free.isdigit():  # "[N/A]" where GPU and host share their memory
            gpus.append(Gpu(int(total) * MIB, int(free) * MIB))
    return tuple(gpus)


def _group_memory(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[int, int]]:
    """Yields (limit, free part) in bytes for each memory limit on this process: the limits of its control group and of
    this group's ancestors (cgroup v1 and v2). The page cache counts as free, because the kernel drops it on demand. In
    a container, the root of `mount` is the container's own group."""
    if groups.is_file():
        lines = groups.read_text().splitlines()
    else:
        lines = []
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number == "0" and not controllers:
            base = mount
            limit_file = "memory.max"
            used = "memory.current"
            pages = ("active_file", "inactive_file")
        elif "memory" in controllers.split(","):
            base = mount / "memory"
            limit_file = "memory.limit_in_bytes"
            used = "memory.usage_in_bytes"
            pages = ("total_active_file", "total_inactive_file")
        else:
            continue
        inner = base / path.lstrip("/")
        for directory in (inner, *inner.parents):
            if directory.is_relative_to(base) and (limit := _read(directory / limit_file).strip()).isdigit():
                counts = dict(line.split() for line in _read(directory / "memory.stat").splitlines())
                taken = int(_read(directory / used) or 0) - sum(int(counts.get(name, 0)) for name in pages)
                yield int(limit), int(limit) - taken


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
