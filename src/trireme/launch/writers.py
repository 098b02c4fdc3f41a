"""Checks that every process which writes to the run directory is on a node that sees it.

Shards of the trainer and the orchestrator write their parts of a commit there, and read them at a resume. Replicas need
the model alone: where their node does not see the directory, they write their log to the same path on its own disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray

from trireme.core.refusals import Refusal
from trireme.process import waits
from trireme.process.ray_cluster import Progress, on_node

SEEN_S = 30.0
"""Seconds until a file that the driver has just written is visible on a node: NFS keeps directories for that long."""
TICK_S = 0.5


def look(file: Path, contents: str, limit_s: float = SEEN_S) -> tuple[str, bool]:
    """Returns this machine's name, and True if `file` has these contents here within `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not (seen := file.is_file() and file.read_text() == contents) and time.monotonic() < deadline:
        time.sleep(TICK_S)
    return os.uname().nodename, seen


def check_writers(
    file: Path,
    rooms: Mapping[str, Sequence[str]],
    writing: Sequence[str],
    kept: str | None,
    timeout_s: float,
    on_tick: Progress,
) -> None:
    """Looks for `file`, which the driver has just written below the run directory, on each node with a writer.

    `rooms`: the rooms that have actors on each node, by Ray's id of the node. `writing`: the rooms whose actors write.
    `kept`: the URL of a run that is kept in object storage. Raises BadInput with the names of the nodes that do not see
    the file; RoomFailed for a node that does not answer.
    """
    writers = {node: [room for room in found if room in writing] for node, found in rooms.items()}
    writers = {node: found for node, found in writers.items() if found}
    task = ray.remote(num_cpus=0, max_retries=0)(look)
    contents = file.read_text()
    refs = [task.options(scheduling_strategy=on_node(node)).remote(file, contents) for node in writers]
    who = [f"node {node[:8]}, which looks for {file}" for node in writers]
    answers = waits.get_all(refs, who=who, timeout_s=timeout_s + SEEN_S, on_tick=on_tick)
    blind = [
        f"{host} ({', '.join(writers[node])})" for node, (host, seen) in zip(writers, answers, strict=True) if not seen
    ]
    if blind:
        root = file.parents[2]
        raise _refusal(root, blind, kept).error()


def _refusal(root: Path, blind: Sequence[str], kept: str | None) -> Refusal:
    key = "local_dir" if kept else "output_dir"
    do = f"put --run.{key.replace('_', '-')} on a file system that these nodes share"
    if not kept:
        do += (
            "; or start the command on the node with the trainer, and keep the run in object storage "
            "(--run.output-dir s3://bucket/prefix), from where any node resumes it"
        )
    return Refusal(
        f"run.{key} = {root.parent}; {root} is not seen by {'; '.join(blind)}",
        "a directory that each node with a shard of the trainer or the orchestrator sees: they write commits there",
        do,
    )
