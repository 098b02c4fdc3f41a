"""The plan of `rl`: replicas, tokens, staleness, what is in flight, and the text."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_support import FACTS
from plan_support import QWEN3_8B, cluster, inference, machines, plan, text_of, trainer
from vllm.v1.core.block_pool import BlockPool

from gpu_check.shapes import SHAPES
from trireme.config.load import load
from trireme.config.model_facts import ModelFacts
from trireme.plan.memory import GIB, gpu_room
from trireme.plan.rl import BLOCK_TOKENS, ENGINE_BYTES, LOOP_ROOMS, RL_ROOMS
from trireme.plan.serve import SERVE_ROOMS
from trireme.plan.whole import Plan

pytestmark = pytest.mark.usefixtures("gpu_build")


class TestNumbers:
    @pytest.mark.parametrize(
        ("bound", "sequences", "replicas", "tokens"),
        [
            (1, 64, 1, 64 * 64),  # the engine is the bound
            (1, 1000, 1, 2 * 16 * 8 * 64),  # the slots are
            (0, 1000, 1, 16 * 8 * 64),
            (1, 64, 3, 192 * 64),
        ],
    )
    def test_recomputed_tokens(self, bound: int, sequences: int, replicas: int, tokens: int) -> None:
        planned = plan(
            replicas=replicas, orchestrator={"max_steps_off_policy": bound}, inference={"max_num_seqs": sequences}
        )
        assert inference(planned).recomputed_tokens == tokens

    def test_memory_of_a_replica(self) -> None:
        expected = int((1.4 + 2) * GIB) + 4 * 1_000_000
        assert inference(plan(inference={"memory_gb": 2})).replica_bytes == expected

    def test_unknown_sizes_are_said(self) -> None:
        text = text_of(plan(facts=None))
        assert "model not reachable, sizes unknown" in text
        assert inference(plan(facts=None)).recomputed_tokens is None


class TestCostOfAnUpdate:
    """Two shards train 16 x 8 sequences a step; K + 1 times as many can be in flight on a replica."""

    @pytest.mark.parametrize(("bound", "share"), [(0, 2 / 3), (1, 4 / 3), (5, 4.0)])
    def test_against_the_training_of_a_step(self, bound: int, share: float) -> None:
        planned = plan(orchestrator={"max_steps_off_policy": bound}, inference={"max_num_seqs": 1000})
        assert inference(planned).recompute_share == pytest.approx(share)
        assert f"at most {share:.2g} times the arithmetic of a step's training" in text_of(planned)
        assert any("--inference.on-update keep_kv" in warning for warning in planned.warnings) == (share > 2)

    @pytest.mark.parametrize(
        ("on_update", "says"),
        [("drain", "requests in flight are finished first"), ("keep_kv", "tokens of KV cache stay, of older weights")],
    )
    def test_other_ways_cost_nothing_of_it(self, on_update: str, says: str) -> None:
        planned = plan(orchestrator={"max_steps_off_policy": 5}, inference={"on_update": on_update})
        text = text_of(planned)
        assert says in text
        assert "computed again" not in text
        assert not planned.warnings


class TestAuto:
    """`inference.on_update = "auto"`, of a replica that has up to twice the 128 sequences of a step in flight."""

    @pytest.mark.parametrize(
        ("sequences", "on_gpus", "decided"),
        [(1000, True, "keep_kv"), (58, True, "keep_kv"), (57, True, "recompute_kv"), (1000, False, "recompute_kv")],
    )
    def test_what_is_dear_to_compute_again_is_kept_on_gpus(self, sequences: int, on_gpus: bool, decided: str) -> None:
        """The bound, 0.3 of the training of 64 sequences three times, is 57.6 sequences."""
        planned = plan(resources=machines(gpus=3 if on_gpus else 0), inference={"max_num_seqs": sequences})
        assert inference(planned).on_update == decided
        assert planned.resolved(planned.config).inference.on_update == decided  # type: ignore[attr-defined]
        assert f"inference.on_update = auto: {decided}" in text_of(planned) or not on_gpus
        assert ("tokens of KV cache stay" in text_of(planned)) == (decided == "keep_kv")

    @pytest.mark.parametrize("chosen", ["recompute_kv", "keep_kv", "drain"])
    def test_a_choice_is_kept(self, chosen: str) -> None:
        planned = plan(resources=machines(gpus=3), inference={"on_update": chosen})
        assert planned.resolved(planned.config).inference.on_update == chosen  # type: ignore[attr-defined]
        assert "inference.on_update" not in text_of(planned)

    def test_a_cost_that_is_unknown_decides_for_exact_samples(self) -> None:
        assert inference(plan(facts=None, resources=machines(gpus=3))).on_update == "recompute_kv"

    def test_a_deterministic_run_computes_again(self) -> None:
        """Also where there are GPUs, as it does not use them."""
        planned = plan(resources=machines(gpus=3), orchestrator={"max_steps_off_policy": 0})
        planned = replace(planned, config=planned.config.model_copy(update={"deterministic": True}))
        assert inference(planned).on_update == "recompute_kv"


class TestEncoding:
    """`inference.encoding = "auto"`, and the memory of changes."""

    @pytest.mark.parametrize(
        ("nodes", "options", "decided"),
        [
            ([3, 3], {}, "delta"),
            ([3], {}, "dense"),
            ([0, 0], {}, "dense"),  # weights in float32
            ([3, 3], {"inference": {"transport": "broadcast"}}, "dense"),
            ([3, 3], {"inference": {"encoding": "dense"}}, "dense"),
            ([3], {"inference": {"encoding": "delta"}}, "delta"),
            ([3, 3], {"trainer": {"lora": {"rank": 8}}}, "dense"),
        ],
    )
    def test_it_is_delta_where_less_passes_a_network(self, nodes: list[int], options: Any, decided: str) -> None:
        planned = plan(resources=cluster(*[machines(gpus=gpus) for gpus in nodes]), **options)
        assert planned.resolved(planned.config).inference.encoding == decided  # type: ignore[attr-defined]
        assert ("only what changed where a replica has the version before" in text_of(planned)) == (decided == "delta")
        arriving = [need.host.get("arriving weights", 0) for need in inference(planned).needs or []]
        assert arriving == [2 * 1_000_000 if decided == "delta" else 0]

    def test_broadcasts_of_changes_need_a_version_more_at_both_ends(self) -> None:
        options = {"transport": "broadcast", "encoding": "delta"}
        planned = plan(resources=cluster(machines(gpus=3), machines(gpus=3)), inference=options)
        (replica,) = inference(planned).needs
        assert {replica.host["arriving weights"], replica.host["the version to which changes apply"]} == {2_000_000}
        trainer = next(part for part in planned.parts if part.room == "trainer")
        assert all(need.shared == {"the version to which the next changes apply": 2_000_000} for need in trainer.needs)


class TestTransport:
    """`inference.transport = "auto"`."""

    @pytest.mark.parametrize(
        ("gpus", "gib_of_gpu", "options", "decided"),
        [
            (1, 80, {}, "ipc"),
            (1, 0, {}, "ipc"),  # a GPU that no driver describes
            (1, 80, {"placement": "colocated"}, "ipc"),
            (1, 80, {"trainer": {"lora": {"rank": 8}}}, "object_store"),  # vLLM copies adapters from host memory
            (1, 24, {}, "object_store"),  # where a version of 2 GB lacks room
            (2, 80, {}, "broadcast"),
            (2, 80, {"placement": "colocated", "shards": 2, "replicas": 2}, "object_store"),
            (2, 80, {"trainer": {"lora": {"rank": 8}}}, "object_store"),
            (2, 80, {"inference": {"encoding": "delta"}}, "object_store"),
            (1, 80, {"inference": {"receive_on": "host"}}, "object_store"),
            (1, 24, {"inference": {"receive_on": "gpu"}}, "ipc"),
            (0, 0, {}, "object_store"),
            (1, 80, {"facts": None}, "object_store"),
            (1, 80, {"inference": {"encoding": "delta"}}, "object_store"),
            (1, 80, {"inference": {"transport": "object_store"}}, "object_store"),
            (0, 0, {"inference": {"transport": "ipc"}}, "ipc"),
        ],
    )
    def test_it_follows_from_the_gpus_and_their_room(
        self, gpus: int, gib_of_gpu: int, options: dict[str, Any], decided: str
    ) -> None:
        facts = replace(FACTS, num_parameters=1_000_000_000)
        resources = machines(gpus=gpus, gpu_bytes=gib_of_gpu * GIB, memory_bytes=64 * GIB)
        planned = plan(**{"shards": 1, "resources": resources, "facts": facts, **options})
        assert planned.resolved(planned.config).inference.transport == decided  # type: ignore[attr-defined]
        assert f"travel by {decided}" in text_of(planned)

    @pytest.mark.parametrize(
        ("gib_of_gpu", "ranks", "inference_options", "on_gpu", "on_host"),
        [
            (80, 1, {}, True, False),
            (80, 2, {}, True, True),  # rank 0 receives for both, into host memory
            (80, 1, {"transport": "object_store"}, True, False),
            (80, 1, {"transport": "object_store", "encoding": "delta"}, True, True),
            (8, 1, {}, False, True),
            (8, 1, {"receive_on": "gpu"}, True, False),
            (80, 1, {"receive_on": "host"}, False, True),
        ],
    )
    def test_arriving_weights_have_a_second_buffer_where_there_is_room(
        self, gib_of_gpu: int, ranks: int, inference_options: dict[str, Any], on_gpu: bool, on_host: bool
    ) -> None:
        facts = replace(FACTS, num_parameters=1_000_000_000)
        resources = machines(gpus=3, gpu_bytes=gib_of_gpu * GIB, memory_bytes=64 * GIB)
        options = {"tensor_parallel": ranks, **inference_options}
        planned = plan(shards=1, resources=resources, facts=facts, inference=options)
        (need,) = inference(planned).needs or []
        assert [need.gpu.get("arriving weights", 0) > 0, need.host.get("arriving weights", 0) > 0] == [on_gpu, on_host]
        decided = planned.resolved(planned.config).inference  # type: ignore[attr-defined]
        assert decided.receive_on == ("gpu" if on_gpu else "host")
        assert (decided.gpu_cache_gb is not None) or not on_gpu, "vLLM must not take the buffer's memory"
        received = decided.transport == "broadcast"
        assert [need.gpu.get("NCCL", 0) > 0, need.gpu.get("a bucket on its way", 0) > 0] == [
            received,
            received and not on_gpu,
        ]
        assert ("to a second buffer on each GPU" in text_of(planned)) == on_gpu

    def test_without_offers_to_replicas_nothing_would_travel_within_a_gpu(self) -> None:
        """A loop of your own, and `trireme serve`: replicas fetch what they need."""
        for kinds in (LOOP_ROOMS, SERVE_ROOMS):
            planned = replace(plan(shards=1, resources=machines(gpus=1), placement="colocated"), kinds=kinds)
            assert inference(planned).transport_name == "object_store"


class TestInFlight:
    def test_what_the_limit_is(self) -> None:
        options = {"group_size": 8, "max_steps_off_policy": 1}
        auto = text_of(plan(replicas=2, orchestrator=options, inference={"max_num_seqs": 10}))
        assert "at first at most 25 rollouts (2 replicas x 10 sequences and a quarter more)" in auto
        assert "at most 32 groups x 8 rollouts of training" in auto
        assert "at most 40 rollouts; at most 32 groups" in text_of(plan(orchestrator=options | {"max_concurrent": 40}))

    def test_without_a_limit(self) -> None:
        planned = plan(orchestrator={"max_steps_off_policy": 0})
        planned = replace(planned, config=planned.config.model_copy(update={"deterministic": True}))
        assert "a whole batch together: 16 groups x 8 rollouts" in text_of(planned)


def test_the_text_has_what_a_reader_needs() -> None:
    text = text_of(plan(run_dir=Path("/data/out/r"), warnings=("mind the gap",)))
    parts = ["2 FSDP2 shards", "1 vLLM replica", "1,000,000 parameters", "up to 1,280 per step", "vllm", "torch 2."]
    parts += ["no group is trained on that is more than 1 step old", "up to 16,384 tokens of KV cache", "ray 2."]
    parts += ["/data/out/r", "mind the gap"]
    assert [part for part in parts if part not in text] == []
    assert "evaluation" not in text
    assert "outputs/sort-m-<8 hex>" in text_of(plan()), "a dry run has no directory yet"
    text = text_of(plan(evaluation={"every": 5, "samples": 4, "env": {"name": "longer"}}))
    assert "128 held-out problems of longer x 4 rollouts: first of all, every 5 steps, and at the end" in text


ROOT = Path(__file__).parents[3]
GPU_BYTES, HOST_BYTES = int(80e9), 128 * GIB
"""Memory of a GPU, and host memory for each GPU."""
CONFIGS = {
    "qwen3-0.6b-1gpu": (1, 1, GPU_BYTES),
    "qwen3-4b-lora-1gpu": (1, 1, GPU_BYTES),
    "qwen3-0.6b-colocated-1gpu": (1, 1, 22 * GIB),
    "qwen3-4b-lora-colocated-1gpu": (1, 1, 22 * GIB),
    "qwen3-8b-lora-colocated-1gpu": (1, 1, 44 * GIB),
    "qwen3-4b-colocated-1gpu": (1, 1, 79 * GIB),
    "qwen3-0.6b-8gpu": (1, 8, GPU_BYTES),
    "qwen3-8b-colocated-8gpu": (1, 8, 79 * GIB),
    "qwen3-32b-lora-colocated-8gpu": (1, 8, 79 * GIB),
    "qwen3-8b-2x8gpu": (2, 8, GPU_BYTES),
}
"""For each: nodes, GPUs of a node, and the memory of a GPU. For colocated rooms it is what drivers report of GPUs that
are sold as 24, 48 and 80 GB."""


def configured(name: str, *flags: str) -> Plan:
    """Returns the plan of a shipped configuration."""
    nodes, per_node, gpu_bytes = CONFIGS[name]
    size = name.split("-")[1]
    config = load(["@", str(ROOT / "configs" / f"{name}.toml"), *flags], {}).config
    facts = ModelFacts.from_json(config.model.name, json.dumps({**SHAPES[size], "dtype": "bfloat16"}))
    assert facts.num_parameters == pytest.approx(float(size.removesuffix("b")) * 1e9, rel=0.05)
    per_machine = machines(cpus=12 * per_node, gpus=per_node, memory_bytes=per_node * HOST_BYTES, gpu_bytes=gpu_bytes)
    return Plan(config, facts, cluster(*[per_machine] * nodes), RL_ROOMS)


def cache_gib(planned: Plan) -> float:
    cache = planned.resolved(planned.config).inference.gpu_cache_gb  # type: ignore[attr-defined]
    return float(cache)


def test_all_are_here() -> None:
    assert {path.stem for path in (ROOT / "configs").glob("*gpu.toml")} == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_fits(name: str) -> None:
    """All GPUs are used, and the plan warns of no shortage on GPUs or hosts."""
    nodes, per_node, _ = CONFIGS[name]
    planned = configured(name)
    assert planned.gpus_needed == nodes * per_node
    planned.check_resources()
    assert planned.shortages(hopeless=False) == []
    assert sum(len(machine.actors) for machine in planned.machines) == len(planned.actor_names)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "colocated" in name])
def test_a_colocated_configuration_says_what_is_planned(name: str) -> None:
    planned = configured(name)
    (machine,) = planned.machines
    header = (ROOT / "configs" / f"{name}.toml").read_text().partition("#   uv run")[0].replace("\n# ", " ")
    numbers = re.search(r"trains ([\d.]+) GiB of (\d+) .* samples ([\d.]+)\b.* KV cache of ([\d.]+)\b", header)
    training, sampling = (sum(parts.values()) / GIB for parts in machine.phases.values())
    expected = [training, CONFIGS[name][2] / GIB, sampling, cache_gib(planned)]
    assert [float(number) for number in numbers.groups()] == pytest.approx(expected, abs=0.06)
    assert "Not run on a GPU yet." in header


def test_4b_needs_its_state_in_host_memory_on_24_gb() -> None:
    name = "qwen3-4b-lora-colocated-1gpu"
    for tokens in ("8192", "2048"):
        flags = ["--trainer.offload", "none", "--trainer.micro-batch-tokens", tokens]
        assert configured(name, *flags).shortages(hopeless=False)


QUICKSTART = ROOT / "configs" / "quickstart.toml"
LARGE = machines(gpus=1, gpu_bytes=140 * GIB)


def quickstart(*flags: str) -> tuple[Plan, ModelFacts]:
    """Returns the plan of the quickstart on one GPU of 140 GiB, and the sizes of its model."""
    options = ["--cluster.device", "gpu", "--trainer.shards", "1", "--inference.gpu-memory-utilization", "0.4"]
    config = load(["@", str(QUICKSTART), *options, *flags], {}).config
    facts = ModelFacts.of(config, required=True)
    return Plan(config, facts, LARGE, RL_ROOMS), facts


def blocks(planned: Plan, facts: ModelFacts) -> int:
    """Returns the number of blocks that the engine makes of the cache."""
    cache = planned.resolved(planned.config).inference.gpu_cache_gb  # type: ignore[attr-defined]
    return int(int(cache * GIB) // (BLOCK_TOKENS * facts.kv_values_per_token * 2))


def test_the_quickstart_on_a_large_gpu_gets_few_blocks() -> None:
    """1,024 sequences of 32 tokens, and as much again; the whole share of the GPU would be seven million blocks."""
    planned, facts = quickstart()
    assert blocks(planned, facts) == 2 * 1024 * 32 // BLOCK_TOKENS + 1 <= 8192
    blocks_that_fit = inference(planned)._cache_left // (BLOCK_TOKENS * facts.kv_values_per_token * 2)
    assert blocks_that_fit > 6_000_000
    text = dict(row for part in planned.parts for row in part.rows("a GPU"))["memory"]
    assert "instead of 40%" in text
    assert "what 1,024 sequences of full length take, and 1 times that" in text


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--inference.prefix-cache", "0"], 1024 * 2),
        (["--inference.prefix-cache", "2.5"], 3.5 * 1024 * 2),
        (["--inference.max-num-seqs", "100"], 2 * 100 * 2),
        (["--model.max-seq-len", "40"], 2 * 1024 * 3),
    ],
)
def test_the_keys_that_decide(flags: list[str], expected: float) -> None:
    assert blocks(*quickstart(*flags)) == expected + 1


@pytest.mark.parametrize("share", ["0.4", "0.01"], ids=["what the engine can use", "a share without space"])
def test_the_smallest_cache_holds_a_sequence(share: str) -> None:
    """vLLM keeps one block empty, and does not start where the others cannot hold a sequence."""
    flags = ["--inference.max-num-seqs", "1", "--inference.prefix-cache", "0", "--model.max-seq-len", "40"]
    planned, facts = quickstart(*flags, "--inference.gpu-memory-utilization", share)
    pool = BlockPool(blocks(planned, facts), enable_caching=True, hash_block_size=BLOCK_TOKENS)
    assert pool.get_num_free_blocks() * BLOCK_TOKENS >= 40


def test_ranks_beyond_the_key_heads_hold_copies() -> None:
    facts = QWEN3_8B
    four, eight, sixteen = (
        inference(plan(facts=facts, resources=machines(gpus=17), inference={"tensor_parallel": ranks}))
        for ranks in (4, 8, 16)
    )
    assert facts.num_kv_heads == 8
    assert four._useful_cache(facts) == 2 * eight._useful_cache(facts) == 2 * sixteen._useful_cache(facts)


def test_the_rest_is_left_to_the_trainer() -> None:
    planned, facts = quickstart()
    taken = (
        ENGINE_BYTES + 2 * facts.num_parameters + blocks(planned, facts) * BLOCK_TOKENS * facts.kv_values_per_token * 2
    )
    resolved = planned.resolved(planned.config)
    share = resolved.inference.gpu_memory_utilization  # type: ignore[attr-defined]
    assert taken <= share * 140 * GIB <= taken + 0.002 * 140 * GIB
    assert planned.shares_gpu
    assert trainer(planned)._room == gpu_room(140 * GIB, 140 * GIB, share)
