"""The memory that `trireme serve` takes for the weights of samplers."""

from __future__ import annotations

from pathlib import Path

from trireme.cli.serve import UNREAD
from trireme.config.load import load
from trireme.config.model_facts import ModelFacts
from trireme.plan.base import Plan
from trireme.plan.needs import SAMPLER_WEIGHTS
from trireme.plan.rl import LOOP_ROOMS
from trireme.plan.serve import SERVE_ROOMS
from trireme.process.environ import Resources

MODEL = str(Path(__file__).parents[3] / "assets" / "sort-base")


def taken(*flags: str) -> int:
    """Bytes for samplers' weights on this machine, and nothing else is added to what a loop takes."""
    argv = ["@", str(UNREAD), "--model.name", MODEL, "--model.max-seq-len", "32", "--cluster.device", "cpu", *flags]
    config = load(argv).config
    facts, resources = ModelFacts.of(config, required=True), Resources.of_this_machine()
    served, loop = (Plan(config, facts, resources, rooms).machines[0].host for rooms in (SERVE_ROOMS, LOOP_ROOMS))
    weights = served.pop(SAMPLER_WEIGHTS)
    assert served == loop
    return weights


def test_each_set_of_weights_counts() -> None:
    """Once for a machine, whether its shards keep them or Ray's object store."""
    facts = ModelFacts.of(load(["@", str(UNREAD), "--model.name", MODEL]).config, required=True)
    assert facts is not None
    four = taken("--trainer.shards", "2")
    assert four == taken("--trainer.shards", "1", "--inference.replicas", "2")
    assert taken("--service.tinker.snapshots", "9", "--trainer.shards", "2") == 2 * four, "the base's count too"
    assert four >= 5 * 2 * facts.num_parameters
    broadcast = taken("--inference.transport", "broadcast", "--trainer.shards", "2")
    assert broadcast >= four
