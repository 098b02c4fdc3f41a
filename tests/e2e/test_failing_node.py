"""Six replicas of a run on three nodes, of which one fails again and again, supervised through Ray.

The replicas are actors without engines, and the nodes are places on this machine that the actors name in their
heartbeats.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from inference import handle as group_module
from inference.handle import InferenceHandle
from trireme.config import Config
from trireme.core.errors import LimitReached
from trireme.core.sampler import Heartbeat
from trireme.process.ray_cluster import PlacePool, reserve
from trireme.supervision.roster import Roster
from trireme.supervision.status import LOCK, ScaleRequests
from trireme.supervision.supervisor import ElasticReplicas, Supervisor

DEADLINE_S = 200.0
REPLICAS, PER_NODE, FAILING = 6, 2, 1
"""The node that fails is the second: it has two places."""
LIVES_S = 1.0
"""Seconds for which a replica on the failing node lives: it answers some heartbeats."""
WINDOW_S = 25.0
RESOURCES = {"num_cpus": 0.1, "num_gpus": 0.0}


class Stub:
    """A replica on a node; while the file `fails` is there, it dies soon after its start."""

    def __init__(self, node: int, fails: str) -> None:
        self.node, self.fails = node, fails

    def start(self) -> None:
        if self.node == FAILING and os.path.exists(self.fails):
            threading.Timer(LIVES_S, os._exit, (1,)).start()

    def heartbeat(self) -> Heartbeat:
        return Heartbeat((os.getpid(),), f"node-{self.node}")

    def has_lost_engine(self) -> bool:
        return False

    def abort_all(self) -> None: ...

    def stop(self) -> None: ...


class Never:
    """Answers nothing."""

    async def wait(self) -> None:
        await asyncio.sleep(3600)


class User:
    """The orchestrator, which agrees to all."""

    def __init__(self) -> None:
        self._never = ray.remote(Never).options(num_cpus=0).remote()

    def join(self, _index: int, _client: Any) -> Any:
        return ray.put(None)

    def leave(self, _index: int, _reason: str) -> Any:
        return ray.put(None)

    def drain(self, _index: int, _timeout_s: float) -> Any:
        return ray.put(None)

    def next_failure(self) -> Any:
        return self._never.wait.remote()


@contextmanager
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, min_replicas: int) -> Iterator[Supervisor]:
    """All replicas serve, of which `min_replicas` are needed; the file `fails` is there from then on."""
    fails = tmp_path / "fails"

    def create(_config: Config, _index: int, options: dict[str, Any], _log_dir: None) -> Any:
        place = options["scheduling_strategy"].placement_group_bundle_index
        return ray.remote(Stub).options(**options).remote(place // PER_NODE, str(fails))

    monkeypatch.setattr(group_module, "_create", create)
    (tmp_path / LOCK).touch()
    config = Config.model_validate(
        {
            "model": {"name": "m"},
            "env": {"id": "sort"},
            "orchestrator": {"batch_size": 4},
            "inference": {"sampling": {"max_tokens": 4}, "replicas": REPLICAS},
            "cluster": {"max_restarts": 1, "restart_window_s": WINDOW_S, "min_replicas": min_replicas},
        }
    )
    with ExitStack() as ending:
        _, options = reserve([RESOURCES] * REPLICAS, DEADLINE_S, lambda *_: None, ending)
        group = InferenceHandle.start(config, options, None)
        ending.callback(group.stop)
        places = PlacePool(RESOURCES, ending)
        elastic = ElasticReplicas(config, group, ScaleRequests(tmp_path), places, lambda _number: None)
        supervisor = ending.enter_context(Supervisor(config, Roster(time.time), "core", elastic))
        supervisor.expect()
        supervisor.attach(serving=User())
        supervisor.await_replicas(tmp_path, lambda _names, _waited_s: None)
        until(lambda: all(part.node for part in supervisor.roster.parts), supervisor)
        fails.touch()
        for replica in range(FAILING * PER_NODE, (FAILING + 1) * PER_NODE):
            ray.kill(group.replicas[replica])
        yield supervisor


def until(is_so: Callable[[], bool], supervisor: Supervisor) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        supervisor.check()
        assert time.monotonic() < deadline, (supervisor.roster.parts, supervisor.roster.incidents)
        time.sleep(0.1)


def number(supervisor: Supervisor) -> int:
    """How many replicas serve."""
    return sum(part.serves for part in supervisor.roster.parts)


def left_out(supervisor: Supervisor) -> list[str]:
    said = f"is left out (node node-{FAILING})"
    return [incident.part for incident in supervisor.roster.incidents if said in incident.what]


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_goes_on_without_a_node_that_fails_and_takes_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch, min_replicas=1) as supervisor:
        until(lambda: len(left_out(supervisor)) >= PER_NODE, supervisor)
        assert set(left_out(supervisor)[:PER_NODE]) == {"inference_2", "inference_3"}
        assert number(supervisor) == REPLICAS - PER_NODE, "no other replica was touched"
        (tmp_path / "fails").unlink()
        until(lambda: number(supervisor) == REPLICAS, supervisor)
        assert {part.node for part in supervisor.roster.parts} == {f"node-{n}" for n in range(REPLICAS // PER_NODE)}


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_that_needs_the_node_ends_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, monkeypatch, min_replicas=REPLICAS - 1) as supervisor:
        with pytest.raises(LimitReached, match=r"failed 2 times .*cluster\.max_restarts"):
            until(lambda: False, supervisor)
        assert len(left_out(supervisor)) == 1
        assert number(supervisor) == REPLICAS - PER_NODE
