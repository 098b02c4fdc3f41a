"""The trainer in a plan: the memory of a shard, copies, and adapters."""

from dataclasses import replace
from typing import ClassVar

import pytest
from model_support import FACTS
from plan_support import gpus, plan, text_of, trainer

from trireme.config.trainer import LoraConfig
from trireme.plan.memory import ShardMemory
from trireme.plan.whole import Plan


def memory_of(planned: Plan) -> ShardMemory:
    return trainer(planned).shard_memory


class TestShards:
    def test_memory_of_a_shard(self) -> None:
        whole, half = (memory_of(plan(shards=shards)) for shards in (1, 2))
        assert (whole.state, half.state) == (16 * 1_000_000, 16 * 1_000_000 // 2)
        assert half.total == half.base + half.state + half.gathered + half.activations
        reference = memory_of(plan(kl={"coef": 0.1, "reference": {"base_model": "m"}}))
        assert reference.state == 20 * 1_000_000 // 2

    def test_copies_of_a_shard_need_as_much_each(self) -> None:
        planned = plan(shards=2, trainer={"replicate": 3}, resources=gpus(7), device="gpu")
        assert trainer(planned).shard_memory == trainer(plan(shards=2, resources=gpus(7), device="gpu")).shard_memory
        assert len(planned.by_room(planned.options)["trainer"]) == 6
        assert planned.gpus_needed == 7
        assert "2 FSDP2 shards x 3 copies: 6 actors" in text_of(planned)

    def test_what_is_done_for_memory_is_said(self) -> None:
        options = {"offload": "cpu", "checkpointing": True, "compile": True}
        options |= {"master_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
        planned = plan(shards=1, trainer=options, resources=gpus(2))
        memory = memory_of(planned)
        assert memory.total == memory.base + memory.gathered + memory.activations, "the state is elsewhere"
        text = text_of(planned)
        assert "compiled layers, master weights in bfloat16, gradients summed in bfloat16" in text
        assert "1,000 tokens whose layers are computed twice) and in host memory 8 B x parameters" in text
        assert "whose layers are kept)" in text_of(plan(resources=gpus(3)))

    def test_activations_in_host_memory_are_counted_there(self) -> None:
        options = {"checkpointing": "offload", "micro_batch_tokens": 10**7}
        planned = plan(facts=replace(FACTS, num_layers=6), shards=1, trainer=options, resources=gpus(2))
        memory = trainer(planned).shard_memory
        needs = trainer(planned).needs
        assert memory is not None
        assert needs is not None
        assert 0 < memory.host_activations == needs[0].host["activations in host memory"]
        moved = memory.host_layers(10**7)
        assert f"layers are kept, {moved} of 6 in host memory" in text_of(planned)
        assert any("never run on a GPU" in warning for warning in planned.warnings)

    @pytest.mark.parametrize(
        ("option", "present", "words"),
        [
            ({"checkpointing": "offload"}, 0, "holds all activations anyway"),
            ({"checkpointing": "offload"}, 3, None),
            ({"packing": "packed"}, 0, "without GPUs"),
            ({"packing": "packed"}, 3, None),
            ({"master_dtype": "bfloat16"}, 3, "1/256 of a weight"),
            ({"offload": "cpu"}, 3, None),
            ({"offload": "cpu"}, 0, "nothing to offload"),
        ],
    )
    def test_what_has_a_price_is_said(self, option: dict, present: int, words: str | None) -> None:
        planned = plan(trainer=option, resources=gpus(present))
        assert planned.warnings == [] if words is None else words in " ".join(planned.warnings)
        if words == "nothing to offload":
            assert trainer(planned).shard_memory == trainer(plan()).shard_memory


class TestAdapters:
    LORA: ClassVar[dict] = {"rank": 8, "alpha": 16, "train_mlp": False}
    WIDTHS = 2 * (128 + 128) + 2 * (128 + 64)
    """Inputs and outputs of q, k, v and o together: 4 heads of 32 on 128, 2 for keys and values."""

    def of(self, lora: dict, kl: dict | None = None) -> Plan:
        planned = plan(shards=1, kl=kl)
        trainer = planned.config.trainer.model_copy(update={"lora": LoraConfig(**lora)})
        return replace(planned, config=planned.config.model_copy(update={"trainer": trainer}))

    def test_what_is_trained_and_what_travels(self) -> None:
        planned, numbers = self.of(self.LORA), 8 * 2 * self.WIDTHS
        text = text_of(planned)
        assert f"LoRA of rank 8 and alpha 16 on q_proj, k_proj, v_proj, o_proj: {numbers:,} parameters" in text
        assert f"the adapters ({4 * numbers / 2**20:.2f} MiB) travel by object_store" in text
        assert memory_of(planned).state == 16 * numbers + 4 * 1_000_000, "the base takes its weights only"
        assert f"(16 B x {numbers:,} of adapters + 4 B x parameters) / shards" in text
        assert "adapters" not in text_of(plan())
        assert "all weights (3.81 MiB) travel" in text_of(plan())

    def test_the_base_is_a_reference_for_nothing(self) -> None:
        plain, reference, named, other = (
            memory_of(self.of(self.LORA, kl))
            for kl in (None, {"coef": 0.1}, *({"coef": 0.1, "reference": {"base_model": name}} for name in "mn"))
        )
        assert plain == reference == named
        assert other.state - reference.state == 4 * 1_000_000
