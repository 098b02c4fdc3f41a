"""Tokens/s of a replica while published bytes arrive, over its rate before.

    python scripts/bench/publish_sampling.py [--transport object_store] [--repeats 8] [--requests 4]
        [--spread 3]

One shard publishes a bfloat16 model of 100 million parameters to one replica on CPUs, which has `--requests` sequences
in flight. *Before* is some seconds in which the trainer is idle; *meanwhile* is from `publish_weights` until the engine
is asked to pause. The engine computes with one thread and may use all cores; all others (shard, actors, Ray, this
process) share the last core, so that a core is free for it.

On two cores the shard's work for a version fills that core, and none is left for receiving. With `--spread` the shard
gathers and sends over so many seconds and sleeps in between, as behind a slow wire: then a core is free for receiving.

CPU seconds of receiving are those of the replica's two processes meanwhile, less what they take for sampling: as much
per token as before. The pause is that of `UpdateReport`. The last line of the output is the result, a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from _common import Result, cpu_by_room, median
from _rooms import all_processes, threads_of
from checkpoint import make_model
from publish import TARGETS, config, offer_by, prepare, rooms

from trireme.core.types import SampleRequest, SamplingParams

if TYPE_CHECKING:
    from inference.handle import InferenceHandle
    from trainer.handle import TrainerHandle

TARGET = 0.9
PROMPT, ANSWER = 16, 200
BEFORE_S = 3.0
REPLICA = ("engine core", "replica actor")
WARM_UP = 2


@dataclass
class Measured:
    """Of each version: tokens/s before and meanwhile, the seconds of that, of the pause, and the CPU seconds of
    receiving and of the shard meanwhile."""

    before: list[float] = field(default_factory=list)
    meanwhile: list[float] = field(default_factory=list)
    meanwhile_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    receiving_cpu_s: list[float] = field(default_factory=list)
    shard_cpu_s: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)


def tokens_between(steps: Sequence[tuple[float, int]], since: float, until: float) -> tuple[int, float]:
    """Returns the tokens that came between two times, and the seconds from the first step there to the last."""
    inside = [(at, tokens) for at, tokens in steps if since <= at <= until]
    if len(inside) < 2:
        raise RuntimeError(f"only {len(inside)} steps ended within {until - since:.2f} s: too few to measure a rate")
    return sum(tokens for _, tokens in inside[1:]), inside[-1][0] - inside[0][0]


def pin_others(driver: psutil.Process) -> None:
    """Binds all but the engine's process to the last core."""
    last = (os.cpu_count() or 1) - 1
    for process, room in all_processes(driver):
        for thread in threads_of(process):
            cores = range(last + 1) if room == "engine core" else {last}
            try:
                os.sched_setaffinity(thread, cores)
            except ProcessLookupError:  # it ended meanwhile
                continue


def room_cpu_s(*rooms: str) -> float:
    """CPU seconds so far of the processes of some rooms."""
    found = cpu_by_room(psutil.Process())
    return sum(sum(found[room]) for room in rooms)


def replica_cpu_s() -> float:
    return room_cpu_s(*REPLICA)


class Bench:
    """Keeps requests in flight and publishes versions."""

    def __init__(self, shards: TrainerHandle, replicas: InferenceHandle, requests: int, spread_s: float) -> None:
        self._shards, self._replicas, self._requests = shards, replicas, requests
        self._spread_s = spread_s
        self._numbers = count()
        self.measured = Measured()

    async def run(self, repeats: int) -> Measured:
        self._router = self._replicas.router_factory()()
        offer_by(self._shards, self._router)
        await self._router.update_weights(await asyncio.to_thread(self._shards.publish_weights, 0))
        sampling = [asyncio.create_task(self._sample(place)) for place in range(self._requests)]
        pin_others(psutil.Process())
        if self._spread_s:
            await asyncio.to_thread(self._shards._call, "spread_over", self._spread_s)
        for version in range(1, 1 + WARM_UP + repeats):
            if version == 1 + WARM_UP:
                self.measured = Measured()
            cpu_s, began = replica_cpu_s(), time.monotonic()
            await asyncio.sleep(BEFORE_S)
            for task in sampling:
                if task.done():
                    task.result()
            await self._publish(version, cpu_s, began)
        for task in sampling:
            task.cancel()
        return self.measured

    async def _sample(self, place: int) -> None:
        """Samples one sequence after the other, the first of other lengths, so that they do not end together."""
        length = 1 + (ANSWER * (place + 1)) // self._requests
        prompt = np.random.default_rng(place).integers(0, 1000, PROMPT, dtype=np.int32)
        while True:
            name = f"{place}/{next(self._numbers)}"
            await self._router.sample(SampleRequest(name, prompt, SamplingParams(length), name))
            length = ANSWER

    async def _publish(self, version: int, cpu_before_s: float, before: float) -> None:
        began, cpu_s, shard_cpu_s = time.monotonic(), replica_cpu_s(), room_cpu_s("trainer shard")
        published = asyncio.create_task(asyncio.to_thread(self._shards.publish_weights, version))
        update = asyncio.create_task(self._update(published))
        (replica,) = self._replicas.replicas.values()
        paused = asyncio.ensure_future(replica.next_pause.remote(began))
        await asyncio.wait({paused, update}, return_when=asyncio.FIRST_COMPLETED)
        meanwhile_cpu_s, shard_cpu_s = replica_cpu_s() - cpu_s, room_cpu_s("trainer shard") - shard_cpu_s
        report = await update
        steps, _ = await replica.noted.remote()
        tokens_before, seconds_before = tokens_between(steps, before, began)
        tokens, seconds = tokens_between(steps, began, await paused)
        m = self.measured
        m.before.append(tokens_before / seconds_before)
        m.meanwhile.append(tokens / seconds)
        m.meanwhile_s.append(await paused - began)
        m.pause_s.append(report.pause_s)
        m.receiving_cpu_s.append(meanwhile_cpu_s - (cpu_s - cpu_before_s) * tokens / tokens_before)
        m.shard_cpu_s.append(shard_cpu_s)
        m.load.append(os.getloadavg()[0])
        print(
            f"{m.before[-1]:.1f} tokens/s before, {m.meanwhile[-1]:.1f} for {m.meanwhile_s[-1]:.2f} s meanwhile; "
            f"receiving took {m.receiving_cpu_s[-1]:.2f} CPU s, the shard {m.shard_cpu_s[-1]:.2f}; "
            f"pause {m.pause_s[-1]:.2f} s (load {m.load[-1]:.1f})",
            flush=True,
        )

    async def _update(self, published: asyncio.Task[Any]) -> Any:
        (report,) = await self._router.update_weights(await published)
        return report


def result(measured: Measured, args: argparse.Namespace, load: float) -> Result:
    ratios = [m / b for m, b in zip(measured.meanwhile, measured.before, strict=True)]
    ratio = median(ratios)
    return Result(
        name=f"publish_sampling_{args.transport}",
        value=median(measured.meanwhile),
        unit="tokens/s of a replica from publish_weights until the pause (median)",
        ratio=ratio,
        target=TARGET,
        holds=ratio >= TARGET,
        against="its rate in the seconds before, with an idle trainer",
        detail={
            "requests": args.requests,
            "spread_s": args.spread,
            "load_before": round(load, 2),
            "ratios": [round(each, 3) for each in ratios],
            **{name: [round(each, 3) for each in values] for name, values in vars(measured).items()},
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=list(TARGETS), default="object_store", help="default: object_store")
    parser.add_argument("--repeats", type=int, default=8, help="measured versions (default: 8)")
    parser.add_argument("--requests", type=int, default=4, help="sequences in flight (default: 4)")
    parser.add_argument("--spread", type=float, default=0.0, metavar="S", help="seconds of sending (default: no pause)")
    args = parser.parse_args()
    if min(args.repeats, args.requests) < 1 or args.spread < 0:
        parser.error("expected at least 1 repeat and 1 request, and 0 s or more")
    load = os.getloadavg()[0]
    prepare()
    with tempfile.TemporaryDirectory(prefix="tr-") as temp:
        directory = Path(temp)
        make_model(directory / "model")
        cfg = config(directory / "model", args.transport, 1, 1, args.requests, ANSWER)
        with rooms(cfg, directory) as (shards, replicas):
            measured = asyncio.run(Bench(shards, replicas, args.requests, args.spread).run(args.repeats))
    result(measured, args, load).print()


if __name__ == "__main__":
    main()
