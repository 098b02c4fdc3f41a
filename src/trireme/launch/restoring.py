"""Brings a run whose directory is lost back from the copy of its newest commit on another node of the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import ray

from trireme.checkpoint.copies import CommitCopy, copies, newest
from trireme.checkpoint.files import fsync_directory, make_directory, storage_errors, write_bytes
from trireme.checkpoint.manifest import MANIFEST, Manifest, step_name
from trireme.checkpoint.store import CheckpointStore
from trireme.config import CommonConfig
from trireme.launch.gathering import FarNode, create_files, receive
from trireme.process import waits
from trireme.process.environ import cluster_address
from trireme.process.ray_cluster import connected, on_node
from trireme.run.rundir import locked, named_root


def bring_back(config: CommonConfig, say: Callable[[str], None]) -> None:
    """If a run is to be resumed, its directory holds no commit and there is a cluster, asks all nodes for a copy, and
    makes a run directory of the newest. Does nothing where there is none. Raises BadInput for a directory that a driver
    holds, RoomFailed, StorageFailed."""
    root, address = named_root(config), cluster_address(config)
    wanted = config.resume.wanted and config.resume.dir is None
    if not wanted or root is None or address is None or CheckpointStore(root).commits():
        return
    with connected(address):
        held = _ask(root, config.timeouts.start_s)
        copy = newest(held.values())
        if copy is None:
            return
        node = next(node for node, found in held.items() if copy in found)
        source = FarNode(node, _address(node), (), create_files)
        try:
            _fetch(source, root, copy, time.monotonic() + config.timeouts.checkpoint_s)
        finally:
            source.forget()
        say(f"{root} held no commit: {step_name(copy.manifest.step)} was brought back from its copy on {source.name}")


def _ask(root: Path, timeout_s: float) -> dict[str, list[CommitCopy]]:
    """Returns the copies that each node has."""
    task = ray.remote(num_cpus=0, max_retries=0)(copies)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    asked = [task.options(scheduling_strategy=on_node(node)).remote(root) for node in nodes]
    who = [f"node {_address(node)}, asked for a copy of {root}" for node in nodes]
    return dict(zip(nodes, waits.get_all(asked, who=who, timeout_s=timeout_s), strict=True))


def _address(node: str) -> str:
    return next(str(each["NodeManagerAddress"]) for each in ray.nodes() if each["NodeID"] == node)


def _fetch(source: FarNode, root: Path, copy: CommitCopy, deadline: float) -> None:
    """Brings the files of a copy here. The commit gets its name last: until then the next call begins anew."""
    store, manifest = CheckpointStore(root), copy.manifest
    commit, draft = store.commit(manifest.step), store.checkpoints / f"{step_name(manifest.step)}.partial-0"
    with storage_errors(root):
        make_directory(store.checkpoints)
    with locked(root):
        store.discard(draft)
        receive(dict.fromkeys(manifest.files, source), commit, draft, deadline)
        receive(dict.fromkeys(copy.beside, source), root, root, deadline)
        write_bytes(draft, MANIFEST, manifest.to_json().encode())
        Manifest.verified(draft, contents=False)
        with storage_errors(commit):
            draft.rename(commit)
            fsync_directory(store.checkpoints)
