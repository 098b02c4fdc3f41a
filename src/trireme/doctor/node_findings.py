"""Decides what is wrong with a node by itself: GPUs, memory, limits, disk."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.doctor.examination import Declared, Expected
from trireme.doctor.facts import NodeFacts
from trireme.doctor.finding import Finding
from trireme.plan.needs import gib

OPEN_FILES, LEAST_OPEN_FILES = 8192, 1024
"""Files that a process may open: enough for many nodes, and what a small run needs. (Each connection of Ray, gloo, NCCL
and vLLM is a file, and so is each bucket of weights while it is mapped.)"""
PROCESSES = 2048
"""Processes and threads that the actors of a node start, with those of their libraries."""
GIB = 2**30


def node_findings(node: Declared, facts: NodeFacts, expected: Expected, *, shares: bool) -> Iterator[Finding]:
    """Yields what is wrong with one node. `shares`: it sees run.output_dir as the asking process does."""
    if expected.on_gpus:
        yield from _gpus(node, facts)
    yield from _memory(node, facts, expected)
    yield from _shm(node, facts, expected)
    yield from _limits(node, facts, expected)
    if expected.output_dir and facts.disk_free >= 0:
        yield from _disk(node, facts, expected) if shares else _own_disk(node, facts, expected)


def _gpus(node: Declared, facts: NodeFacts) -> Iterator[Finding]:
    seen = facts.machine.num_gpus
    if seen == node.gpus:
        return
    do = f"on {node.name}: look at `nvidia-smi`, and start its Ray again with `ray start ... --num-gpus={seen}`"
    yield Finding(
        node.name,
        "gpus",
        f"its Ray gives {node.gpus} GPUs, the machine shows {seen}",
        "as many GPUs as the node gives to Ray",
        do,
        fatal=seen < node.gpus,
    )


def _memory(node: Declared, facts: NodeFacts, expected: Expected) -> Iterator[Finding]:
    needed = expected.memory.get(node.name, 0)
    if facts.available_bytes < needed:
        yield Finding(
            node.name,
            "memory",
            f"{gib(facts.available_bytes)} of {gib(facts.machine.memory_bytes)} of memory are free",
            f"{gib(needed)}, by the estimate of the plan (`--dry-run` shows it)",
            f"on {node.name}: `ps aux --sort=-rss | head` shows what takes it; end what is left of other runs",
            fatal=False,
        )


def _shm(node: Declared, facts: NodeFacts, expected: Expected) -> Iterator[Finding]:
    has, needed, store = facts.machine.shm_bytes, expected.shm_bytes(node.name), node.store_bytes
    free = expected.shm_free.get(node.name, 0)
    no_start, small = facts.shm_free < free, has < needed
    if has >= store and not no_start and not small:
        return
    size = -(-max(needed, store) // GIB)
    if no_start:
        need = f"{gib(free)}, without which vLLM starts no replica of several ranks"
    elif small:
        need = f"{gib(needed)} for two versions of the weights and the libraries"
    else:
        need = f"{gib(store)}, the size of its Ray's object store, which is a file on a disk otherwise"
    grow = f"`mount -o remount,size={size}G /dev/shm` (Docker: --shm-size {size}g), and start its Ray again"
    yield Finding(
        node.name,
        "shm",
        f"/dev/shm has {gib(has)}" + (f", of which {gib(facts.shm_free)} are free" if no_start else ""),
        need,
        f"on {node.name}: `ls -lS /dev/shm` shows what fills it; {grow}" if no_start else f"on {node.name}: {grow}",
        fatal=no_start or (small and expected.on_gpus),  # what is small makes NCCL crash; most runs on CPUs work
    )


def _limits(node: Declared, facts: NodeFacts, expected: Expected) -> Iterator[Finding]:
    again = f"and start its Ray again: `ray start --address={expected.head}`"
    if facts.open_files < OPEN_FILES:
        yield Finding(
            node.name,
            "open files",
            f"a process may open {facts.open_files:,} files",
            f"{OPEN_FILES:,} or more (at least {LEAST_OPEN_FILES:,}): each connection and each mapped bucket is one",
            f"on {node.name}: `ulimit -n 65536` (Slurm: `#SBATCH --propagate=NONE`; Docker: --ulimit nofile=65536), "
            f"{again}",
            fatal=facts.open_files < LEAST_OPEN_FILES,
        )
    if facts.processes < PROCESSES:
        yield Finding(
            node.name,
            "processes",
            f"{facts.processes:,} more processes and threads may be started",
            f"{PROCESSES:,}, which the actors of a node and their libraries take",
            f"on {node.name}: `ulimit -u unlimited` (Docker: --pids-limit -1), {again}",
            fatal=False,
        )


def _disk(node: Declared, facts: NodeFacts, expected: Expected) -> Iterator[Finding]:
    wanted = (expected.kept + 1) * expected.commit_bytes
    if facts.disk_free >= wanted:
        return
    yield Finding(
        node.name,
        "disk",
        f"{gib(facts.disk_free)} are free where run.output_dir = {expected.output_dir} is",
        f"{gib(wanted)}: {expected.kept} commits (checkpoint.keep_last) and the next one, "
        f"of about {gib(expected.commit_bytes)} each",
        f"on {node.name}: `df -h {expected.output_dir}` and make room, or choose another --run.output-dir",
        fatal=facts.disk_free < expected.commit_bytes,
    )


def _own_disk(node: Declared, facts: NodeFacts, expected: Expected) -> Iterator[Finding]:
    """A node that does not share the directory keeps its parts of one commit, and perhaps a copy of one."""
    if facts.disk_free < expected.commit_bytes:
        yield Finding(
            node.name,
            "disk",
            f"{gib(facts.disk_free)} are free where it would write to run.output_dir = {expected.output_dir}",
            f"at most {gib(expected.commit_bytes)}, a commit: its parts of one until they are gathered, or a copy",
            f"on {node.name}: `df -h {expected.output_dir}` and make room, or choose another --run.output-dir",
            fatal=False,
        )
