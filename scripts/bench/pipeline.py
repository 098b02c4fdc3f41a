"""Measures how many rollouts per second the whole orchestrator processes when the replica answers immediately.

    python scripts/bench/pipeline.py [--only at_once|ray|in_flight] [--steps 60] [--repeats 3]

Nothing of the orchestrator is left out: cursor, dispatch, ledger, the sort environment with its tokens and rewards,
deadlines and retries, the router, group rewards, datums, minibatches, rows of metrics. Only the replica is none: its
answers are ready. A driver asks for minibatches, brings new weights, and releases, without training.

    at_once    the replica is an object in the same process
    ray        it is an actor, called as the replicas of a run are
    in_flight  it holds all answers back until 1,000, 10,000, 100,000 rollouts are in flight, and then gives them all:
               what a rollout costs then, and what memory they take together

Each is measured in a process of its own, after a warm-up, with all its threads on one core; the actor and Ray's
services have the other cores. The last lines of the output are the results, a JSON object each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import uvloop
from _common import ROOT, Result, median, run_for_json

from inference.batching_server import BatchingServer, Give
from trireme.core.sampler import ReplicaStats
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity
from trireme.core.weights import EXACT, Canary, Drift, PublishedWeights, UpdateReport, WeightsManifest
from trireme.process.environ import prepare_ray_environment

if TYPE_CHECKING:
    from inference.handle import ReplicaClient
    from orchestrator.pipeline import Pipeline
    from trireme.config import Config

CONFIG = ROOT / "configs" / "quickstart.toml"
GROUP_SIZE = 8
GROUPS = 64
"""Problems of a step, of `at_once` and `ray`; with K = 1 twice as many are under way."""
WARM_UP_STEPS = 4
IN_FLIGHT = {1_000: 20, 10_000: 2, 100_000: 1}
"""Rollouts in flight, and how often in a row that is measured: so short a time cannot be."""
DISTINCT_ANSWERS = 64
FIRST_DIGIT = 20
EOS = 1
"""Token ids of the quickstart's model."""
ORCHESTRATOR_CORE = 0
TARGETS = {"at_once": 5000.0, "ray": 1500.0}
TARGET_BYTES = 2e9
TARGET_FLATNESS = 1.5
START_S = 60.0


@dataclass(frozen=True)
class Measured:
    """`wall_s` and `cpu_s` (of the whole process) from the first dispatch to the last release; `peak_bytes`: by how
    much its resident memory grew at most; the machine's load just before."""

    rollouts: int
    wall_s: float
    cpu_s: float
    peak_bytes: int
    load_before: float


class ReadyAnswers:
    """The client of a replica with ready answers. `hold`: the first one waits for that many requests."""

    name = "replica with ready answers"

    def __init__(self, hold: int = 0) -> None:
        self._missing = hold
        self._all_there = asyncio.Event()
        self._answers: list[SampledSequence] = []

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, SampledSequence]]:
        self._missing -= len(requests)
        if self._missing > 0:
            await self._all_there.wait()
        self._all_there.set()
        for index, request in enumerate(requests):
            yield index, self._answers[(request.params.seed or 0) % DISTINCT_ANSWERS]

    async def load_weights(self, weights: PublishedWeights) -> UpdateReport:
        rng = np.random.default_rng(0)
        self._answers = [answer(rng, weights.identity) for _ in range(DISTINCT_ANSWERS)]
        return UpdateReport(0, weights.identity, Drift(0.0, 0.0), 0, 0.0)

    async def stats(self) -> ReplicaStats:
        return ReplicaStats(running=0, waiting=0, kv_used=0.0, preemptions=0)

    async def progress(self, lengths: Mapping[str, int]) -> dict[str, object]:
        """Nothing is unfinished for long."""
        return {}

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Nothing is aborted here."""


class ReadyActor(ReadyAnswers):
    """The replica as an actor, with the interface of `inference.actor.ReplicaActor`."""

    def __init__(self) -> None:
        super().__init__()
        self._desk = BatchingServer(self._give, lambda: None)

    async def exchange(self, caller: str, message: bytes) -> bytes:
        return await self._desk.exchange(caller, message)

    async def _give(self, requests: list[SampleRequest], give: Give) -> None:
        async for index, answered in self.sample(requests):
            give(requests[index].request_id, answered)


def answer(rng: np.random.Generator, identity: WeightIdentity) -> SampledSequence:
    """Three to eight digits and the end of sequence."""
    tokens = np.asarray([*rng.integers(FIRST_DIGIT, FIRST_DIGIT + 10, rng.integers(3, 9)), EOS], np.int32)
    logprobs = rng.normal(-1.0, 0.1, len(tokens)).astype(np.float32)
    return SampledSequence(tokens, logprobs, "stop", (VersionSpan(identity, 0, len(tokens)),))


def published(version: int) -> PublishedWeights:
    canary = Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), EXACT)
    return PublishedWeights(WeightsManifest(WeightIdentity(1, version, f"{version:032x}"), (), canary), ())


def make_pipeline(client: Any, groups: int, steps: int) -> Pipeline:
    from trireme.config.load import load

    sizes = {
        "--orchestrator.batch-size": groups,
        "--orchestrator.group-size": GROUP_SIZE,
        "--max-steps": steps,
        "--orchestrator.max-concurrent": 2 * groups * GROUP_SIZE,
    }
    return pipeline_of(load(["@", str(CONFIG), *(str(part) for pair in sizes.items() for part in pair)]).config, client)


def pipeline_of(config: Config, client: Any) -> Pipeline:
    """Returns a pipeline with a single replica behind `client`."""
    from inference.replica_set.actor import ReplicaSet
    from inference.router import Router
    from orchestrator.env import EnvContext, load_dataset
    from orchestrator.pipeline import Pipeline
    from orchestrator.rollout import RolloutLimits
    from trireme.core.tokenizer import load_tokenizer

    context = EnvContext(load_tokenizer(config.tokenizer_name), config.seed, GROUP_SIZE, "train")
    limits = RolloutLimits.of(config, context.tokenizer.decode)
    make_router = partial(Router, ReplicaSet({0: client}))
    return Pipeline(config, [load_dataset(config.env[0], context)], make_router, limits)


async def begin_version(pipeline: Pipeline, weights: PublishedWeights) -> None:
    await pipeline.end_version()
    sampler: Any = pipeline.sampler
    await pipeline.begin_version(weights.identity.version, sampler.source.update(weights))


async def drive(pipeline: Pipeline, steps: int) -> None:
    """Calls the orchestrator as a driver does."""
    await begin_version(pipeline, published(0))
    for step in range(steps):
        while not (await pipeline.next_minibatch(step, 0)).last:
            pass
        await begin_version(pipeline, published(step + 1))
        pipeline.release(step)
    await pipeline.stop()


def measure(client: Any, groups: int, steps: int) -> Measured:
    pipeline = make_pipeline(client, groups, steps)
    load_before = os.getloadavg()[0]
    resident = psutil.Process().memory_info().rss
    started = time.monotonic()
    cpu_started = time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the loop that Ray gives its actors
        runner.run(drive(pipeline, steps))
    wall_s = time.monotonic() - started
    cpu_s = time.process_time() - cpu_started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Measured(steps * groups * GROUP_SIZE, wall_s, cpu_s, max(peak - resident, 0), load_before)


def measure_at_once(steps: int) -> Measured:
    measure(ReadyAnswers(), GROUPS, WARM_UP_STEPS)
    return measure(ReadyAnswers(), GROUPS, steps)


def measure_ray(steps: int) -> Measured:
    with ray_replica(ReadyActor) as client:
        measure(client, GROUPS, WARM_UP_STEPS)
        return measure(client, GROUPS, steps)


def measure_in_flight(rollouts: int) -> Measured:
    """At K = 1 two steps' rollouts are in flight at once, and they are all of the run. The costs of several such runs
    are added; the memory is the first one's."""
    groups = rollouts // GROUP_SIZE // 2
    measure(ReadyAnswers(), GROUPS, WARM_UP_STEPS)
    runs = [measure(ReadyAnswers(hold=2 * groups * GROUP_SIZE), groups, 2) for _ in range(IN_FLIGHT[rollouts])]
    return Measured(
        rollouts=sum(run.rollouts for run in runs),
        wall_s=sum(run.wall_s for run in runs),
        cpu_s=sum(run.cpu_s for run in runs),
        peak_bytes=runs[0].peak_bytes,
        load_before=runs[0].load_before,
    )


@contextmanager
def ray_replica(kind: type, *arguments: object) -> Iterator[ReplicaClient]:
    """The router's client of an actor of this kind, in a Ray cluster that leaves this process's core alone."""
    prepare_ray_environment(None, threads=1, deterministic=False)
    import ray

    from inference.handle import MAX_CALLS, ReplicaClient
    from trireme.process import waits

    cores = set(range(os.cpu_count() or 1))
    pin(cores - {ORCHESTRATOR_CORE} or cores)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=directory)
        actor = ray.remote(kind).options(max_concurrency=MAX_CALLS, num_cpus=0).remote(*arguments)
        waits.get(actor.abort.remote([]), owner="the replica", timeout_s=START_S)
        pin({ORCHESTRATOR_CORE})
        yield ReplicaClient(actor, ReadyAnswers.name, None, START_S, START_S, gathers=True)
        ray.shutdown()


def pin(cores: set[int]) -> None:
    """All threads of this process, and what they start from now on, run on `cores` only."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def measure_here(name: str, amount: int) -> Measured:
    from trireme.process.collector import spare_collector

    pin({ORCHESTRATOR_CORE})
    make_pipeline(ReadyAnswers(), GROUPS, WARM_UP_STEPS)  # imports what there is to import
    spare_collector()  # as in the actor
    return {"at_once": measure_at_once, "ray": measure_ray, "in_flight": measure_in_flight}[name](amount)


def measure_apart(name: str, amount: int) -> Measured:
    """In a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--measure", name, str(amount)]
    return Measured(**run_for_json(command, {})[1])


def print_rate(name: str, steps: int, repeats: int) -> None:
    runs = [measure_apart(name, steps) for _ in range(repeats)]
    value = median([run.rollouts / run.wall_s for run in runs])
    Result(
        name=f"pipeline, {name}",
        value=value,
        unit="rollouts/s",
        ratio=round(value / TARGETS[name], 3),
        target=TARGETS[name],
        holds=value >= TARGETS[name],
        against="the target",
        detail={
            "rollouts_per_cpu_s": median([run.rollouts / run.cpu_s for run in runs]),
            "runs": [asdict(run) for run in runs],
        },
    ).print()


def print_in_flight() -> None:
    runs = {rollouts: measure_apart("in_flight", rollouts) for rollouts in IN_FLIGHT}
    cost_us = {rollouts: round(run.cpu_s / run.rollouts * 1e6, 1) for rollouts, run in runs.items()}
    flatness = round(max(cost_us.values()) / min(cost_us.values()), 3)
    largest = runs[max(runs)].peak_bytes
    Result(
        name="pipeline, in flight",
        value=round(largest / 1e9, 3),
        unit=f"GB for {max(runs)} rollouts in flight",
        ratio=flatness,
        target=TARGET_BYTES / 1e9,
        holds=largest <= TARGET_BYTES and flatness <= TARGET_FLATNESS,
        against="ratio: the largest over the smallest cost of a rollout, to be flat",
        detail={"cpu_us_per_rollout": cost_us, "runs": {key: asdict(run) for key, run in runs.items()}},
    ).print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("at_once", "ray", "in_flight"), help="one of the three (default: all)")
    parser.add_argument("--steps", type=int, default=60, help=f"steps of {GROUPS * GROUP_SIZE} rollouts (default: 60)")
    parser.add_argument("--repeats", type=int, default=3, help="of `at_once` and `ray` (default: 3)")
    parser.add_argument("--measure", nargs=2, metavar=("NAME", "AMOUNT"), help="one of them, in this process")
    args = parser.parse_args()
    if args.measure:
        name = args.measure[0]
        amount = int(args.measure[1])
        print(json.dumps(asdict(measure_here(name, amount))), flush=True)
        return
    for name in ("at_once", "ray"):
        if args.only in (None, name):
            print_rate(name, args.steps, args.repeats)
    if args.only in (None, "in_flight"):
        print_in_flight()


if __name__ == "__main__":
    main()
