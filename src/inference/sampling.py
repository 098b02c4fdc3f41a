"""An engine and the requests in it: how they enter, what they have, how they end; and how it is found to be broken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from inference.engine import give_tokenizer, sampled_sequence, vllm_params
from inference.handover import NOTHING, Outcome, Progress, made_since
from inference.wrong import made_wrong
from trireme.config import Config
from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.types import SampledSequence, SampleRequest, WeightIdentity
from trireme.process import trace
from trireme.process.faults import fault_point

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from inference.engine_stats import EngineStats

Value = TypeVar("Value")
HEALTH_TICK_S = 0.5


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


class SamplingEngine:
    """The part of a replica that samples. `engine`, `engine_stats` and `end_ids` are there once it has started."""

    engine: AsyncLLM
    engine_stats: EngineStats
    end_ids: list[int]

    def __init__(self, cfg: Config, name: str) -> None:
        self.cfg = cfg
        self.name = name
        self.sampling = trace.Busy("sampling")
        self.identity: WeightIdentity | None = None
        self.adapter: LoRARequest | None = None  # what requests name once an adapter has been taken
        self.broken: TriremeError | None = None
        self.running: dict[str, Running] = {}
        self.halting = self.standing = False  # told to stop between two steps; stands still
        self.pausing = asyncio.Lock()  # held by whoever has paused the engine, so that nobody else lets it go on
        self.proved = asyncio.Event()  # while it is not set, what is sampled may come from wrong weights
        self._era = 0  # counts how often all requests were given up
        self._keeps_kv = cfg.inference.on_update == "keep_kv"
        self._drains = cfg.inference.on_update == "drain"

    @property
    def behind_s(self) -> float:
        """Seconds for which the engine, which has something to do, has said nothing. Nothing is expected of it while it
        stands still for an update, which has a deadline of its own."""
        works = bool(self.engine.output_processor.request_states) or self.halting
        return self.engine_stats.silent_s if works and not self.standing else 0.0

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[list[tuple[int, Outcome]]]:
        """Samples all `requests` at once; yields (index, sequence or that request's error) of those that have finished,
        as soon as there is one. An aborted one ends as Progress: all that it has.

        Ray's calls and items of a stream cost about a millisecond, so requests come in groups, and answers go in
        groups. Raises at the end when this replica broke meanwhile; what it could not finish ends as Progress.
        """
        fault_point("inference.sample")
        era = self._era
        finished: asyncio.Queue[tuple[int, asyncio.Task[SampledSequence | Progress]]] = asyncio.Queue()
        async with self._entering():
            entered = [await self._enter(request) for request in requests]
        for index, (request, entry) in enumerate(zip(requests, entered, strict=True)):
            task = asyncio.create_task(self._answer(request, entry))
            self.running[request.request_id] = Running(task, entry)
            task.add_done_callback(partial(self._finished, finished, index, request.request_id))
        if self._era != era:  # all were given up while these entered
            await self.abort([request.request_id for request in requests])
        left = len(requests)
        while left:
            together = [await finished.get()]
            while not finished.empty():
                together.append(finished.get_nowait())
            left -= len(together)
            yield [(index, await self._outcome(task, entered[index])) for index, task in together]
        self._raise_if_broken()

    def _finished(self, finished: asyncio.Queue[Any], index: int, request_id: str, task: asyncio.Task[Any]) -> None:
        del self.running[request_id]
        finished.put_nowait((index, task))

    async def _outcome(self, task: asyncio.Task[SampledSequence | Progress], entry: Entry | TriremeError) -> Outcome:
        """What a finished task came to: its sequence, what it had, or its error as one that a person can read."""
        if task.cancelled():  # before it began, or twice
            await self._leave(entry)
            return NOTHING
        error = task.exception()
        return as_failure("sampling", error) if error else task.result()

    async def _leave(self, entry: Entry | TriremeError) -> None:
        """Takes a request out of the engine, if it is there."""
        if isinstance(entry, Entry):
            await self.engine.abort(entry.collector.request_id, internal=True)

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
            await self._leave(entry)
            return made
        except Exception as error:
            if self._failure():
                return self._made(entry)
            raise self._can_not_sample(request, error) from error
        kept_from = entry.identity if self._keeps_kv else None
        answer = sampled_sequence(request, output, kept_from)
        action = fault_point("inference.answer")
        return await made_wrong(answer, action) if action else answer

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
            self.engine_stats.listen()
        prompt = tokens_input(list(tokens), cache_salt=salt)
        return await self.engine.add_request(name, prompt, params, lora_request=self.adapter, priority=priority)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests whose answers nobody waits for any more; unknown and finished ones are passed over."""
        for request_id in request_ids:
            if running := self.running.get(request_id):
                running.task.cancel()

    async def abort_all(self) -> None:
        """Ends all requests, those on their way in too; returns when the engine is free of the others."""
        self._era += 1
        self._give_up_all()
        while self.running:
            await asyncio.wait([running.task for running in self.running.values()], timeout=HEALTH_TICK_S)

    async def _stand_still(self, *, clear_cache: bool) -> None:
        if not self.engine.output_processor.request_states:
            self.engine_stats.listen()
        self.halting = True
        # AsyncLLM.pause_generation would do no more but sleep for 20 ms in the end.
        await self.engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
        self.halting, self.standing = False, True

    async def resume(self) -> None:
        """Goes on with the requests."""
        await self.engine.resume_generation()
        self.standing = False
        self.engine_stats.listen()
        self.sampling.resume(version=self.identity.version if self.identity else None)

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


def as_failure(who: str, error: BaseException) -> TriremeError:
    if isinstance(error, TriremeError):
        return error
    return RoomFailed(f"{who}: {type(error).__name__}: {error}")
