"""The results of an examination, and what a run expects of the nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trireme.config import CommonConfig
from trireme.doctor.facts import NodeFacts
from trireme.doctor.links import Link
from trireme.plan.base import Plan
from trireme.process.environ import Resources
from trireme.process.machine import Node

COMMIT_BYTES = 16
"""Bytes of a commit for each trained parameter: weights and moments in float32, and a model for inference."""
LOG_BYTES = 2**26
"""Room for logs, traces and records of a run's first hours."""
SHM_BYTES = 2**27
"""Room in /dev/shm that PyTorch, vLLM and Ray need for a small run."""
VERSIONS = 2
"""Versions of the weights that live at the same time."""


def absolute(directory: str) -> str:
    """Returns a directory as every process of a node finds it, wherever that works."""
    return str(Path(directory).expanduser().absolute())


@dataclass(frozen=True)
class Declared:
    """A node as the cluster knows it."""

    name: str
    """Its name in findings: its address, with its id where several nodes have that."""
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
class ClockOffset:
    """How far a node's clock is from that of the asking process."""

    seconds: float
    """Positive if it is ahead."""
    error_s: float
    """The offset is exact to this: half of the time that question and answer took."""


@dataclass(frozen=True)
class Examination:
    """Results: the reports of all nodes of a cluster, and their tries to reach each other."""

    nodes: Sequence[Declared]
    """All nodes that the cluster knows, the head first."""
    asking: NodeFacts
    """The report of the process that asked."""
    facts: Mapping[str, NodeFacts]
    """The report of each node that answered, by its name."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """The nodes that live by what the cluster knows and did not answer, with the reason."""
    clocks: Mapping[str, ClockOffset] = field(default_factory=dict)
    """The clock of each node that answered."""
    cannot_listen: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Why nodes cannot listen where they should."""
    links: Sequence[Link] = ()
    """Each way between two nodes that was tried."""
    rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Bytes per second from one node to another, for the pairs that were measured."""
    unseen: Sequence[str] = ()
    """The nodes whose files in run.output_dir the asking process does not see."""

    @property
    def sent_model_to(self) -> list[str]:
        """The nodes to which a run sends the model's files."""
        return [name for name in self.facts if self.sent_model(name)]

    def sent_model(self, name: str) -> bool:
        """Returns True if a run sends the model's files to the node `name`, which lacks them. Files of its own that
        differ, in a directory, are refused before."""
        facts = self.facts[name]
        return bool(self.asking.model_bytes) and facts.model != self.asking.model and not facts.model_cached

    def resources(self) -> Resources:
        """Returns what the nodes give to the cluster, as a plan needs it."""
        return Resources(tuple(self._machine(node) for node in self.nodes if node.name in self.facts), "the cluster")

    def _machine(self, node: Declared) -> Node:
        found = self.facts[node.name].machine
        gpus = found.gpus[: node.gpus]
        return replace(
            found, name=node.name, cpus=node.cpus, num_gpus=node.gpus, store_bytes=node.store_bytes, gpus=gpus
        )


@dataclass(frozen=True)
class Expected:
    """The needs of a run on its nodes; without a configuration, those of any run."""

    nodes: Sequence[str] = ()
    """Host names or addresses of the nodes that should be there; empty if they are not known."""
    count: int = 0
    """How many nodes should be there; 0 if that is not known."""
    head: str = "HEAD:6379"
    """The address at which nodes join."""
    on_gpus: bool = False
    """True: models compute on GPUs."""
    version_bytes: int = 0
    """Bytes of one version of the published weights."""
    commit_bytes: int = 0
    """Bytes of a commit."""
    kept: int = 0
    """How many commits are kept."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of memory that the plan takes of nodes, by their names."""
    shm_free: Mapping[str, int] = field(default_factory=dict)
    """Bytes that have to be free in /dev/shm of nodes, by their names, when the run starts."""
    output_dir: str = ""
    """Where runs are written; "" if it is not known."""
    model: str = ""
    """The model; "" if it is not known."""
    ports: Sequence[int] = ()
    """The ports at which a run may listen; empty if any will do."""
    refusal: str = ""
    """Why the plan of the run does not fit the nodes that answer; empty if it does."""
    grace_s: float = 0.0
    """Seconds that a run has to commit when it is stopped; 0 if nothing stops it by `ray job stop`."""

    def shm_bytes(self, node: str) -> int:
        """Returns how many bytes /dev/shm should have at least on a node."""
        return SHM_BYTES + VERSIONS * self.version_bytes + self.shm_free.get(node, 0)

    @classmethod
    def of(cls, config: CommonConfig, plan: Plan) -> Expected:
        """Returns what a run of `config` needs of the nodes of `plan`, which are named as in the examination."""
        parameters = plan.facts.trained_parameters(config.trainer.lora) if plan.facts else 0
        return cls(
            on_gpus=plan.on_gpus,
            version_bytes=plan.parts[0].published_bytes if config.num_replicas else 0,
            commit_bytes=COMMIT_BYTES * parameters + LOG_BYTES,
            kept=config.checkpoint.keep_last,
            memory={machine.node.name: sum(machine.host.values()) for machine in plan.machines},
            shm_free={machine.node.name: machine.shm_free for machine in plan.machines},
            output_dir=absolute(config.run.directory),
            model=config.model.name,
            ports=config.cluster.port_range,
            grace_s=math.ceil(config.checkpoint.grace_s),
        )
