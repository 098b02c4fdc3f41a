"""Measures how long generation stands still for an update: a bf16 model of 100 million parameters, requests in flight.

    python scripts/bench/inflight_update.py [--updates 200] [--requests 16] [--on-update recompute_kv]

One replica in this process, its engine in a process of its own, `--requests` sequences decoded all the time. Per
update: the wait for the step in progress; the pause proper, from when the engine stands still until it goes on (load,
label); and from then on until each request has its next token (prefill, and the canary with it). Between updates the
engine is asked to load the same tensors again, bare: vLLM's layerwise reload and nothing else, on bytes that are mapped
and in memory, timed inside the engine.

And the memory of the engine's process: its resident set after each update, a line fitted to it after the first quarter.
(After the update and before the bare reload, which gives nothing back to the system: the next update does. And not the
proportional one: that also grows when this process, of which the engine is a fork, frees a page.) Two versions are
published in turn.

The two last lines of the output are the results, a JSON object each. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
from _common import Result, median
from checkpoint import make_model

from inference.messages import pack_requests
from trainer.publish import CANARY_TOKENS
from trireme.config import Config
from trireme.core.types import SampleRequest, SamplingParams, WeightIdentity
from trireme.core.weights import Canary, Drift, PublishedWeights, WeightsManifest, weights_digest
from trireme.transports.packing import pack, tensor_of

TARGET = 1.3
FLAT_MIB = 8.0
"""Growth of the fitted line over 100 updates that counts as none: 4 % of the weights."""
PROMPT, ANSWER = 16, 200
BETWEEN_S = 0.5
WARM_UP = 3


class Bucket:
    """An array that can be awaited, any number of times, like a reference to the object store."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.data = data

    def __await__(self) -> Generator[Any, None, npt.NDArray[np.uint8]]:
        return self.data
        yield


@dataclass
class Measured:
    """Seconds, tokens and MiB of each update."""

    wait_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    bare_s: list[float] = field(default_factory=list)
    next_tokens_s: list[float] = field(default_factory=list)
    reprefill_tokens: list[int] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)


def publish(model: Path, scale: float) -> PublishedWeights:
    """The model's weights in bf16, times `scale`, as a trainer packs them. The canary accepts whatever it finds."""
    import torch
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    tensors = [(name, tensor * scale) for name, tensor in state.items() if name != "lm_head.weight"]
    entries, buckets = pack([tensors], lambda data: Bucket(data.copy()))
    tokens = np.arange(CANARY_TOKENS, dtype=np.int32)
    canary = Canary(tokens, np.zeros(CANARY_TOKENS - 1, np.float32), Drift(np.inf, np.inf))
    return PublishedWeights(WeightsManifest(WeightIdentity(1, 0, weights_digest(entries)), entries, canary), buckets)


def bare_reload(worker: Any, pickled_files: bytes) -> float:
    """Seconds of vLLM's own reload, in the engine's process; a method of its worker."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

    manifest, regions = pickle.loads(pickled_files)
    buckets = [region.map() for region in regions]
    for bucket in buckets:
        bucket.sum()
    tensors = [(entry.name, tensor_of(entry, buckets)) for entry in manifest.entries]
    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config):
        started = time.perf_counter()
        initialize_layerwise_reload(model)
        model.load_weights(tensors)
        finalize_layerwise_reload(model, worker.vllm_config.model_config)
        return time.perf_counter() - started


@dataclass
class Steps:
    """Records when each step's tokens arrive, and how many."""

    at: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for(self, tokens: int, since: int) -> None:
        """Returns when so many tokens have come after the first `since` steps."""
        while sum(self.tokens[since:]) < tokens:
            self.arrived.clear()
            await self.arrived.wait()


@contextmanager
def step_log() -> Iterator[Steps]:
    """Listens to the statistics that come with each step."""
    from inference.engine_stats import EngineStats

    steps = Steps()
    record = EngineStats.record

    def recorded(self: EngineStats, scheduler: Any, iteration: Any, *args: Any, **kwargs: Any) -> None:
        record(self, scheduler, iteration, *args, **kwargs)
        if iteration is not None:
            steps.at.append(time.monotonic())
            steps.tokens.append(iteration.num_generation_tokens)
            steps.arrived.set()

    EngineStats.record = recorded  # type: ignore[method-assign, assignment]
    yield steps
    EngineStats.record = record  # type: ignore[method-assign]


def replica_that_notes_resumptions(cfg: Config, steps: Steps) -> Any:
    """A replica with `resumed` and `steps_before`: when its engine last went on, and after how many steps."""
    from inference.actor import ReplicaActor

    class Noting(ReplicaActor):
        async def resume(self) -> None:
            await super().resume()
            self.resumed, self.steps_before = time.monotonic(), len(steps.at)

    return Noting(cfg, 0, None)


class Bench:
    """One replica, `requests` sequences in flight, and two versions that it takes in turn."""

    def __init__(self, cfg: Config, requests: int, steps: Steps) -> None:
        self.replica = replica_that_notes_resumptions(cfg, steps)
        self.model, self.requests, self.steps = Path(cfg.model.name), requests, steps
        self.numbers = count()
        self.measured = Measured()

    async def run(self, updates: int) -> Measured:
        health = await self.replica.start()
        engine = psutil.Process(health.engine_pid)
        self.versions = [publish(self.model, scale) for scale in (1.0, 1.01)]
        await self.update(0)
        sampling = [asyncio.create_task(self.sample(i)) for i in range(self.requests)]
        for number in range(1, WARM_UP + updates + 1):
            await self.between(sampling)
            published = await self.update(number)
            self.measured.memory_mib.append(engine.memory_info().rss / 2**20)
            self.measured.bare_s.append(await self.reload(published))
            if number == WARM_UP:
                self.measured = Measured()
        for task in sampling:
            task.cancel()
        await self.replica.stop()
        return self.measured

    async def sample(self, place: int) -> None:
        """One sequence after the other; the first are of different lengths, so that they do not end together."""
        length = 1 + (ANSWER * (place + 1)) // self.requests
        while True:
            prompt = np.random.default_rng(place).integers(0, 1000, PROMPT, dtype=np.int32)
            name = f"{place}/{next(self.numbers)}"
            await self.replica.exchange(
                name, pack_requests([SampleRequest(name, prompt, SamplingParams(length), name)])
            )
            length = ANSWER

    async def between(self, sampling: list[asyncio.Task[None]]) -> None:
        """Lets requests go on for a moment. Raises what sampling failed with."""
        done, _ = await asyncio.wait(sampling, timeout=BETWEEN_S, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def update(self, number: int) -> PublishedWeights:
        weights = self.versions[number % len(self.versions)]
        identity = replace(weights.identity, version=number)
        published = replace(weights, manifest=replace(weights.manifest, identity=identity))
        report = await self.replica.load_weights(published)
        tokens = 1 + len(self.replica.running)  # the canary has one too
        await self.steps.wait_for(tokens, since=self.replica.steps_before)
        self.measured.wait_s.append(report.wait_s)
        self.measured.pause_s.append(report.pause_s)
        self.measured.next_tokens_s.append(self.steps.at[-1] - self.replica.resumed)
        self.measured.reprefill_tokens.append(report.reprefill_tokens)
        return published

    async def reload(self, published: PublishedWeights) -> float:
        from inference.session import copy_to_memory

        file, regions = copy_to_memory([bucket.data for bucket in published.source])
        with os.fdopen(file):
            files = pickle.dumps((published.manifest, regions))
            return float((await self.replica._in_engine("bare_reload", (files,)))[0])


def config(model: Path, requests: int, on_update: str) -> Config:
    return Config.model_validate(
        {
            "model": {"name": str(model), "dtype": "bfloat16"},
            "orchestrator": {"batch_size": 2},
            "env": {"id": "sort"},
            "cluster": {"device": "cpu"},
            "inference": {
                "sampling": {"max_tokens": ANSWER},
                "max_num_seqs": requests,
                # just enough: a KV block is new memory to the process when it is used for the first time
                "memory_gb": 0.01 + 0.005 * requests,
                "on_update": on_update,
            },
        }
    )


def measure(cfg: Config, requests: int, updates: int) -> tuple[Measured, float, int]:
    """Returns the measurements, the median step in seconds, and the bytes of one version."""
    from inference.worker import WorkerExtension

    WorkerExtension.bare_reload = bare_reload  # type: ignore[attr-defined]  # the engine is forked from here
    with step_log() as steps:
        bench = Bench(cfg, requests, steps)
        measured = asyncio.run(bench.run(updates))
    return measured, median(np.diff(steps.at).tolist()), bench.versions[0].nbytes


def results(measured: Measured, step_s: float, nbytes: int, on_update: str) -> list[Result]:
    pause, bare = median(measured.pause_s), median(measured.bare_s)
    ratio = median([p / b for p, b in zip(measured.pause_s, measured.bare_s, strict=True)])
    pause_result = Result(
        name="inflight_update_pause",
        value=pause,
        unit="s in which generation stands still (pause proper, median)",
        ratio=ratio,
        target=TARGET,
        holds=ratio <= TARGET,
        against="a bare layerwise reload of the same tensors in the engine's process, after each update",
        detail={
            "on_update": on_update,
            "updates": len(measured.pause_s),
            "weights_mib": round(nbytes / 2**20, 1),
            "bare_s": bare,
            "pause_p90_s": round(float(np.percentile(measured.pause_s, 90)), 3),
            "step_s": step_s,
            "wait_for_step_s": median(measured.wait_s),
            "next_tokens_s": median(measured.next_tokens_s),
            "reprefill_tokens": median(measured.reprefill_tokens),
        },
    )
    return [pause_result, memory_result(measured.memory_mib)]


def memory_result(memory_mib: list[float]) -> Result:
    """Returns the growth of memory: the slope of a line through all but the first quarter."""
    fitted = np.asarray(memory_mib[len(memory_mib) // 4 :])
    slope = float(np.polyfit(np.arange(len(fitted)), fitted, 1)[0])
    return Result(
        name="inflight_update_memory",
        value=round(slope, 4),
        unit="MiB that the engine's process grows per update (fitted, after the first quarter)",
        ratio=round(memory_mib[-1] / memory_mib[0], 3),
        target=FLAT_MIB / 100,
        holds=slope <= FLAT_MIB / 100,
        against="its memory after the first update that was measured",
        detail={"mib": [round(memory_mib[i], 1) for i in np.linspace(0, len(memory_mib) - 1, 12).astype(int)]},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200, help="measured updates (default: 200)")
    parser.add_argument("--requests", type=int, default=16, help="sequences in flight (default: 16)")
    parser.add_argument("--on-update", default="recompute_kv", help="inference.on_update (default: recompute_kv)")
    args = parser.parse_args()
    if args.updates < 4 or args.requests < 1:
        parser.error("expected at least 4 updates and 1 request")

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        model = Path(directory) / "model"
        make_model(model)
        cfg = config(model, args.requests, args.on_update)
        measured, step_s, nbytes = measure(cfg, args.requests, args.updates)
    for result in results(measured, step_s, nbytes, args.on_update):
        result.print()


if __name__ == "__main__":
    main()
