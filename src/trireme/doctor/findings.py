"""Decides what is wrong with the nodes of a cluster, from an examination and what a run expects."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from trireme.doctor.examination import Declared, Examination, Expected
from trireme.doctor.facts import SECRET, STOP_WAIT, NodeFacts
from trireme.doctor.finding import CLUSTER, Finding
from trireme.doctor.link_findings import link_findings
from trireme.doctor.node_findings import node_findings
from trireme.plan.needs import gib

CLOCK_S = 1.0
"""Seconds by which a clock may differ: logs and traces of nodes are read side by side, and object stores refuse what is
minutes off."""
SHOWN = 3
"""How many names of a list a finding shows."""
HARMLESS = frozenset({"driver", "pydantic", "numpy"})
"""What may differ with a warning. (A difference of another package, or of this project's source, changes what is
computed, or what processes understand of each other.)"""
UNSHARED = "unshared directory"
"""The check of nodes that do not see run.output_dir."""


def findings(examination: Examination, expected: Expected) -> list[Finding]:
    """Returns all that is wrong, in the order of the nodes, those first for which a run is refused."""
    found = [*_missing(examination, expected), *_silent(examination, expected), *_job_stop(examination, expected)]
    found += _plan(expected)
    for node in examination.nodes:
        if facts := examination.facts.get(node.name):
            found += node_findings(node, facts, expected, shares=_shares(node, examination))
            found += _versions(node.name, facts, examination.asking, expected)
            found += _variables(node.name, facts, examination.asking, expected)
            found += _clock(node.name, examination)
            found += _model(node.name, facts, examination, expected)
    if examination.asking.nonce_seen:
        found += _shared(examination, expected)
    found += link_findings(examination, expected)
    return sorted(found, key=lambda finding: not finding.fatal)


def _missing(examination: Examination, expected: Expected) -> Iterator[Finding]:
    """Nodes that were expected and never joined, or were lost."""
    join = f"`uv run --no-sync ray start --address={expected.head}`"
    alive = [node for node in examination.nodes if node.alive]
    known = {name for node in alive for name in (node.address, node.host, node.host.partition(".")[0])}
    for name in expected.nodes:
        if name not in known:
            yield Finding(
                name,
                "missing node",
                "it is not in the cluster",
                f"{len(expected.nodes)} nodes: {', '.join(expected.nodes)}",
                f"on {name}: {join}, and read what that prints",
            )
    there = ", ".join(node.name for node in alive)
    if len(alive) < expected.count:
        lost = [node.name for node in examination.nodes if not node.alive and node.name not in known]
        gone = f"; lost: {', '.join(lost)}" if lost else ""
        yield Finding(
            CLUSTER,
            "missing node",
            f"{len(alive)} of {expected.count} nodes joined: {there}{gone}",
            f"{expected.count} nodes (--nodes; give their names to have the missing ones named)",
            f"on each missing node: {join}, and read what that prints",
        )


def _silent(examination: Examination, expected: Expected) -> Iterator[Finding]:
    for name, why in examination.silent.items():
        yield Finding(
            name,
            "silent node",
            why,
            "an answer: each node is asked what it has, in a process of its Ray",
            f"on {name}: install the project (`uv sync`) and start its Ray by `uv run --no-sync ray start "
            f"--address={expected.head}`; its errors are in /tmp/ray/session_latest/logs/raylet.err",
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


def _job_stop(examination: Examination, expected: Expected) -> Iterator[Finding]:
    head = examination.nodes[0].name
    facts = examination.facts.get(head)
    if facts and expected.grace_s and facts.stop_wait_s < expected.grace_s:
        yield Finding(
            head,
            "job stop",
            f"`ray job stop` kills after {facts.stop_wait_s} s ({STOP_WAIT})",
            f"{expected.grace_s:g} s (checkpoint.grace_s): else the steps since the newest commit are lost",
            f"on {head}: `{STOP_WAIT}={expected.grace_s:.0f} ray start --head ...`",
            fatal=False,
        )


def _versions(name: str, facts: NodeFacts, asking: NodeFacts, expected: Expected) -> Iterator[Finding]:
    for package in sorted({*facts.versions, *asking.versions}):
        here, there = asking.versions.get(package, ""), facts.versions.get(package, "")
        if here == there or (package == "driver" and not (here and there)):  # a head often has no GPU
            continue
        what = "its copy of this project" if package == "source" else package
        patch = package == "python" and here.split(".")[:2] == there.split(".")[:2]
        yield Finding(
            name,
            "package" if package != "driver" else "driver",
            f"{what} is {there or 'not there'}",
            f"{here or 'none'}, as where the command runs",
            f"on {name}: the same commit of this project and `uv sync`, and start its Ray again: "
            f"`uv run --no-sync ray start --address={expected.head}`"
            if package != "driver"
            else f"on {name}: install the driver of the other nodes",
            fatal=package not in HARMLESS and not patch,
        )


def _variables(name: str, facts: NodeFacts, asking: NodeFacts, expected: Expected) -> Iterator[Finding]:
    for variable in sorted({*facts.variables, *asking.variables}):
        here, there = asking.variables.get(variable), facts.variables.get(variable)
        if here == there or variable in facts.chosen:
            continue
        do = f"`export {variable}={shlex.quote(here)}`" if here is not None else f"`unset {variable}`"
        if here is not None and here.startswith(SECRET):
            do = f"give {variable} the value that it has where the command runs"
        yield Finding(
            name,
            "variable",
            f"{variable} {'is not set' if there is None else f'is {there}'}",
            f"{'not set' if here is None else here}, as where the command runs",
            f"on {name}: {do}, and start its Ray again: `ray start --address={expected.head}`",
            fatal=False,
        )


def _clock(name: str, examination: Examination) -> Iterator[Finding]:
    clock = examination.clocks.get(name)
    if clock and abs(clock.seconds) - clock.error_s > CLOCK_S:
        yield Finding(
            name,
            "clock",
            f"its clock is {abs(clock.seconds):.1f} s {'ahead' if clock.seconds > 0 else 'behind'} "
            f"(measured to {clock.error_s:.3f} s)",
            f"at most {CLOCK_S:g} s from the clock where the command runs: logs are read side by side, and object "
            "stores refuse requests that are minutes off",
            f"on {name}: `timedatectl set-ntp true`, or `chronyc makestep`",
            fatal=False,
        )


def _model(name: str, facts: NodeFacts, examination: Examination, expected: Expected) -> Iterator[Finding]:
    asking = examination.asking
    if facts.model == asking.model:
        return
    copy = f"on {name}: copy them (`rsync -a`), or for a model of the hub `hf download {expected.model}`"
    what = f"the files of model.name = {expected.model} where the command runs"
    is_directory = expected.model.startswith(("/", ".", "~"))
    if asking.model_bytes and (facts.model is None or not is_directory):  # the driver's node sends them
        if examination.sent_model(name) and facts.model_room < asking.model_bytes:
            has = f"{gib(facts.model_room)} are free for sent models, for {gib(asking.model_bytes)} of the model"
            yield Finding(name, "model", has, "room for the files that it lacks and is sent", copy)
    elif facts.model is None:
        # A hub's model is downloaded by the node itself, a directory is not.
        fatal = is_directory or facts.variables.get("HF_HUB_OFFLINE") == "1"
        whole = f"{what}; they would be sent if all of its safetensors files were there"
        yield Finding(name, "model", f"it has no model {expected.model}", whole, copy, fatal=fatal)
    elif asking.model is not None:
        every = sorted({*facts.model, *asking.model})
        differ = [file for file in every if facts.model.get(file) != asking.model.get(file)]
        named = ", ".join(differ[:SHOWN]) + (f" and {len(differ) - SHOWN} more" if len(differ) > SHOWN else "")
        yield Finding(name, "model", f"files of the model differ: {named}", what, copy)


def _shared(examination: Examination, expected: Expected) -> Iterator[Finding]:
    """Nodes that do not see the file of the asking process in run.output_dir, or the other way."""
    for node in examination.nodes:
        facts = examination.facts.get(node.name)
        if facts is None or _shares(node, examination):
            continue
        yield _unshared(node, examination, expected)


def _shares(node: Declared, examination: Examination) -> bool:
    seen = examination.facts[node.name].nonce_seen == examination.asking.nonce_seen
    return seen and node.name not in examination.unseen


def _unshared(node: Declared, examination: Examination, expected: Expected) -> Finding:
    sees = examination.facts[node.name].nonce_seen == examination.asking.nonce_seen
    found = "does not see what the command wrote" if not sees else "wrote a file that the command does not see"
    return Finding(
        node.name,
        UNSHARED,
        f"in run.output_dir = {expected.output_dir} it {found}",
        "a directory that all nodes share; else commits and logs are gathered, and only one node has a copy",
        f"mount it on {node.name}, or put --run.output-dir on a file system that the nodes share",
        fatal=False,
    )
