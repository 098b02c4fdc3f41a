"""One inference replica: an async Ray actor around one vLLM engine, on CPUs and GPUs by the same code."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import ray

from inference.engine import (
    canary_params,
    end_of_sequence_ids,
    give_tokenizer,
    policy_adapter,
    prompt_logprobs,
    sampled_sequence,
    start_engine,
    vllm_params,
)
from inference.progress import NOTHING, Progress, made_since
from inference.shipment import Shipment, in_memory_files
from trireme import logs, trace
from trireme.base_digest import base_digest
from trireme.config import Config
from trireme.errors import RoomFailed, TriremeError, WeightsRefused
from trireme.faults import fault_point, number_process
from trireme.protocols import Pulse, ReplicaLoad
from trireme.types import SampledSequence, SampleRequest, SamplingParams, WeightIdentity
from trireme.weights import PublishedWeights, UpdateReport, check_canary

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.output_processor import RequestOutputCollector

Value = TypeVar("Value")
Outcome = SampledSequence | Progress | TriremeError
Step = Callable[[str, Awaitable[Any]], Awaitable[Any]]
HEALTH_TICK_S = 0.5
NAMED = 8
WARM_UP = SampleRequest("warm-up", (0, 0), SamplingParams(max_tokens=2, seed=0), "")
CANARY_REQUEST = "trireme-canary"
CANARY_PRIORITY = -1
"""Of smaller ones vLLM thinks more; requests have 0."""


@dataclass(frozen=True)
class Health:
    """A living replica: process id of its engine, and the weights it samples from (None before the first update)."""

    engine_pid: int
    identity: WeightIdentity | None


@dataclass(frozen=True)
class Entry:
    """A request in the engine: the weights that were in use when it entered, and where its answer will come."""

    identity: WeightIdentity
    collector: RequestOutputCollector


@dataclass(frozen=True, eq=False)
class Running:
    """A request in flight: the task that brings its answer, and how it entered the engine, or why it could not."""

    task: asyncio.Task[SampledSequence | Progress]
    entry: Entry | TriremeError


class Replica:
    """Ray actor (many concurrent calls). `index` is its number; `start` must have answered before any other verb.

    After WeightsRefused, a failed update or the death of the engine every further verb raises with the reason: the
    replica is to be replaced; an update is never tried again half-way.
    """

    def __init__(self, cfg: Config, index: int, log_dir: Path | None) -> None:
        logs.redirect(log_dir, f"inference_{index}")
        number_process(index)
        trace.start(log_dir, f"inference_{index}", cfg.trace.max_mb)
        self.sampling = trace.Busy("sampling")
        self.cfg = cfg
        self.index = index
        self.name = f"inference replica {index}"
        self.identity: WeightIdentity | None = None
        self.adapter: LoRARequest | None = None  # what requests name once an adapter has been taken
        self.base: str | None = None
        self.broken: TriremeError | None = None
        self.running: dict[str, Running] = {}
        self.standing = False  # told to stand still, between two steps
        self.pausing = asyncio.Lock()  # held by whoever has paused the engine, so that nobody else lets it go on
        self.proved = asyncio.Event()  # while it is not set, what is sampled may come from wrong weights
        self._keeps_kv = cfg.inference.on_update == "keep_kv"
        self._drains = cfg.inference.on_update == "drain"

    async def start(self) -> Health:
        """Starts the engine and samples once: the first logprobs compile a function that a request would wait for."""
        fault_point("inference.start")
        self.engine = start_engine(self.cfg)
        from inference.load import load_log  # imports vLLM

        self.load_log = load_log(self.engine)
        self.end_ids = end_of_sequence_ids(self.engine)
        if self.cfg.trainer.lora.on:
            self.base = await asyncio.to_thread(base_digest, self.cfg.model.name)
        await (await self._submit(WARM_UP, salt="warm-up")).get()
        self.proved.set()
        return await self.health()

    async def health(self) -> Health:
        """Raises RoomFailed or WeightsRefused, with the reason, when this replica is of no more use."""
        self._raise_if_broken()
        return Health(self._engine_pid, self.identity)

    async def pulse(self) -> Pulse:
        """Answers at once. Raises RoomFailed or WeightsRefused, with the reason, when this replica is of no more use.

        While it stands still for an update, which has a deadline of its own, nothing is expected of its engine."""
        self._raise_if_broken()
        works = bool(self.engine.output_processor.request_states) and not self.standing
        behind_s = self.load_log.silent_s if works else 0.0
        return Pulse((os.getpid(), self._engine_pid), ray.get_runtime_context().get_node_id(), behind_s)

    @property
    def _engine_pid(self) -> int:
        return self.engine.engine_core.resources.engine_manager.processes[0].pid

    async def weight_version(self) -> WeightIdentity | None:
        """What the engine labels its tokens with; None before the first update."""
        self._raise_if_broken()
        label = await self._guarded("its version", self.engine.get_weight_version(), self.cfg.timeouts.update_s)
        return WeightIdentity.parse(label) if self.identity else None

    async def load(self) -> ReplicaLoad:
        """What there is to do, by the engine's last step. Raises RoomFailed or WeightsRefused when broken."""
        self._raise_if_broken()
        return self.load_log.load(len(self.engine.output_processor.request_states))

    async def stop(self) -> None:
        """Ends the engine process."""
        self.engine.shutdown()
        trace.stop()

    # ------------------------------------------------------------------------------------------------------ sampling

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[list[tuple[int, Outcome]]]:
        """Samples all `requests` at once; yields (index, sequence or that request's error) of those that have finished,
        as soon as there is one. An aborted one ends as Progress: all that it has.

        Ray's calls and items of a stream cost about a millisecond, so requests come in groups, and answers go in
        groups. Raises at the end when this replica broke meanwhile; what it could not finish ends as Progress.
        """
        fault_point("inference.sample")
        finished: asyncio.Queue[tuple[int, asyncio.Task[SampledSequence | Progress]]] = asyncio.Queue()
        async with self._entering():
            entered = [await self._enter(request) for request in requests]
        for index, (request, entry) in enumerate(zip(requests, entered, strict=True)):
            task = asyncio.create_task(self._answer(request, entry))
            self.running[request.request_id] = Running(task, entry)
            task.add_done_callback(partial(self._finished, finished, index, request.request_id))
        left = len(requests)
        while left:
            together = [await finished.get()]
            while not finished.empty():
                together.append(finished.get_nowait())
            left -= len(together)
            yield [(index, outcome(task)) for index, task in together]
        self._raise_if_broken()

    def _finished(self, finished: asyncio.Queue[Any], index: int, request_id: str, task: asyncio.Task[Any]) -> None:
        del self.running[request_id]
        finished.put_nowait((index, task))

    async def progress(self, known: Mapping[str, int]) -> dict[str, Progress]:
        """What requests in flight have made beyond the number of tokens that is known of each, of those that have made
        anything. Raises RoomFailed or WeightsRefused when this replica is of no more use."""
        self._raise_if_broken()
        made = {
            name: self._made(self.running[name].entry, start) for name, start in known.items() if name in self.running
        }
        return {name: progress for name, progress in made.items() if len(progress.tokens)}

    def _made(self, entry: Entry | TriremeError, start: int = 0) -> Progress:
        """What an unfinished request has from token number `start` on, as far as its weights have been proved."""
        if isinstance(entry, TriremeError):
            return NOTHING
        state = self.engine.output_processor.request_states.get(entry.collector.request_id)
        if state is None:
            return NOTHING
        kept_from = entry.identity if self._keeps_kv else None
        return made_since(start, state, kept_from, None if self.proved.is_set() else self.identity)

    @asynccontextmanager
    async def _entering(self) -> AsyncIterator[None]:
        """Requests enter the engine within.

        With `drain` they wait for an update that waits for the engine to be empty. In deterministic mode all start in
        one step, in order of entry: the engine stands still until they are there. So the composition of every step
        follows from the requests alone, and with it the order in which numbers are added up; otherwise the first would
        run ahead by as many steps as the machine allows.
        """
        async with AsyncExitStack() as stack:
            if self.cfg.deterministic or self._drains:
                await stack.enter_async_context(self.pausing)
                self._raise_if_broken()
            limit = self.cfg.timeouts.update_s
            if self.cfg.deterministic:
                await self._guarded("a pause before sampling", self._stand_still(clear_cache=False), limit)
            yield
            if self.cfg.deterministic:
                await self._guarded("the start of sampling", self.resume(), limit)

    async def _enter(self, request: SampleRequest) -> Entry | TriremeError:
        """Hands `request` to the engine: where its answer will come, or why it can not be sampled."""
        try:
            self._raise_if_broken()
            if self.identity is None:
                raise RoomFailed(f"{self.name} was asked to sample before any weights were published to it")
            return Entry(self.identity, await self._submit(request, salt=str(self.identity)))
        except Exception as error:
            return self._can_not_sample(request, error)

    async def _answer(self, request: SampleRequest, entry: Entry | TriremeError) -> SampledSequence | Progress:
        """The whole answer; or what there is of it when it is aborted, or given up because this replica broke."""
        if isinstance(entry, TriremeError):
            if entry is self.broken:
                return NOTHING
            raise entry
        try:
            with self.sampling:
                output = await entry.collector.get()
            await self.proved.wait()  # at most until the end of the update, which cancels this if it fails
        except asyncio.CancelledError:
            made = self._made(entry)
            await self.engine.abort(entry.collector.request_id, internal=True)
            return made
        except Exception as error:
            if self._failure():
                return self._made(entry)
            raise self._can_not_sample(request, error) from error
        kept_from = entry.identity if self._keeps_kv else None
        return sampled_sequence(request, output, kept_from)

    def _can_not_sample(self, request: SampleRequest, error: Exception) -> TriremeError:
        """What failed: this replica as a whole, or `request` alone."""
        if failure := self._failure():
            return failure
        return as_failure(f"{self.name} could not sample request {request.request_id}", error)

    async def _submit(self, request: SampleRequest, salt: str) -> RequestOutputCollector:
        if request.params.stop_strings:
            give_tokenizer(self.engine, self.cfg.tokenizer_name)
        return await self._add(request.request_id, request.prompt, vllm_params(request, self.end_ids), salt)

    async def _add(
        self, name: str, tokens: Sequence[int], params: Any, salt: str, priority: int = 0
    ) -> RequestOutputCollector:
        """Adds a request to the engine's queue. `salt`: prefix-cache blocks are shared under equal salts only."""
        from vllm.inputs import tokens_input

        if not self.engine.output_processor.request_states:
            self.load_log.listen()
        prompt = tokens_input(list(tokens), cache_salt=salt)
        return await self.engine.add_request(name, prompt, params, lora_request=self.adapter, priority=priority)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests whose answers nobody waits for any more; unknown and finished ones are passed over."""
        for request_id in request_ids:
            if running := self.running.get(request_id):
                running.task.cancel()

    async def abort_all(self) -> None:
        """Ends all requests; returns when the engine is free of them."""
        self._give_up_all()
        while self.running:
            await asyncio.wait([running.task for running in self.running.values()], timeout=HEALTH_TICK_S)

    # ------------------------------------------------------------------------------------------------------- weights

    async def pause(self) -> None:
        """Stops between two steps and keeps the requests. Their KV, and all that is cached, is dropped and computed
        again under the next weights; with `keep_kv` it stays."""
        await self._stand_still(clear_cache=not self._keeps_kv)
        self.sampling.pause()

    async def _stand_still(self, *, clear_cache: bool) -> None:
        # AsyncLLM.pause_generation would do no more but sleep for 20 ms in the end.
        self.standing = True
        await self.engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)

    async def resume(self) -> None:
        """Goes on with the requests."""
        await self.engine.resume_generation()
        self.standing = False
        self.load_log.listen()
        self.sampling.resume(version=self.identity.version if self.identity else None)

    async def update_weights(self, published: PublishedWeights) -> UpdateReport:
        """Takes `published` while requests are in flight. Raises RoomFailed when the bytes are not to be had, because
        whoever published them is dead: then nothing has changed. Raises WeightsRefused or RoomFailed; after either this
        replica is of no more use, and its requests are given up: no token leaves it whose weights were not proved."""
        started = time.monotonic()
        self._raise_if_broken()
        step = partial(self._step, deadline=started + self.cfg.timeouts.update_s)
        buckets = await self._fetch(published, step)
        try:
            fault_point("inference.update")
            with trace.span("update", "update", version=published.identity.version):
                await self._receive(published, buckets, step)
                async with self.pausing:
                    if self._drains:
                        await self._drained(published.identity, started)
                    return await self._take(published, step, started)
        except Exception as error:
            self.broken = as_failure(f"{self.name}, taking version {published.identity.version}", error)
            self._give_up_all()
            raise self.broken from error

    async def adopt(self, identity: WeightIdentity) -> None:
        """Names what the engine itself has loaded `identity`, instead of a first update. Raises RoomFailed."""
        self._raise_if_broken()
        label = self.engine.update_weight_version(str(identity))
        await self._guarded("a name for its weights", label, self.cfg.timeouts.update_s)
        self.identity = identity

    async def _fetch(self, published: PublishedWeights, step: Step) -> list[npt.NDArray[np.uint8]]:
        try:
            return await step("fetch", asyncio.gather(*published.buckets))
        except Exception as error:
            raise as_failure(f"{self.name}, fetching version {published.identity.version}", error) from error

    async def _receive(self, published: PublishedWeights, buckets: Sequence[npt.NDArray[np.uint8]], step: Step) -> None:
        """Brings the bytes into the engine process and checks them, while requests go on."""
        self._check_base(published)
        with in_memory_files(buckets) as paths:
            shipment = pickle.dumps(Shipment(published.identity, published.entries, paths, published.adapter))
            reason = await step("receive", self._in_engine("receive_weights", args=(shipment,)))
        if reason:
            raise WeightsRefused(f"{self.name}: {reason}")

    def _check_base(self, published: PublishedWeights) -> None:
        """Raises WeightsRefused for adapters of other weights than this replica has loaded."""
        if published.adapter and published.adapter.base != self.base:
            raise WeightsRefused(
                f"{self.name}: version {published.identity.version} is an {published.adapter}, but the files of "
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

    async def _take(self, published: PublishedWeights, step: Step, started: float) -> UpdateReport:
        """From the engine's pause to the proof, in few calls to its process: requests in flight wait meanwhile.

        The canary is computed together with the first step of the requests that go on, not while they stand still;
        until it agrees, answers are held back.
        """
        asked = time.monotonic()
        await step("pause", self.pause())
        still = time.monotonic()
        in_flight = await step("take", self._in_engine("take_weights"))
        if published.adapter:
            self.adapter = policy_adapter()
        self.proved.clear()
        self.identity = published.identity
        prefilled = 0 if self._keeps_kv else self._cleared(in_flight)
        label = self.engine.update_weight_version(str(published.identity))
        _, canary = await step("label", asyncio.gather(label, self._submit_canary(published)))
        await step("resume", self.resume())
        resumed = time.monotonic()
        diff = await step("canary", self._prove(published, canary))
        self.proved.set()
        await step("free memory", self._in_engine("free_memory"))
        seconds = time.monotonic() - started
        return UpdateReport(self.index, published.identity, diff, prefilled, seconds, still - asked, resumed - still)

    def _cleared(self, in_flight: dict[str, int]) -> int:
        """How many tokens are prefilled again: of the requests that have not been answered or aborted meanwhile."""
        self.load_log.cache_cleared()
        unfinished = self.engine.output_processor.request_states
        return sum(tokens for request_id, tokens in in_flight.items() if request_id in unfinished)

    async def _submit_canary(self, published: PublishedWeights) -> RequestOutputCollector:
        return await self._add(
            CANARY_REQUEST,
            published.canary.tokens.tolist(),
            canary_params(),
            salt=str(published.identity),
            priority=CANARY_PRIORITY,
        )

    async def _prove(self, published: PublishedWeights, canary: RequestOutputCollector) -> float:
        """Largest difference of this engine's canary to the trainer's. Raises WeightsRefused if it is too large."""
        logprobs = prompt_logprobs(published.canary.tokens.tolist(), await canary.get())
        try:
            return check_canary(published.identity, published.canary, logprobs)
        except WeightsRefused as refused:
            raise WeightsRefused(f"{self.name}: {refused}") from None

    async def _in_engine(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        """Calls a method of vLLM's worker in the engine process; the answer of its first rank."""
        return (await self.engine.collective_rpc(method, args=args))[0]

    async def _step(self, name: str, awaitable: Awaitable[Value], *, deadline: float) -> Value:
        with trace.span(name, "update"):
            return await self._guarded(f"update step {name!r}", awaitable, max(deadline - time.monotonic(), 0.0))

    # ------------------------------------------------------------------------------------------------------ failures

    async def _guarded(self, what: str, awaitable: Awaitable[Value], timeout_s: float) -> Value:
        """The value of `awaitable`. vLLM leaves calls pending for ever when its engine process is dead, so the process
        is looked at while waiting. Raises RoomFailed when it died or `timeout_s` seconds have passed."""
        task = asyncio.ensure_future(awaitable)
        deadline = time.monotonic() + timeout_s
        while not task.done():
            await asyncio.wait({task}, timeout=HEALTH_TICK_S)
            if not task.done() and (self.engine.errored or time.monotonic() > deadline):
                task.cancel()
                self._raise_if_broken()
                raise RoomFailed(f"{self.name}: no answer for {what} within {timeout_s:.0f} s")
        return task.result()

    def _failure(self) -> TriremeError | None:
        """Why this replica is of no more use, if so."""
        if self.broken is None and self.engine.errored:
            self.broken = RoomFailed(f"{self.name}: its engine process died")
        return self.broken

    def _raise_if_broken(self) -> None:
        if failure := self._failure():
            raise failure

    def _give_up_all(self) -> None:
        """Ends every request in flight with what it has."""
        for running in list(self.running.values()):
            running.task.cancel()


def outcome(task: asyncio.Task[SampledSequence | Progress]) -> Outcome:
    """What a finished task came to: its sequence, what it had, or its error as one that a person can read."""
    if task.cancelled():  # before it began, or twice
        return NOTHING
    error = task.exception()
    return as_failure("sampling", error) if error else task.result()


def as_failure(who: str, error: BaseException) -> TriremeError:
    if isinstance(error, TriremeError):
        return error
    return RoomFailed(f"{who}: {type(error).__name__}: {error}")
