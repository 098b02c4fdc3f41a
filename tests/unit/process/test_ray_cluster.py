"""Places for actors: which of them share a bundle, which Ray never splits over nodes. (Ray itself: tests/e2e.)"""

import os
import subprocess
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import ray
from plan_support import plan
from ray.exceptions import RaySystemError
from rich.console import Console
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

from trireme.cli.common import run_command
from trireme.core.errors import EXIT_OK, BadInput, RoomFailed, ServicesLost
from trireme.process import private
from trireme.process import ray_cluster as cluster

SHARD, ACTOR = {"num_cpus": 2.0, "num_gpus": 1.0}, {"num_cpus": 1.0, "num_gpus": 0.0}


class Group:
    def __init__(self, bundles: list[dict[str, float]], strategy: str) -> None:
        self.bundles, self.strategy = bundles, strategy

    def ready(self) -> None: ...


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def alive(**resources: float) -> dict[str, Any]:
        return {"Alive": True, "Resources": resources}

    nodes = [alive(CPU=64.0, GPU=4.0), alive(CPU=8.0), {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 16.0}}]
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(cluster, "placement_group", Group)
    monkeypatch.setattr(cluster, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(cluster.waits, "get_all", lambda *args, **options: None)
    monkeypatch.setattr(
        cluster,
        "PlacementGroupSchedulingStrategy",
        lambda group, placement_group_bundle_index: placement_group_bundle_index,
    )
    monkeypatch.setattr(cluster.ray, "init", lambda **_: None)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(private.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(private, "LONGEST_BASE", 1000)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def reserved(resources: list[Any], places: list[int]) -> tuple[Any, list[int]]:
    with ExitStack() as ending:
        group, options = cluster.reserve(resources, 1.0, lambda *_: None, ending, places)
    assert [
        {name: option[name] for name in expected} for expected, option in zip(resources, options, strict=True)
    ] == resources
    return group, [option["scheduling_strategy"] for option in options]


def test_actors_without_a_place_have_bundles_of_their_own() -> None:
    group, places = reserved([SHARD, SHARD, ACTOR], [])
    assert group.bundles == [{"CPU": 2.0, "GPU": 1.0}] * 2 + [{"CPU": 1.0}]
    assert (group.strategy, places) == ("PACK", [0, 1, 2])
    group, places = reserved([*[SHARD] * 6, ACTOR, ACTOR], [0, 0, 0, 0, 1, 1, 2, 3])
    assert group.bundles == [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 1.0}, {"CPU": 1.0}]
    assert places == [0, 0, 0, 0, 1, 1, 2, 3]
    with pytest.raises(BadInput, match=r"(?s)'GPU': 5\.0.* no node has more than .*4\.0.*--trainer\.gpus-per-node"):
        reserved([*[SHARD] * 5, ACTOR], [0, 0, 0, 0, 0, 1])


def test_the_ranks_of_a_replica_are_one_bundle_which_some_node_must_hold() -> None:
    group, places = reserved([SHARD, {"num_cpus": 4.0, "num_gpus": 4.0}], [])
    assert (group.bundles[1], places) == ({"CPU": 4.0, "GPU": 4.0}, [0, 1])
    with pytest.raises(BadInput) as refused:
        reserved([SHARD, {"num_cpus": 8.0, "num_gpus": 8.0}], [])
    assert "inference.tensor_parallel, which needs {'CPU': 8.0, 'GPU': 8.0} on one node" in str(refused.value)
    assert "no node has more than {'CPU': 64.0, 'GPU': 4.0}" in str(refused.value)
    assert "--inference.tensor-parallel" in str(refused.value)


def test_a_gpu_that_two_actors_share_counts_once() -> None:
    shards = [{"num_cpus": 1.0, "num_gpus": 0.0, "gpus": [number]} for number in (0, 1, 0, 1)]
    replicas = [{"num_cpus": 2.0, "num_gpus": 0.0, "gpus": [0, 1]}] * 2
    group, places = reserved([*shards, *replicas, ACTOR], [0, 0, 1, 1, 0, 1, 2])
    assert group.bundles == [{"CPU": 4.0, "GPU": 2.0}] * 2 + [{"CPU": 1.0}]
    assert places == [0, 0, 1, 1, 0, 1, 2]
    wide = {"num_cpus": 1.0, "num_gpus": 0.0, "gpus": [0, 1, 2, 3, 4]}
    with pytest.raises(BadInput, match=r"(?s)inference\.tensor_parallel.*'GPU': 5.* no node has more than .*4\.0"):
        reserved([ACTOR, wide], [1, 0])


@pytest.mark.parametrize(
    ("shards", "replicate", "gpus_per_node", "places"),
    [
        (3, 1, None, [0, 1, 2]),
        (8, 2, 8, [0] * 8 + [1] * 8),
        (2, 4, 4, [0] * 4 + [1] * 4),
        (3, 1, 2, [0, 0, 1]),
        (2, 1, 8, [0, 0]),
    ],
)
def test_places_of_a_run(shards: int, replicate: int, gpus_per_node: int | None, places: list[int]) -> None:
    planned = plan(shards=shards, trainer={"replicate": replicate, "gpus_per_node": gpus_per_node})
    assert planned.places == [*places, places[-1] + 1, places[-1] + 2], "the replica, the orchestrator"


class Ended:
    """A process of Ray that ended with this exit code; None: it lives."""

    def __init__(self, code: int | None) -> None:
        self.returncode, self.process = code, self

    def poll(self) -> int | None:
        return self.returncode


@pytest.mark.parametrize(
    ("raylet", "error", "expected"),
    [
        (-9, RoomFailed("trainer_0 died"), ServicesLost),
        (-9, RaySystemError("broken pipe"), ServicesLost),
        (None, RoomFailed("trainer_0 died"), RoomFailed),
        (-9, BadInput("wrong"), BadInput),
    ],
)
def test_what_a_block_raises_when_rays_services_have_ended(
    raylet: int | None, error: Exception, expected: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = {"gcs_server": [Ended(None)], "raylet": [Ended(raylet)], "log_monitor": [Ended(1)]}
    monkeypatch.setattr(ray._private.worker, "_global_node", SimpleNamespace(all_processes=processes))
    with pytest.raises(expected) as raised, cluster._local_cluster(1):
        raise error
    assert type(raised.value) is expected
    if expected is ServicesLost:
        assert str(raised.value).endswith("and all actors with them: raylet (exit code -9)")


@pytest.mark.parametrize("failures", [1, 2])
def test_ray_that_does_not_start_is_started_twice_and_then_an_error_for_people(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray raises Exception itself when its services take longer than 30 s, as they do on a machine with a high load.
    The services that the first attempt left over have ended before the second."""
    services: list[subprocess.Popen[bytes]] = []

    def init(**_: Any) -> None:
        assert all(service.poll() is not None for service in services)
        if len(services) < failures:
            services.append(subprocess.Popen(["sleep", "60"]))
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(cluster, "SHUTDOWN_S", 0.1)
    monkeypatch.setattr(cluster.ray, "init", init)
    message = r"did not start on this machine in 2 attempts: The current node timed out during startup. If the machine"
    with pytest.raises(RoomFailed, match=message) if failures == 2 else nullcontext(), cluster._local_cluster(1):
        pass
    assert "It is started once more" in caplog.text
    assert all(service.poll() is not None for service in services)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chosen", [None, "/of/the/user"])
def test_compiled_code_outlives_a_run(chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch itself finds the places of its cache and of Triton's. (vLLM's default is no temporary directory.)"""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # for it to be set back
    if chosen is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    else:
        chosen = str(tmp_path) + chosen
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    places: list[str] = []

    def look_at_a_model(_words: list[str], _console: Console) -> None:
        places.append(cache_dir())  # as transformers' classes do when they are imported

    assert run_command(look_at_a_model, []) == EXIT_OK, "before there is a cluster"
    with cluster._local_cluster(1):
        directory = os.environ["TMPDIR"]
        places += [cache_dir(), triton_cache_dir(0)]
    assert not Path(directory).exists()
    expected = chosen or str(tmp_path / "cache/trireme/torchinductor")
    assert places == [expected, expected, f"{expected}/triton/0"]


GROUP = SimpleNamespace(id="group")


def place(bundle: int) -> dict[str, Any]:
    return {"scheduling_strategy": SimpleNamespace(placement_group=GROUP, placement_group_bundle_index=bundle)}


class TestAwaitPlaces:
    """A group of two shards and an orchestrator, whose second shard was on a node that is lost."""

    OPTIONS: ClassVar = {"trainer": [place(0), place(1)], "orchestrator": [place(2)]}

    @pytest.fixture(autouse=True)
    def _clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        self.now, self.nodes, self.notices = 0.0, {0: "a", 1: "", 2: "a"}, list[tuple[list[str], float]]()
        monkeypatch.setattr(cluster, "placement_group_table", self._table)
        nodes = [{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": True}, {"NodeID": "lost", "Alive": False}]
        monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)
        monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _table(self, _group: object) -> dict[str, Any]:
        self.looks += 1
        is_whole = {"", "lost"}.isdisjoint(self.nodes.values())
        return {"state": "CREATED" if is_whole else "RESCHEDULING", "bundles_to_node_id": self.nodes}

    @pytest.mark.parametrize("node", ["", "lost"])
    def test_only_the_bundles_of_the_lost_node_have_no_place(self, node: str) -> None:
        self.nodes[1] = node
        places = [*self.OPTIONS["trainer"], *self.OPTIONS["orchestrator"]]
        assert cluster.PlacePool.are_there(places) == [True, False, True]
        assert self.looks == 1, "places of one group are looked at together"

    def test_a_lost_place_is_waited_for_until_its_time_is_over(self) -> None:
        def progress(names: list[str], waited_s: float) -> None:
            self.notices.append((names, waited_s))
            if waited_s == 40.0:
                self.nodes[1] = "b"

        cluster.await_places(self.OPTIONS, 60.0, progress)
        assert self.notices[0] == (["a place in the cluster for the trainer (1 of 2 actors)"], 0.0)
        assert self.notices[-1][1] == 40.0
        self.nodes[1] = ""
        with pytest.raises(RoomFailed, match=r"a place .* trainer \(1 of 2 actors\) within 60 s \(timeouts\.place_s"):
            cluster.await_places(self.OPTIONS, 60.0, lambda *_: None)
        self.nodes[1] = "a"
        cluster.await_places(self.OPTIONS, 60.0, lambda *_: pytest.fail("it waited"))
