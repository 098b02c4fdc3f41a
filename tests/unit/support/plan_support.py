"""Plans of small runs."""

import io
import json
from dataclasses import replace
from pathlib import Path

from model_support import FACTS
from rich.console import Console

from gpu_check.shapes import SHAPES
from trireme.config import Config
from trireme.config.model_facts import ModelFacts
from trireme.plan.memory import GIB
from trireme.plan.rl import RL_ROOMS, InferencePart, OrchestratorPart
from trireme.plan.trainer import TrainerPart
from trireme.plan.whole import Plan
from trireme.process.environ import Resources
from trireme.process.machine import Gpu, Node


def machines(cpus: int = 8, gpus: int = 0, memory_bytes: int = 16 * GIB, gpu_bytes: int = 0) -> Resources:
    """One machine; with `gpu_bytes` its driver tells how much memory each GPU has, all of it free."""
    gpus_of_node = (Gpu(gpu_bytes, gpu_bytes),) * gpus if gpu_bytes else ()
    node = Node(
        "this machine", cpus, gpus, memory_bytes, memory_bytes, memory_bytes // 2, memory_bytes // 4, gpus_of_node
    )
    return Resources((node,), "this machine")


def cluster(*parts: Resources) -> Resources:
    """The machines of all these together, in a cluster."""
    nodes = [replace(node, name=f"node {n}") for n, one in enumerate(parts) for node in one.nodes]
    return Resources(tuple(nodes), "the Ray cluster")


LAPTOP = machines()
QWEN3_8B = ModelFacts.from_json("m", json.dumps({**SHAPES["8b"], "dtype": "bfloat16"}))


def plan(
    *,
    shards: int = 2,
    replicas: int = 1,
    resources: Resources = LAPTOP,
    facts: ModelFacts | None = FACTS,
    device: str = "auto",
    orchestrator: dict | None = None,
    inference: dict | None = None,
    evaluation: dict | None = None,
    kl: dict | None = None,
    trainer: dict | None = None,
    placement: str = "auto",
    run_dir: Path | None = None,
    warnings: tuple[str, ...] = (),
) -> Plan:
    config = Config.model_validate(
        {
            "model": {"name": "m"},
            "env": {"id": "sort"},
            "eval": evaluation or {},
            "trainer": {"shards": shards, "micro_batch_tokens": 1000, "kl": kl or {}, **(trainer or {})},
            "orchestrator": {"batch_size": 16, **(orchestrator or {})},
            "inference": {"replicas": replicas, "sampling": {"max_tokens": 10}, **(inference or {})},
            "cluster": {"device": device},
            "placement": placement,
        }
    )
    return Plan(config, facts, resources, RL_ROOMS, run_dir, warnings)


def text_of(plan_of_run: Plan) -> str:
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(plan_of_run.render(whole=True))
    return console.export_text()


def trainer(plan_of_run: Plan) -> TrainerPart:
    (part,) = (part for part in plan_of_run.parts if isinstance(part, TrainerPart))
    return part


def inference(plan_of_run: Plan) -> InferencePart:
    (part,) = (part for part in plan_of_run.parts if isinstance(part, InferencePart))
    return part


def orchestrator(plan_of_run: Plan) -> OrchestratorPart:
    (part,) = (part for part in plan_of_run.parts if isinstance(part, OrchestratorPart))
    return part


def gpus(number: int) -> Resources:
    return machines(gpus=number)
