"""A healthy cluster of three nodes, as an examination, and ways to change it."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

from trireme.doctor.examination import ClockOffset, Declared, Examination, Expected
from trireme.doctor.facts import UNLIMITED, NodeFacts
from trireme.doctor.finding import Finding
from trireme.doctor.findings import findings
from trireme.doctor.links import Endpoint, Link
from trireme.plan.memory import GIB
from trireme.process.machine import Node

NAMES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
HEAD, SECOND, THIRD = NAMES
MACHINE = Node("this machine", 16, 8, 64 * GIB, 32 * GIB, 10 * GIB)
EXPECTED = Expected(
    head=f"{HEAD}:6379",
    on_gpus=True,
    version_bytes=GIB,
    commit_bytes=8 * GIB,
    kept=3,
    memory=dict.fromkeys(NAMES, 20 * GIB),
    shm_free={THIRD: GIB},
    output_dir="/shared/outputs",
    model="/models/base",
    ports=range(20000, 21000),
    grace_s=60.0,
)


def facts_of(name: str) -> NodeFacts:
    return NodeFacts(
        host=f"host-{name}",
        versions={"python": "3.12.4", "torch": "2.13.0", "ray": "2.60.0", "driver": "580.1", "source": "ab12"},
        machine=MACHINE,
        available_bytes=50 * GIB,
        shm_free=31 * GIB,
        open_files=65536,
        processes=UNLIMITED,
        disk_free=100 * GIB,
        nonce_seen="salt",
        model={"config.json": "1", "model.safetensors": "2"},
        variables={"HF_HOME": "/models/hub", "HF_TOKEN": "(secret, digest 12)"},
        routes={peer: "lo" if peer == name else "eth0" for peer in NAMES},
        interfaces={"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "eth0": [name, "fe80::1"]},
        kernel_ports=(32768, 60999),
        stop_wait_s=60,
    )


def healthy() -> Examination:
    """Three nodes on which nothing is wrong."""
    pairs = list(permutations(NAMES, 2))
    return Examination(
        nodes=[Declared(name, name, f"host-{name}", True, 16, 8, 10 * GIB, name) for name in NAMES],
        asking=facts_of(HEAD),
        facts={name: facts_of(name) for name in NAMES},
        clocks={name: ClockOffset(0.01, 0.001) for name in NAMES},
        links=[Link(source, target, Endpoint(target, port), "") for source, target in pairs for port in (40001, 20000)],
        rates=dict.fromkeys(pairs, 1e9),
    )


def changed(name: str, **values: Any) -> Examination:
    """The healthy cluster, of which one node reports something else."""
    good = healthy()
    return replace(good, facts={**good.facts, name: replace(good.facts[name], **values)})


def broken(source: str, target: str, *ports: int) -> Examination:
    """The healthy cluster, in which one node does not reach another, or only not at some ports."""
    good = healthy()
    links = [
        replace(link, error="timed out")
        if (link.source, link.target) == (source, target) and link.at.port in (ports or (link.at.port,))
        else link
        for link in good.links
    ]
    return replace(good, links=links, rates={**good.rates, (source, target): 0.0})


def found(examination: Examination, expected: Expected = EXPECTED) -> list[Finding]:
    return findings(examination, expected)
