"""What each process takes, the sums on each machine, and what is done about too little."""

import json
from dataclasses import replace

import pytest
import torch
from model_support import FACTS
from plan_support import QWEN3_8B, cluster, inference, machines, plan, text_of, trainer
from transformers import AutoConfig, AutoModelForCausalLM

from gpu_check.shapes import SHAPES
from trireme.config.model_facts import ModelFacts
from trireme.config.trainer import LoraConfig
from trireme.core.errors import BadInput
from trireme.core.transport import TRANSPORTS, TransportKind
from trireme.plan.memory import GIB
from trireme.plan.needs import BUCKET_BYTES, BUFFERS, GPU_TOLERANCE, HOST_TOLERANCE, SLAB_BYTES, SLABS
from trireme.plan.rl import BLOCK_TOKENS
from trireme.plan.suggestions import suggestions
from trireme.plan.whole import Plan
from trireme.transports import packing, slabs

HUGE = 2**42
pytestmark = pytest.mark.usefixtures("gpu_build")


def large(
    *,
    shards: int = 8,
    replicas: int = 8,
    gpus: int = 16,
    gpu_gib: int = 80,
    host: int = HUGE,
    facts: ModelFacts = QWEN3_8B,
    **options_of_plan,
) -> Plan:
    """A plan of Qwen3-8B on one machine."""
    options = {"micro_batch_tokens": 16384, **options_of_plan.pop("trainer", {})}
    resources = machines(cpus=64, gpus=gpus, memory_bytes=host, gpu_bytes=gpu_gib * GIB)
    return plan(shards=shards, replicas=replicas, resources=resources, facts=facts, trainer=options, **options_of_plan)


class TestNeeds:
    def test_on_cpus_all_is_in_host_memory(self) -> None:
        planned = plan(shards=2, replicas=2)
        (machine,) = planned.machines
        assert list(machine.actors) == planned.actor_names
        assert machine.gpu == {}
        memory = trainer(planned).shard_memory
        assert machine.host["state"] == 2 * memory.state
        assert machine.host["copies for checkpoints"] == 12 * FACTS.num_parameters
        assert machine.host["KV caches"] == 2 * GIB // 4

    def test_on_gpus_tensors_are_there_and_copies_and_offloaded_state_in_host_memory(self) -> None:
        (machine,), (offloaded,) = (large(trainer={"offload": place}).machines for place in ("none", "cpu"))
        assert machine.gpu["its KV cache"] > 0
        assert sum(machine.gpu.values()) == pytest.approx(0.9 * 80 * GIB, rel=1e-6)
        state = 16 * QWEN3_8B.num_parameters
        assert machine.actors["trainer shard 0"].gpu["state"] == state // 8
        assert "state" not in machine.host
        assert machine.host["copies for checkpoints"] == pytest.approx(12 * QWEN3_8B.num_parameters, rel=1e-6)
        assert offloaded.host["state"] == state
        assert "state" not in offloaded.actors["trainer shard 0"].gpu

    def test_adapters_are_all_that_is_copied_and_published(self) -> None:
        (machine,) = large(trainer={"lora": {"rank": 8}}).machines
        trained = QWEN3_8B.trained_parameters(LoraConfig(rank=8))
        assert machine.host["copies for checkpoints"] == pytest.approx(12 * trained, rel=1e-3)
        assert machine.host["two versions of the weights"] == 2 * 2 * trained
        (machine,) = large(trainer={"lora": {"rank": 8}}, inference={"transport": "broadcast"}).machines
        assert machine.host["arriving weights"] == 8 * 2 * trained
        assert machine.host["shares of two versions of the weights"] == 2 * 2 * trained

    def test_stacked_experts_are_held_while_they_are_read(self) -> None:
        experts = replace(QWEN3_8B, num_chosen=8, described={})
        few = plan(shards=1, facts=experts, trainer={"master_dtype": "bfloat16"}, resources=machines(memory_bytes=HUGE))
        assert "loading" not in few.machines[0].host or few.machines[0].host["loading"] == 0
        many = plan(shards=16, facts=experts, trainer={}, resources=machines(memory_bytes=HUGE))
        assert many.machines[0].host["loading"] == 4 * experts.num_parameters - 24 * experts.num_parameters // 16


class TestPublishedWeights:
    """Two versions of them, and what is on its way."""

    BYTES = 2 * QWEN3_8B.num_parameters

    def by(self, planned: Plan, transport: str = "broadcast") -> Plan:
        inference = planned.config.inference.model_copy(update={"transport": transport})
        return replace(planned, config=planned.config.model_copy(update={"inference": inference}))

    def test_a_store_has_them_once_a_machine(self) -> None:
        (machine,) = self.by(large(), "object_store").machines
        assert machine.host["two versions of the weights"] == 2 * self.BYTES, "for 8 replicas and 8 shards"
        assert "arriving weights" not in machine.host, "they are mapped from there"

    def test_a_store_where_no_replica_is_has_the_shares_of_its_ranks(self) -> None:
        four = machines(cpus=32, gpus=4, memory_bytes=HUGE, gpu_bytes=80 * GIB)
        planned = plan(shards=8, replicas=4, facts=QWEN3_8B, resources=cluster(four, four, four))
        versions = [machine.host["two versions of the weights"] for machine in planned.machines]
        assert versions == [self.BYTES, self.BYTES, 2 * self.BYTES], "half of the ranks each, and a replica's are whole"
        alone = plan(shards=3, replicas=1, facts=QWEN3_8B, resources=cluster(four, four))
        third = -(-self.BYTES // 3)
        assert alone.machines[0].actors["trainer shard 2"].parts == {"two versions of the weights": 2 * third}

    def test_a_broadcast_needs_no_store(self) -> None:
        (machine,) = self.by(large(host=100 * GIB)).machines
        assert "two versions of the weights" not in machine.host
        assert machine.host["shares of two versions of the weights"] == 2 * self.BYTES, "of 8 ranks together"
        assert machine.host["arriving weights"] == 8 * self.BYTES, "each replica receives them, ranks map them"
        assert machine.store_warning == ""
        assert "buckets on their way" not in machine.host
        sent = machine.actors["trainer shard 3"].gpu["buckets on their way"]
        assert sent == 2 * 2 * QWEN3_8B.vocab_size * QWEN3_8B.hidden_size, "all of them, from its GPU"
        several = large(shards=1, replicas=1, inference={"tensor_parallel": 4})
        assert self.by(several).machines[0].host["arriving weights"] == self.BYTES

    def test_a_transport_says_who_has_the_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(TRANSPORTS, "mapped", TransportKind("no module"))
        (machine,) = self.by(large(host=100 * GIB), "mapped").machines
        assert machine.host["shares of two versions of the weights"] == 2 * self.BYTES
        assert not {"two versions of the weights", "arriving weights"} & set(machine.host)

    def test_each_rank_has_two_buckets_on_their_way(self) -> None:
        """Page-locked ones have powers of two: 256 MiB for the 201 MB of gate and up, 2 GiB for the 1.2 GB of
        embeddings and output matrix, which two ranks send."""
        assert (BUFFERS, BUCKET_BYTES) == (packing.BUFFERS, packing.BUCKET_BYTES)
        host = self.by(large(), "object_store").machines[0].host
        assert host["buckets on their way"] == 2 * (6 * GIB // 4 + 2 * 2 * GIB)
        tied = self.by(large(facts=replace(QWEN3_8B, tied_embeddings=True)), "object_store").machines[0].host
        assert tied["buckets on their way"] == 2 * (7 * GIB // 4 + 2 * GIB)
        adapters = large(trainer={"lora": {"rank": 8}}).machines[0].host
        assert adapters["buckets on their way"] == 2 * 8 * 2**26, "all of them, 44 MB"
        small = plan(shards=1).machines[0].host
        assert small["buckets on their way"] == 2 * 4 * FACTS.num_parameters, "all of a small one, twice"

    @pytest.mark.parametrize("placement", ["split", "colocated"])
    def test_within_a_gpu_a_version_arrives_there_through_slabs(self, placement: str) -> None:
        """All the time, whoever works: slabs and the memory for a version are never given back."""
        assert (SLABS, SLAB_BYTES) == (slabs.SLABS, slabs.SLAB_BYTES)
        share = {"gpu_memory_utilization": 0.9 if placement == "colocated" else 0.45}
        gpu = machines(cpus=8, gpus=1, memory_bytes=HUGE, gpu_bytes=80 * GIB)
        small = replace(QWEN3_8B, num_parameters=600_000_000)
        planned = plan(shards=1, facts=small, resources=gpu, placement=placement, inference=share)
        (machine,) = planned.machines
        shard = machine.actors["trainer shard 0"]
        replica = machine.actors["inference replica 0"]
        assert shard.gpu["memory shared with replicas"] == SLABS * SLAB_BYTES
        assert replica.gpu["arriving weights"] == 1_200_000_000
        assert "arriving weights" not in machine.host
        assert machine.host["staging buffers"] == SLABS * SLAB_BYTES
        assert machine.host["shares of two versions of the weights"] == 2 * 1_200_000_000
        if placement == "colocated":
            assert shard.resting["memory shared with replicas"] == SLABS * SLAB_BYTES
            assert replica.resting["arriving weights"] == 1_200_000_000
        adapters = plan(
            shards=1,
            facts=small,
            resources=gpu,
            placement=placement,
            inference={**share, "transport": "ipc"},
            trainer={"lora": {"rank": 8}},
        )
        replica = adapters.machines[0].actors["inference replica 0"]
        assert "arriving weights" in replica.host, "vLLM copies adapters from host memory"
        assert "arriving weights" not in replica.gpu

    def test_on_cpus_slabs_are_in_the_memory_of_each_rank(self) -> None:
        host = self.by(plan(shards=2), "ipc").machines[0].host
        assert host["memory shared with replicas"] == 2 * SLABS * SLAB_BYTES
        assert host["arriving weights"] == 4 * FACTS.num_parameters

    def test_the_largest_bucket_is_that_of_the_layout(self) -> None:
        """Of a model without memory, in the sizes of Qwen3-8B."""
        sizes = {**SHAPES["8b"], "num_hidden_layers": 1}
        facts = ModelFacts.from_json("m", json.dumps(sizes))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), dtype=torch.bfloat16)
        layout = packing.lay_out([list(model.named_parameters())])
        of_layer = packing.lay_out([[(name, p) for name, p in model.named_parameters() if ".layers." in name]])
        part = trainer(large(facts=facts))
        assert max(layout.sizes) == part.largest_bucket(facts, embeddings=True)
        assert max(of_layer.sizes) == part.largest_bucket(facts, embeddings=False)


class TestMachines:
    def test_actors_are_packed_as_ray_does(self) -> None:
        eight = machines(cpus=32, gpus=8, memory_bytes=HUGE, gpu_bytes=80 * GIB)
        planned = plan(shards=8, replicas=8, facts=QWEN3_8B, resources=cluster(eight, eight, machines(cpus=4)))
        first, second = planned.machines
        assert [name.split()[0] for name in first.actors] == ["trainer"] * 8 + ["orchestrator"]
        assert [name.split()[0] for name in second.actors] == ["inference"] * 8
        assert "node 0: about" in text_of(planned)
        assert "node 1: about" in text_of(planned)

    def test_shards_that_belong_together_are_on_one_machine(self) -> None:
        resources = cluster(*[machines(cpus=8, gpus=n, memory_bytes=HUGE) for n in (3, 4, 4)])
        planned = plan(shards=8, replicas=1, trainer={"gpus_per_node": 4}, facts=QWEN3_8B, resources=resources)
        on = {
            machine.node.name: len([n for n in machine.actors if n.startswith("trainer")])
            for machine in planned.machines
        }
        assert on == {"node 0": 0, "node 1": 4, "node 2": 4}

    def test_a_dry_run_elsewhere_has_a_place_for_all(self) -> None:
        (machine,) = large(gpus=0, device="gpu").machines
        assert len(machine.actors) == 17

    def test_a_small_object_store_is_warned_of(self) -> None:
        stored = {"transport": "object_store"}
        small = large(host=100 * GIB, inference=stored)
        assert any("Ray's object store on this machine" in warning for warning in small.warnings)
        assert not any("object store" in warning for warning in large(inference=stored).warnings)


class TestRefusals:
    def test_a_gpu_that_is_too_small(self) -> None:
        with pytest.raises(BadInput) as refused:
            large(shards=1, replicas=1, gpus=8).check_resources()
        text = str(refused.value)
        assert "a GPU of this machine has 80.00 GiB free" in text
        assert "state 122.05 GiB" in text, "16 bytes a parameter"
        assert "only above 1.15 times the memory of a GPU or 2 times the memory of a machine" in text
        assert "cheapest first: --trainer.shards 7 (GPUs that are there); or --trainer.offload cpu" in text
        assert text.count("; or ") == 2, "three suggestions"
        assert not large(shards=7, replicas=1, gpus=8).shortages(hopeless=False), "the first fits"
        assert not large(shards=1, replicas=1, gpus=8, trainer={"offload": "cpu"}).shortages(hopeless=False)

    def test_a_shard_that_is_suggested_is_one_for_each_copy_of_the_model(self) -> None:
        with pytest.raises(BadInput, match=r"--trainer.shards 3 \(GPUs that are there\)"):
            large(shards=1, replicas=1, gpus=8, trainer={"replicate": 2}).check_resources()

    def half_full(self, **options) -> Plan:
        """Others have taken 40 of 80 GiB on the GPU of the replica and on those of all shards, which need 20."""
        few = {"checkpointing": True, "micro_batch_tokens": 2048}
        one = large(shards=16, replicas=1, gpus=17, trainer=few, **options)
        return self.with_free(one, 40 * GIB)

    def with_free(self, planned: Plan, free: int) -> Plan:
        (node,) = planned.resources.nodes
        taken = tuple(replace(gpu, free_bytes=free) for gpu in node.gpus)
        return replace(planned, resources=replace(planned.resources, nodes=(replace(node, gpus=taken),)))

    def test_a_share_that_is_not_free_though_the_cache_is_small(self) -> None:
        """vLLM asks at its start for the share of all memory, also where the cache has a size of its own."""
        small = self.half_full(inference={"gpu_cache_gb": 4.0})
        assert sum(small.machines[0].gpu.values()) < 40 * GIB, "it would fit"
        with pytest.raises(BadInput) as refused:
            small.check_resources()
        text = str(refused.value)
        assert "a GPU of this machine has 40.00 GiB of 80.00 GiB free, and vLLM starts only where 72.00 GiB are" in text
        assert "cheapest first: --inference.gpu-memory-utilization 0.4 (nothing, as gpu_cache_gb is set)" in text
        share = {"gpu_cache_gb": 4.0, "gpu_memory_utilization": 0.4}
        self.half_full(inference=share).check_resources()

    def test_a_share_without_room_for_a_sequence_is_not_suggested(self) -> None:
        """Weights of 15.3 GiB, 3 GiB of workspaces, 5.6 GiB of cache for 40,960 tokens, 1 GiB for NCCL and a bucket of
        1.2 GiB need 0.33 of 80 GiB."""
        planned = self.half_full()
        assert inference(planned).least_gpu_share == pytest.approx(26.04 / 80, abs=1e-3)
        assert any(way.startswith("--inference.gpu-memory-utilization 0.4 (fewer") for way in suggestions(planned))
        assert suggestions(self.with_free(planned, 23 * GIB)) == [], "though 0.2 of 80 GiB are free"
        assert inference(self.half_full(inference={"gpu_cache_gb": 4.0})).least_gpu_share == 0

    def test_beside_a_shard_its_state_is_taken_too(self) -> None:
        one = machines(gpus=1, gpu_bytes=80 * GIB, memory_bytes=HUGE)
        options = {"gpu_memory_utilization": 0.5, "gpu_cache_gb": 1.0}
        planned = plan(shards=1, resources=one, facts=FACTS, inference=options)
        assert planned.shares_gpu
        state = trainer(planned).shard_memory.state  # type: ignore[union-attr]
        for free, warns in ((40 * GIB + GIB // 2 + state, False), (40 * GIB + GIB // 2 + state - 1, True)):
            tight = self.with_free(planned, free)
            assert any("vLLM starts only where" in text for text in tight.warnings) is warns

    def test_a_host_that_is_too_small(self) -> None:
        need = sum(large().machines[0].host.values())
        large(host=int(need / HOST_TOLERANCE) + GIB).check_resources()
        with pytest.raises(BadInput, match=r"this machine has [\d.]+ GiB of memory, [\d.]+ GiB are needed: "):
            large(host=int(need / HOST_TOLERANCE) - GIB).check_resources()

    def test_on_cpus_caches_and_replicas_are_suggested(self) -> None:
        planned = plan(shards=1, replicas=8, resources=machines(memory_bytes=20 * GIB), inference={"memory_gb": 2.0})
        assert suggestions(planned)[:2] == [
            "--inference.memory-gb 0.5 (fewer sequences at the same time)",
            "--inference.replicas 1 (slower sampling)",
        ]

    def test_a_replica_is_split_over_gpus_that_are_there(self) -> None:
        small = {"checkpointing": True, "micro_batch_tokens": 2048}
        planned = large(shards=8, replicas=1, gpus=12, gpu_gib=22, trainer=small)
        assert "--inference.tensor-parallel 4 " in suggestions(planned)[0]

    def test_up_to_the_tolerance_it_only_warns(self) -> None:
        small = {"checkpointing": True, "micro_batch_tokens": 2048}
        planned = large(shards=2, replicas=1, gpus=3, trainer=small, inference={"gpu_memory_utilization": 0.5})
        need = sum(planned.machines[0].actors["trainer shard 0"].gpu.values())
        for times, refused in ((1.02, False), (GPU_TOLERANCE - 0.02, False), (GPU_TOLERANCE + 0.02, True)):
            tight = self.with_free(planned, int(need / times))
            assert any("too little memory, by an estimate" in warning for warning in tight.warnings)
            assert bool(tight.shortages(hopeless=True)) is refused


class TestSharedGpu:
    def test_the_cache_of_the_replica_is_fixed(self) -> None:
        one = machines(gpus=1, gpu_bytes=80 * GIB)
        planned = plan(shards=1, resources=one, facts=QWEN3_8B, inference={"gpu_memory_utilization": 0.4})
        assert planned.shares_gpu
        resolved = planned.resolved(planned.config)
        assert resolved.inference.gpu_memory_utilization == 0.4
        cache = resolved.inference.gpu_cache_gb
        assert cache == pytest.approx(0.4 * 80 - 3 - 2 * QWEN3_8B.num_parameters / GIB)
        assert planned.machines[0].gpu["its KV cache"] == int(cache * GIB)
        chosen = plan(shards=1, resources=one, inference={"gpu_memory_utilization": 0.4, "gpu_cache_gb": 5.0})
        assert chosen.resolved(chosen.config).inference.gpu_cache_gb == 5.0

    def test_elsewhere_vllm_measures_it(self) -> None:
        """Unless buffers that it does not know of come later."""
        for transport, measured in (("object_store", True), ("broadcast", False)):
            options = {"transport": transport, "receive_on": "host"}
            planned = plan(shards=1, resources=machines(gpus=2), facts=QWEN3_8B, inference=options)
            cache = planned.resolved(planned.config).inference.gpu_cache_gb
            assert (cache is None) == measured
        on_cpus = plan(shards=1)
        assert on_cpus.resolved(on_cpus.config).inference.gpu_cache_gb is None

    def test_a_share_without_room_for_a_sequence_does_not_fit(self) -> None:
        tight = plan(
            shards=1,
            resources=machines(gpus=1, gpu_bytes=24 * GIB, memory_bytes=HUGE),
            facts=QWEN3_8B,
            inference={"gpu_memory_utilization": 0.2},
            trainer={"lora": {"rank": 8}},
        )
        assert any("a replica's weights 15.26 GiB" in text for text in tight.shortages(hopeless=True))
        assert inference(tight)._gpu_cache(QWEN3_8B) == (40_960 + BLOCK_TOKENS) * 2 * 36 * 8 * 128 * 2


def test_the_time_to_start_grows_with_the_model() -> None:
    small, big = plan(), large(kl={"coef": 0.1, "reference": {"base_model": "m"}})
    assert small.start_s == pytest.approx(600 + 4e6 / 1e8)
    assert big.start_s == pytest.approx(600 + 2 * 2 * QWEN3_8B.num_parameters / 1e8), "and its reference"
    assert plan(facts=None).start_s == 600
    assert big.resolved(big.config).timeouts.start_s == big.start_s
    assert "all rooms are ready within 928 s (timeouts.start_s = 600 s, and 328 s to read the model" in text_of(big)
