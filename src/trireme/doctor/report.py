"""Shows an examination and its findings: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from trireme.doctor.examination import Examination
from trireme.doctor.finding import Finding
from trireme.doctor.link_findings import mbit
from trireme.plan.needs import gib


def network_line(examination: Examination) -> str:
    """Says by which interfaces the nodes reach the head, which the libraries of a run use too, and how fast."""
    head = examination.nodes[0].address
    used = {
        facts.chosen.get("GLOO_SOCKET_IFNAME") or facts.routes.get(head) or "no route"
        for name, facts in examination.facts.items()
        if name != examination.nodes[0].name
    }
    measured = [rate for rate in examination.rates.values() if rate]
    rates = f"; slowest connection {mbit(min(measured))}, fastest {mbit(max(measured))}" if measured else ""
    return f"{len(examination.facts)} nodes reach each other by {', '.join(sorted(used)) or 'lo'}{rates}"


def model_line(examination: Examination) -> str:
    """Says to which nodes the model's files will be sent, and how many bytes; "" if to none."""
    nodes = examination.sent_model_to
    size = f"{examination.asking.model_bytes / 1e6:,.1f} MB"
    return f"model: its files ({size}) will be sent to {', '.join(nodes)}, once to each node" if nodes else ""


def render(examination: Examination, found: Sequence[Finding]) -> Iterator[Table | Text]:
    """Yields what a terminal shows: the nodes, and what is wrong."""
    yield _nodes(examination)
    if len(examination.nodes) > 1:
        yield Text(network_line(examination))
    if said := model_line(examination):
        yield Text(said)
    yield _findings(found) if found else Text("nothing is wrong")


def as_json(examination: Examination, found: Sequence[Finding]) -> dict[str, Any]:
    """Returns all of it as values of JSON. Pairs of nodes become "SOURCE -> TARGET"."""
    return {
        "findings": [asdict(finding) for finding in found],
        "nodes": [asdict(node) for node in examination.nodes],
        "silent": dict(examination.silent),
        "asking": asdict(examination.asking),
        "facts": {name: asdict(facts) for name, facts in examination.facts.items()},
        "clocks": {name: asdict(clock) for name, clock in examination.clocks.items()},
        "links": [asdict(link) for link in examination.links],
        "model_sent_to": examination.sent_model_to,
        "bytes_per_s": {f"{source} -> {target}": rate for (source, target), rate in examination.rates.items()},
    }


def _nodes(examination: Examination) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("node", "host", "cores", "GPUs", "memory free", "/dev/shm", "clock", "python"):
        table.add_column(title)
    for node in examination.nodes:
        facts = examination.facts.get(node.name)
        if facts is None:
            table.add_row(node.name, node.host, Text("does not answer" if node.alive else "lost", style="red"))
            continue
        clock = examination.clocks.get(node.name)
        free = f"{gib(facts.available_bytes)} of {gib(facts.machine.memory_bytes)}"
        offset = f"{clock.seconds:+.3f} s" if clock else ""
        cells = (str(node.cpus), str(node.gpus), free, gib(facts.machine.shm_bytes), offset, facts.versions["python"])
        table.add_row(node.name, node.host, *cells)
    return table


def _findings(found: Sequence[Finding]) -> Table:
    table = Table(show_lines=True)
    for title in ("node", "found", "expected", "what to type"):
        table.add_column(title)
    for finding in found:
        style = "red" if finding.fatal else "yellow"
        said = Text(f"{'error' if finding.fatal else 'warning'}, {finding.check}: {finding.found}", style=style)
        table.add_row(Text(finding.node), said, Text(finding.expected), Text(finding.do))
    return table
