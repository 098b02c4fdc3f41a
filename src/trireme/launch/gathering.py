"""Gathers the commits of a run whose directory not every node sees.

Before an attempt each node with a part of the run is asked whether it sees a file that the driver has just written. A
node that does not writes to the same path on a disk of its own. Its parts of a commit are gathered in the run directory
while training continues; only then the manifest is written. What the rooms of the node load is brought to it.

Files travel through Ray's object store, a few pieces at a time, and are verified where they arrive. A commit that
cannot be gathered, because a node was lost or a disk is full, is a missed commit (`trireme.run.commits`). One of the
nodes keeps a copy of the newest commit (`trireme.checkpoint.copies`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from trireme.checkpoint.copies import beside, record_of
from trireme.checkpoint.files import FileRecord, storage_errors
from trireme.checkpoint.manifest import MANIFEST, Manifest
from trireme.checkpoint.pieces import Assembly, Piece, cut, flow, held, of_rooms, read_piece
from trireme.checkpoint.store import STAGING
from trireme.core.errors import RoomFailed, StorageFailed, TriremeError
from trireme.core.refusals import Refusal
from trireme.launch.node_files import NodeFilesActor, NodeView
from trireme.process import trace, waits
from trireme.process.environ import view_of
from trireme.process.ray_cluster import Progress, on_node

NOT_GATHERED = "a part of the commit was not gathered"
ALONE = (
    "files: the driver and all actors are on one node. Commits are in {root} there, and no node keeps a copy: unless "
    "other nodes share this directory, the run can be resumed on this node only, and is lost with its disk"
)
CLEAR_S = 30.0
"""Time limit for deleting what is not needed any more on a node."""


class FarNode:
    """A node that does not see the run directory, and the actor there that reads and writes its files."""

    def __init__(self, node: str, name: str, rooms: Sequence[str], create: Callable[[str], Any]) -> None:
        """`rooms`: those with a part in each commit that have an actor there."""
        self.node, self.name, self.rooms = node, name, tuple(rooms)
        self._create = create
        self._actor: Any = None
        self._lock = threading.Lock()  # commits and logs have threads of their own

    @property
    def files(self) -> Any:
        """The actor; a new one after `forget`."""
        with self._lock:
            self._actor = self._actor or self._create(self.node)
            return self._actor

    def use(self, actor: Any) -> None:
        """Uses an actor that is there already."""
        with self._lock:
            self._actor = actor

    def forget(self) -> None:
        """Ends the actor, which may be dead."""
        with self._lock:
            actor, self._actor = self._actor, None
        if actor is not None:
            ray.kill(actor)

    def get(self, reference: Any, what: str, deadline: float) -> Any:
        """Returns what the actor answers. Raises StorageFailed, and RoomFailed for a node that does not answer."""
        who = f"the files of node {self.name} ({what}; timeouts.checkpoint_s)"
        return waits.get(reference, who=who, timeout_s=max(deadline - time.monotonic(), 0.1))


def create_files(node: str) -> Any:
    """Starts the actor on the node with this Ray id."""
    return NodeFilesActor.options(scheduling_strategy=on_node(node)).remote()


def receive(where: Mapping[FileRecord, FarNode], source: Path, target: Path, deadline: float) -> None:
    """Brings each file from directory `source` of the node that has it to directory `target` here, in the order of
    `where`. Raises StorageFailed, RoomFailed."""
    assembly = Assembly(target)
    try:
        flow(
            cut(where),
            lambda piece: where[piece.record].files.read.remote(source, piece),
            lambda piece, ref: assembly.take(piece, where[piece.record].get(ref, named(piece), deadline)),
        )
    finally:
        assembly.abandon()


class FarNodes:
    """The nodes of an attempt that do not see the run directory."""

    def __init__(self, nodes: Sequence[FarNode]) -> None:
        self.nodes = nodes

    def gather(self, draft: Path, files: Sequence[FileRecord], limit_s: float) -> None:
        """Brings those of `files` that nodes have written to their own disks into the directory `draft` here. Raises
        StorageFailed: for a lost node too, whose part of this commit is then missing."""
        here = set(held(draft, files))
        missing = [record for record in files if record not in here]
        if not missing:
            return
        deadline = time.monotonic() + limit_s
        size = sum(record.size for record in missing)
        with trace.span("gather", "gathering", files=len(missing), bytes=size), self._lost_is_missed(NOT_GATHERED):
            receive(self._find(draft, missing, deadline), draft, draft, deadline)

    @contextmanager
    def _lost_is_missed(self, what: str) -> Iterator[None]:
        try:
            yield
        except RoomFailed as error:
            for node in self.nodes:
                node.forget()
            raise StorageFailed(f"{what}: {error}") from error

    def _find(self, draft: Path, files: Sequence[FileRecord], deadline: float) -> Mapping[FileRecord, FarNode]:
        """Returns the node that has each file. Raises StorageFailed for a file that is on none."""
        where: dict[FileRecord, FarNode] = {}
        asked = [(node, node.files.held.remote(draft, files, False)) for node in self.nodes]
        for node, ref in asked:
            where |= dict.fromkeys(node.get(ref, "which it has", deadline), node)
        if lost := [record.path for record in files if record not in where]:
            nodes = ", ".join(node.name for node in self.nodes)
            raise StorageFailed(f"{draft}: {', '.join(lost)} was written, and is neither here nor on {nodes}")
        return {record: where[record] for record in files}

    def clear(self, draft: Path) -> None:
        """Deletes what nodes have written of a draft that is given up. What cannot be deleted now is deleted before the
        next attempt."""
        self._ask_all("remove", draft)

    def sealed(self, draft: Path, commit: Path, manifest: Manifest, limit_s: float) -> None:
        """Keeps a copy of `commit`, which was `draft`, on the first of the nodes, and nothing of it on the others.
        Files that the node wrote itself do not travel. Raises StorageFailed if there is no copy; the one before
        stays then."""
        holder, root, deadline = self.nodes[0], commit.parents[1], time.monotonic() + limit_s
        try:
            with trace.span("copy", "gathering", version=manifest.step), self._lost_is_missed("the copy was not made"):
                holder.get(holder.files.adopt.remote(draft, commit), f"its part of {commit.name}", deadline)
                self._bring(commit, {holder: manifest.files}, deadline)
                with storage_errors(root):
                    others = [*beside(root), record_of(root, str(commit.relative_to(root) / MANIFEST))]
                self._bring(root, {holder: others}, deadline)
        finally:
            self._ask_all("remove", draft)
        self._ask_all("keep_only", commit)  # older copies, and what an earlier attempt left

    @contextmanager
    def brought(self, commit: Path, manifest: Manifest, limit_s: float) -> Iterator[None]:
        """Brings each node the parts of `commit` that its rooms load within the block, and deletes them there after it.
        Raises StorageFailed, RoomFailed."""
        wanted = {node: of_rooms(manifest.files, node.rooms) for node in self.nodes}
        try:
            self._bring(commit, wanted, time.monotonic() + limit_s)
            yield
        finally:
            self._ask_all("remove", commit)

    def _bring(self, commit: Path, wanted: Mapping[FarNode, Sequence[FileRecord]], deadline: float) -> None:
        """Brings files to the nodes that lack them. Each is read once here, and crosses the wire once for a node."""
        asked = [(node, node.files.held.remote(commit, files, True)) for node, files in wanted.items()]
        has = {node: set(node.get(ref, "which it has", deadline)) for node, ref in asked}
        lacking = {
            record: [node for node, files in wanted.items() if record in files and record not in has[node]]
            for record in dict.fromkeys(record for files in wanted.values() for record in files)
        }

        def send(piece: Piece) -> list[tuple[FarNode, Any]]:
            contents = ray.put(read_piece(commit, piece))
            return [(node, node.files.take.remote(commit, piece, contents)) for node in lacking[piece.record]]

        def arrived(piece: Piece, taken: list[tuple[FarNode, Any]]) -> None:
            for node, ref in taken:
                node.get(ref, named(piece), deadline)

        with trace.span("bring", "gathering", nodes=len(wanted)):
            flow(cut(record for record, nodes in lacking.items() if nodes), send, arrived)

    def _ask_all(self, verb: str, directory: Path) -> None:
        """Has all nodes delete something. One that fails, or is lost, is asked again by the next attempt."""
        asked = [(node, getattr(node.files, verb).remote(directory)) for node in self.nodes]
        for node, ref in asked:
            with suppress(TriremeError):
                node.get(ref, f"{verb} {directory.name}", time.monotonic() + CLEAR_S)

    def close(self) -> None:
        """Ends the actors on the nodes."""
        for node in self.nodes:
            node.forget()


def named(piece: Piece) -> str:
    """Names a piece in errors."""
    return f"the piece at {piece.offset:,} of {piece.record.path}"


@dataclass(frozen=True)
class AskedNodes:
    """The nodes of an attempt while they look for a file of the driver. The process that looks is the one that later
    reads and writes the node's files: to start one takes as long as many seconds of other work."""

    nonce: Path
    """The file."""
    root: Path
    """The run directory, which holds it."""
    rooms: Mapping[str, Sequence[str]]
    """The rooms that have actors on each node, by Ray's id of the node."""
    answers: Mapping[str, Any]
    """The reference to the NodeView of each node."""
    actors: dict[str, Any]
    """The actor that looks on each node, until it is handed over or ended."""

    @classmethod
    def ask(cls, nonce: Path, root: Path, rooms: Mapping[str, Sequence[str]]) -> AskedNodes:
        """Asks each node, and does not wait. `close` ends what that started."""
        actors, contents = {node: create_files(node) for node in rooms}, view_of(nonce)[1]
        answers = {node: actor.look.remote(nonce, contents, root) for node, actor in actors.items()}
        return cls(nonce, root, rooms, answers, actors)

    def found(
        self, holding: Sequence[str], stored: str | None, timeout_s: float, on_tick: Progress
    ) -> tuple[FarNodes | None, str]:
        """Returns the nodes that do not see the run directory, if there are any, and a line for people. `holding`: the
        rooms with a part in each commit; `stored`: the URL of a run that is kept in object storage. Raises BadInput
        where a node has such a room, does not see the directory and has no disk for its parts; RoomFailed for a node
        that does not answer."""
        who = [f"node {node[:8]}, asked if it sees {self.nonce}" for node in self.answers]
        told = waits.get_all(list(self.answers.values()), who=who, timeout_s=timeout_s, on_tick=on_tick)
        nodes, said = sort_out(dict(zip(self.answers, told, strict=True)), self.rooms, self.root, holding, stored)
        for node in nodes.nodes if nodes else ():
            node.use(self.actors.pop(node.node))
        self.close()
        return nodes, said

    def close(self) -> None:
        """Ends the actors that were not handed over."""
        while self.actors:
            ray.kill(self.actors.popitem()[1])


def sort_out(
    views: Mapping[str, NodeView],
    rooms: Mapping[str, Sequence[str]],
    root: Path,
    holding: Sequence[str],
    stored: str | None = None,
) -> tuple[FarNodes | None, str]:
    """Returns the nodes whose files are gathered, from the answers of all; see `AskedNodes.found`."""
    blind = {node: view for node, view in views.items() if not view.sees}
    if blind and (root / STAGING).exists():
        # A node wrote its mark here: it does share the directory, and saw the driver's file too late (a cache of NFS).
        (root / STAGING).unlink()
        blind = {}
    own = {node: [room for room in rooms[node] if room in holding] for node in blind}
    _refuse_unfit({node: view for node, view in blind.items() if own[node]}, rooms, root)
    here = os.uname().nodename
    # The first one keeps the copy: on another machine, and one whose loss is noticed, as it ends the attempt.
    apart_first = sorted(blind, key=lambda node: (blind[node].host == here, not own[node]))
    nodes = [FarNode(node, blind[node].host, own[node], create_files) for node in apart_first if not blind[node].unfit]
    if not blind:
        return None, _seen_by_all(views, root, here, stored)
    if not nodes:
        only = f"its commits are kept in {stored}" if stored else "each commit is here alone"
        return None, f"{_said(blind, rooms, root)}; none of them can keep a copy, so {only}"
    return FarNodes(nodes), f"{_said(blind, rooms, root)}; {nodes[0].name} keeps a copy of the newest commit"


def _seen_by_all(views: Mapping[str, NodeView], root: Path, here: str, stored: str | None) -> str:
    if len(views) > 1:
        return f"files: all {len(views)} nodes of the run see its directory"
    (view,) = views.values()
    if view.host != here:
        return f"files: {view.host}, which has all actors, and the driver's node see the run directory"
    if stored:
        return f"files: the driver and all actors are on one node; commits are kept in {stored}"
    return ALONE.format(root=root)


def _said(blind: Mapping[str, NodeView], rooms: Mapping[str, Sequence[str]], root: Path) -> str:
    names = "; ".join(f"{view.host} ({', '.join(rooms[node])})" for node, view in blind.items())
    return (
        f"files: {names} {'does' if len(blind) == 1 else 'do'} not see {root}: parts of commits are written to this "
        "path there and gathered here, through Ray's object store"
    )


def _refuse_unfit(views: Mapping[str, NodeView], rooms: Mapping[str, Sequence[str]], root: Path) -> None:
    if unfit := [f"{v.host} ({', '.join(rooms[node])}): {v.unfit}" for node, v in views.items() if v.unfit]:
        raise Refusal(
            f"run.output_dir = {root.parent}, which not all nodes share; and their parts of commits cannot be gathered "
            f"from {root} on {'; '.join(unfit)}",
            "a directory that all nodes with a part of the trainer or the orchestrator share, or a path that each of "
            "them can write on a disk of its own",
            "put --run.output-dir on a file system that they share, or where the nodes that are named have a disk",
        ).error()
