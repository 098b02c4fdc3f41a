"""Examines all nodes of the Ray cluster that this process has joined, at once: starts an `Examiner` process on each
node."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import ray
from rich.console import Console

from trireme.config import CommonConfig
from trireme.core.actors import ActorProxy, Ref
from trireme.core.errors import TriremeError
from trireme.core.refusals import Refusal, refuse
from trireme.doctor.examination import Declared, Examination, Expected, absolute
from trireme.doctor.examiner import Examiner
from trireme.doctor.facts import Questions, collect
from trireme.doctor.findings import findings
from trireme.doctor.report import network_line
from trireme.plan.whole import Plan
from trireme.process import waits
from trireme.process.ray_cluster import create_actor, on_node

Value = TypeVar("Value")
REPORT_S = 60.0
"""Time limit for a node's report: its process starts, and imports this project, on a machine that may be busy."""
LINKS_S = 30.0
"""Time limit for a node to try its connections to all others, and for one node to measure the network's rate."""
TOKEN_BYTES = 16
MAX_WARNINGS = 8
"""Warnings that the start of a run shows; `trireme doctor` shows all."""


class Calls:
    """Calls the examiners of all nodes at the same time. `nodes`: {name of a node: handle of its examiner}. If a node
    fails to answer, it is removed from the attribute `nodes`, and added to `silent`, {name of a node: reason}."""

    def __init__(self, nodes: Mapping[str, ActorProxy[Examiner]]) -> None:
        self.nodes = dict(nodes)
        self.silent: dict[str, str] = {}

    def all(self, call: Callable[[str, ActorProxy[Examiner]], Ref[Value]], timeout_s: float) -> dict[str, Value]:
        """Makes a call to every node, and returns {name: answer} of the nodes that answer within `timeout_s` seconds.
        `call(name, handle)` starts the call and returns Ray's reference."""
        deadline = time.monotonic() + timeout_s
        pending = {call(name, handle): name for name, handle in self.nodes.items()}
        answers: dict[str, Value] = {}
        while pending and time.monotonic() < deadline:
            for ref, answer in waits.ready(pending, deadline - time.monotonic()).items():
                name = pending.pop(ref)
                if isinstance(answer, TriremeError):
                    self.silent[name] = str(answer)
                else:
                    answers[name] = answer
        self.silent |= dict.fromkeys(pending.values(), f"it did not answer within {timeout_s:.0f} s")
        self.nodes = {name: handle for name, handle in self.nodes.items() if name not in self.silent}
        return {name: answers[name] for name in self.nodes}


def joined_nodes(among: Collection[str] = ()) -> list[Declared]:
    """Returns all nodes that the cluster knows, lost ones included, the head first. With `among` (Ray's ids): only
    these nodes and the head. A node that was lost and has joined again is listed once."""
    nodes = sorted(ray.nodes(), key=lambda node: (not _is_head(node), node["NodeID"]))
    alive = [node["NodeManagerAddress"] for node in nodes if node["Alive"]]
    nodes = [node for node in nodes if node["Alive"] or node["NodeManagerAddress"] not in alive]

    def name(node: Mapping[str, Any]) -> str:
        address = str(node["NodeManagerAddress"])
        if alive.count(address) < 2:
            return address
        return f"{address} ({node['NodeID'][:6]})"

    return [
        Declared(
            name=name(node),
            address=node["NodeManagerAddress"],
            host=node["NodeManagerHostname"],
            alive=node["Alive"],
            cpus=int(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
            store_bytes=int(node["Resources"].get("object_store_memory", 0)),
            id=node["NodeID"],
        )
        for node in nodes
        if not among or node["NodeID"] in among or _is_head(node)
    ]


def _is_head(node: Mapping[str, Any]) -> bool:
    return "node:__internal_head__" in node["Resources"]


def examine(config: CommonConfig | None, among: Collection[str] = (), trainer: str = "") -> Examination:
    """Examines all nodes of the cluster; with `among` (Ray's ids of nodes), only these nodes and the head. `config`:
    the configuration of the run for which the nodes are examined; None: any run. `trainer`: Ray's id of the trainer's
    node, which measures the network's rate. If it is "", the first node with GPUs measures, or the head if there is no
    such node."""
    if config:
        output_dir = absolute(config.run.directory)
    else:
        output_dir = ""
    ports = config.cluster.port_range if config else range(0)
    nodes = joined_nodes(among)
    alive = {node.name: node for node in nodes if node.alive}
    token = secrets.token_bytes(TOKEN_BYTES)
    with trial_file(output_dir) as trial, _examiners(alive, token) as calls:
        questions = Questions(trial, config.model.name if config else "")
        reports = calls.all(lambda name, handle: handle.report.remote(questions, alive[name].address, ports), REPORT_S)
        endpoints = {name: report.endpoints for name, report in reports.items()}
        links = calls.all(
            lambda name, handle: handle.reach.remote({other: endpoints[other] for other in endpoints if other != name}),
            LINKS_S,
        )
        sender = _sender([alive[name] for name in calls.nodes], trainer)
        receivers = {name: places[0] for name, places in endpoints.items() if name != sender}
        sending = Calls({name: handle for name, handle in calls.nodes.items() if name == sender})
        rates = sending.all(lambda _, handle: handle.rates.remote(receivers), LINKS_S + len(receivers))
        return Examination(
            nodes,
            driver=collect(questions),
            facts={name: report.facts for name, report in reports.items()},
            silent=calls.silent,
            links=[link for node_links in links.values() for link in node_links],
            sender=sender,
            rates=rates.get(sender, {}),
        )


def _sender(nodes: Sequence[Declared], trainer: str) -> str:
    """Returns the name of the node that measures the network's rate: the node with the id `trainer`, else the first
    with GPUs, else the first; "" if `nodes` is empty."""
    nodes = [node for node in nodes if node.id == trainer] or [node for node in nodes if node.gpus] or nodes
    if nodes:
        return nodes[0].name
    return ""


@contextmanager
def _examiners(nodes: Mapping[str, Declared], token: bytes) -> Iterator[Calls]:
    """Context manager: starts an examiner on each of `nodes`, and kills the examiners at the end of the `with` block.
    Examiners reserve no cores and no GPUs. `token`: the secret by which examiners know each other."""
    handles = {
        name: create_actor(Examiner, num_cpus=0, scheduling_strategy=on_node(node.id))(name, token)
        for name, node in nodes.items()
    }
    try:
        yield Calls(handles)
    finally:
        for handle in handles.values():
            ray.kill(handle)


@contextmanager
def trial_file(output_dir: str) -> Iterator[str]:
    """Context manager: writes a temporary file into `output_dir`, or into its nearest parent that exists, and yields
    the file's path ("" if `output_dir` is ""). Deletes the file at the end of the `with` block. Raises BadInput if
    nothing can be written there."""
    if not output_dir:
        yield ""
        return
    directory = Path(output_dir)
    place = next(place for place in (directory, *directory.parents) if place.exists())
    with ExitStack() as ending:
        try:
            trial = ending.enter_context(NamedTemporaryFile(prefix=".doctor-", dir=place))
        except OSError as error:
            raise Refusal(
                f"run.output_dir = {directory}; nothing can be written in {place}: {error.strerror}",
                "a directory for the files of runs, with room for them",
                f"`df -h {place}`, or choose another --run.output-dir",
            ) from None
        yield trial.name


def check_nodes(plan: Plan, rooms: Mapping[str, Sequence[str]], console: Console) -> None:
    """Examines the nodes of a run before its actors start on them. `rooms`: {Ray's id of a node: rooms with actors on
    it}. Does nothing if the driver's node is the only one. Prints warnings and the network's rate. Raises BadInput
    that names the nodes if the run cannot work on them."""
    among = {*rooms, ray.get_runtime_context().get_node_id()}
    if len(among) == 1:
        return
    trainer = next((node for node in rooms if "trainer" in rooms[node]), "")
    result = examine(plan.config, among, trainer)
    expected = Expected(head=join_address())
    if result.facts:
        expected = replace(Expected.of(plan.config, replace(plan, resources=result.resources())), head=join_address())
    # Each attempt looks for the run directory on the nodes of its own writers (`trireme.launch.writers`).
    problems = findings(result, replace(expected, writers=()))
    warnings = [finding for finding in problems if not finding.fatal]
    for finding in warnings[:MAX_WARNINGS]:
        console.print(f"warning: {finding.line()}", style="yellow")
    if len(warnings) > MAX_WARNINGS:
        count = len(warnings) - MAX_WARNINGS
        console.print(f"warning: {count} more; `trireme doctor` shows them", style="yellow")
    refuse([finding.refusal() for finding in problems if finding.fatal])
    console.print(network_line(result))


def join_address() -> str:
    """Returns the address, host:port, at which nodes join the cluster."""
    return str(ray.get_runtime_context().gcs_address)
