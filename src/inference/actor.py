"""One inference replica: an async Ray actor around one vLLM engine, with the same code on CPUs and GPUs."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import psutil
import ray

from inference.engine import end_of_sequence_ids, import_engine, start_engine, tables_of
from inference.loaded import LoadedProof
from inference.sampling import HEALTH_TICK_S, SamplingEngine, Value, answer_of, as_failure
from inference.session import Arrived, Broadcasts
from inference.stalls import StallClock
from trireme.config import Config
from trireme.core.base_digest import base_digest
from trireme.core.errors import RoomFailed, WeightsRefused
from trireme.core.sampler import Heartbeat, ReplicaStats
from trireme.core.transport import Offer, load_transport
from trireme.core.types import SampleRequest, SamplingParams, WeightIdentity
from trireme.core.weights import Drift, PublishedWeights, UpdateReport, WeightsManifest, check_canary
from trireme.process import trace
from trireme.process.device import VISIBLE
from trireme.process.environ import redirect_output
from trireme.process.faults import fault_point, number_process
from trireme.process.ray_cluster import see_own_gpus

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from inference.engine_stats import EngineStats

Step = Callable[[str, Awaitable[Any]], Awaitable[Any]]
NAMED = 8
WARM_UP = SampleRequest("warm-up", np.zeros(2, np.int32), SamplingParams(max_tokens=2, seed=0), "")
FETCH = "fetch"
CANARY_REQUEST = "trireme-canary"
CANARY_PRIORITY = -1
"""vLLM runs lower numbers first; normal requests use 0."""
GONE_S, GONE_TICK_S, CHECK_TICK_S = 30.0, 0.02, 0.01
NICE = 10
"""A nice value with which a thread gets a tenth of the CPU time that other threads on its core get."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplicaInfo:
    """A living replica."""

    engine_pid: int
    """Process id of its engine."""
    ranks: tuple[int, ...]
    """Process ids of the engine's ranks, in order; one that is alone is the engine's process itself."""
    identity: WeightIdentity | None
    """The weights that it samples from; None before the first update."""
    node: str
    """Ray's id of its node."""
    devices: str
    """Its GPUs, as CUDA_VISIBLE_DEVICES names them."""


class ReplicaActor(SamplingEngine):
    """One replica (many concurrent calls). `start` must have answered before any other verb.

    Without a number it is a spare: `prepare` imports what takes most of a start, and `succeed`, instead of `start`,
    gives it the number and the GPUs of a replica that was lost on its node.

    After WeightsRefused, a failed update or the death of the engine every further verb raises with the reason. The
    replica must then be replaced: a failed update is never repeated. Where `has_lost_engine`, `restart` does that.
    """

    def __init__(self, config: Config, index: int | None, log_dir: Path | None) -> None:
        see_own_gpus()
        super().__init__(config, "a spare replica")
        self._log_dir, self._prepared = log_dir, False
        self._watched: list[int] = []  # descriptors of the ranks' processes
        self.base: str | None = None
        self.broadcasts = Broadcasts(load_transport(config.transport).make_receiver(), self._receive_broadcast)
        self.updating = asyncio.Lock()
        if index is None:
            redirect_output(log_dir, "inference_spare")
        else:
            self._become(index)

    def _become(self, index: int) -> None:
        self.index, self.name = index, f"inference replica {index}"
        self.proof = LoadedProof(self.name)
        redirect_output(self._log_dir, f"inference_{index}")
        number_process(index)
        trace.start(self._log_dir, f"inference_{index}", self.config.trace.max_mb)

    async def prepare(self) -> None:
        """Imports all that a start needs in this process."""
        if not self._prepared:
            # Nothing waits for it yet. A thread keeps its priority for ever, so it gets a thread of its own; on Linux
            # `nice` applies to the thread alone.
            with ThreadPoolExecutor(1, "prepare", initializer=os.nice, initargs=(NICE,)) as thread:
                on_cpu = self.config.cluster.device == "cpu"
                await asyncio.wrap_future(thread.submit(import_engine, on_cpu=on_cpu))
            self._prepared = True
            log.info("process %d is a spare: all is imported", os.getpid())

    async def succeed(self, index: int, lost: ReplicaInfo) -> ReplicaInfo:
        """Starts a spare in the place of replica `index`, on the GPUs that it had."""
        self._become(index)
        log.info("process %d, a spare until now, succeeds replica %d", os.getpid(), index)
        os.environ[VISIBLE] = lost.devices
        await self._await_end({lost.engine_pid, *lost.ranks})
        return await self.start()

    async def has_lost_engine(self) -> bool:
        """Tells if a process of the engine died under this one, or stood still and was killed."""
        # a call may fail before vLLM notices the death
        return self.engine_killed or self.engine.errored or any(map(has_ended, (self._engine_pid, *self.ranks)))

    async def restart(self) -> ReplicaInfo:
        """Starts an engine in place of one that was lost: most of a start is importing vLLM, which is done."""
        log.info("process %d starts another engine for %s", os.getpid(), self.name)
        lost = {self._engine_pid, *self.ranks}
        self._forget_ranks()
        self.broadcasts.lose_engine()
        self._give_up_all()
        self._engine_process.kill()  # one that is stopped would hold up the next call
        await self._await_end(lost)
        self.broken = self.broken or RoomFailed(f"{self.name}: its engine process died")
        async with self.updating:  # an update of the lost engine ends first: it would take the next one for its own
            self.engine.shutdown()
            super().__init__(self.config, self.name)  # the state of an engine without requests and weights
            self.proof = LoadedProof(self.name)
            return await self.start()

    async def _await_end(self, pids: Iterable[int]) -> None:
        """Waits for the processes of the engine that was lost to free their memory: there is none for both."""
        for pid, gone in zip(pids, await asyncio.gather(*map(_gone, pids)), strict=True):
            if not gone:
                log.warning(
                    "waited %g s for process %d, of %s's lost engine, to end and free its memory; starting beside it",
                    GONE_S,
                    pid,
                    self.name,
                )

    async def start(self) -> ReplicaInfo:
        """Starts the engine and samples once: the first logprobs compile a function that a request would wait for."""
        fault_point("inference.start")
        log.info("importing vLLM and loading %s", self.config.model.name)
        self.engine = start_engine(self.config, self.name)
        log.info("sampling for the first time")
        assert self.engine.logger_manager is not None
        (self.engine_stats,) = cast("list[EngineStats]", self.engine.logger_manager.stat_loggers)
        self.engine_stats.places = self.engine.vllm_config.scheduler_config.max_num_seqs
        self.end_ids = end_of_sequence_ids(self.engine)
        if self.config.trainer.lora.on:
            self.base = await asyncio.to_thread(base_digest, self.config.model.name)
        await (await self._submit(WARM_UP, salt="warm-up")).get()
        self.ranks = tuple(await self._in_engine("settle"))
        self._stalls = StallClock(self._cpu_s)  # before there was one process to look at, the engine's own
        self._watch_ranks()
        self.engine_stats.answered = self.note_step  # from now on: the first steps of all are slow
        self.proved.set()
        log.info("ready")
        return await self.health()

    async def health(self) -> ReplicaInfo:
        """Raises RoomFailed or WeightsRefused, with the reason, when this replica is broken."""
        self._raise_if_broken()
        node = ray.get_runtime_context().get_node_id()
        return ReplicaInfo(self._engine_pid, self.ranks, self.identity, node, os.environ.get(VISIBLE, ""))

    async def heartbeat(self) -> Heartbeat:
        """Answers immediately. Raises RoomFailed or WeightsRefused, with the reason, when this replica is broken, and
        when its engine has been silent for too long, which is killed then."""
        self._raise_if_broken()
        node = ray.get_runtime_context().get_node_id()
        others = [pid for pid in self.ranks if pid != self._engine_pid]
        return Heartbeat((os.getpid(), self._engine_pid, *others), node, *self.behind())

    async def weight_version(self) -> WeightIdentity | None:
        """Returns the engine's label of its tokens; None before the first update."""
        self._raise_if_broken()
        label = await self._guarded("its version", self.engine.get_weight_version(), self.config.timeouts.update_s)
        return WeightIdentity.parse(label) if self.identity else None

    async def stats(self) -> ReplicaStats:
        """Returns the utilisation at the engine's last step. Raises RoomFailed or WeightsRefused when broken."""
        self._raise_if_broken()
        return self.engine_stats.stats(self.engine.get_num_unfinished_requests())

    def _watch_ranks(self) -> None:
        """Makes the death of a rank the engine's. vLLM sees it too, but waits for ranks that wait for that one."""
        for rank, pid in enumerate(self.ranks):
            if pid != self._engine_pid:
                self._watched.append(descriptor := os.pidfd_open(pid))  # readable once the process has ended
                asyncio.get_running_loop().add_reader(descriptor, self._lost_rank, rank)

    def _lost_rank(self, rank: int) -> None:
        self._forget_ranks()
        if not has_ended(self._engine_pid):  # else its ranks died with it
            died = f"{self.name}: rank {rank} of its engine, process {self.ranks[rank]}, died"
            self.broken = self.broken or RoomFailed(died)
            log.error("%s; its engine, process %d, is killed", died, self._engine_pid)
            os.kill(self._engine_pid, signal.SIGKILL)  # and with it all ranks

    def _forget_ranks(self) -> None:
        while self._watched:
            asyncio.get_running_loop().remove_reader(descriptor := self._watched.pop())
            os.close(descriptor)

    async def stop(self) -> None:
        """Ends the engine process, if there is one: a spare may still wait to start it."""
        self._forget_ranks()
        self.broadcasts.close()
        if hasattr(self, "engine"):
            self.engine.shutdown()
        trace.stop()

    # ------------------------------------------------------------------------------------------------------- weights

    async def pause(self) -> None:
        """Stops between two steps and keeps the requests. Their KV cache and all prefixes are dropped, to be computed
        again under the next weights; with `keep_kv` they stay."""
        await self._stand_still(clear_cache=not self._keeps_kv)
        self.sampling.pause()

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        """Takes `published` while requests are in flight. Raises RoomFailed when the bytes cannot be fetched because
        their sender is dead; then nothing has changed. Other failures raise WeightsRefused or RoomFailed and break this
        replica, and its requests are given up: no token leaves it whose weights were not proved."""
        started = time.monotonic()
        self._raise_if_broken()
        step = partial(self._step, deadline=started + self.config.timeouts.update_s)
        here = AsyncExitStack()
        try:
            fetched = self.broadcasts.fetched(self.index, published.source)
            arrived = await step(FETCH, here.enter_async_context(fetched))
        except Exception as error:
            raise as_failure(f"{self.name}, fetching version {published.identity.version}", error) from error
        async with here, self.updating:  # one that a dead orchestrator began may still run
            self._raise_if_broken()
            try:
                fault_point("inference.update")
                with trace.span("update", "update", version=published.identity.version):
                    await self._receive(published.manifest, arrived, step)
                    await here.aclose()  # the engine has mapped them
                    async with self.pausing:
                        if self._drains:
                            await self._drained(published.identity, started)
                        return await self._take(published.manifest, step, started)
            except Exception as error:
                if isinstance(error, WeightsRefused):
                    self.broken = WeightsRefused(f"{self.name}: {error}")
                else:
                    self.broken = as_failure(f"{self.name}, taking version {published.identity.version}", error)
                self._give_up_all()
                raise self.broken from error

    async def offer(self, offer: Offer) -> None:
        """Returns when this replica is ready to receive a broadcast. Raises RoomFailed when it is not."""
        self._raise_if_broken()
        fault_point("transport.offer")
        await self._guarded("an offer", self.broadcasts.offer(offer), offer.timeout_s)

    async def adopt(self, identity: WeightIdentity) -> None:
        """Labels the weights that the engine loaded from disk as `identity`, in place of a first update. Raises
        RoomFailed."""
        self._raise_if_broken()
        label = self.engine.update_weight_version(str(identity))
        await self._guarded("a name for its weights", label, self.config.timeouts.update_s)
        self.identity = identity

    async def _receive(self, manifest: WeightsManifest, arrived: Arrived, step: Step) -> None:
        """Brings the bytes into the engine process and checks them, while it samples. Raises WeightsRefused, also for
        adapters of other weights than this replica has loaded."""
        if manifest.adapter and manifest.adapter.base != self.base:
            raise WeightsRefused(
                f"version {manifest.identity.version} is an {manifest.adapter}, but the files of "
                f"{self.config.model.name} here have digest {self.base}: every node needs the same ones"
            )
        await step("receive", self._in_engine("receive_weights", (pickle.dumps((manifest, arrived.regions)),)))
        while (refusal := (await step("check", self._in_engine("checked")))[0]) is None:  # noqa: ASYNC110
            await asyncio.sleep(CHECK_TICK_S)  # a thread of the engine's process checks
        if refusal:
            raise WeightsRefused(refusal)

    async def _drained(self, identity: WeightIdentity, started: float) -> None:
        """Waits until no request is in flight; new ones wait in `_entering`."""
        limit = self.config.timeouts.update_s
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
        """Pauses, loads, resumes and proves, in few calls to the engine's process: requests in flight wait for them.

        The canary is computed together with the requests' first step after the pause, not while they stand still; until
        it agrees, answers are held back.
        """
        asked = time.monotonic()
        await step("pause", self.pause())
        still = time.monotonic()
        self.proof.check(manifest, await step("take", self._in_engine("take_weights", (self.proof.known,))))
        if manifest.adapter:
            from inference.adapter import POLICY  # imports vLLM

            self.adapter = POLICY
        self.proved.clear()
        self.identity = manifest.identity
        prefilled = 0 if self._keeps_kv else self._cleared()
        label = self.engine.update_weight_version(str(manifest.identity))
        _, canary = await step("label", asyncio.gather(label, self._submit_canary(manifest)))
        await step("resume", self.resume())
        resumed = time.monotonic()
        drift = await step("canary", self._prove(manifest, canary))
        self.proved.set()
        await step("free memory", self._in_engine("free_memory"))
        seconds = time.monotonic() - started
        return UpdateReport(self.index, manifest.identity, drift, prefilled, seconds, still - asked, resumed - still)

    def _cleared(self) -> int:
        """Returns how many tokens are prefilled again: prompt and answer of each request that has made a token.

        A request that only waits in the queue is left out, and one whose prompt is prefilled in chunks, until its last
        chunk. One that vLLM has preempted for want of space counts: vLLM does not say which, and it must be prefilled
        again too.
        """
        self.engine_stats.cache_cleared()
        states = self.engine.output_processor.request_states.values()
        made = ((state.prompt_len, state.detokenizer) for state in states)
        answers = ((prompt, tokens.num_output_tokens()) for prompt, tokens in made if tokens is not None)
        return sum(prompt + answer for prompt, answer in answers if answer)

    async def _submit_canary(self, manifest: WeightsManifest) -> RequestOutputCollector:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        # The logprob of each token of the prompt, and the least that vLLM samples.
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        tokens, salt = manifest.canary.tokens, str(manifest.identity)
        return await self._add(CANARY_REQUEST, tokens, params, salt, CANARY_PRIORITY)

    async def _prove(self, manifest: WeightsManifest, canary: RequestOutputCollector) -> Drift:
        """Returns the drift of this engine's canary. Raises WeightsRefused if it is too large."""
        tables = tables_of((await answer_of(canary)).prompt_logprobs)
        pairs = zip(manifest.canary.tokens[1:].tolist(), tables, strict=True)
        logprobs = np.asarray([table[token].logprob for token, table in pairs], dtype=np.float32)
        return check_canary(manifest, logprobs)

    async def _in_engine(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Calls a method of vLLM's worker on every rank of the engine; returns their answers, in order of the ranks."""
        return await self.engine.collective_rpc(method, args=args)

    async def _receive_broadcast(self, offer: Offer, serial: int, pipe: str) -> None:
        """Has the engine's rank 0 receive: its thread begins between two steps."""
        await self._in_engine("receive_broadcast", args=(pickle.dumps((offer, self.index, serial, pipe)),))

    async def _step(self, name: str, awaitable: Awaitable[Value], *, deadline: float) -> Value:
        with trace.span(name, "update"):
            usual = None if name == FETCH else self.call_deadline  # the engine has no part in it
            return await self._guarded(f"update step {name!r}", awaitable, max(deadline - time.monotonic(), 0.0), usual)


async def _gone(pid: int) -> bool:
    """Waits for this process to end; returns False after GONE_S."""
    deadline = time.monotonic() + GONE_S
    while not has_ended(pid):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(GONE_TICK_S)
    return True


def has_ended(pid: int) -> bool:
    """Tells whether a process has freed its memory and devices: its last thread does that, while it is a zombie as soon
    as its first thread has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE and len(os.listdir(f"/proc/{pid}/task")) == 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return True
