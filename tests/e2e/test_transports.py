"""A broadcast brings what was published, over real training: models, shards, ranks of a replica and dtypes in pairs.

A trainer broadcasts three of four versions; the fourth is fetched from its shards. Replicas prove what they have loaded
by the version's digest. Two halves of an orthogonal array have each pair of values. A row of experts, one of adapters
and few updates always run (whole weights in float32: test_resume.py). In long runs replicas are lost and join: each
moment of an offer is in the half where it meets all models, and both values of all else. At the end of each run no
socket and no thread is left but those of the last group, and a shard dies while it sends.
"""

import asyncio
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
from inference_support import START_S, prompt_of, random_model, request
from ray import cloudpickle
from replica_support import joined
from run_support import shm_left_since, taken
from trainer_support import make_batch

from inference.handle import InferenceHandle
from trainer.handle import TrainerHandle
from trireme.config import Config
from trireme.core.errors import RoomFailed
from trireme.core.transport import Offer, Session
from trireme.core.types import AdamParams, WeightIdentity
from trireme.core.weights import PublishedWeights
from trireme.process.waits import get, get_all

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not find this module
FAMILIES = {"tied": ("qwen3", True), "untied": ("qwen3", False), "experts": ("qwen3_moe", False)}
MODELS = ("tied", "untied", "experts", "lora")
BUCKET_BYTES = 2**16
SENT_S = 100.0
"""Time limit of a broadcast, a tenth of which replicas have to be ready: more than they need on a busy machine."""
LENGTHS = (9, 5, 12, 7)
LEARNING_RATE = 1e-4
"""It is small: with 1e-3 the canary of random experts in bfloat16 passed its bound after 100 steps."""
LOST = 1
"""The replica that is lost; replica 0 is before it in its group."""


@dataclass(frozen=True)
class Row:
    """A row of the array."""

    model: str
    shards: int
    ranks: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.model}-{self.shards}_shards-{self.ranks}_ranks-{self.dtype}"


def half(which: int) -> list[Row]:
    """Returns four rows. Bits a and b choose the model, c the shards; the other columns are sums of these."""
    rows = []
    for a, b in product((0, 1), repeat=2):
        c = (a + b + which) % 2
        rows.append(Row(MODELS[2 * a + b], 1 + c, 1 + (a + c) % 2, ("float32", "bfloat16")[(b + c) % 2]))
    return rows


MOMENTS = (
    ("offer=kill", "ready=stop", "bucket=kill", "finish=stop"),
    ("offer=stop", "ready=kill", "bucket=stop", "finish=kill"),
)
"""What replica LOST meets in the rows of each half, and its successors after it."""
AFTER = (20, 30, 40, 50)
"""Versions that each of them is offered until then: more than those before it, which pass the same points."""
FEW, JOINS_AT, UPDATES = 6, 170, 200
"""Versions: a replica joins at one of them, in the first half."""


class Rooms:
    """A trainer, and replicas that take what it publishes."""

    def __init__(self, row: Row, replicas: int, moments: Sequence[str], directory: Path, started: ExitStack) -> None:
        """`started` stops at its end what was started here."""
        self.logs, self.once = directory / "logs", directory / "once"
        self.once.mkdir()
        random_model(*FAMILIES.get(row.model, FAMILIES["untied"]), seed=0).save_pretrained(directory / "model")
        config = config_of(row, directory / "model")
        self.trainer = TrainerHandle.start(config, [{"num_cpus": 0.5}] * row.shards, self.logs, 1, self._offer, SENT_S)
        started.callback(self.trainer.stop)
        await_start(self.trainer)
        self.doors = listening(self.in_shards(pid_of))
        """The ports of the shards' stores, and of Ray's servers in them: there is no group yet."""
        (buckets,) = set(self.in_shards(lay_out_small))
        self.options = {"num_cpus": 0.5, "runtime_env": {"env_vars": self._environment(moments, buckets)}}
        self.replicas = InferenceHandle.start(config, [self.options] * replicas, self.logs)
        started.callback(self.replicas.stop)
        await_start(self.replicas)
        self.offers = True
        self.newest: WeightIdentity | None = None
        self.servers: Mapping[int, int] = {}  # of the replicas in the last session
        self.threads = self.in_shards(threads_of_groups)

    def _environment(self, moments: Sequence[str], buckets: int) -> dict[str, str]:
        """Arms the points at which replica LOST and its successors are lost."""
        faults = []
        for moment, versions in zip(moments, AFTER, strict=False):
            point, _, action = moment.partition("=")
            passage = buckets * (versions - 1) + 2 if point == "bucket" else versions
            faults.append(f"transport.{point}[{LOST}]@{passage}={action}")
        once = {"TRIREME_FAULT_ONCE": str(self.once)} if faults else {}
        return {"OMP_NUM_THREADS": "1", "TRIREME_FAULTS": ",".join(faults), **once}

    def in_shards(self, function: Callable[[Any], Any]) -> list[Any]:
        """Returns what `function` returns for the actor of each shard."""
        refs = [actor.__ray_call__.remote(function) for actor in self.trainer._actors_R]
        return get_all(refs, owners=["a shard"] * len(refs), timeout_s=60)

    async def run(self, updates: int, *, joins_at: int | None = None) -> None:
        """Trains and publishes, and replaces what is lost; then a shard dies in the middle of a version."""
        self.router = self.replicas.router_factory(self.replicas.replica_set())()
        self.loop = asyncio.get_running_loop()
        for version in range(updates):
            await self._train(version)
            await self._publish(version)
            if version == joins_at:
                await self._join(self.replicas.add(self.options), "the joiner")
        await self._lose_a_shard(updates)

    async def _train(self, version: int) -> None:
        """Takes the step before a version, which changes the weights."""
        batch = make_batch(LENGTHS, seed=version)
        await asyncio.to_thread(self.trainer.forward_backward, batch, "importance_sampling")
        await asyncio.to_thread(self.trainer.optim_step, AdamParams(LEARNING_RATE), float(sum(LENGTHS)))

    async def _publish(self, version: int) -> None:
        """Publishes a version. Each fourth is sent to nobody, and the replicas fetch it from the shards."""
        if version % 4 == 3:
            published = await asyncio.to_thread(self.trainer.publish_weights, version)
        else:
            published = await self._send(version)
            self.servers = published.source.session.servers
        assert published.identity != self.newest
        reports = await self.router.source.update(published)
        self.newest = published.identity
        assert {report.identity for report in reports} == {published.identity}
        got, all_of_them = {report.replica for report in reports}, set(self.replicas.indices)
        assert got >= all_of_them - {LOST}, "those that are not lost continue"
        if got != all_of_them:
            self.router.source.leave(LOST, "it was lost")
            self.replicas.replace(LOST)
            await self._join(LOST, "the successor")

    def _offer(self, offer: Offer) -> Session:
        if not self.offers:
            return Session(offer.attempt, 0, {})
        return asyncio.run_coroutine_threadsafe(self.router.source.offer(offer), self.loop).result(2 * SENT_S)

    async def _send(self, version: int) -> PublishedWeights:
        """Publishes a version by a broadcast. Where a machine stands still for seconds, all replicas are late for an
        offer, and nothing is sent; then it is offered once more."""
        self.offers = True
        sent = await asyncio.to_thread(self.trainer.publish_weights, version)
        if not sent.source.session.members:
            sent = await asyncio.to_thread(self.trainer.publish_weights, version)
        self.offers = False
        return sent

    async def _join(self, index: int, owner: str) -> None:
        await asyncio.to_thread(get, self.replicas.ready_ref(index), owner=owner, timeout_s=START_S)
        await joined(self.router.source, index, self.replicas.client(index))

    async def _lose_a_shard(self, version: int) -> None:
        """Kills the last shard while it gathers and sends. The replicas keep the version that they have, and sample."""
        self.offers = True
        await self._train(version)
        assert self.in_shards(sending) == [[] for _ in self.trainer._actors_R], "nothing is left of what was sent"
        for now, before in zip(self.in_shards(threads_of_groups), self.threads, strict=True):
            assert now - before <= 1, "of the last group"
        assert self._wires() <= Counter((server, replica) for replica, server in self.servers.items())
        last = self.trainer._actors_R[-1]
        get(last.__ray_call__.remote(die_in_between), owner="a shard", timeout_s=60)
        with pytest.raises(RoomFailed, match=f"trainer shard {len(self.trainer._actors_R) - 1}"):
            await asyncio.to_thread(self.trainer.publish_weights, version)
        requests = [request(f"r{i}", prompt_of(6, i), 8) for i in range(4 * len(self.replicas.indices))]
        for answer in await asyncio.gather(*map(self.router.sample, requests)):
            assert {span.identity for span in answer.spans} == {self.newest}
        assert self.router.acknowledged().keys() == set(self.replicas.indices)

    def _wires(self) -> Counter[tuple[int, int]]:
        """Counts the connections between a shard and the engine of a replica, without those at the shards' stores and
        those of Ray. (A replica's actor has some of Ray's, when it has taken a version on demand. An engine that it
        starts later is forked from it and has these open too, also when the actor has closed them.)"""
        shards = {pid: rank for rank, pid in enumerate(self.in_shards(pid_of))}
        processes = {index: self.pids(index) for index in self.replicas.indices}
        doors = self.doors | listening({pids[0] for pids in processes.values()})
        engines = {pid: index for index, pids in processes.items() for pid in pids[1:]}
        connections = [connection for connection in psutil.net_connections("tcp") if connection.raddr]
        owner = {connection.laddr: connection.pid for connection in connections if connection.pid in engines}
        return Counter(
            (shards[connection.pid], engines[owner[connection.raddr]])
            for connection in connections
            if connection.pid in shards
            and connection.raddr in owner
            and not doors & {connection.laddr.port, connection.raddr.port}
        )

    def pids(self, index: int) -> Sequence[int]:
        """Returns the processes of a replica, its actor's first."""
        return list(get(self.replicas.heartbeat_ref(index), owner="a replica", timeout_s=60).pids)


def await_start(rooms: TrainerHandle | InferenceHandle) -> None:
    references, owners = rooms.ready_refs()
    get_all(references, owners=owners, timeout_s=START_S)


def listening(pids: Collection[int]) -> set[int]:
    """Returns the ports at which these processes listen."""
    connections = (
        connection for connection in psutil.net_connections("tcp") if connection.status == psutil.CONN_LISTEN
    )
    return {connection.laddr.port for connection in connections if connection.pid in pids}


def lay_out_small(actor: Any) -> int:
    from trainer.lora import published_adapters
    from trainer.model import published_units
    from trireme.transports.packing import lay_out

    shard = actor._shard
    shapes = published_adapters if shard._adapter else published_units
    shard.layout = lay_out(shapes(shard._model, shard._sharding.dtype), BUCKET_BYTES)
    return len(shard.layout.sizes)


def sending(actor: Any) -> list[str]:
    """Returns the threads of a shard that still send."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("broadcast of")]


def threads_of_groups(actor: Any) -> int:
    """Counts the threads of gloo's groups in a shard, those of FSDP among them."""
    return sum(task.read_text().strip() == "pt_gloo_runloop" for task in Path("/proc/self/task").glob("*/comm"))


def pid_of(actor: Any) -> int:
    return os.getpid()


def die_in_between(actor: Any) -> None:
    """Has a shard die when it has gathered a part of the next version."""
    plain = actor._sender.send

    def send(version: int, layout: Any, units: Any, session: Any) -> Any:
        def some() -> Iterator[Any]:
            yield next(units)
            os.kill(os.getpid(), signal.SIGKILL)

        return plain(version, layout, some(), session)

    actor._sender.send = send


def config_of(row: Row, model: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"name": str(model), "dtype": row.dtype, "max_seq_len": 128},
            "orchestrator": {"batch_size": 2, "max_steps_off_policy": 1},
            "env": {"id": "sort"},
            "trainer": {"shards": row.shards, **({"lora": {"rank": 8}} if row.model == "lora" else {})},
            "inference": {
                "transport": "broadcast",
                "tensor_parallel": row.ranks,
                "sampling": {"max_tokens": 8},
                "memory_gb": 0.05,
            },
            "timeouts": {"update_s": 60, "step_s": 300},
            "cluster": {"device": "cpu"},
        }
    )


@contextmanager
def rooms_of(row: Row, replicas: int, moments: Sequence[str], directory: Path) -> Iterator[Rooms]:
    """Starts all of it. Nothing is left of it afterwards, also where it could not start: other tests are to have the
    cluster."""
    shared_memory, pids = set(os.listdir("/dev/shm")), list[int]()
    with ExitStack() as started:
        rooms = Rooms(row, replicas, moments, directory, started)
        yield rooms
        pids += [pid for index in rooms.replicas.indices for pid in rooms.pids(index)]
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    assert shm_left_since(shared_memory) == set()


@pytest.mark.parametrize("row", [half(0)[3]], ids=str)  # the others: below
def test_a_few_updates(ray_cluster: str, tmp_path: Path, row: Row) -> None:
    with rooms_of(row, 1, (), tmp_path) as rooms:
        asyncio.run(rooms.run(FEW))
        assert len(taken(rooms.logs, 0, "as it was broadcast")) >= 3, "most of those that were"


@pytest.mark.long
@pytest.mark.parametrize(("which", "row"), [(which, row) for which in (0, 1) for row in half(which)], ids=str)
def test_many_updates_with_replicas_that_are_lost_and_join(
    ray_cluster: str, tmp_path: Path, which: int, row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second half all are as on nodes of their own: each of two shards sends to a replica."""
    if which == 1:
        monkeypatch.setattr("inference.offers.servers_of", lambda nodes, _: {i: i % row.shards for i in nodes})
    with rooms_of(row, 2, MOMENTS[which], tmp_path) as rooms:
        asyncio.run(rooms.run(UPDATES, joins_at=JOINS_AT if which == 0 else None))
        assert len(os.listdir(rooms.once)) == len(MOMENTS[which])
        assert len(taken(rooms.logs, 0, "as it was broadcast")) > UPDATES / 2
