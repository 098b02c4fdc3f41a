"""The configurations for GPUs fit into the machines that they name, GPUs of 80 GB, by the plan's figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plan_support import cluster, machines

from gpu_check.shapes import SHAPES
from trireme.config import installed
from trireme.config.load import load
from trireme.config.model_facts import ModelFacts
from trireme.plan.base import Plan
from trireme.plan.memory import GIB
from trireme.plan.rl import RL_ROOMS

ROOT = Path(__file__).parents[3]
GPU_BYTES, HOST_BYTES = int(80e9), 128 * GIB
"""Memory of each GPU, and host memory for each GPU."""
QWEN3_8B = {
    **SHAPES["4b"],
    **{"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}
CONFIGS = {
    "qwen3-0.6b-1gpu": (1, 1, SHAPES["0.6b"]),
    "qwen3-4b-lora-1gpu": (1, 1, SHAPES["4b"]),
    "qwen3-0.6b-8gpu": (1, 8, SHAPES["0.6b"]),
    "qwen3-8b-2x8gpu": (2, 8, QWEN3_8B),
}
"""For each: nodes, GPUs of a node, and the sizes of its model."""


def test_all_are_here() -> None:
    assert {path.stem for path in (ROOT / "configs").glob("*gpu.toml")} == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_fits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All GPUs are used, and the plan warns of no shortage on GPUs or hosts."""
    monkeypatch.setattr(installed, "installed_vllm", lambda: "vllm 0.32.0")
    nodes, per_node, sizes = CONFIGS[name]
    config = load(["@", str(ROOT / "configs" / f"{name}.toml")], {}).config
    facts = ModelFacts.from_json(config.model.name, json.dumps({**sizes, "dtype": "bfloat16"}))
    assert facts.num_parameters == pytest.approx(float(name.split("-")[1].removesuffix("b")) * 1e9, rel=0.05)
    each = machines(cpus=12 * per_node, gpus=per_node, memory_bytes=per_node * HOST_BYTES, gpu_bytes=GPU_BYTES)
    given = Plan(config, facts, cluster(*[each] * nodes), RL_ROOMS)
    assert given.gpus_needed == nodes * per_node
    given.check_resources()
    assert given.shortages(hopeless=False) == []
    assert sum(len(machine.actors) for machine in given.machines) == len(given.actor_names)
