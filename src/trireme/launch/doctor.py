"""Examines all nodes of the Ray cluster that this process has joined, at once: an `Examiner` in a process on each."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from rich.console import Console

from trireme.config import CommonConfig
from trireme.core.errors import TriremeError
from trireme.core.refusals import Refusal, refuse
from trireme.doctor.examination import ClockOffset, Declared, Examination, Expected, absolute
from trireme.doctor.examiner import Examiner
from trireme.doctor.facts import Questions, answer_file, collect, sendable_digest
from trireme.doctor.finding import Finding
from trireme.doctor.findings import UNSHARED, findings
from trireme.doctor.links import Endpoint
from trireme.doctor.report import model_line, network_line
from trireme.plan.base import Plan
from trireme.process import waits
from trireme.process.model_cache import MODEL_CACHE
from trireme.process.ray_cluster import on_node

ANSWER_S = 60.0
"""Time limit for a node's first answer: its process starts, and imports this project, on a machine that may be busy."""
CALL_S = 30.0
"""Time limit for further answers; connections and rates have shorter ones of their own (`trireme.doctor.links`)."""
CLOCK_ANSWER_S = 5.0
"""Time limit for the time of a node, which has answered before."""
CLOCK_TRIES = 3
"""How often each clock is asked; the answer that came soonest counts."""
ROUNDS = 8
"""The most rounds in which rates are measured. In each one every node sends to one other, so up to nine nodes measure
all their connections, and more nodes a sample."""
TOKEN_BYTES = 16
WARNINGS = 8
"""How many warnings the start of a run shows; `trireme doctor` shows all."""


class Calls:
    """The examiners of all nodes, and calls to all of them at the same time. A node that fails to answer is left out
    from then on, and `silent` says why."""

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        """`nodes`: the handle of each node's examiner, by the node's name."""
        self.nodes = dict(nodes)
        self.silent: dict[str, str] = {}

    def all(self, call: Callable[[str, Any], Any], timeout_s: float = CALL_S) -> dict[str, Any]:
        """Makes a call, `call(name, handle)`, to every node, and returns the answers that arrive in time."""
        started = time.monotonic()
        asked = {call(name, handle): name for name, handle in self.nodes.items()}
        pending, answers = dict(asked), {}
        while pending and (left := started + timeout_s - time.monotonic()) > 0:
            for ref, answer in waits.ready(pending, left).items():
                answers[pending.pop(ref)] = answer
        failed = {name: str(answer) for name, answer in answers.items() if isinstance(answer, TriremeError)}
        failed |= dict.fromkeys(pending.values(), f"it did not answer within {timeout_s:.0f} s")
        self.silent |= failed
        self.nodes = {name: handle for name, handle in self.nodes.items() if name not in failed}
        return {name: answers[name] for name in self.nodes}

    def clocks(self) -> dict[str, ClockOffset]:
        """Returns how far the clock of each node is from that of this process."""
        best: dict[str, ClockOffset] = {}
        for _ in range(CLOCK_TRIES):
            for name in list(self.nodes):  # one after the other, so that no answer waits for another
                before = time.time()
                told = Calls({name: self.nodes[name]}).all(lambda _, handle: handle.now.remote(), CLOCK_ANSWER_S)
                error_s = (time.time() - before) / 2
                if told and (name not in best or error_s < best[name].error_s):
                    best[name] = ClockOffset(told[name] - before - error_s, error_s)
        return best


def joined_nodes(among: Collection[str] = ()) -> list[Declared]:
    """Returns all nodes that the cluster knows, the head first; of `among`, Ray's ids, only these and the head. A lost
    node that has joined again is there once."""
    told = sorted(ray.nodes(), key=lambda node: (not _is_head(node), node["NodeID"]))
    alive = [node["NodeManagerAddress"] for node in told if node["Alive"]]
    told = [node for node in told if node["Alive"] or node["NodeManagerAddress"] not in alive]

    def name(node: Mapping[str, Any]) -> str:
        address = str(node["NodeManagerAddress"])
        return address if alive.count(address) < 2 else f"{address} ({node['NodeID'][:6]})"

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
        for node in told
        if not among or node["NodeID"] in among or _is_head(node)
    ]


def _is_head(node: Mapping[str, Any]) -> bool:
    return "node:__internal_head__" in node["Resources"]


def examine(config: CommonConfig | None, among: Collection[str] = ()) -> Examination:
    """Examines all nodes of the cluster, or the head and those `among` them, for a run of `config`, whose directory is
    made; without one what is needed by any run."""
    output_dir = absolute(config.run.directory) if config else ""
    model, cache = (config.model.name, MODEL_CACHE) if config else ("", "")
    ports = config.cluster.port_range if config else range(0)
    nodes = joined_nodes(among)
    living = {node.name: node for node in nodes if node.alive}
    salt = secrets.token_hex(16)
    peers = list(dict.fromkeys(node.address for node in living.values()))
    with nonce_in(output_dir) as nonce, _examiners(living) as calls:
        asked = Questions(output_dir, nonce, model, cache, sendable_digest(model), peers, salt)
        facts = calls.all(lambda _, handle: handle.collect.remote(asked), ANSWER_S)
        found = Examination(
            nodes,
            asking=collect(asked),
            facts=facts,
            clocks=calls.clocks(),
            unseen=[name for n, name in enumerate(living) if name in facts and not _sees(asked, n)] if nonce else (),
        )
        return _examine_links(replace(found, silent=calls.silent), calls, living, ports)


def _examine_links(
    found: Examination, calls: Calls, living: Mapping[str, Declared], ports: Sequence[int]
) -> Examination:
    token = secrets.token_bytes(TOKEN_BYTES)
    opened = calls.all(
        lambda name, handle: handle.listen.remote(living[name].address, ports, token, found.facts[name].chosen)
    )
    endpoints = {name: each.endpoints for name, each in opened.items()}

    def others(name: str) -> dict[str, Sequence[Endpoint]]:
        return {other: places for other, places in endpoints.items() if other != name}

    links = calls.all(lambda name, handle: handle.reach.remote(others(name)))
    whole = {(link.source, link.target) for each in links.values() for link in each if not link.error}
    rates = _rates(calls, {name: places[0] for name, places in endpoints.items() if places}, whole)
    calls.all(lambda _, handle: handle.close.remote())
    return replace(
        found,
        silent=calls.silent,
        cannot_listen={name: each.errors for name, each in opened.items() if each.errors},
        links=[link for each in links.values() for link in each],
        rates=rates,
    )


def _send_to(receivers: Mapping[str, Endpoint], name: str, handle: Any) -> Any:
    """Asks the examiner of a node for the rate at which it sends to its receiver."""
    return handle.rate.remote(receivers[name])


def _rates(calls: Calls, at: Mapping[str, Endpoint], whole: set[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """Measures the rates of connections that work: in each round every node sends to one other."""
    names = list(at)
    rates: dict[tuple[str, str], float] = {}
    steps = range(1, len(names))
    for step in steps[:: math.ceil(len(steps) / ROUNDS) or 1]:
        to = {name: names[(n + step) % len(names)] for n, name in enumerate(names)}
        senders = Calls({name: h for name, h in calls.nodes.items() if name in to and (name, to[name]) in whole})
        told = senders.all(partial(_send_to, {name: at[to[name]] for name in senders.nodes}))
        rates |= {(name, to[name]): rate for name, rate in told.items()}
    return rates


@contextmanager
def _examiners(nodes: Mapping[str, Declared]) -> Iterator[Calls]:
    """Starts an examiner on each node, and ends them after the block. They take no share of a node."""
    made = {
        name: ray.remote(Examiner)
        .options(num_cpus=0, scheduling_strategy=on_node(node.id), max_concurrency=1)
        .remote(name, number)
        for number, (name, node) in enumerate(nodes.items())
    }
    try:
        yield Calls(made)
    finally:
        for handle in made.values():
            ray.kill(handle)


@contextmanager
def nonce_in(output_dir: str) -> Iterator[str]:
    """Writes a file into a directory, which is made, and yields its name, which it contains; "" without a directory.
    Removes the file after the block, with those that nodes have written beside it, and the directories that it made."""
    if not output_dir:
        yield ""
        return
    directory = Path(output_dir)
    made = [place for place in (directory, *directory.parents) if not place.exists()]
    name = f".doctor-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        _write(directory / name, name)
        yield name
    finally:
        for file in directory.glob(f"{name}*"):
            file.unlink(missing_ok=True)
        for place in made:
            with suppress(OSError):  # a run has written there meanwhile
                place.rmdir()


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        raise Refusal(
            f"run.output_dir = {file.parent}, where nothing can be written: {error.strerror}",
            "a directory for the files of runs, with room for them",
            f"`df -h {file.parent}`, or choose another --run.output-dir",
        ).error() from None


def _sees(asked: Questions, number: int) -> bool:
    file = answer_file(asked, number)
    return file.is_file() and file.read_text() == asked.nonce


def check_nodes(plan: Plan, nodes: Collection[str], console: Console) -> None:
    """Examines the nodes of a run, before its actors start on `nodes` (Ray's ids). Does nothing if the driver's node is
    the only one. Prints warnings, and the interfaces that the run will use. Raises BadInput, which names the nodes, for
    what cannot work."""
    among = {*nodes, ray.get_runtime_context().get_node_id()}
    if len(among) == 1:
        return
    config = plan.config
    found = examine(config, among)
    expected = Expected.of(config, replace(plan, resources=found.resources())) if found.facts else Expected()
    expected = replace(expected, head=join_address(), grace_s=expected.grace_s if is_submitted() else 0.0)
    # Which nodes do not see the run directory is said at the start of each attempt, by who writes there.
    wrong = [finding for finding in findings(found, expected) if finding.check != UNSHARED]
    show_warnings([finding for finding in wrong if not finding.fatal], console)
    refuse([finding.refusal() for finding in wrong if finding.fatal])
    console.print(network_line(found), markup=False)
    if said := model_line(found):
        console.print(said, markup=False)


def show_warnings(found: Sequence[Finding], console: Console) -> None:
    """Prints the first of what was found, and how much more there is."""
    for finding in found[:WARNINGS]:
        console.print(f"warning: {finding.line()}", style="yellow", markup=False)
    if left := found[WARNINGS:]:
        console.print(f"warning: {len(left)} more; `trireme doctor` shows them", style="yellow", markup=False)


def is_submitted() -> bool:
    """Returns True if this process is the entrypoint of a job of `ray job submit`, which `ray job stop` ends."""
    return RAY_JOB_CONFIG_JSON_ENV_VAR in os.environ


def join_address() -> str:
    """Returns the address at which nodes join the cluster."""
    return str(ray.get_runtime_context().gcs_address)


def has_dashboard() -> bool:
    """Returns True if the cluster takes jobs (`ray job submit`), which is a part of Ray's dashboard."""
    return bool(ray._private.worker.get_dashboard_url())
