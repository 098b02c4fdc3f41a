"""Finds the nodes whose processes write to the run directory but do not see it, and moves the files of these nodes.

Shards of the trainer and the orchestrator write their parts of a checkpoint there, and read them at a resume. On a node
that does not see the directory these parts travel through object storage (`trireme.checkpoint.parts`), if the run is
stored there; else the run is refused. Replicas need only the model: a replica on such a node writes its log to the same
path on the node's own disk.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ray

from trireme.checkpoint.bucket import Bucket, StoreSilent
from trireme.checkpoint.files import FileRecord
from trireme.checkpoint.manifest import Manifest
from trireme.checkpoint.parts import CheckpointSource, put_parts, sees
from trireme.checkpoint.store import HEAD
from trireme.core.errors import StorageFailed, TriremeError
from trireme.core.paths import path_in
from trireme.core.refusals import Refusal
from trireme.process import waits
from trireme.process.faults import fault_point
from trireme.process.ray_cluster import Progress, on_node
from trireme.run.mirror import Mirror
from trireme.run.rundir import RunDir

SEEN_S = 30.0
"""Seconds until a file that the driver has just written is visible on a node: NFS keeps directories for that long."""
STORED_SEEN_S = 3.0
"""The same for a run in object storage: there a node that sees the file too late only sends its files the longer way,
through the store."""
TICK_S = 0.5


@dataclass(frozen=True)
class Sight:
    """A node's report on whether it sees the run directory."""

    host: str
    """The name of the machine."""
    sees: bool
    """True: the run directory is there."""
    problem: str = ""
    """Why a node that does not see the run directory cannot use object storage instead; "" if it can."""


def look(mark: Path, text: str, url: str | None, limit_s: float) -> Sight:
    """Waits up to `limit_s` seconds until this node sees the file `mark` with the contents `text`. Returns a Sight,
    which says whether it does.

    If the node does not see the file, and `url` is given, the node has to send its parts of checkpoints to the object
    storage `url`. Then this function checks that the node can read HEAD in that storage, and deletes drafts that killed
    attempts have left on the node's disk. Raises StoreSilent if the storage does not answer.
    """
    deadline = time.monotonic() + limit_s
    while not (visible := sees(mark, text)) and time.monotonic() < deadline:
        time.sleep(TICK_S)
    problem = ""
    if not visible and url:
        for draft in mark.parents[2].glob("checkpoints/*.partial-*"):
            shutil.rmtree(draft, ignore_errors=True)
        try:
            if Bucket(url).read(HEAD):
                problem = ""
            else:
                problem = f"{url}/{HEAD} is missing"
        except StoreSilent as error:  # the same command may work later, so this is no wrong input
            raise StoreSilent(
                f"the store of run.output_dir does not answer {os.uname().nodename}: {error}. Start the same command "
                "again when it does; if it never has, correct AWS_ENDPOINT_URL or the network of that node"
            ) from None
        except TriremeError as error:
            problem = str(error)
    return Sight(os.uname().nodename, visible, problem)


@dataclass(frozen=True)
class FarNodes:
    """The nodes that write parts of checkpoints but do not see the directory of `run`. This class moves their parts
    through the object storage that also stores the run. `nodes`: {Ray's id: the node's name in errors}.
    `timeout_s`: seconds for all parts of a checkpoint."""

    run: RunDir
    mirror: Mirror
    nodes: Mapping[str, str]
    timeout_s: float

    @property
    def text(self) -> str:
        """A message that names these nodes."""
        return (
            f"{self.run.root} is not seen by {'; '.join(self.nodes.values())}: parts of checkpoints travel through "
            f"{self.mirror.bucket.url}"
        )

    def gather(self, draft: Path, manifest: Manifest) -> None:
        """Makes the far nodes upload their files of the checkpoint in `draft`, and downloads these into `draft`. Raises
        StorageFailed, RoomFailed."""
        bucket = self.mirror.bucket
        key = self.mirror.draft_key(manifest)
        try:
            failed = self._put(key, draft, manifest.files)
            if failed:
                raise StorageFailed("; ".join(failed))
            for record in manifest.files:
                if not path_in(draft, record.path).exists():
                    bucket.fetch(f"{key}/{record.path}", draft, record)
                    fault_point("parts.fetch")
        except StorageFailed:
            with suppress(StorageFailed):
                bucket.delete(bucket.keys(key))
            raise

    def discard(self, draft: Path) -> None:
        """Deletes `draft` from the disks of the far nodes. Raises RoomFailed."""
        self._put("", draft, ())

    def _put(self, key: str, draft: Path, files: Sequence[FileRecord]) -> list[str]:
        """Calls `put_parts` on all far nodes. Waits until all calls have ended, so that no node is still writing when
        the caller tries again. Returns the reasons of failures. Raises RoomFailed."""
        task = ray.remote(num_cpus=0, max_retries=0)(put_parts)
        url = self.mirror.bucket.url
        refs = [task.options(scheduling_strategy=on_node(node)).remote(url, key, draft, files) for node in self.nodes]
        owners = [f"{name}, which puts its parts of {draft.name} into {url}" for name in self.nodes.values()]
        return list(filter(None, waits.get_all(refs, owners=owners, timeout_s=self.timeout_s)))

    def source(self, checkpoint: Path, manifest: Manifest) -> CheckpointSource:
        """Waits until the store has `checkpoint`. Returns where the far nodes find its files. Raises StorageFailed,
        LockLost."""
        key = self.mirror.await_key(checkpoint, self.timeout_s)
        mark = self.run.nonce
        return CheckpointSource(self.mirror.bucket.url, key, manifest.files, mark, mark.read_text())


def check_writers(
    run: RunDir,
    rooms: Mapping[str, Sequence[str]],
    writing: Sequence[str],
    timeout_s: float,
    checkpoint_s: float,
    on_tick: Progress,
) -> FarNodes | None:
    """Makes each node with a writer look for a file that the driver has just written below the run directory. Returns
    None if all nodes see the file. Otherwise returns the nodes that do not; these write to the run's object storage.

    `rooms`: {Ray's id of a node: rooms with actors on it}. `writing`: the rooms with actors that write. `timeout_s`:
    limit for the nodes' answers. `checkpoint_s`: limit for the returned nodes to store their parts of a checkpoint. If
    nodes do not see the file, raises BadInput that names them unless the run has an object storage that they can read.
    Raises StoreSilent if the storage does not answer a node, and RoomFailed if a node does not answer.
    """
    writers = {node: [room for room in local_rooms if room in writing] for node, local_rooms in rooms.items()}
    writers = {node: local_rooms for node, local_rooms in writers.items() if local_rooms}
    task = ray.remote(num_cpus=0, max_retries=0)(look)
    mark = run.nonce
    text = mark.read_text()
    url = run.mirror and run.mirror.bucket.url
    limit_s = STORED_SEEN_S if url else SEEN_S
    refs = [task.options(scheduling_strategy=on_node(node)).remote(mark, text, url, limit_s) for node in writers]
    owners = [f"node {node[:8]}, which looks for {mark}" for node in writers]
    sights = waits.get_all(refs, owners=owners, timeout_s=timeout_s + SEEN_S, on_tick=on_tick)
    blind = {node: sight for node, sight in zip(writers, sights, strict=True) if not sight.sees}
    names = {node: f"{sight.host} ({', '.join(writers[node])})" for node, sight in blind.items()}
    if blind and run.mirror is None:
        raise _unseen(run.root, list(names.values()))
    problems = [f"{names[node]}: {sight.problem}" for node, sight in blind.items() if sight.problem]
    if problems:
        raise _unreached(run.root, str(url), problems)
    if run.mirror and names:
        return FarNodes(run, run.mirror, names, checkpoint_s)
    return None


def _unseen(root: Path, blind: Sequence[str]) -> Refusal:
    return Refusal(
        f"run.output_dir = {root.parent}; {root} is not seen by {'; '.join(blind)}",
        "a directory that each node with a shard of the trainer or the orchestrator sees: they write checkpoints there",
        "put --run.output-dir on a file system that these nodes share; or keep the run in object storage "
        "(--run.output-dir s3://bucket/prefix), which needs no shared file system",
    )


def _unreached(root: Path, url: str, problems: Sequence[str]) -> Refusal:
    return Refusal(
        f"run.output_dir = {url}, which cannot be read on {'; '.join(problems)}",
        f"object storage that each node with a shard of the trainer or the orchestrator can read, or {root} on a file "
        "system that these nodes share",
        "correct the network or the package there (`uv sync --extra s3`); keys, region and endpoint are those of the "
        "driver's environment; or put --run.local-dir on a file system that these nodes share",
    )
