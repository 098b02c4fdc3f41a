"""Brings a run whose directory is lost back from the copy of its newest commit on another node of the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from trireme.checkpoint.copies import CommitCopy, copies, delete_halves, keep_only, newest
from trireme.checkpoint.files import fsync_directory, make_directory, storage_errors, write_bytes
from trireme.checkpoint.manifest import MANIFEST, Manifest, step_name
from trireme.checkpoint.store import STAGING, CheckpointStore
from trireme.config import CommonConfig
from trireme.core.errors import RoomFailed, TriremeError
from trireme.launch.gathering import FarNode, create_files, receive
from trireme.process import waits
from trireme.process.environ import cluster_address
from trireme.process.ray_cluster import connected, on_node
from trireme.run.rundir import locked, named_root

LOOK_S = 1.0
"""Seconds after which it is looked again which nodes live."""


def bring_back(config: CommonConfig, say: Callable[[str], None]) -> None:
    """If a run is to be resumed, its directory holds no commit and there is a cluster, asks all nodes for a copy, and
    makes a run directory of the newest. A directory with staged files counts as none: another node may have a newer
    copy than it has. A run that has begun here gets no copy of another run. Does nothing where there is no copy. Raises
    BadInput for a directory that a driver holds, RoomFailed, StorageFailed."""
    root, address = named_root(config), cluster_address(config)
    wanted = config.resume.wanted and config.resume.dir is None
    if not wanted or root is None or address is None:
        return
    if CheckpointStore(root).commits() and not (root / STAGING).exists():
        return
    with connected(address, config):
        held = _ask(root, config.timeouts.start_s, say)
        copy = _wanted(root, held)
        if copy is None:
            if not copies(root):
                with storage_errors(root):
                    delete_halves(root)
            return
        node = next(node for node, found in held.items() if copy in found)
        source = FarNode(node, _address(node), (), create_files)
        try:
            fetched = _fetch(source, root, copy, time.monotonic() + config.timeouts.checkpoint_s)
        finally:
            source.forget()
        if fetched:
            what = step_name(copy.manifest.step)
            say(f"{root} held no newer commit: {what} was brought back from its copy on {source.name}")


def _wanted(root: Path, held: Mapping[str, Sequence[CommitCopy]]) -> CommitCopy | None:
    """Returns the newest copy that other nodes hold, unless `root` has as new a one itself; None if there is none."""
    head = None if (root / STAGING).exists() else CheckpointStore(root).head()
    fit = [[copy for copy in found if head is None or copy.run_id == head.run_id] for found in held.values()]
    best, own = newest(fit), newest([copies(root)])
    return None if best and own and own.age >= best.age else best


def _ask(root: Path, timeout_s: float, say: Callable[[str], None]) -> dict[str, list[CommitCopy]]:
    """Returns the copies that each node has. One that is lost meanwhile is left out, which is said. Raises RoomFailed,
    which names the nodes that live by what the cluster knows and do not answer: they may have the newest copy."""
    task = ray.remote(num_cpus=0, max_retries=0)(copies)
    names = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in _living()}
    asked = {task.options(scheduling_strategy=on_node(node)).remote(root): node for node in names}
    who = {ref: f"node {names[node]}, asked for a copy of {root}" for ref, node in asked.items()}
    held: dict[str, list[CommitCopy]] = {}
    deadline = time.monotonic() + timeout_s
    while who:
        if time.monotonic() > deadline:
            raise RoomFailed(
                f"waited {timeout_s:.0f} s (timeouts.start_s) for {'; '.join(who.values())} and got no answer. It may "
                "hold the newest commit: mend its connection, or stop its Ray so that the cluster gives it up"
            )
        answers = waits.ready(who, LOOK_S)
        living = {node["NodeID"] for node in _living()}
        for ref in [ref for ref in who if ref in answers or asked[ref] not in living]:
            node, answer = asked[ref], answers.get(ref)
            del who[ref]
            if isinstance(answer, list):
                held[node] = answer
            elif node in living:
                assert isinstance(answer, TriremeError)
                raise answer
            else:
                lost = f"node {names[node]} was lost before it said if it holds a copy of {root}"
                say(f"{lost}: its disk is not looked at")
    return held


def _living() -> list[Any]:
    return [node for node in ray.nodes() if node["Alive"]]


def _address(node: str) -> str:
    return next(str(each["NodeManagerAddress"]) for each in ray.nodes() if each["NodeID"] == node)


def _fetch(source: FarNode, root: Path, copy: CommitCopy, deadline: float) -> bool:
    """Brings the files of a copy here. The commit gets its name last: until then the next call begins anew. Returns
    False if another driver has made a run directory of `root` meanwhile."""
    store, manifest = CheckpointStore(root), copy.manifest
    commit, draft = store.commit(manifest.step), store.checkpoints / f"{step_name(manifest.step)}.partial-0"
    with storage_errors(root):
        make_directory(store.checkpoints)
    with locked(root):
        if store.commits() and not (root / STAGING).exists():
            return False
        store.discard(draft)
        receive(dict.fromkeys(manifest.files, source), commit, draft, deadline)
        receive(dict.fromkeys(copy.beside, source), root, root, deadline)
        write_bytes(draft, MANIFEST, manifest.to_json().encode())
        Manifest.verified(draft, contents=False)
        store.discard(commit)  # part of a staged copy, or an older one
        with storage_errors(commit):
            draft.rename(commit)
            fsync_directory(store.checkpoints)
            keep_only(commit)  # an older copy may have a later step, of a lineage that was left
    return True
