"""An engine and the requests in it: how they enter, what they have, how they end; and how it is found to be broken."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import numpy.typing as npt

from inference.desk import Give
from inference.engine import check_tokens, give_tokenizer, sampled_sequence, vllm_params
from inference.handover import NOTHING, Progress
from inference.in_flight import EngineRequest, HeldAdapter, InFlight
from inference.stalls import StallClock, cpu_seconds
from inference.wrong_answers import wrong_answer
from trireme.config import Config
from trireme.core.deadline import LearnedDeadline
from trireme.core.errors import BadInput, BadRequest, RoomFailed, TriremeError
from trireme.core.types import SampledSequence, SampleRequest, WeightIdentity
from trireme.process import trace
from trireme.process.environ import STACKS, STACKS_S
from trireme.process.faults import fault_point

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import RequestOutputCollector
    from vllm.v1.engine.utils import CoreEngineProcManager

    from inference.engine_stats import EngineStats

Value = TypeVar("Value")
HEALTH_TICK_S = 0.5
CHATS_LATER_S = 5.0
"""A chat enters the engine, and loses its place for lack of space, as if it had come this much later: the run's
requests of these seconds go before it."""
log = logging.getLogger(__name__)


class SamplingEngine:
    """The part of a replica that samples. `engine`, `engine_stats` and `end_ids` are there once it has started."""

    engine: AsyncLLM
    engine_stats: EngineStats
    end_ids: list[int]
    vocab_size = 2**31  # the model's, once it has started

    def __init__(self, config: Config, name: str) -> None:
        self.config = config
        self.name = name
        self.sampling = trace.Busy("sampling")
        self.identity: WeightIdentity | None = None
        self.adapter: LoRARequest | None = None  # named by requests once an adapter has been taken
        self.adapters: dict[str, HeldAdapter] = {}
        self.broken: TriremeError | None = None
        self.engine_killed = False  # it was silent for too long
        self.ranks: tuple[int, ...] = ()  # process ids of the engine's ranks, once it has started
        self.running: dict[str, InFlight] = {}
        self.halting = self.standing = False  # told to stop between two steps; stands still
        self.pausing = asyncio.Lock()  # held while the engine is paused, so that nothing else resumes it
        self.proved = asyncio.Event()  # while it is not set, tokens may come from wrong weights
        self._stalls = StallClock(self._cpu_s)
        self._step_deadline = LearnedDeadline(config.timeouts.update_s)  # of a step of the engine without progress
        self.call_deadline = LearnedDeadline(config.timeouts.update_s)  # of a call in an update without progress
        self._aborts: set[asyncio.Future[None]] = set()
        self._era = 0  # counts how often all requests were given up
        self._keeps_kv = config.inference.on_update == "keep_kv"
        self._drains = config.inference.on_update == "drain"

    @property
    def _core(self) -> AsyncMPClient:
        core: AsyncMPClient = self.engine.engine_core  # a decorator in vLLM hides its type
        return core

    @property
    def _has_requests(self) -> bool:
        return self.engine.get_num_unfinished_requests() > 0

    @property
    def _engine_process(self) -> BaseProcess:
        # vLLM names the process nowhere else; asking it for its pid fails when it matters, after its death.
        manager = cast("CoreEngineProcManager", self._core.resources.engine_manager)
        return manager.processes[0]

    @property
    def _engine_pid(self) -> int:
        pid = self._engine_process.pid
        assert pid is not None, "it was started"
        return pid

    def kill_engine(self) -> None:
        """Ends an engine process that stands still. Another one can be started from this process."""
        log.warning("process %d, the engine of %s, stands still: it is killed", self._engine_pid, self.name)
        self.engine_killed = True
        with suppress(ProcessLookupError):
            os.kill(self._engine_pid, STACKS)  # it writes its stacks, if it can
        asyncio.get_running_loop().call_later(STACKS_S, self._engine_process.kill)

    def _cpu_s(self) -> list[float]:
        return [cpu_seconds(pid) for pid in self.ranks or (self._engine_pid,)]

    async def sample(self, requests: list[SampleRequest], give: Give) -> None:
        """Samples all `requests` at the same time. Returns when they have entered the engine; raises when none can.
        Gives the outcome of each, its sequence or error, as soon as it is there. One that is aborted, or that this
        replica cannot finish because it broke, ends as Progress: all that it has."""
        fault_point("inference.sample")
        era = self._era
        refused: dict[str, Exception] = {}
        async with self._entering():
            entered = [await self._enter(request) for request in requests]
        for request, entry in zip(requests, entered, strict=True):
            if isinstance(entry, Exception):
                refused[request.request_id] = entry
                continue
            task = asyncio.create_task(self._answer(request, entry))
            self.running[request.request_id] = InFlight(task, entry)
            task.add_done_callback(partial(self._finished, give, request.request_id))
        if self._era != era:  # all were given up while these entered
            await self.abort([request.request_id for request in requests])
        if refused:
            theirs = await self._are_theirs(refused.values())
            for name, error in refused.items():
                give(name, refusal(error) if theirs else NOTHING)

    def _finished(self, give: Give, request_id: str, task: asyncio.Task[SampledSequence | Progress]) -> None:
        """Gives the result of a task that has ended, or its error as one that a person can read."""
        ended = self.running.pop(request_id)
        if task.cancelled():  # before it began, or twice
            abort = asyncio.ensure_future(self.engine.abort(ended.entry.collector.request_id, internal=True))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)
            give(request_id, NOTHING)
        elif error := task.exception():
            give(request_id, refusal(error))
        else:
            give(request_id, task.result())

    async def progress(self, known: Mapping[str, int]) -> dict[str, Progress]:
        """Returns {request id: what it has made beyond the number of tokens that is known}, for requests in flight that
        have made something. Raises RoomFailed or WeightsRefused when this replica is broken."""
        self._raise_if_broken()
        made = {
            name: self._made(self.running[name].entry, start) for name, start in known.items() if name in self.running
        }
        return {name: progress for name, progress in made.items() if len(progress.tokens)}

    def _made(self, entry: EngineRequest, start: int = 0) -> Progress:
        """Returns what an unfinished request has from token number `start` on, as far as its weights are proved."""
        # Public ways are answers at their end, or a message for each token.
        state = self.engine.output_processor.request_states.get(entry.collector.request_id)
        if state is None:
            return NOTHING
        kept_from = entry.oldest if self._keeps_kv else None
        made = Progress.of_state(start, state, kept_from, None if self.proved.is_set() else self.identity)
        return entry.named(made)

    @asynccontextmanager
    async def _entering(self) -> AsyncIterator[None]:
        """Requests enter the engine within.

        With `drain` they wait for an update that waits for the engine to be empty. In deterministic mode all start in
        one step, in order of entry: the engine stands still until they are there. So the composition of each step
        follows from the requests alone, and with it the order in which numbers are added up; otherwise the first would
        run ahead by as many steps as the machine allows.
        """
        async with AsyncExitStack() as stack:
            if self.config.deterministic or self._drains:
                await stack.enter_async_context(self.pausing)
                self._raise_if_broken()
            limit = self.config.timeouts.update_s
            if self.config.deterministic:
                await self._guarded("a pause before sampling", self._stand_still(clear_cache=False), limit)
            yield
            if self.config.deterministic:
                await self._guarded("the start of sampling", self.resume(), limit)

    async def _enter(self, request: SampleRequest) -> EngineRequest | Exception:
        """Hands `request` to the engine; returns its entry, or what was raised."""
        try:
            self._raise_if_broken()
            if self.identity is None:
                raise RoomFailed(f"{self.name} was asked to sample before any weights were published to it")
            # With `keep_kv` a conversation keeps its prefix over updates: keys and values may be as old as its first
            # token, but no older. Others begin with the newest weights; elsewhere an update drops all prefixes. One
            # that moves to a replica with older weights takes their name: no prefix may be older than its name says.
            if request.adapter:
                return await self._enter_adapted(request)
            began = request.began if self._keeps_kv else None
            oldest = min(began, self.identity) if began else self.identity
            return EngineRequest(oldest, await self._submit(request, salt=str(oldest)))
        except TriremeError as error:
            return error
        except Exception as error:
            with suppress(Exception):  # vLLM notes a request before it sends it: one that it cannot send would stay
                await self.engine.abort(request.request_id)
            return error

    async def _enter_adapted(self, request: SampleRequest) -> EngineRequest:
        if (held := self.adapters.get(request.adapter)) is None:
            there = ", ".join(self.adapters) or "none"
            raise BadInput(f"the adapter {request.adapter!r}; expected one that was loaded: {there}")
        return EngineRequest(held.identity, await self._submit(request, str(held.identity), held.asked), held)

    async def _answer(self, request: SampleRequest, entry: EngineRequest) -> SampledSequence | Progress:
        """Returns the answer, or what there is of it if it is aborted or this replica broke. Raises what vLLM does."""
        try:
            with self.sampling:
                output = await answer_of(entry.collector)
            await self.proved.wait()  # at most until the end of the update, which cancels this if it fails
            answer = entry.named(sampled_sequence(request, output, entry.oldest if self._keeps_kv else None))
        except asyncio.CancelledError:
            made = self._made(entry)
            await self.engine.abort(entry.collector.request_id, internal=True)
            return made
        except Exception as error:
            if not await self._are_theirs([error]):
                return self._made(entry)
            await self.engine.abort(entry.collector.request_id, internal=True)
            raise
        action = fault_point("inference.answer")
        return await wrong_answer(answer, action) if action else answer

    async def _submit(
        self, request: SampleRequest, salt: str, adapter: LoRARequest | None = None
    ) -> RequestOutputCollector:
        if request.params.stop_strings:
            give_tokenizer(self.engine, self.config.tokenizer_name)
        check_tokens(request.prompt, self.vocab_size)
        params = vllm_params(request, self.end_ids)
        # vLLM orders equal priorities by time of arrival. A priority of their own would let chats wait for ever in an
        # engine that is always full.
        arrival = time.time() + CHATS_LATER_S if request.chat else None
        return await self._add(request.request_id, request.prompt, params, salt, adapter=adapter, arrival=arrival)

    async def _add(
        self,
        name: str,
        tokens: npt.NDArray[np.int32],
        params: SamplingParams,
        salt: str,
        priority: int = 0,
        adapter: LoRARequest | None = None,
        arrival: float | None = None,
    ) -> RequestOutputCollector:
        """Adds a request to the engine's queue. `salt`: prefix-cache blocks are shared under equal salts only.
        `adapter`: another one than that of updates. `arrival`: Unix time by which it is ordered; None: now."""
        from vllm.inputs import tokens_input

        if not self._has_requests:
            self.engine_stats.listen()
        prompt = tokens_input(tokens.tolist(), cache_salt=salt)
        return await self.engine.add_request(
            name,
            prompt,
            params,
            arrival_time=arrival,
            lora_request=adapter or self.adapter,
            priority=priority,
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests whose answers are not needed any more; ignores unknown and finished ones."""
        for request_id in request_ids:
            if running := self.running.get(request_id):
                running.task.cancel()

    async def abort_all(self) -> None:
        """Ends all requests, also those that are entering; returns when the engine is free of the others."""
        self._era += 1
        self._give_up_all()
        while self.running:
            await asyncio.wait([running.task for running in self.running.values()], timeout=HEALTH_TICK_S)

    async def _stand_still(self, *, clear_cache: bool) -> None:
        if not self._has_requests:
            self.engine_stats.listen()
        self.halting = True
        # AsyncLLM.pause_generation would do the same, then sleep for 20 ms.
        await self._core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
        self.halting, self.standing = False, True

    async def resume(self) -> None:
        """Lets the engine continue with the requests."""
        await self.engine.resume_generation()
        self.standing = False
        self.engine_stats.listen()
        self.sampling.resume(version=self.identity.version if self.identity else None)

    # ------------------------------------------------------------------------------------------------------ failures

    def note_step(self, silent_s: float) -> None:
        """Learns from a step of the engine, which ends now, that so many seconds are nothing unusual."""
        self._step_deadline.note(self._stalls.answered(silent_s))

    def behind(self) -> tuple[float, float]:
        """Returns for how many seconds the engine, which has work, has not answered, and the deadline for that; or, if
        that is closer to its deadline, for how many it has not even made progress. Kills it, and raises RoomFailed, at
        the deadline."""
        # Nothing is expected of the engine while it stands still for an update, which has a deadline of its own.
        works = (self._has_requests or self.halting) and not self.standing
        silent_s, limit_s = self.engine_stats.silent_s if works else 0.0, self.config.timeouts.update_s
        stalled = self._stalls.look(silent_s), self._step_deadline.seconds
        behind_s, limit_s = max((silent_s, limit_s), stalled, key=lambda pair: pair[0] / pair[1])
        if behind_s >= limit_s:
            self.kill_engine()
            self.broken = RoomFailed(
                f"{self.name} has had no sign of life of its engine, which has work, for {behind_s:.0f} s (the limit "
                f"is {limit_s:.0f} s, learned from this run or timeouts.update_s): the engine is killed"
            )
            raise self.broken
        return behind_s, limit_s

    async def _guarded(
        self, what: str, awaitable: Awaitable[Value], timeout_s: float, usual: LearnedDeadline | None = None
    ) -> Value:
        """Returns the value of `awaitable`. vLLM leaves calls pending for ever when its engine process is dead, so the
        process is checked while waiting. Raises RoomFailed when it died or has a successor, after `timeout_s` seconds,
        or when it made no progress for `usual` seconds: only for what the engine does itself."""
        task, engine = asyncio.ensure_future(awaitable), self.engine
        started, stalls, stalled_s = time.monotonic(), StallClock(self._cpu_s), 0.0
        while not task.done():
            await asyncio.wait({task}, timeout=HEALTH_TICK_S)
            waited_s = time.monotonic() - started
            if self.engine is not engine and not task.done():
                task.cancel()
                raise RoomFailed(f"{self.name}: its engine was replaced before it answered {what}")
            if usual and not task.done():
                stalled_s = stalls.look(waited_s)
            stands_still = usual is not None and stalled_s > usual.seconds and waited_s <= timeout_s
            if not task.done() and (self._failure() or waited_s > timeout_s or stands_still):
                task.cancel()
                self._raise_if_broken()
                why = f"no answer for {what} within {timeout_s:.0f} s"
                if stands_still:
                    self.kill_engine()
                    why = (
                        f"no progress of its engine for {stalled_s:.0f} s, which has not answered {what}: it is killed"
                    )
                raise RoomFailed(f"{self.name}: {why}")
        if usual:
            usual.note(stalls.answered(time.monotonic() - started))
        return task.result()

    def _failure(self) -> TriremeError | None:
        """Returns why this replica is broken, None if it is not."""
        if self.broken is None and self.engine.errored:
            self.broken = RoomFailed(f"{self.name}: its engine process died")
        return self.broken

    async def _are_theirs(self, errors: Collection[Exception]) -> bool:
        """Tells whether exceptions are their requests' own: the engine still answers. Else this replica is broken."""
        engine = self.engine
        if self._failure() is None and not all(isinstance(error, TriremeError) for error in errors):
            try:
                await self._guarded("a call after an exception", engine.is_paused(), self.config.timeouts.update_s)
            except Exception as error:
                if self.engine is not engine:  # it was lost, and has a successor
                    return False
                self.broken = self.broken or as_failure(f"{self.name}, after the exception of a request", error)
        return self._failure() is None

    def _raise_if_broken(self) -> None:
        if failure := self._failure():
            raise failure

    def _give_up_all(self) -> None:
        """Ends every request in flight with what it has."""
        for running in list(self.running.values()):
            running.task.cancel()


async def answer_of(collector: RequestOutputCollector) -> RequestOutput:
    """Waits for vLLM's final answer to a request for tokens; the other kind of answer is that of pooling models."""
    return cast("RequestOutput", await collector.get())


def as_failure(who: str, error: BaseException) -> TriremeError:
    if isinstance(error, TriremeError):
        return error
    return RoomFailed(f"{who}: {type(error).__name__}: {error}")


def refusal(error: BaseException) -> TriremeError:
    """Returns what the caller of a request gets for an exception that is the request's own."""
    if isinstance(error, TriremeError):
        return error
    log.warning("a request is refused", exc_info=error)
    return BadRequest(f"vLLM does not sample this request: {type(error).__name__}: {error}")
