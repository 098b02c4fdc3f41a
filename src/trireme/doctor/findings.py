"""Finds the faults of the nodes of a cluster, from an examination and the needs of a run."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.doctor.examination import Declared, Examination, Expected
from trireme.doctor.facts import NodeFacts
from trireme.doctor.finding import CLUSTER, Finding
from trireme.doctor.link_findings import link_findings
from trireme.plan.needs import gib

MAX_NAMES = 3
"""The most names of a list that a finding shows."""
HARMLESS = frozenset({"driver", "pydantic", "numpy"})
"""Packages that may differ in version with only a warning. (A difference in another package, or in this project's
source, changes the results, or how processes understand each other.)"""
GIB = 2**30


def findings(examination: Examination, expected: Expected) -> list[Finding]:
    """Returns all faults: first those for which a run is refused, then warnings, each in the order of the nodes."""
    result = [*_missing(examination, expected), *_silent(examination, expected), *_plan(expected)]
    for node in examination.nodes:
        facts = examination.facts.get(node.name)
        if facts:
            if expected.on_gpus:
                result += _gpus(node, facts)
            result += _memory(node, facts, expected)
            result += _shm(node, facts, expected)
            result += _versions(node.name, facts, examination.driver, expected)
            result += _model(node.name, facts, examination.driver, expected)
            result += _run_directory(node.name, facts, expected)
    result += link_findings(examination, expected)
    return sorted(result, key=lambda finding: not finding.fatal)


def _missing(examination: Examination, expected: Expected) -> Iterator[Finding]:
    """Yields a fault for each expected node that never joined the cluster or was lost."""
    join = f"`uv run --no-sync ray start --address={expected.head}`"
    alive = [node for node in examination.nodes if node.alive]
    names = {name for node in alive for name in (node.address, node.host, node.host.partition(".")[0])}
    for name in expected.nodes:
        if name not in names:
            yield Finding(
                name,
                "missing node",
                "it is not in the cluster",
                f"{len(expected.nodes)} nodes: {', '.join(expected.nodes)}",
                f"on {name}: {join}, and read what that prints",
            )


def _silent(examination: Examination, expected: Expected) -> Iterator[Finding]:
    for name, reason in examination.silent.items():
        yield Finding(
            name,
            "silent node",
            reason,
            "an answer of each node, by a process of its Ray",
            f"on {name}: install the project (`uv sync`) and start its Ray by `uv run --no-sync ray start "
            f"--address={expected.head}`; its errors are in /tmp/ray/session_latest/logs/raylet.err. Where ports are "
            "taken, choose other --cluster.ports",
        )


def _plan(expected: Expected) -> Iterator[Finding]:
    if expected.refusal:
        yield Finding(
            CLUSTER,
            "plan",
            expected.refusal,
            "a place for each actor, and memory, on the nodes that answer",
            "what stands there under `to do`, or let the missing nodes join",
        )


def _gpus(node: Declared, facts: NodeFacts) -> Iterator[Finding]:
    count = facts.machine.num_gpus
    if count != node.gpus:
        yield Finding(
            node.name,
            "gpus",
            f"its Ray gives {node.gpus} GPUs, the machine shows {count}",
            "as many GPUs as the node gives to Ray",
            f"on {node.name}: look at `nvidia-smi`, and start its Ray again with `ray start ... --num-gpus={count}`",
            fatal=count < node.gpus,
        )


def _memory(node: Declared, facts: NodeFacts, expected: Expected) -> Iterator[Finding]:
    needed = expected.memory.get(node.name, 0)
    if facts.machine.free_bytes < needed:
        yield Finding(
            node.name,
            "memory",
            f"{gib(facts.machine.free_bytes)} of {gib(facts.machine.memory_bytes)} of memory are free",
            f"{gib(needed)}, by the estimate of the plan (`--dry-run` shows it)",
            f"on {node.name}: `ps aux --sort=-rss | head` shows what takes it; end what is left of other runs",
            fatal=False,
        )


def _shm(node: Declared, facts: NodeFacts, expected: Expected) -> Iterator[Finding]:
    size = facts.machine.shm_bytes
    needed = max(expected.shm_bytes(node.name), node.store_bytes)
    needed_free = expected.shm_free.get(node.name, 0)
    is_full = facts.shm_free < needed_free
    if size >= needed and not is_full:
        return
    reason = f"{gib(needed)} for two versions of the weights, the libraries and its Ray's object store"
    if is_full:
        reason = f"{gib(needed_free)} free, which vLLM needs to start a replica of several ranks"
    target = -(-needed // GIB)
    yield Finding(
        node.name,
        "shm",
        f"/dev/shm has {gib(size)}, of which {gib(facts.shm_free)} are free",
        reason,
        f"on {node.name}: `ls -lS /dev/shm` shows what fills it; `mount -o remount,size={target}G /dev/shm` "
        f"(Docker: --shm-size {target}g), and start its Ray again",
        # Too little makes NCCL crash. Most runs on CPUs work with it, and with an object store on a disk.
        fatal=is_full or (expected.on_gpus and size < expected.shm_bytes(node.name)),
    )


def _versions(name: str, facts: NodeFacts, driver: NodeFacts, expected: Expected) -> Iterator[Finding]:
    for package in sorted({*facts.versions, *driver.versions}):
        required = driver.versions.get(package, "")
        actual = facts.versions.get(package, "")
        if package == "driver":
            if required and actual and required != actual:  # a head often has no GPU
                do = f"on {name}: install the driver of the other nodes"
                yield Finding(name, "driver", f"driver is {actual}", f"{required}, as on the driver's node", do, False)
        elif required != actual:
            if package == "source":
                subject = "its copy of this project"
            else:
                subject = package
            is_patch = package == "python" and required.split(".")[:2] == actual.split(".")[:2]
            yield Finding(
                name,
                "code" if package == "source" else "package",
                f"{subject} is {actual or 'not there'}",
                f"{required or 'none'}, as where the command runs",
                f"on {name}: the same commit of this project and `uv sync`, and start its Ray again: "
                f"`uv run --no-sync ray start --address={expected.head}`",
                fatal=package not in HARMLESS and not is_patch,
            )


def _model(name: str, facts: NodeFacts, driver: NodeFacts, expected: Expected) -> Iterator[Finding]:
    if facts.model == driver.model:
        return
    copy = f"on {name}: copy it (`rsync -a`), or for a model of the hub `hf download {expected.model}`"
    required = f"the files of model.name = {expected.model} where the command runs"
    is_directory = expected.model.startswith(("/", ".", "~"))
    if facts.model is None:
        # The node downloads a model of the hub by itself, but not a directory.
        fatal = is_directory or facts.offline
        yield Finding(name, "model", f"it has no model {expected.model}", required, copy, fatal=fatal)
    elif driver.model is not None:
        # A node downloads the files that it lacks of a model of the hub.
        if is_directory:
            files = {*facts.model, *driver.model}
        else:
            files = {*facts.model} & {*driver.model}
        differing = [file for file in sorted(files) if facts.model.get(file) != driver.model.get(file)]
        if not differing:
            return
        listed = ", ".join(differing[:MAX_NAMES])
        if len(differing) > MAX_NAMES:
            listed += f" and {len(differing) - MAX_NAMES} more"
        yield Finding(name, "model", f"files of the model differ: {listed}", required, copy)


def _run_directory(name: str, facts: NodeFacts, expected: Expected) -> Iterator[Finding]:
    """Yields a fault if a process on the node `name` must write to the run directory, and the node does not see this
    directory."""
    if name in expected.writers and not facts.shares_run_directory:
        yield Finding(
            name,
            "run directory",
            f"it does not see the file that the driver has written for run.output_dir = {expected.output_dir}",
            "one directory for all nodes with a trainer shard or the orchestrator, which write to it",
            f"mount it on {name}, or put --run.output-dir on a file system that the nodes share, or in object storage "
            "(s3://bucket/prefix), which needs no shared file system",
        )
