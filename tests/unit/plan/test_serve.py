"""The memory that `trireme serve` takes for the weights of samplers."""

from pathlib import Path

from trireme.cli.serve import UNREAD
from trireme.config.load import load
from trireme.config.model_facts import ModelFacts
from trireme.config.trainer import LoraConfig
from trireme.plan.needs import SAMPLER_WEIGHTS
from trireme.plan.rl import LOOP_ROOMS
from trireme.plan.serve import SERVE_ROOMS, WAITING_ADAPTERS
from trireme.plan.whole import Plan
from trireme.process.environ import Resources

MODEL = str(Path(__file__).parents[3] / "assets" / "sort-base")


def added(*flags: str) -> dict[str, int]:
    """Bytes that are added on this machine to what a loop takes."""
    argv = ["@", str(UNREAD), "--model.name", MODEL, "--model.max-seq-len", "32", "--cluster.device", "cpu", *flags]
    config = load(argv).config
    facts, resources = ModelFacts.of(config, required=True), Resources.of_this_machine()
    served, loop = (Plan(config, facts, resources, rooms).machines[0].host for rooms in (SERVE_ROOMS, LOOP_ROOMS))
    return {name: size - loop.get(name, 0) for name, size in served.items() if size != loop.get(name, 0)}


def taken(*flags: str) -> int:
    """Bytes for samplers' weights; nothing else is added."""
    (weights,) = added(*flags).items()
    assert weights[0] == SAMPLER_WEIGHTS
    return weights[1]


def test_adapters_that_wait_and_sets_that_replicas_hold_count() -> None:
    facts = ModelFacts.of(load(["@", str(UNREAD), "--model.name", MODEL]).config, required=True)
    lora = ("--trainer.lora.rank", "8", "--trainer.shards", "1")
    few = added(*lora, "--service.models", "2", "--inference.max-cpu-loras", "4")
    trained = facts.trained_parameters(LoraConfig(rank=8))
    assert few[WAITING_ADAPTERS] == 2 * 16 * trained, "values, two moments and a gradient, in float32"
    many = added(*lora, "--service.models", "6", "--inference.max-cpu-loras", "10")
    assert many[WAITING_ADAPTERS] == 3 * few[WAITING_ADAPTERS]
    assert many[SAMPLER_WEIGHTS] * 5 == few[SAMPLER_WEIGHTS] * 10, "the base's and four; the base's and nine"


def test_each_set_of_weights_counts() -> None:
    """Once for a machine, whether its shards keep them or Ray's object store."""
    facts = ModelFacts.of(load(["@", str(UNREAD), "--model.name", MODEL]).config, required=True)
    four = taken("--trainer.shards", "2")
    assert four == taken("--trainer.shards", "1", "--inference.replicas", "2")
    assert taken("--service.tinker.snapshots", "9", "--trainer.shards", "2") == 2 * four, "the base's count too"
    assert four >= 5 * 2 * facts.num_parameters
    broadcast = taken("--inference.transport", "broadcast", "--trainer.shards", "2")
    assert broadcast >= four
