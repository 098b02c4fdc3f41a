"""One inference replica: an async Ray actor around one vLLM engine, on CPUs and GPUs by the same code."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import psutil
import ray

from inference.engine import (
    canary_params,
    end_of_sequence_ids,
    import_engine,
    policy_adapter,
    prompt_logprobs,
    start_engine,
)
from inference.handover import prefilled_tokens
from inference.sampling import HEALTH_TICK_S, SamplingEngine, Value, as_failure
from inference.weight_files import WeightFiles, in_memory_files
from trireme.config import Config
from trireme.core.base_digest import base_digest
from trireme.core.errors import RoomFailed, WeightsRefused
from trireme.core.sampler import Heartbeat, ReplicaStats
from trireme.core.transport import load_transport
from trireme.core.types import SampleRequest, SamplingParams, WeightIdentity
from trireme.core.weights import PublishedWeights, UpdateReport, WeightsManifest, check_canary
from trireme.process import trace
from trireme.process.environ import lower_priority, redirect_output
from trireme.process.faults import fault_point, number_process

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestOutputCollector

Step = Callable[[str, Awaitable[Any]], Awaitable[Any]]
NAMED = 8
WARM_UP = SampleRequest("warm-up", (0, 0), SamplingParams(max_tokens=2, seed=0), "")
CANARY_REQUEST = "trireme-canary"
CANARY_PRIORITY = -1
"""Of smaller ones vLLM thinks more; requests have 0."""
SPARE = "inference_spare"
"""Name of the log of spares."""
DEVICES = "CUDA_VISIBLE_DEVICES"
GONE_S, GONE_TICK_S = 30.0, 0.02
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplicaInfo:
    """A living replica: process id of its engine, the weights it samples from (None before the first update), Ray's id
    of its node, and the GPUs that it has there (as CUDA_VISIBLE_DEVICES names them; None where that is not set)."""

    engine_pid: int
    identity: WeightIdentity | None
    node: str
    devices: str | None


class ReplicaActor(SamplingEngine):
    """Ray actor (many concurrent calls). `index` is its number; `start` must have answered before any other verb.

    Without a number it is a spare: `prepare` has it import what takes most of a start, and `succeed`, instead of
    `start`, gives it the number and the GPUs of a replica that was lost on its node.

    After WeightsRefused, a failed update or the death of the engine every further verb raises with the reason: the
    replica is to be replaced; an update is never tried again half-way.
    """

    def __init__(self, cfg: Config, index: int | None, log_dir: Path | None) -> None:
        super().__init__(cfg, "a spare replica")
        self._log_dir, self._prepared = log_dir, False
        self.base: str | None = None
        self.receiver = load_transport(cfg.transport).make_receiver()
        self.updating = asyncio.Lock()
        if index is None:
            redirect_output(log_dir, SPARE)
        else:
            self._become(index)

    def _become(self, index: int) -> None:
        self.index, self.name = index, f"inference replica {index}"
        redirect_output(self._log_dir, f"inference_{index}")
        number_process(index)
        trace.start(self._log_dir, f"inference_{index}", self.cfg.trace.max_mb)

    async def prepare(self) -> None:
        """Returns when all is imported that a start needs here."""
        if not self._prepared:
            # Nobody waits for it yet. Threads keep their priority for good, so it is one of its own.
            with ThreadPoolExecutor(1, "prepare", initializer=lower_priority) as thread:
                await asyncio.wrap_future(thread.submit(import_engine))
            self._prepared = True
            log.info("process %d is a spare: all is imported", os.getpid())

    async def succeed(self, index: int, lost: ReplicaInfo) -> ReplicaInfo:
        """`start` of a spare, in the place of replica `index`, on the GPUs that it had."""
        self._become(index)
        log.info("process %d, a spare until now, succeeds replica %d", os.getpid(), index)
        if lost.devices is not None:
            os.environ[DEVICES] = lost.devices
        # It ends with its actor, but a large one not at once, and both have no room.
        if not await _gone(lost.engine_pid):
            log.warning(
                "waited %g s for process %d, the engine of the replica that was lost, to end, whose memory is needed; "
                "starting beside it, as a new process would",
                GONE_S,
                lost.engine_pid,
            )
        return await self.start()

    async def start(self) -> ReplicaInfo:
        """Starts the engine and samples once: the first logprobs compile a function that a request would wait for."""
        fault_point("inference.start")
        self.engine = start_engine(self.cfg)
        from inference.engine_stats import engine_stats  # imports vLLM

        self.engine_stats = engine_stats(self.engine)
        self.end_ids = end_of_sequence_ids(self.engine)
        if self.cfg.trainer.lora.on:
            self.base = await asyncio.to_thread(base_digest, self.cfg.model.name)
        await (await self._submit(WARM_UP, salt="warm-up")).get()
        self.proved.set()
        return await self.health()

    async def health(self) -> ReplicaInfo:
        """Raises RoomFailed or WeightsRefused, with the reason, when this replica is of no more use."""
        self._raise_if_broken()
        node = ray.get_runtime_context().get_node_id()
        return ReplicaInfo(self._engine_pid, self.identity, node, os.environ.get(DEVICES))

    async def heartbeat(self) -> Heartbeat:
        """Answers at once. Raises RoomFailed or WeightsRefused, with the reason, when it is of no more use."""
        self._raise_if_broken()
        return Heartbeat((os.getpid(), self._engine_pid), ray.get_runtime_context().get_node_id(), self.behind_s)

    @property
    def _engine_pid(self) -> int:
        return self.engine.engine_core.resources.engine_manager.processes[0].pid

    async def weight_version(self) -> WeightIdentity | None:
        """What the engine labels its tokens with; None before the first update."""
        self._raise_if_broken()
        label = await self._guarded("its version", self.engine.get_weight_version(), self.cfg.timeouts.update_s)
        return WeightIdentity.parse(label) if self.identity else None

    async def stats(self) -> ReplicaStats:
        """What there is to do, by the engine's last step. Raises RoomFailed or WeightsRefused when broken."""
        self._raise_if_broken()
        return self.engine_stats.stats(len(self.engine.output_processor.request_states))

    async def stop(self) -> None:
        """Ends the engine process, if there is one: a spare that succeeds a lost replica may still wait to start it."""
        if hasattr(self, "engine"):
            self.engine.shutdown()
        trace.stop()

    # ------------------------------------------------------------------------------------------------------- weights

    async def pause(self) -> None:
        """Stops between two steps and keeps the requests. Their KV, and all that is cached, is dropped and computed
        again under the next weights; with `keep_kv` it stays."""
        await self._stand_still(clear_cache=not self._keeps_kv)
        self.sampling.pause()

    async def update_weights(self, published: PublishedWeights) -> UpdateReport:
        """Takes `published` while requests are in flight. Raises RoomFailed when the bytes are not to be had, because
        whoever published them is dead: then nothing has changed. Raises WeightsRefused or RoomFailed; after either this
        replica is of no more use, and its requests are given up: no token leaves it whose weights were not proved."""
        started = time.monotonic()
        self._raise_if_broken()
        step = partial(self._step, deadline=started + self.cfg.timeouts.update_s)
        buckets = await self._fetch(published, step)
        async with self.updating:  # of an orchestrator that has died, one may be under way
            self._raise_if_broken()
            try:
                return await self._update(published.manifest, buckets, step, started)
            except Exception as error:
                self.broken = as_failure(f"{self.name}, taking version {published.identity.version}", error)
                self._give_up_all()
                raise self.broken from error

    async def _update(
        self, manifest: WeightsManifest, buckets: Sequence[npt.NDArray[np.uint8]], step: Step, started: float
    ) -> UpdateReport:
        fault_point("inference.update")
        with trace.span("update", "update", version=manifest.identity.version):
            await self._receive(manifest, buckets, step)
            async with self.pausing:
                if self._drains:
                    await self._drained(manifest.identity, started)
                return await self._take(manifest, step, started)

    async def adopt(self, identity: WeightIdentity) -> None:
        """Names what the engine itself has loaded `identity`, instead of a first update. Raises RoomFailed."""
        self._raise_if_broken()
        label = self.engine.update_weight_version(str(identity))
        await self._guarded("a name for its weights", label, self.cfg.timeouts.update_s)
        self.identity = identity

    async def _fetch(self, published: PublishedWeights, step: Step) -> Sequence[npt.NDArray[np.uint8]]:
        try:
            return await step("fetch", self.receiver.open(published.source))
        except Exception as error:
            raise as_failure(f"{self.name}, fetching version {published.identity.version}", error) from error

    async def _receive(self, manifest: WeightsManifest, buckets: Sequence[npt.NDArray[np.uint8]], step: Step) -> None:
        """Brings the bytes into the engine process and checks them, while requests go on."""
        self._check_base(manifest)
        with in_memory_files(buckets) as paths:
            files = pickle.dumps(WeightFiles(manifest, paths))
            reason = await step("receive", self._in_engine("receive_weights", args=(files,)))
        if reason:
            raise WeightsRefused(f"{self.name}: {reason}")

    def _check_base(self, manifest: WeightsManifest) -> None:
        """Raises WeightsRefused for adapters of other weights than this replica has loaded."""
        if manifest.adapter and manifest.adapter.base != self.base:
            raise WeightsRefused(
                f"{self.name}: version {manifest.identity.version} is an {manifest.adapter}, but the files of "
                f"{self.cfg.model.name} here have digest {self.base}: every node needs the same ones"
            )

    async def _drained(self, identity: WeightIdentity, started: float) -> None:
        """Returns when no request is in flight; new ones wait in `_entering`."""
        limit = self.cfg.timeouts.update_s
        while self.running:
            self._raise_if_broken()
            left = started + limit - time.monotonic()
            if left <= 0:
                raise RoomFailed(
                    f"{self.name} could not take version {identity.version} within {limit:g} s: it waited for "
                    f"{len(self.running)} requests in flight ({', '.join(sorted(self.running)[:NAMED])}). Raise "
                    "timeouts.update_s, or let updates come in flight: inference.on_update = recompute_kv"
                )
            tasks = [running.task for running in self.running.values()]
            await asyncio.wait(tasks, timeout=min(left, HEALTH_TICK_S))

    async def _take(self, manifest: WeightsManifest, step: Step, started: float) -> UpdateReport:
        """From the engine's pause to the proof, in few calls to its process: requests in flight wait meanwhile.

        The canary is computed together with the first step of the requests that go on, not while they stand still;
        until it agrees, answers are held back.
        """
        asked = time.monotonic()
        await step("pause", self.pause())
        still = time.monotonic()
        await step("take", self._in_engine("take_weights"))
        if manifest.adapter:
            self.adapter = policy_adapter()
        self.proved.clear()
        self.identity = manifest.identity
        prefilled = 0 if self._keeps_kv else self._cleared()
        label = self.engine.update_weight_version(str(manifest.identity))
        _, canary = await step("label", asyncio.gather(label, self._submit_canary(manifest)))
        await step("resume", self.resume())
        resumed = time.monotonic()
        diff = await step("canary", self._prove(manifest, canary))
        self.proved.set()
        await step("free memory", self._in_engine("free_memory"))
        seconds = time.monotonic() - started
        return UpdateReport(self.index, manifest.identity, diff, prefilled, seconds, still - asked, resumed - still)

    def _cleared(self) -> int:
        """How many tokens are prefilled again: see `prefilled_tokens`."""
        self.engine_stats.cache_cleared()
        return prefilled_tokens(self.engine.output_processor.request_states.values())

    async def _submit_canary(self, manifest: WeightsManifest) -> RequestOutputCollector:
        return await self._add(
            CANARY_REQUEST,
            manifest.canary.tokens.tolist(),
            canary_params(),
            salt=str(manifest.identity),
            priority=CANARY_PRIORITY,
        )

    async def _prove(self, manifest: WeightsManifest, canary: RequestOutputCollector) -> float:
        """Largest difference of this engine's canary to the trainer's. Raises WeightsRefused if it is too large."""
        logprobs = prompt_logprobs(manifest.canary.tokens.tolist(), await canary.get())
        try:
            return check_canary(manifest, logprobs)
        except WeightsRefused as refused:
            raise WeightsRefused(f"{self.name}: {refused}") from None

    async def _in_engine(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        """Calls a method of vLLM's worker in the engine process; the answer of its first rank."""
        return (await self.engine.collective_rpc(method, args=args))[0]

    async def _step(self, name: str, awaitable: Awaitable[Value], *, deadline: float) -> Value:
        with trace.span(name, "update"):
            return await self._guarded(f"update step {name!r}", awaitable, max(deadline - time.monotonic(), 0.0))


async def _gone(pid: int) -> bool:
    """Whether this process ends within GONE_S."""
    deadline = time.monotonic() + GONE_S
    while not has_ended(pid):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(GONE_TICK_S)
    return True


def has_ended(pid: int) -> bool:
    """Whether a process holds nothing any more: memory and devices are given back by the last of its threads, and it is
    a zombie when the first has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE and len(os.listdir(f"/proc/{pid}/task")) == 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return True
