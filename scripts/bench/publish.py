"""Publishes a model of 100 million parameters from two shards to two replicas, and does each part of it bare.

    python scripts/bench/publish.py [--transport object_store] [--repeats 5]

Real shards over gloo and real vLLM replicas on CPUs, in bfloat16, without requests in flight. *Published* is the time
from `publish_weights` until every replica has proved the version: gather, digest, send, receive, load, canary. Bare
parts run after each of them, in the same processes, groups and on the same cores, in turn:

- *gather*: FSDP's `unshard` and `reshard` of each unit, by all shards.
- *broadcast*: torch's broadcast over gloo of as many bytes, in the group in which they are published: on one machine
  shard 0 serves all replicas.
- *cast*: each shard's own part of the master weights from float32 to bfloat16.
- *reload*: vLLM's layerwise reload of as many bytes that are in memory already, in both engines.

`ratio_without_canaries` leaves out the traced time by which the canaries made a publication longer: on the shard that
waited least for the others, and the mean of the replicas. They are 16 tokens through the whole model.

CPU seconds count all processes of the run, Ray's included, while it published. The last line of the output is the
result, a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from _common import DEADLINE_S, Result, cpu_by_room, median
from _rooms import let_actors_import_benchmarks
from checkpoint import make_model

from trireme.process.environ import prepare_ray_environment

if TYPE_CHECKING:
    from inference.handle import InferenceHandle
    from trainer.handle import TrainerHandle
    from trireme.config import Config
    from trireme.core.transport import Offer, Session

SHARDS = REPLICAS = 2
TARGETS = {"object_store": 1.5, "broadcast": 1.3, "ipc": 1.3}
AGAINST = {
    "object_store": ("gather", "cast", "reload"),
    "broadcast": ("gather", "broadcast", "reload"),
    "ipc": ("gather", "cast", "reload"),
}
WARM_UP = 2
BF16_FILE = "bf16.safetensors"


@dataclass
class Measured:
    """Seconds of each round; `parts_s` of each bare part, `spans_s` of each span that a process traced."""

    published_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    parts_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def config(model: Path, transport: str, shards: int, replicas: int, requests: int, answer: int) -> Config:
    """Returns a run's configuration, for n requests in flight on each replica, with answers of m tokens."""
    from trireme.config import Config

    return Config.model_validate(
        {
            "model": {"name": str(model), "dtype": "bfloat16"},
            "orchestrator": {"batch_size": 2},
            "env": {"id": "sort"},
            "trainer": {"shards": shards},
            "inference": {
                "replicas": replicas,
                "transport": transport,
                "sampling": {"max_tokens": answer},
                "max_num_seqs": requests,
                "memory_gb": 0.01 + 0.005 * requests,
            },
            "cluster": {"device": "cpu"},
        }
    )


@contextmanager
def rooms(cfg: Config, directory: Path) -> Iterator[tuple[TrainerHandle, InferenceHandle]]:
    """Starts shards and replicas in a Ray cluster of their own, each with one thread that computes. Call it once
    the environment is prepared."""
    import ray
    from _publish_rooms import ReplicaActor, ShardActor

    import inference.handle
    import trainer.handle
    from trireme.process import waits

    inference.handle.ReplicaActor = ReplicaActor  # type: ignore[misc]
    trainer.handle.ShardActor = ShardActor  # type: ignore[misc, assignment]
    ray.init(
        address="local",
        num_cpus=cfg.trainer.shards + cfg.inference.replicas,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=4 * 2**30,
        _temp_dir=str(directory / "ray"),
    )
    logs = directory / "run" / "logs" / "attempt_1"
    shards = trainer.handle.TrainerHandle.start(cfg, [{"num_cpus": 1}] * cfg.trainer.shards, logs)
    replicas = inference.handle.InferenceHandle.start(cfg, [{"num_cpus": 1}] * cfg.inference.replicas, logs)
    try:
        for group in (shards, replicas):
            refs, names = group.ready_refs()
            waits.get_all(refs, owners=names, timeout_s=DEADLINE_S)
        yield shards, replicas
    finally:
        replicas.stop()
        shards.stop()
        ray.shutdown()


class Bench:
    """Publishes versions, and does the parts of it bare."""

    def __init__(self, shards: TrainerHandle, replicas: InferenceHandle, file: Path) -> None:
        self._shards = shards
        self._replicas = replicas
        self._file = str(file)
        self._nbytes = file.stat().st_size
        self._port = _free_port()
        self.measured = Measured()

    async def run(self, repeats: int) -> Measured:
        router = self._replicas.router_factory(self._replicas.replica_set())()
        offer_by(self._shards, router)
        for version in range(WARM_UP + repeats):
            if version == WARM_UP:
                self.measured = Measured()
            await self._publish(router, version)
            for part in ("gather", "broadcast", "cast", "reload"):
                await self._bare(part)
            m = self.measured
            parts = ", ".join(f"{name} {values[-1]:.2f}" for name, values in m.parts_s.items())
            print(f"published {m.published_s[-1]:.2f} s, {m.cpu_s[-1]:.2f} CPU s (load {m.load[-1]:.1f}); {parts}")
        return self.measured

    async def _publish(self, router: Any, version: int) -> None:
        before = all_cpu_s()
        started = time.monotonic()
        published = await asyncio.to_thread(self._shards.publish_weights, version)
        sent = time.monotonic()
        reports = await router.source.update(published)
        self.measured.published_s.append(time.monotonic() - started)
        self.measured.cpu_s.append(all_cpu_s() - before)
        self.measured.load.append(os.getloadavg()[0])
        parts = self.measured.parts_s
        parts["publish_weights"].append(sent - started)
        parts["update"].append(max(report.seconds for report in reports))
        parts["pause"].append(max(report.pause_s for report in reports))

    async def _bare(self, part: str) -> None:
        """Does a part in all processes that take part in it, at once."""
        before = all_cpu_s()
        if part == "reload":
            took = await self._in_engines("bare_reload", [(self._file,)] * REPLICAS)
        elif part == "broadcast":
            took = await self._broadcast()
        else:
            call: Any = self._shards._call  # with a verb that only these shards have
            took = await asyncio.to_thread(call, f"bare_{part}")
        seconds = max(end for _, end in took) - min(start for start, _ in took)
        self.measured.parts_s[part].append(seconds)
        self.measured.parts_s[f"{part}, CPU"].append(all_cpu_s() - before)

    async def _broadcast(self) -> list[tuple[float, float]]:
        size = 1 + REPLICAS
        root = self._shards._actors_R[0].call.remote("bare_root", self._port, size, self._nbytes)
        members = [(self._port, rank, size, self._nbytes) for rank in range(1, size)]
        return [*await self._in_engines("bare_member", members), await root]

    async def _in_engines(self, part: str, args: Sequence[tuple[object, ...]]) -> list[tuple[float, float]]:
        handles: list[Any] = [self._replicas.replicas[i] for i in self._replicas.indices]
        return await asyncio.gather(*(h.bare.remote(part, *values) for h, values in zip(handles, args, strict=True)))


def offer_by(shards: TrainerHandle, router: Any) -> None:
    """Has the router asked, on its own loop, who takes part in sending a version."""
    loop = asyncio.get_running_loop()

    def offering(offer: Offer) -> Session:
        return asyncio.run_coroutine_threadsafe(router.source.offer(offer), loop).result(DEADLINE_S)

    shards._offering = offering


def all_cpu_s() -> float:
    """CPU seconds so far of this process and all below it."""
    return sum(sum(seconds) for seconds in cpu_by_room(psutil.Process()).values())


def traced(directory: Path, first: int) -> dict[str, list[list[float]]]:
    """Returns the seconds of all spans that shards and replicas traced, by room and name, from the `first` of each name
    on: a list for each process."""
    durations: dict[str, list[list[float]]] = defaultdict(list)
    for file in sorted((directory / "run" / "trace").rglob("*.json")):
        room = file.stem.rpartition("_")[0]
        durations_of_run = defaultdict[str, list[float]](list)
        for line in file.read_text().splitlines():
            event = json.loads(line.strip("[,") or "{}")
            if event.get("ph") == "X":
                durations_of_run[event["name"]].append(round(event["dur"] / 1e6, 3))
        for name, values in durations_of_run.items():
            durations[f"{room} {name}"].append(values[first:])
    return durations


def result(measured: Measured, spans: dict[str, list[list[float]]], transport: str, nbytes: int, load: float) -> Result:
    parts = measured.parts_s
    against = AGAINST[transport]
    bare = [sum(seconds) for seconds in zip(*(parts[name] for name in against), strict=True)]
    bare_cpu = [sum(seconds) for seconds in zip(*(parts[f"{name}, CPU"] for name in against), strict=True)]
    ratio = median([p / b for p, b in zip(measured.published_s, bare, strict=True)])
    computed = [min(seconds) for seconds in zip(*spans["trainer canary"], strict=True)]
    proved = [statistics.mean(seconds) for seconds in zip(*spans["inference canary"], strict=True)]
    rest = [p - c - q for p, c, q in zip(measured.published_s, computed, proved, strict=True)]
    return Result(
        name=f"publish_{transport}",
        value=median(measured.published_s),
        unit="s from publish_weights until all replicas have proved the version (median)",
        ratio=ratio,
        target=TARGETS[transport],
        holds=ratio <= TARGETS[transport],
        against=f"bare {' + '.join(against)}",
        detail={
            "weights_mb": round(nbytes / 1e6, 1),
            "shards": SHARDS,
            "replicas": REPLICAS,
            "load_before": round(load, 2),
            "load": [round(seconds, 1) for seconds in measured.load],
            "published_s": [round(seconds, 3) for seconds in measured.published_s],
            "bare_s": [round(seconds, 3) for seconds in bare],
            "cpu_s": [round(seconds, 2) for seconds in measured.cpu_s],
            "bare_cpu_s": [round(seconds, 2) for seconds in bare_cpu],
            "ratio_without_canaries": median([r / b for r, b in zip(rest, bare, strict=True)]),
            "ratio_by_cpu": median([p / b for p, b in zip(measured.cpu_s, bare_cpu, strict=True)]),
            "parts_s": {name: median(values) for name, values in parts.items()},
            "spans_s": {
                name: median([s for run_spans in seconds for s in run_spans])
                for name, seconds in spans.items()
                if seconds[0]
            },
        },
    )


def prepare() -> None:
    """Lets actors import this directory's modules, and compute with one thread."""
    let_actors_import_benchmarks()
    prepare_ray_environment(None, 1, deterministic=False)


def save_in_bf16(model: Path, file: Path) -> None:
    """Writes the model's tensors in bfloat16 into `file`."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, file)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=list(TARGETS), default="object_store", help="default: object_store")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds (default: 5)")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("expected at least 1 repeat")
    load = os.getloadavg()[0]
    prepare()
    with tempfile.TemporaryDirectory(prefix="tr-") as temp:
        directory = Path(temp)
        make_model(directory / "model")
        save_in_bf16(directory / "model", directory / BF16_FILE)
        cfg = config(directory / "model", args.transport, SHARDS, REPLICAS, requests=4, answer=8)
        with rooms(cfg, directory) as (shards, replicas):
            bench = Bench(shards, replicas, directory / BF16_FILE)
            measured = asyncio.run(bench.run(args.repeats))
        spans = traced(directory, WARM_UP)
        nbytes = (directory / BF16_FILE).stat().st_size
    result(measured, spans, args.transport, nbytes, load).print()


if __name__ == "__main__":
    main()
