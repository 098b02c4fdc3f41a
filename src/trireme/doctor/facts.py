"""Collects the facts that one node reports on itself. Takes about a second, and needs no Ray or GPU library."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash

from trireme.config.installed import package_versions
from trireme.core.model_files import file_digests, model_directory
from trireme.core.own_packages import ENTRY, OWN_PACKAGES
from trireme.process.device import DRIVER
from trireme.process.machine import Node, this_machine

ROOMS = (ENTRY, *OWN_PACKAGES)
"""This project's packages."""
OBJECT_PACKAGES = ("numpy", "pydantic", "safetensors", "peft")
"""Packages with objects that travel between nodes, in addition to the packages of a plan."""
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Questions:
    """The questions that every node answers about files: whether it sees the driver's trial file and has the model."""

    trial: str = ""
    """The path of a file that the driver has written where run.output_dir is; "" if there is none to look for."""
    model: str = ""
    """The model, a directory or a name on the hub; "" if there is none to look at."""


@dataclass(frozen=True)
class NodeFacts:
    """A node's report on itself."""

    host: str
    """The name that the machine has for itself."""
    versions: Mapping[str, str]
    """Versions of Python, of packages and of the NVIDIA driver ("" without one), and a digest of this project's
    source ("source")."""
    machine: Node
    """Cores, memory, free memory, /dev/shm and the GPUs that the driver of the machine shows."""
    shm_free: int
    """Free bytes in /dev/shm."""
    shares_run_directory: bool
    """True: it sees the driver's trial file, or there is none to look for."""
    model: Mapping[str, str] | None
    """The model's files with a digest for each; None if the node has no such model."""
    offline: bool
    """True: the node must not download a model of the hub (HF_HUB_OFFLINE=1)."""


def collect(questions: Questions) -> NodeFacts:
    """Returns the facts about this node, with the answers to `questions`."""
    if questions.model:
        directory = model_directory(questions.model)
    else:
        directory = None
    return NodeFacts(
        host=os.uname().nodename,
        versions=_versions(),
        machine=this_machine(),
        shm_free=shutil.disk_usage(SHM).free if SHM.is_dir() else 0,
        shares_run_directory=not questions.trial or Path(questions.trial).is_file(),
        model=file_digests(directory) if directory else None,
        offline=os.environ.get("HF_HUB_OFFLINE") == "1",
    )


def _versions() -> dict[str, str]:
    versions = package_versions()
    for name in OBJECT_PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    driver = ""
    with suppress(OSError):
        driver = (re.findall(r"\d+(?:\.\d+)+", DRIVER.read_text()) or [""])[0]
    return {**versions, "driver": driver, "source": source_digest()}


@cache
def source_digest() -> str:
    """Returns a digest of the source of this project's packages on this node. Each package is located separately, as
    Ray may copy each one to a directory of its own."""
    digest = xxhash.xxh3_64()
    for room in ROOMS:
        spec = PathFinder.find_spec(room)
        for place in map(Path, (spec and spec.submodule_search_locations) or ()):
            for file in sorted(place.rglob("*.py")):
                digest.update(f"{file.relative_to(place.parent)}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()
