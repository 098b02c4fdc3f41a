"""The results of an examination, and the needs of a run on the nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trireme.config import CommonConfig
from trireme.doctor.facts import NodeFacts
from trireme.doctor.links import Link
from trireme.plan.whole import Plan
from trireme.process.environ import Resources
from trireme.process.machine import Node

SHM_BYTES = 2**27
"""Room in /dev/shm that PyTorch, vLLM and Ray need for a small run."""
VERSIONS = 2
"""Versions of the weights that live at the same time."""
WRITERS = ("trainer", "orchestrator")
"""The rooms with processes that write to the run directory."""


def absolute(directory: str) -> str:
    """Returns the absolute path of `directory`, with ~ expanded, so that processes in any working directory find it."""
    return str(Path(directory).expanduser().absolute())


@dataclass(frozen=True)
class Declared:
    """A node as the cluster's state describes it, before the node itself answers."""

    name: str
    """Its name in findings: its address, with its id where several nodes have that address."""
    address: str
    """Its address in the cluster."""
    host: str = ""
    """The name of the machine."""
    alive: bool = True
    """False: it joined, and was lost."""
    cpus: int = 0
    """Cores that it gives to Ray."""
    gpus: int = 0
    """GPUs that it gives to Ray."""
    store_bytes: int = 0
    """Size of its part of Ray's object store."""
    id: str = ""
    """Ray's id of the node."""


@dataclass(frozen=True)
class Examination:
    """The reports of all nodes of a cluster, and the results of their attempts to reach each other."""

    nodes: Sequence[Declared]
    """All nodes that the cluster knows, the head first."""
    driver: NodeFacts
    """The report of the process that examines the nodes."""
    facts: Mapping[str, NodeFacts]
    """The report of each node that answered, by the node's name."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """{node that did not answer, although the cluster lists it as alive: the reason}."""
    links: Sequence[Link] = ()
    """The results of connecting: for each ordered pair of nodes, one for each endpoint of the second node."""
    sender: str = ""
    """The node of the trainer, if rates were measured from it; else ""."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second from `sender` to each other node, by the receiver's name."""

    def resources(self) -> Resources:
        """Returns the resources of all nodes that answered, in the form that a plan takes. Cores, GPUs and object store
        are the amounts that the nodes give to Ray."""
        return Resources(tuple(self._machine(node) for node in self.nodes if node.name in self.facts), "the cluster")

    def _machine(self, node: Declared) -> Node:
        machine = self.facts[node.name].machine
        gpus = machine.gpus[: node.gpus]
        return replace(
            machine, name=node.name, cpus=node.cpus, num_gpus=node.gpus, store_bytes=node.store_bytes, gpus=gpus
        )


@dataclass(frozen=True)
class Expected:
    """The requirements that the nodes must meet for a run. If no run is given, only the requirements that all runs have
    in common."""

    nodes: Sequence[str] = ()
    """Host names or addresses of the nodes that should be there; empty if they are not specified."""
    head: str = "HEAD:6379"
    """The address at which nodes join."""
    on_gpus: bool = False
    """True: models compute on GPUs."""
    version_bytes: int = 0
    """Bytes of one version of the published weights."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of memory that the plan needs, by node."""
    shm_free: Mapping[str, int] = field(default_factory=dict)
    """Bytes that must be free in /dev/shm when the run starts, by node."""
    writers: Collection[str] = ()
    """The nodes with a process that writes to the run directory; none for a run in object storage."""
    output_dir: str = ""
    """The directory of runs; "" if it is not specified."""
    model: str = ""
    """The model; "" if it is not specified."""
    ports: Sequence[int] = ()
    """The ports at which a run may listen; empty if all ports will do."""
    refusal: str = ""
    """Why the plan of the run does not fit the nodes that answer; empty if it does."""

    def shm_bytes(self, node: str) -> int:
        """Returns how many bytes /dev/shm of `node` must have at least."""
        return SHM_BYTES + VERSIONS * self.version_bytes + self.shm_free.get(node, 0)

    @classmethod
    def of(cls, config: CommonConfig, plan: Plan) -> Expected:
        """Returns the needs of a run of `config` on the nodes of `plan`. The plan's nodes must have the names that they
        have in the examination."""
        memory: dict[str, int] = {}
        shm_free: dict[str, int] = {}
        writers: list[str] = []
        for machine in plan.machines:
            name = machine.node.name
            memory[name] = sum(machine.host.values())
            shm_free[name] = machine.shm_free
            if not config.run.url and any(actor.startswith(WRITERS) for actor in machine.actors):
                writers.append(name)
        return cls(
            on_gpus=plan.on_gpus,
            version_bytes=plan.parts[0].published_bytes if config.num_replicas else 0,
            memory=memory,
            shm_free=shm_free,
            writers=writers,
            output_dir=absolute(config.run.directory),
            model=config.model.name,
            ports=config.cluster.port_range,
        )
