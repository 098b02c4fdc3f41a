"""Shows an examination and its findings: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from trireme.doctor.examination import Examination
from trireme.doctor.finding import Finding
from trireme.doctor.link_findings import mbit
from trireme.plan.needs import gib


def network_line(examination: Examination) -> str:
    """Returns a line on the number of nodes, and on the rate from the trainer's node to the slowest other node."""
    rates = [rate for rate in examination.rates.values() if rate]
    text = f"{len(examination.facts)} nodes examined"
    if rates:
        text += f"; {examination.sender} sends {mbit(min(rates))} to the slowest of the others"
    return text


def render(examination: Examination, findings: Sequence[Finding]) -> Iterator[Table | Text]:
    """Yields the parts of the report for a terminal: the nodes, the network, the faults."""
    yield _nodes(examination)
    if len(examination.nodes) > 1:
        yield Text(network_line(examination))
    yield _findings(findings) if findings else Text("nothing is wrong")


def as_json(examination: Examination, findings: Sequence[Finding]) -> dict[str, object]:
    """Returns the findings, the nodes, and the rates from the trainer's node to the other nodes (bytes per second) as
    JSON values."""
    return {
        "findings": [asdict(finding) for finding in findings],
        "nodes": [asdict(node) for node in examination.nodes],
        "bytes_per_s": dict(examination.rates),
    }


def _nodes(examination: Examination) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("node", "host", "cores", "GPUs", "memory free", "/dev/shm", "python"):
        table.add_column(title)
    for node in examination.nodes:
        facts = examination.facts.get(node.name)
        if facts is None:
            table.add_row(node.name, node.host, Text("does not answer" if node.alive else "lost", style="red"))
            continue
        free = f"{gib(facts.machine.free_bytes)} of {gib(facts.machine.memory_bytes)}"
        cells = (str(node.cpus), str(node.gpus), free, gib(facts.machine.shm_bytes), facts.versions["python"])
        table.add_row(node.name, node.host, *cells)
    return table


def _findings(findings: Sequence[Finding]) -> Table:
    table = Table(show_lines=True)
    for title in ("node", "problem", "expected", "what to type"):
        table.add_column(title)
    for finding in findings:
        style = "red" if finding.fatal else "yellow"
        problem = Text(f"{'error' if finding.fatal else 'warning'}, {finding.check}: {finding.actual}", style=style)
        table.add_row(Text(finding.node), problem, Text(finding.expected), Text(finding.do))
    return table
