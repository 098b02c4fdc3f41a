"""Files that launch a run on a cluster, filled in from its configuration: `trireme launch slurm|rayjob|..`.

The templates in `launchers/` have `@NAME@` in place of what follows from the configuration and its plan.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from textwrap import indent

from trireme.config import CommonConfig
from trireme.config.model_facts import ModelFacts
from trireme.core.finite_json import to_json
from trireme.core.refusals import Refusal
from trireme.plan.base import PartKind, Plan
from trireme.plan.needs import VERSIONS
from trireme.process.environ import Resources
from trireme.process.machine import Node

TEMPLATES = Path(__file__).parent / "launchers"
KINDS = {"slurm": "slurm.sbatch", "rayjob": "rayjob.yaml", "raycluster": "raycluster.yaml", "skypilot": "skypilot.yaml"}
"""The template of each kind of launch file."""
SHARED = "/shared"
"""Where the files for Kubernetes and SkyPilot mount the volume that all nodes share."""
CPUS_PER_GPU, CPUS_BESIDE = 8, 4
"""Cores for each GPU, of which a process that computes, its threads and an engine's take some; and for all else."""
IMAGE = "trireme:latest"
"""The image of the repository that a file for Kubernetes names if none is given."""
MOST_GPUS = 64
"""GPUs of a node beyond which no plan is tried."""
HEAD_GIB = 16
"""Memory of a head without GPUs, beside /dev/shm: Ray, the driver and perhaps the orchestrator."""
STOP_BESIDE_S, END_BESIDE_S = 30, 90
"""Seconds after `checkpoint.grace_s` in which a stopped job ends its rooms, and then its pods or its job."""
LONGEST_NAME = 47
"""Characters of a name that KubeRay accepts for a job, from which it makes longer ones."""
GIB = 2**30


@dataclass(frozen=True)
class NodeRequest:
    """The resources that a launch file asks for, on each node."""

    gpus: int
    """GPUs; 0: the run computes on CPUs."""
    cpus: int
    """Cores."""
    memory_gib: int
    """Memory, with /dev/shm."""
    shm_gib: int
    """/dev/shm: two versions of the weights, and as much again as rounding takes."""

    @property
    def store_bytes(self) -> int:
        """The size of Ray's object store, which lies in /dev/shm."""
        return (self.shm_gib - 1) * GIB


def node_request(
    config: CommonConfig, facts: ModelFacts, kinds: Sequence[PartKind], nodes: int, gpus: int | None
) -> NodeRequest:
    """Returns what each of so many nodes needs: the fewest GPUs with which the plan fits, unless `gpus` says how many.
    Raises BadInput when they are too few."""
    if config.cluster.device == "cpu":
        plan = _plan_on(config, facts, kinds, nodes, 0)
        processes = sum(len(part.actors) * part.ranks for part in plan.parts)
        return _request(plan, 0, -(-processes // nodes) + CPUS_BESIDE)
    for each in range(1, MOST_GPUS + 1) if gpus is None else (gpus,):
        plan = _plan_on(config, facts, kinds, nodes, each)
        if _fits(plan, each):
            return _request(plan, each, CPUS_PER_GPU * each + CPUS_BESIDE)
    raise Refusal(
        f"{nodes} nodes with {gpus or f'up to {MOST_GPUS}'} GPUs each",
        f"a place for each of {plan.gpus_needed} processes with a GPU; blocks of trainer.gpus_per_node, and ranks of "
        "a replica, are on one node",
        "give more --nodes or --gpus-per-node, or lower --trainer.shards or --inference.replicas",
    ).error()


def _plan_on(config: CommonConfig, facts: ModelFacts, kinds: Sequence[PartKind], nodes: int, gpus: int) -> Plan:
    """Returns the plan on nodes that have all the memory and cores that it may ask for."""
    much = 2**60
    node = Node("node", cpus=10_000, num_gpus=gpus, memory_bytes=much, shm_bytes=much, store_bytes=much)
    return Plan(config, facts, Resources((node,) * nodes, "the cluster"), kinds)


def _fits(plan: Plan, gpus: int) -> bool:
    """Returns True if no node gets more actors than it has GPUs, where none is shared."""
    options = dict(zip(plan.actor_names, plan.options, strict=True))
    taken = [sum(options[name]["num_gpus"] for name in machine.actors) for machine in plan.machines]
    return max(taken) <= gpus


def _request(plan: Plan, gpus: int, cpus: int) -> NodeRequest:
    versions = max(machine.host.get(VERSIONS, 0) for machine in plan.machines)
    host = max(sum(machine.host.values()) for machine in plan.machines)
    return NodeRequest(gpus, cpus, math.ceil(host / GIB) + 2, max(math.ceil(1.1 * versions / GIB), 1) + 1)


def launch_file(
    kind: str,
    command: str,
    words: Sequence[str],
    config: CommonConfig,
    request: NodeRequest,
    nodes: int,
    image: str,
    gpus: int | None = None,
) -> str:
    """Returns the launch file of a kind for the run that `command` (`rl`, `sft`) with `words` makes. Raises BadInput
    for a run.output_dir that the file could not place on the volume that all nodes share. `gpus`: those of each node,
    if they were given; the file says how it is printed again."""
    name = label(config.run.name or config.default_name(""))
    own = [] if config.run.name else ["--run.name", name]
    if kind != "slurm" and not Path(config.run.directory).is_absolute():
        key = "--run.local-dir" if config.run.url else "--run.output-dir"
        own = [key, f"{SHARED}/{_below(config.run.directory)}", *own]
    run = shlex.join([command, *words, *own, "--resume", "auto"])
    again = [] if gpus is None else ["--gpus-per-node", str(gpus)]
    if image != IMAGE:
        again += ["--image", image]
    grace_s = math.ceil(config.checkpoint.grace_s)
    values = {
        "ARGUMENTS": shlex.join([*([command] if command != "rl" else []), *words, *again]),
        "COMMAND": run,
        "COMMAND_YAML": to_json(f"uv run {run}"),
        "NAME": name,
        "NODES": str(nodes),
        "GPUS": str(request.gpus),
        "CPUS": str(request.cpus),
        "MEMORY_GIB": str(request.memory_gib),
        "HEAD_GIB": str(HEAD_GIB + request.shm_gib),
        "SHM_GIB": str(request.shm_gib),
        "STORE_BYTES": str(request.store_bytes),
        "STOP_S": str(grace_s + STOP_BESIDE_S),
        "END_S": str(grace_s + END_BESIDE_S),
        "RAY": version("ray"),
        "IMAGE": image,
        "ACCELERATOR": "H100",
    }
    cluster = _filled((TEMPLATES / "cluster_spec.yaml").read_text(), values)
    values |= {"CLUSTER": indent(cluster.rstrip("\n"), "  "), "CLUSTER_DEEPER": indent(cluster.rstrip("\n"), "    ")}
    text = _filled((TEMPLATES / KINDS[kind]).read_text(), values)
    return text if request.gpus else _without_gpus(text)


def label(name: str) -> str:
    """Returns a name that all places accept for a job: for Kubernetes it begins with a letter and is short.

    >>> label("Qwen3_8B sort")
    'qwen3-8b-sort'
    >>> label("2026-11")
    'run-2026-11'
    """
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (words if words[:1].isalpha() else f"run-{words}")[:LONGEST_NAME].strip("-")


def _below(output_dir: str) -> Path:
    """Returns a relative run.output_dir. Raises BadInput for one that leads somewhere else."""
    place = Path(output_dir)
    if output_dir.startswith("~") or ".." in place.parts:
        raise Refusal(
            f"run.output_dir = {output_dir}, which is another place on each node",
            f"a directory below {SHARED}, where the file mounts the volume that all nodes share, or an absolute one",
            f"--run.output-dir {SHARED}/outputs",
        ).error()
    return place


def _filled(template: str, values: dict[str, str]) -> str:
    return re.sub(r"@([A-Z_]+)@", lambda found: values[found[1]], template)


def _without_gpus(text: str) -> str:
    """Leaves out what asks a scheduler for GPUs: some refuse to give none."""
    text = re.sub(r"(?m)^(#SBATCH --gpus-per-node=0|  accelerators: .*:0)\n", "", text)
    return (
        text.replace(', nvidia.com/gpu: "0"', "").replace("--no-group cpu --group gpu", "").replace("sync \n", "sync\n")
    )
