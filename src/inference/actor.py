"""One inference replica: an async Ray actor around one vLLM engine, with the same code on CPUs and GPUs.

The file follows this order: how an engine starts and ends; how requests enter it and end; how it takes new weights
while requests are in flight, and proves that it uses them; how a broken engine is found.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import psutil
import ray

from inference.batching_server import BatchingServer, Give
from inference.engine import (
    RESERVED,
    check_tokens,
    end_of_sequence_ids,
    give_tokenizer,
    prompt_logprobs,
    sampled_logprobs,
    sampled_sequence,
    start_engine,
    vllm_params,
)
from inference.handover import NOTHING, Progress
from inference.in_flight import EngineRequest, HeldAdapter, InFlight
from inference.loaded import LoadedProof
from inference.messages import Reply
from inference.session import Arrived, Broadcasts
from inference.stalls import StallClock, cpu_seconds, gpus_compute
from inference.wrong_answers import wrong_answer
from trireme.config import Config
from trireme.core.actors import remote_method
from trireme.core.base_digest import base_digest
from trireme.core.deadline import LearnedDeadline
from trireme.core.errors import (
    BadInput,
    BadRequest,
    ReplicaBehind,
    RoomFailed,
    TriremeError,
    WeightsRefused,
    as_failure,
)
from trireme.core.sampler import Heartbeat, ReplicaStats
from trireme.core.transport import Offer, load_transport
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, WeightIdentity
from trireme.core.weights import (
    DECODED,
    Drift,
    PublishedWeights,
    UpdateReport,
    WeightsManifest,
    check_canary,
    check_decoding,
)
from trireme.process import trace
from trireme.process.collector import spare_collector
from trireme.process.environ import STACKS, STACKS_S, end_of_far_log, redirect_output
from trireme.process.faults import fault_point, number_process
from trireme.process.ray_cluster import SharedGpus, see_own_gpus

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    import vllm
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import RequestOutputCollector
    from vllm.v1.engine.utils import CoreEngineProcManager

    from inference.engine_stats import EngineStats

Value = TypeVar("Value")
Step = Callable[[str, Awaitable[Any]], Awaitable[Any]]
WARM_UP = SampleRequest("warm-up", np.zeros(2, np.int32), SamplingParams(max_tokens=2, seed=0), "")
TRIAL_REQUESTS = [f"trial-{number}" for number in range(4)]
"""Names of requests that a replica decodes while it receives its first version. They make this version a trial of
receiving under load, before the run has requests of its own."""
GONE_S = 30.0
GONE_TICK_S = 0.02
HEALTH_TICK_S = 0.5
CHATS_LATER_S = 5.0
"""Seconds. In the engine's queue, and when vLLM preempts requests for lack of space, a chat counts as if it had arrived
this much later: the run's requests of these seconds go before it."""
NAMED = 8
FETCH = "fetch"
CANARY_REQUEST = "trireme-canary"
CANARY_PRIORITY = -1
"""vLLM runs lower numbers first; normal requests use 0."""
DECODE_PROOFS = 2
"""Number of updates at which an engine without CUDA graphs proves its decode steps: the first, which vLLM's loaders
load, and the second, which may be copied in place. After that its prefills are proof enough, because it decodes with
the same code and tensors. A proof at each update would slow down a small model's run on CPUs by 6 to 9 % (two pairs of
the quickstart, 28 November 2026)."""
CHECK_TICK_S = 0.01
KV_CACHE = "kv_cache"
WEIGHTS = "weights"
"""vLLM's tags of the memory of the KV cache and of the weights."""
log = logging.getLogger(__name__)


class ReplicaActor:
    """The Ray actor of one replica. Call `start` first, and wait for it; then methods may be called concurrently.

    This replica breaks when its engine dies or hangs, or when loading weights fails. It then no longer samples, and
    `heartbeat` raises the reason. If only the engine was lost (`has_lost_engine`), `restart` starts another engine in
    this actor. After any other failure the replica must be replaced, because a failed update is never repeated.
    """

    engine: AsyncLLM
    engine_stats: EngineStats
    _trial: asyncio.Task[None]
    end_ids: list[int]
    vocab_size = 2**31  # the model's, once it has started
    node = ""
    """Ray's id of the replica's node."""

    def __init__(self, config: Config, index: int, log_dir: Path | None, gpus: SharedGpus | None = None) -> None:
        see_own_gpus(gpus)
        self.config = config
        self.index = index
        self.name = f"inference replica {index}"
        self._log_dir = log_dir
        self._watched: list[int] = []  # descriptors of the ranks' processes
        self.base: str | None = None
        """Digest of the model's files; None unless the run trains an adapter."""
        self.broadcasts = Broadcasts(
            load_transport(config.transport), self._receive_broadcast, delta=config.encoding == "delta"
        )
        self.updating = asyncio.Lock()  # held during an update
        self._desk = BatchingServer(self.sample, self._failure)
        self._aborts: set[asyncio.Future[None]] = set()
        self._era = 0  # counts how often all requests were given up
        self._keeps_kv = config.inference.on_update == "keep_kv"
        self._drains = config.inference.on_update == "drain"
        self._begin_anew()
        redirect_output(log_dir, f"inference_{index}")
        number_process(index)
        trace.start(log_dir, f"inference_{index}", config.trace.max_mb)

    def _begin_anew(self) -> None:
        """Resets this actor's state for a new engine, which has no requests and has not taken any weights."""
        self.sampling = trace.Busy("sampling")
        self.identity: WeightIdentity | None = None
        self._newest_update: tuple[WeightIdentity, asyncio.Task[UpdateReport]] | None = None
        self.adapter: LoRARequest | None = None  # named by requests once an adapter has been taken
        self.adapters: dict[str, HeldAdapter] = {}
        self._adapter_number = 1  # of the newest adapter; 1 is the policy's
        self.broken: TriremeError | None = None
        self.engine_killed = False  # it was silent for too long
        self.ranks: tuple[int, ...] = ()  # process ids of the engine's ranks, once it has started
        self.running: dict[str, InFlight] = {}
        self.halting = self.standing = False  # told to stop between two steps; stands still
        self.asleep = False
        self.pausing = asyncio.Lock()  # held while the engine is paused, so that nothing else resumes it
        self.proved = asyncio.Event()  # while it is not set, tokens may come from wrong weights
        self.proof = LoadedProof(self.name)
        self.captures_graphs = True  # until the engine says otherwise
        self.decode_proofs = 0  # updates after which decode steps agreed with a prefill
        self._stalls = StallClock(self._cpu_s, self._computes)
        limit_s = self.config.timeouts.update_s
        self._step_deadline = LearnedDeadline(limit_s)  # of a step of the engine without progress
        self.call_deadline = LearnedDeadline(limit_s)  # of a call in an update without progress

    @remote_method
    async def has_lost_engine(self) -> bool:
        """Returns True if a process of the engine died, or was killed because it stood still."""
        # a call may fail before vLLM notices the death
        return self.engine_killed or self.engine.errored or any(map(has_ended, (self._engine_pid, *self.ranks)))

    @remote_method
    async def restart(self) -> None:
        """Starts a new engine after the old one was lost. Importing vLLM takes most of the time of a start, and this
        actor has already imported it."""
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
            self._begin_anew()
            await self.start()

    async def _await_end(self, pids: Iterable[int]) -> None:
        """Waits up to GONE_S seconds for `pids`, the processes of the lost engine, to end and free their memory,
        because two engines do not fit in memory. Logs a warning for each process that has not ended."""
        for pid, has_ended in zip(pids, await asyncio.gather(*map(_has_ended, pids)), strict=True):
            if not has_ended:
                log.warning(
                    "waited %g s for process %d, of %s's lost engine, to end and free its memory; starting beside it",
                    GONE_S,
                    pid,
                    self.name,
                )

    @remote_method
    async def start(self) -> None:
        """Starts the engine and samples once, so that no request has to wait for the compilation that the first
        logprobs cause. Raises RoomFailed if this replica is broken afterwards."""
        with self._log_in_errors():
            await self._start()

    async def _start(self) -> None:
        fault_point("inference.start")
        log.info("importing vLLM and loading %s", self.config.model.name)
        self.engine = start_engine(self.config, self.name)
        log.info("sampling for the first time")
        assert self.engine.logger_manager is not None
        (self.engine_stats,) = cast("list[EngineStats]", self.engine.logger_manager.stat_loggers)
        self.engine_stats.places = self.engine.vllm_config.scheduler_config.max_num_seqs - RESERVED
        self.captures_graphs = bool(self.engine.vllm_config.compilation_config.cudagraph_mode)
        self.end_ids = end_of_sequence_ids(self.engine)
        self.vocab_size = self.engine.model_config.get_vocab_size()
        if self.config.trainer.lora.on:
            self.base = await asyncio.to_thread(base_digest, self.config.model.name)
        await (await self._submit(WARM_UP, salt="warm-up")).get()
        delta = self.config.encoding == "delta"
        second_buffer = self.config.inference.receive_on == "gpu"
        self.ranks = tuple(await self._in_engine("settle", (delta, second_buffer)))
        self._stalls = StallClock(
            self._cpu_s, self._computes
        )  # before there was one process to look at, the engine's own
        self._watch_ranks()
        self.engine_stats.answered = self.note_step  # from now on: the first steps of all are slow
        self.proved.set()
        spare_collector()  # its passes over the same objects took nearly a quarter of this thread's time
        self.node = ray.get_runtime_context().get_node_id()
        self._raise_if_broken()
        log.info("ready")

    @remote_method
    async def heartbeat(self) -> Heartbeat:
        """Returns a Heartbeat without waiting: the process ids of this actor and its engine, their node, how many
        seconds the engine has been silent, and how many seconds of silence are allowed (see `behind`). Raises
        RoomFailed or WeightsRefused, with the reason, if this replica is broken. If the engine has been silent for too
        long, kills it and raises RoomFailed."""
        with self._log_in_errors():
            self._raise_if_broken()
        node = ray.get_runtime_context().get_node_id()
        further = [pid for pid in self.ranks if pid != self._engine_pid]
        return Heartbeat((os.getpid(), self._engine_pid, *further), node, *self.behind())

    @remote_method
    async def stop(self) -> None:
        """Ends the engine process, if one has started."""
        self._forget_ranks()
        self.broadcasts.close()
        if hasattr(self, "engine"):
            self.engine.shutdown()
        trace.stop()

    # -------------------------------------------------------------------------------------------------------- requests

    @remote_method
    async def exchange(self, caller: str, message: bytes) -> bytes:
        """Begins to sample the packed requests in `message`. Then waits until a request of this `caller`, from this
        call or an earlier one, has an outcome, or until the caller makes another call. Returns the outcomes as a packed
        `Reply` (see `BatchingServer.exchange` in `inference.batching_server`)."""
        return await self._desk.exchange(caller, message)

    @remote_method
    async def packed_progress(self, lengths: Mapping[str, int]) -> bytes:
        """Returns the result of `progress` as bytes: a packed `inference.messages.Reply`."""
        return Reply(list((await self.progress(lengths)).items())).pack()

    @remote_method
    async def stats(self) -> ReplicaStats:
        """Returns how busy the engine was at its last step (running and waiting sequences, share of the KV cache in
        use), and the identity of the weights in use. Raises RoomFailed or WeightsRefused when this replica is
        broken."""
        self._raise_if_broken()
        stats = self.engine_stats.stats(self.engine.get_num_unfinished_requests())
        return replace(stats, weights=self.identity)

    async def sample(self, requests: list[SampleRequest], give: Give) -> None:
        """Begins to sample all `requests` together. Returns once they have entered the engine; raises if the engine can
        take no requests at all. When a request ends, calls `give` with its id and its outcome: a sequence or an error.
        If a request is aborted, or this replica breaks, the outcome is Progress with the tokens so far."""
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
        """Takes a request out of `running` when its `task` has ended, and calls `give` with the outcome: the result, or
        a readable error."""
        finished = self.running.pop(request_id)
        if task.cancelled():  # before it began, or twice
            abort = asyncio.ensure_future(self.engine.abort(finished.entry.collector.request_id, internal=True))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)
            give(request_id, NOTHING)
        elif error := task.exception():
            give(request_id, refusal(error))
        else:
            give(request_id, task.result())

    async def progress(self, lengths: Mapping[str, int]) -> dict[str, Progress]:
        """Returns {request id: its new tokens} for the requests in flight that have new tokens. `lengths`: {request id:
        the number of its tokens that the caller already has}. Raises RoomFailed or WeightsRefused when this replica is
        broken."""
        self._raise_if_broken()
        progress_of = {
            name: self._progress_of(self.running[name].entry, start)
            for name, start in lengths.items()
            if name in self.running
        }
        return {name: progress for name, progress in progress_of.items() if len(progress.tokens)}

    def _progress_of(self, entry: EngineRequest, start: int = 0) -> Progress:
        """Returns the tokens of an unfinished request from index `start` on. Leaves out tokens sampled by weights that
        are not yet proved."""
        # Public ways are answers at their end, or a message for each token.
        state = self.engine.output_processor.request_states.get(entry.collector.request_id)
        if state is None:
            return NOTHING
        kept_from = entry.oldest if self._keeps_kv else None
        progress = Progress.of_state(start, state, kept_from, None if self.proved.is_set() else self.identity)
        return entry.named(progress)

    @asynccontextmanager
    async def _entering(self) -> AsyncIterator[None]:
        """Context manager: requests may enter the engine within its `async with` block.

        If `inference.on_update` is drain and an update is running, the block begins only after the update. (The update
        itself waits until the engine is empty.) In deterministic mode the engine is paused within the block, so that
        all requests start in the same step, in order of entry. The composition of each batch, and so the order of
        floating-point additions, then depends on the requests alone. Without the pause, the first request would be
        ahead by a number of steps that depends on the machine.
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
        """Hands `request` to the engine. Returns an EngineRequest, which says where the answer will come, or the
        exception if the request cannot enter."""
        try:
            self._raise_if_broken()
            if self.asleep:
                raise ReplicaBehind(f"{self.name} sleeps, and has no weights before the next update")
            if self.identity is None:
                raise RoomFailed(f"{self.name} was asked to sample before any weights were published to it")
            floor = request.attempt, request.floor or 0
            if (self.identity.attempt, self.identity.version) < floor:
                raise ReplicaBehind(f"{self.name} has weights {self.identity}, below the floor {floor} of a request")
            # With `keep_kv` a conversation keeps its prefix over updates: keys and values may be as old as its first
            # token, but no older. Others begin with the newest weights; elsewhere an update drops all prefixes. One
            # that moves to a replica with older weights takes their name: no prefix may be older than its name says.
            if request.adapter:
                return await self._enter_adapted(request)
            first = request.began if self._keeps_kv else None
            if first:
                oldest = min(first, self.identity)
            else:
                oldest = self.identity
            return EngineRequest(oldest, await self._submit(request, salt=str(oldest)))
        except TriremeError as error:
            return error
        except Exception as error:
            with suppress(Exception):  # vLLM notes a request before it sends it: one that it cannot send would stay
                await self.engine.abort(request.request_id)
            return error

    async def _enter_adapted(self, request: SampleRequest) -> EngineRequest:
        adapter = self.adapters.get(request.adapter)
        if adapter is None:
            names = ", ".join(self.adapters) or "none"
            raise BadInput(f"the adapter {request.adapter!r}; expected one that was loaded: {names}")
        return EngineRequest(
            adapter.identity, await self._submit(request, str(adapter.identity), adapter.request), adapter
        )

    async def _answer(self, request: SampleRequest, entry: EngineRequest) -> SampledSequence | Progress:
        """Waits for the answer to a request in the engine, and returns it. If the request is aborted or this replica
        breaks, returns the request's tokens so far. If the request itself makes vLLM fail, raises vLLM's exception."""
        try:
            with self.sampling:
                output = await answer_of(entry.collector)
            await self.proved.wait()  # at most until the end of the update, which cancels this if it fails
            answer = entry.named(sampled_sequence(request, output, entry.oldest if self._keeps_kv else None))
        except asyncio.CancelledError:
            progress = self._progress_of(entry)
            await self.engine.abort(entry.collector.request_id, internal=True)
            return progress
        except Exception as error:
            if not await self._are_theirs([error]):
                return self._progress_of(entry)
            await self.engine.abort(entry.collector.request_id, internal=True)
            raise
        action = fault_point("inference.answer")
        if action:
            return await wrong_answer(answer, action)
        return answer

    async def _submit(
        self, request: SampleRequest, salt: str, adapter: LoRARequest | None = None
    ) -> RequestOutputCollector:
        if request.params.stop_strings:
            give_tokenizer(self.engine, self.config.tokenizer_name)
        check_tokens(request.prompt, self.vocab_size)
        params = vllm_params(request, self.end_ids)
        # vLLM orders equal priorities by time of arrival. A priority of their own would let chats wait for ever in an
        # engine that is always full.
        if request.chat:
            arrival = time.time() + CHATS_LATER_S
        else:
            arrival = None
        return await self._add(request.request_id, request.prompt, params, salt, adapter=adapter, arrival=arrival)

    async def _add(
        self,
        name: str,
        tokens: npt.NDArray[np.int32],
        params: vllm.SamplingParams,
        salt: str,
        priority: int = 0,
        adapter: LoRARequest | None = None,
        arrival: float | None = None,
    ) -> RequestOutputCollector:
        """Adds the request `name` to the engine's queue; returns the collector that will get its answer. `salt`: only
        requests with equal salts share blocks of the prefix cache. `priority`: lower numbers run first. `adapter`: the
        adapter to sample with. If it is None, the weights of the newest update are used. `arrival`: the Unix time by
        which the queue orders requests of equal priority. If it is None, the present time is used."""
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

    @remote_method
    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests that nothing waits for any more; ignores unknown and finished ones."""
        for request_id in request_ids:
            running = self.running.get(request_id)
            if running:
                running.task.cancel()

    @remote_method
    async def abort_all(self) -> None:
        """Ends all requests, also those still entering the engine. Returns once all requests that were in the engine
        have left the engine."""
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
        self.halting = False
        self.standing = True

    async def resume(self) -> None:
        """Lets the engine continue with its requests after `pause` or `sleep`."""
        if self.asleep and self.config.cluster.device == "gpu":
            await self.engine.wake_up([KV_CACHE])
        self.asleep = False
        await self.engine.resume_generation()
        self.standing = False
        self.engine_stats.listen()
        self.sampling.resume(version=self.identity.version if self.identity else None)

    # --------------------------------------------------------------------------------------------------------- weights

    async def pause(self, clear_cache: bool = True) -> None:
        """Stops the engine between two steps; it keeps its requests. `clear_cache`: drop their KV cache and all cached
        prefixes, which are computed again under the next weights."""
        await self._stand_still(clear_cache=clear_cache)
        self.sampling.pause()

    @remote_method
    async def sleep(self) -> None:
        """Pauses the engine and drops its KV cache; on a GPU also frees the memory of the cache and, unless the run
        trains an adapter, of the weights. From then on this replica has no weights: it samples again after the next
        update, even if this brings the weights that the replica had before. Requests in flight stay in the engine; the
        update makes it compute their KV cache again. Does nothing if this replica sleeps already.

        If the engine does not answer, raises RoomFailed, breaks this replica and ends its requests.
        """
        step = partial(self._step, deadline=time.monotonic() + self.config.timeouts.update_s)
        async with self.updating, self.pausing:
            self._raise_if_broken()
            if self.asleep:
                return
            with self._breaks("falling asleep"):
                fault_point("inference.sleep")
                await step("pause", self.pause())
                self.asleep = True
                self.identity = None
                self._newest_update = None
                if self._drops_weights:
                    await step("release memory", self.engine.sleep(level=2, mode="keep"))
                elif self.config.cluster.device == "gpu":
                    await step("release memory", self.engine.release_kv_cache_memory())

    @property
    def _drops_weights(self) -> bool:
        """True if the engine loses its weights when it sleeps: on a GPU where each update brings a whole model. An
        adapter's update brings neither the base nor other adapters, so all of them stay."""
        return self.config.cluster.device == "gpu" and not self.config.trainer.lora.on

    @remote_method
    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        """Loads `published` while requests are in flight, and returns a report. A second call for the newest weights
        returns the same report. If the bytes cannot be fetched, raises a TriremeError (WeightsGone if they no longer
        exist); nothing has changed then. Any other failure raises WeightsRefused or RoomFailed, breaks this replica and
        ends its requests. Tokens of unproved weights never leave this replica. The update continues when the caller is
        cancelled."""
        newest = self._newest_update
        if newest is None or newest[0] != published.identity or _has_raised(newest[1]):
            newest = published.identity, asyncio.create_task(self._load_weights(published))
            self._newest_update = newest
        return await asyncio.shield(newest[1])

    async def _load_weights(self, published: PublishedWeights) -> UpdateReport:
        started = time.monotonic()
        step = partial(self._step, deadline=started + self.config.timeouts.update_s)
        async with self._received(published, step) as received, self.pausing:
            if self._drains:
                await self._drained(published.identity, started)
            return replace(await self._take(published.manifest, step, started), **received)

    @remote_method
    async def load_adapter(self, name: str, published: PublishedWeights) -> None:
        """Loads an adapter in addition to the current weights, for requests that name it; other requests do not pause.
        Raises WeightsRefused or RoomFailed if that fails, or if the adapter's canary does not agree with the trainer;
        this replica is then broken, as after a failed `load_weights`."""
        step = partial(self._step, deadline=time.monotonic() + self.config.timeouts.update_s)
        async with self._received(published, step):
            from inference.adapter import request_of  # imports vLLM

            if self.identity is None:
                raise WeightsRefused(
                    f"adapter {name!r} was sent to a replica that has not taken any weights yet; expected an update "
                    "of the replica's weights first"
                )
            if published.manifest.adapter is None:
                raise WeightsRefused(
                    f"adapter {name!r} is the weights of a whole model; expected a published LoRA adapter"
                )
            self._adapter_number += 1
            request = request_of(name, self._adapter_number)
            await step("add adapter", self._in_engine("add_adapter", (request.lora_int_id,)))
            canary = await self._submit_canary(published.manifest, adapter=request)
            await step("canary", self._prove(published.manifest, canary, request))
            self.adapters[name] = HeldAdapter(request, published.identity)
            # The engine may have moved the policy's adapter to another place: the next update finds out where it is.
            self.proof = LoadedProof(self.name)

    @remote_method
    async def drop_adapter(self, name: str) -> None:
        """Forgets the adapter `name`; no request in flight may name it. Does nothing if the adapter is unknown. Raises
        RoomFailed when this replica is broken or its engine does not answer."""
        self._raise_if_broken()
        adapter = self.adapters.pop(name, None)
        if adapter:
            dropped = self._in_engine("drop_adapter", (adapter.request.lora_int_id,))
            await self._guarded(f"dropping the adapter {name}", dropped, self.config.timeouts.update_s)

    @asynccontextmanager
    async def _received(self, published: PublishedWeights, step: Step) -> AsyncIterator[dict[str, Any]]:
        """Context manager: fetches the bytes of `published` and maps them into the engine process. The block of the
        caller's `async with` then loads them. If a delta does not produce the published bytes, this replica refuses the
        delta and fetches the whole weights instead. Yields a dict with two fields for the UpdateReport: `received`, the
        number of bytes in the last fetch, and `refused`, True if a delta was refused. If the first fetch fails, raises
        a TriremeError, and nothing has changed. If anything fails later, also in the block, breaks this replica and
        raises a TriremeError."""
        self._raise_if_broken()
        stack = AsyncExitStack()
        try:
            fetched = self.broadcasts.fetched(self.index, published)
            arrived = await step(FETCH, stack.enter_async_context(fetched))
        except Exception as error:
            raise as_failure(f"{self.name}, fetching version {published.identity.version}", error) from error
        async with stack, self.updating:  # one that a dead orchestrator began may still run
            self._raise_if_broken()
            version = published.identity.version
            with self._breaks(f"taking version {version}"), trace.span("update", "update", version=version):
                fault_point("inference.update")
                refusal = await self._receive(published.manifest, arrived, step)
                refused = bool(refusal) and arrived.has_changes
                if refused:
                    log.warning("%s takes version %d whole: %s", self.name, version, refusal)
                    fetched = self.broadcasts.fetched(self.index, published, whole=True)
                    arrived = await step(FETCH, stack.enter_async_context(fetched))
                    refusal = await self._receive(published.manifest, arrived, step)
                if refusal:
                    raise WeightsRefused(refusal)
                await stack.aclose()  # the engine has mapped them
                yield {"received": arrived.nbytes, "refused": refused}

    @contextmanager
    def _breaks(self, doing: str) -> Iterator[None]:
        """Context manager: if its `with` block raises, breaks this replica, ends the replica's requests and raises the
        reason as a TriremeError. `doing`: what the block does, for the message."""
        try:
            yield
        except Exception as error:
            if isinstance(error, WeightsRefused):
                self.broken = WeightsRefused(f"{self.name}: {error}")
            else:
                self.broken = as_failure(f"{self.name}, {doing}", error)
            self._give_up_all()
            raise self.broken from error

    @remote_method
    async def offer(self, offer: Offer) -> None:
        """Prepares to receive the version that the trainer offers to broadcast. Returns when this replica is ready.
        Raises RoomFailed when it is not."""
        self._raise_if_broken()
        fault_point("transport.offer")
        await self._guarded("an offer", self.broadcasts.offer(offer), offer.timeout_s)
        if self.identity is None and not self.asleep:
            self._trial = asyncio.create_task(self._decode_until_arrival(offer.version))

    async def _decode_until_arrival(self, version: int) -> None:
        """Decodes the requests TRIAL_REQUESTS until the offered `version` has arrived, has failed, or is late."""
        steps = self.engine_stats.steps
        arrival = asyncio.create_task(self.broadcasts.settled())
        await asyncio.gather(*(self._decode(name, arrival) for name in TRIAL_REQUESTS), return_exceptions=True)
        await arrival
        steps = self.engine_stats.steps - steps
        log.info("%s decoded for %d steps while version %d was on its way", self.name, steps, version)

    async def _decode(self, name: str, end: asyncio.Task[None]) -> None:
        """Samples as many tokens as a sequence can have, again and again until the task `end` has ended, as the request
        `name`. Raises vLLM's exception if the engine is dead."""
        length = self.engine.model_config.max_model_len - len(WARM_UP.prompt)
        params = replace(WARM_UP.params, max_tokens=length)
        while not end.done():
            collector = await self._submit(replace(WARM_UP, request_id=name, params=params), salt=WARM_UP.request_id)
            answer = asyncio.create_task(answer_of(collector))
            await asyncio.wait({end, answer}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
            else:
                answer.cancel()
                await self.engine.abort(collector.request_id, internal=True)

    @remote_method
    async def adopt(self, identity: WeightIdentity) -> None:
        """Gives the name `identity` to the weights that the engine loaded from disk, so that this replica needs no
        first update. Raises RoomFailed if this replica is broken or its engine does not answer."""
        self._raise_if_broken()
        label = self.engine.update_weight_version(str(identity))
        await self._guarded("a name for its weights", label, self.config.timeouts.update_s)
        self.identity = identity

    async def _receive(self, manifest: WeightsManifest, arrived: Arrived, step: Step) -> str:
        """Maps the received bytes (`arrived`) into the engine process and waits until they are checked. The engine
        continues to sample meanwhile. Returns "" if the bytes match the manifest, else the reason why they do not. For
        an adapter, raises WeightsRefused if the adapter was trained on a base model whose files differ from this
        replica's."""
        if manifest.adapter and manifest.adapter.base != self.base:
            raise WeightsRefused(
                f"version {manifest.identity.version} is a LoRA adapter of a base model with digest "
                f"{manifest.adapter.base}, but the files of {self.config.model.name} on this node have digest "
                f"{self.base}. Put the same model files on every node"
            )
        self.broadcasts.base = None
        pickled = pickle.dumps((manifest, arrived.regions, arrived.steps))
        await step("receive", self._in_engine("receive_weights", (pickled,)))
        refusals = await step("check", self._in_engine("checked"))
        while None in refusals:
            await asyncio.sleep(CHECK_TICK_S)  # a thread of each rank's process checks
            refusals = await step("check", self._in_engine("checked"))
        refusal: str = next(filter(None, refusals), "")
        if arrived.steps and not refusal:
            self.broadcasts.base = manifest.identity
        return refusal

    async def _drained(self, identity: WeightIdentity, started: float) -> None:
        """Waits until no request is in flight; new requests wait in `_entering`. Raises RoomFailed if requests are
        still in flight `timeouts.update_s` seconds after `started`. `identity`: the weights to be loaded, for the
        message."""
        limit = self.config.timeouts.update_s
        while self.running:
            self._raise_if_broken()
            remaining_s = started + limit - time.monotonic()
            if remaining_s <= 0:
                raise RoomFailed(
                    f"{self.name} could not take version {identity.version} within {limit:g} s. Requests still in "
                    f"flight: {len(self.running)} ({', '.join(sorted(self.running)[:NAMED])}"
                    f"{', ...' if len(self.running) > NAMED else ''}). Raise timeouts.update_s, or let requests "
                    "continue during updates: inference.on_update = recompute_kv"
                )
            tasks = [running.task for running in self.running.values()]
            await asyncio.wait(tasks, timeout=min(remaining_s, HEALTH_TICK_S))

    async def _take(self, manifest: WeightsManifest, step: Step, started: float) -> UpdateReport:
        """Pauses the engine, loads the received weights, resumes the engine and proves that it uses the weights.
        Returns a report. Requests in flight stand still only for a few calls to the engine's process.

        The canary is computed together with the requests' first steps after the pause, not while they stand still;
        until it agrees, answers are held back.
        """
        requested_at = time.monotonic()
        # After a return to an older checkpoint, prefixes of conversations that live on may be of weights that are gone.
        returned = self.identity is not None and self.identity.attempt != manifest.identity.attempt
        clears = returned or not self._keeps_kv
        if not self.asleep:  # else it is paused, without a cache
            await step("pause", self.pause(clear_cache=clears))
        elif self._drops_weights:
            await step("wake", self.engine.wake_up([WEIGHTS]))
        still = time.monotonic()
        self.proof.check(manifest, await step("take", self._in_engine("take_weights", (self.proof.traced,))))
        if manifest.adapter:
            from inference.adapter import POLICY  # imports vLLM

            self.adapter = POLICY
        self.proved.clear()
        self.identity = manifest.identity
        prefilled = self._cleared() if clears else 0
        label = self.engine.update_weight_version(str(manifest.identity))
        decodes = self.captures_graphs or self.decode_proofs < DECODE_PROOFS
        _, canary = await step("label", asyncio.gather(label, self._submit_canary(manifest, decodes=decodes)))
        await step("resume", self.resume())
        resumed = time.monotonic()
        drift = await step("canary", self._prove(manifest, canary))
        self.decode_proofs += decodes
        self.proved.set()
        await step("free memory", self._in_engine("free_memory"))
        seconds = time.monotonic() - started
        waited = still - requested_at
        paused = resumed - still
        return UpdateReport(self.index, manifest.identity, drift, prefilled, seconds, waited, paused, self.node)

    def _cleared(self) -> int:
        """Tells the engine's statistics that the KV cache was cleared. Returns how many tokens must be prefilled again:
        the prompt, and the answer so far, of each request that has made a token.

        A request without a token does not count: it waits in the queue, or is in chunked prefill before its last chunk.
        A request that vLLM preempted for lack of space counts, because it must be prefilled again too, and vLLM does
        not say which requests it preempted.
        """
        states = self.engine.output_processor.request_states.values()
        self.engine_stats.cache_cleared(len(states))
        lengths = ((state.prompt_len, state.detokenizer) for state in states)
        answers = ((prompt, tokens.num_output_tokens()) for prompt, tokens in lengths if tokens is not None)
        return sum(prompt + answer for prompt, answer in answers if answer)

    async def _submit_canary(
        self,
        manifest: WeightsManifest,
        sampled: Sequence[int] = (),
        adapter: LoRARequest | None = None,
        *,
        decodes: bool = True,
    ) -> RequestOutputCollector:
        """Adds the canary of `manifest` to the engine's queue; returns where its answer will come. The answer has the
        logprobs of the canary's tokens and of the tokens that are sampled after them: one token in the prefill and, if
        `decodes`, DECODED more in decode steps. `sampled`: tokens that an earlier canary sampled; they are appended to
        the prompt, so that a prefill computes their logprobs. `adapter`: the adapter to test; None: the weights of the
        newest update."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        in_decode_steps = DECODED if decodes and not sampled else 0
        params = SamplingParams(
            max_tokens=1 + in_decode_steps,
            temperature=0.0,
            logprobs=0,
            flat_logprobs=True,
            prompt_logprobs=0,  # vLLM then computes the whole prompt, whatever its cache of prefixes holds
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        tokens = np.append(manifest.canary.tokens, np.asarray(sampled, np.int32))
        salt = str(manifest.identity)
        return await self._add(CANARY_REQUEST, tokens, params, salt, CANARY_PRIORITY, adapter)

    async def _prove(
        self, manifest: WeightsManifest, canary: RequestOutputCollector, adapter: LoRARequest | None = None
    ) -> Drift:
        """Waits for the answer to `canary`, and returns how far its logprobs drift from the trainer's in `manifest`. If
        the engine sampled tokens in decode steps after the canary, also computes their logprobs in a prefill. Raises
        WeightsRefused if the canary drifts too far, or if decode steps and the prefill do not agree."""
        tokens = manifest.canary.tokens
        answer = await answer_of(canary)
        drift = check_canary(manifest, prompt_logprobs(tokens, answer))
        (completion,) = answer.outputs
        sampled = list(completion.token_ids)
        if len(sampled) == 1:
            return drift
        decoded = sampled_logprobs(completion.logprobs, 1, sampled[1:])
        prefill = await answer_of(await self._submit_canary(manifest, sampled, adapter))
        check_decoding(manifest, decoded, prompt_logprobs(np.append(tokens, sampled), prefill)[-DECODED:])
        return drift

    async def _in_engine(self, method: str, args: tuple[object, ...] = ()) -> list[Any]:
        """Calls a method of vLLM's worker on every rank of the engine; returns their answers, in order of the ranks."""
        return await self.engine.collective_rpc(method, args=args)

    async def _receive_broadcast(self, offer: Offer, serial: int, pipe: str) -> None:
        """Makes the engine's rank 0 receive the offered version in a thread, which starts between two steps. The thread
        writes messages about its progress to the pipe at the path `pipe`; each message carries `serial`."""
        await self._in_engine("receive_broadcast", args=(pickle.dumps((offer, self.index, serial, pipe)),))

    async def _step(self, name: str, awaitable: Awaitable[Value], *, deadline: float) -> Value:
        with trace.span(name, "update"):
            usual = None if name == FETCH else self.call_deadline  # the engine has no part in it
            return await self._guarded(f"update step {name!r}", awaitable, max(deadline - time.monotonic(), 0.0), usual)

    # -------------------------------------------------------------------------------------------------------- failures

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
        """Signals the hanging engine process to write its stack traces, and kills the process STACKS_S seconds later.
        Returns at once. Afterwards `restart` can start another engine."""
        log.warning("process %d, the engine of %s, stands still: it is killed", self._engine_pid, self.name)
        self.engine_killed = True
        with suppress(ProcessLookupError):
            os.kill(self._engine_pid, STACKS)  # it writes its stacks, if it can
        asyncio.get_running_loop().call_later(STACKS_S, self._engine_process.kill)

    def _cpu_s(self) -> list[float]:
        return [cpu_seconds(pid) for pid in self.ranks or (self._engine_pid,)]

    def _computes(self) -> list[bool]:
        count = max(1, len(self.ranks))
        if self.config.cluster.device == "gpu":
            return gpus_compute(count)
        return [False] * count

    def _watch_ranks(self) -> None:
        """Watches the processes of the ranks, so that the engine is killed when one dies. vLLM notices too, but first
        waits for the other ranks, which wait for the dead one."""
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

    def note_step(self, silent_s: float) -> None:
        """Records that the engine ended a step now, after `silent_s` seconds without an answer: from now on such a
        silence counts as normal."""
        self._step_deadline.note(self._stalls.answered(silent_s))

    def behind(self) -> tuple[float, float]:
        """Returns two durations in seconds: how long the engine has been silent, and the limit. Measures silence in two
        ways, each with its own limit: the time since the engine's last answer, and the time without progress on CPU or
        GPU (`StallClock`). Returns the measurement that is closer to its limit; the silence is 0 if the engine has no
        work or is paused. At the limit, kills the engine and raises RoomFailed."""
        # Nothing is expected of the engine while it stands still for an update, which has a deadline of its own.
        works = (self._has_requests or self.halting) and not self.standing
        silent_s = self.engine_stats.silent_s if works else 0.0
        limit_s = self.config.timeouts.update_s
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
        self, subject: str, awaitable: Awaitable[Value], timeout_s: float, usual: LearnedDeadline | None = None
    ) -> Value:
        """Waits for `awaitable`, a call to the engine, and returns its value. `subject` names the call in messages.
        Also watches the engine process, because vLLM leaves calls pending for ever when that process is dead. Raises
        RoomFailed after `timeout_s` seconds, or if the engine died or was replaced. If the engine makes no progress for
        `usual.seconds`, kills it and raises RoomFailed. Give `usual` only for a call in which the engine itself does
        the work."""
        task = asyncio.ensure_future(awaitable)
        engine = self.engine
        started = time.monotonic()
        stalls = StallClock(self._cpu_s, self._computes)
        stalled_s = 0.0
        while not task.done():
            await asyncio.wait({task}, timeout=HEALTH_TICK_S)
            waited_s = time.monotonic() - started
            if self.engine is not engine and not task.done():
                task.cancel()
                raise RoomFailed(f"{self.name}: its engine was replaced before it answered {subject}")
            if usual and not task.done():
                stalled_s = stalls.look(waited_s)
            stands_still = usual is not None and stalled_s > usual.seconds and waited_s <= timeout_s
            if not task.done() and (self._failure() or waited_s > timeout_s or stands_still):
                task.cancel()
                self._raise_if_broken()
                reason = f"no answer for {subject} within {timeout_s:.0f} s"
                if stands_still:
                    self.kill_engine()
                    silence = f"no progress of its engine for {stalled_s:.0f} s"
                    reason = f"{silence}, which has not answered {subject}: it is killed"
                raise RoomFailed(f"{self.name}: {reason}")
        if usual:
            usual.note(stalls.answered(time.monotonic() - started))
        return task.result()

    def _failure(self) -> TriremeError | None:
        """Returns why this replica is broken; None if it is not. Also notes the death of the engine."""
        if self.broken is None and self.engine.errored:
            self.broken = RoomFailed(f"{self.name}: its engine process died")
        return self.broken

    async def _are_theirs(self, errors: Collection[Exception]) -> bool:
        """Returns True if the engine still answers after `errors`: then the requests themselves caused the errors.
        Otherwise marks this replica as broken and returns False."""
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
        failure = self._failure()
        if failure:
            raise failure

    def _give_up_all(self) -> None:
        """Ends every request in flight; each ends as Progress with its tokens so far."""
        for running in list(self.running.values()):
            running.task.cancel()

    @contextmanager
    def _log_in_errors(self) -> Iterator[None]:
        """Context manager: if its `with` block raises, and the driver cannot see this process's log file, appends the
        last lines of the log to the exception's message."""
        try:
            yield
        except Exception as error:
            lines = end_of_far_log(self._log_dir, f"inference_{self.index}")
            if not lines:
                raise
            if isinstance(error, TriremeError):
                raise type(error)(f"{error}; {lines}") from error
            raise RoomFailed(f"{self.name} raised {type(error).__name__}: {error}; {lines}") from error


async def answer_of(collector: RequestOutputCollector) -> RequestOutput:
    """Waits for vLLM's final answer to a request for tokens, and returns it. (A request to a pooling model would get an
    answer of another type.)"""
    return cast("RequestOutput", await collector.get())


def refusal(error: BaseException) -> TriremeError:
    """Converts `error`, an exception that a request itself caused, to the error that the request's caller gets. Returns
    `error` unchanged if it is a TriremeError, else a BadRequest."""
    if isinstance(error, TriremeError):
        return error
    log.warning("a request is refused", exc_info=error)
    return BadRequest(f"vLLM does not sample this request: {type(error).__name__}: {error}")


def _has_raised(task: asyncio.Task[object]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _has_ended(pid: int) -> bool:
    """Waits up to GONE_S seconds for the process `pid` to end. Returns True if it has ended."""
    deadline = time.monotonic() + GONE_S
    while not has_ended(pid):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(GONE_TICK_S)
    return True


def has_ended(pid: int) -> bool:
    """Returns True if a process has ended and has freed its memory and devices. A zombie counts as ended only when none
    of its other threads is left, because such a thread still holds memory and devices."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE and len(os.listdir(f"/proc/{pid}/task")) == 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return True
