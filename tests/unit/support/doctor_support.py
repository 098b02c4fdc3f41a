"""A healthy cluster of three nodes, as an examination, and ways to change it."""

from dataclasses import replace
from itertools import permutations
from typing import Any

from trireme.doctor.examination import Declared, Examination, Expected
from trireme.doctor.facts import NodeFacts
from trireme.doctor.finding import Finding
from trireme.doctor.findings import findings
from trireme.doctor.links import Endpoint, Link
from trireme.plan.memory import GIB
from trireme.process.machine import Node

NAMES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
HEAD, SECOND, THIRD = NAMES
MACHINE = Node("this machine", 16, 8, 64 * GIB, 50 * GIB, 32 * GIB, 10 * GIB)
EXPECTED = Expected(
    head=f"{HEAD}:6379",
    on_gpus=True,
    version_bytes=GIB,
    memory=dict.fromkeys(NAMES, 20 * GIB),
    shm_free={THIRD: GIB},
    writers=[HEAD, THIRD],
    output_dir="/shared/outputs",
    model="/models/base",
    ports=range(20000, 21000),
)


def facts_of(name: str) -> NodeFacts:
    return NodeFacts(
        host=f"host-{name}",
        versions={"python": "3.12.4", "torch": "2.13.0", "ray": "2.60.0", "driver": "580.1", "source": "ab12"},
        machine=MACHINE,
        shm_free=31 * GIB,
        shares_run_directory=True,
        model={"config.json": "1", "model.safetensors": "2"},
        offline=False,
    )


def healthy() -> Examination:
    pairs = list(permutations(NAMES, 2))
    return Examination(
        nodes=[Declared(name, name, f"host-{name}", True, 16, 8, 10 * GIB, name) for name in NAMES],
        driver=facts_of(HEAD),
        facts={name: facts_of(name) for name in NAMES},
        links=[Link(source, target, Endpoint(target, port), "") for source, target in pairs for port in (40001, 20000)],
        sender=SECOND,
        rates={HEAD: 1e9, THIRD: 2e9},
    )


def changed(name: str, **values: Any) -> Examination:
    """The healthy cluster with one node that reports other facts."""
    cluster = healthy()
    return replace(cluster, facts={**cluster.facts, name: replace(cluster.facts[name], **values)})


def broken(source: str, target: str, *ports: int) -> Examination:
    """The healthy cluster, in which one node does not reach another, or only not at some ports."""
    cluster = healthy()
    links = [
        replace(link, error="timed out")
        if (link.source, link.target) == (source, target) and link.at.port in (ports or (link.at.port,))
        else link
        for link in cluster.links
    ]
    return replace(cluster, links=links)


def problems(examination: Examination, expected: Expected = EXPECTED) -> list[Finding]:
    return findings(examination, expected)
