"""The course of an update: an engine takes new weights while requests are in flight, and proves that it uses them."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inference.engine import tables_of
from inference.in_flight import HeldAdapter
from inference.loaded import LoadedProof
from inference.sampling import HEALTH_TICK_S, SamplingEngine, Value, answer_of, as_failure
from inference.session import Arrived, Broadcasts
from trireme.core.errors import RoomFailed, WeightsRefused
from trireme.core.transport import Offer
from trireme.core.types import WeightIdentity
from trireme.core.weights import Drift, PublishedWeights, UpdateReport, WeightsManifest, check_canary
from trireme.process import trace
from trireme.process.faults import fault_point

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.output_processor import RequestOutputCollector

Step = Callable[[str, Awaitable[Any]], Awaitable[Any]]
NAMED = 8
FETCH = "fetch"
CANARY_REQUEST = "trireme-canary"
CANARY_PRIORITY = -1
"""vLLM runs lower numbers first; normal requests use 0."""
CHECK_TICK_S = 0.01


class UpdatingEngine(SamplingEngine):
    """The part of a replica that takes weights. The actor makes what it needs for that."""

    index: int
    base: str | None
    """Digest of the model's files, where an adapter is trained."""
    proof: LoadedProof
    broadcasts: Broadcasts
    updating: asyncio.Lock
    """Held during an update."""
    node = ""
    """Ray's id of its node."""
    _numbers = 1
    """The number of the newest adapter; 1 is the policy's."""

    async def pause(self, clear_cache: bool = True) -> None:
        """Stops between two steps and keeps the requests. `clear_cache`: their KV cache and all prefixes are dropped,
        to be computed again under the next weights."""
        await self._stand_still(clear_cache=clear_cache)
        self.sampling.pause()

    async def load_weights(self, published: PublishedWeights) -> UpdateReport:
        """Takes `published` while requests are in flight. Raises RoomFailed when the bytes cannot be fetched because
        their sender is dead; then nothing has changed. Other failures raise WeightsRefused or RoomFailed and break this
        replica, and its requests are given up: no token leaves it whose weights were not proved."""
        started = time.monotonic()
        step = partial(self._step, deadline=started + self.config.timeouts.update_s)
        async with self._received(published, step), self.pausing:
            if self._drains:
                await self._drained(published.identity, started)
            return await self._take(published.manifest, step, started)

    async def load_adapter(self, name: str, published: PublishedWeights) -> None:
        """Takes an adapter beside the weights that it has, for requests that name it; others do not stand still. Raises
        RoomFailed or WeightsRefused like `load_weights`, also when the canary of this adapter does not agree."""
        step = partial(self._step, deadline=time.monotonic() + self.config.timeouts.update_s)
        async with self._received(published, step):
            from inference.adapter import request_of  # imports vLLM

            if self.identity is None or published.manifest.adapter is None:
                raise WeightsRefused(
                    f"an adapter {name} beside no weights; expected an adapter, and an update before it"
                )
            self._numbers += 1
            asked = request_of(name, self._numbers)
            await step("add adapter", self._in_engine("add_adapter", (asked.lora_int_id,)))
            canary = await self._submit_canary(published.manifest, asked)
            await step("canary", self._prove(published.manifest, canary))
            self.adapters[name] = HeldAdapter(asked, published.identity)
            # The engine may have moved the policy's adapter to another place: the next update finds out where it is.
            self.proof = LoadedProof(self.name)

    async def drop_adapter(self, name: str) -> None:
        """Forgets an adapter, which no request in flight may name. Raises RoomFailed."""
        self._raise_if_broken()
        if held := self.adapters.pop(name, None):
            dropped = self._in_engine("drop_adapter", (held.asked.lora_int_id,))
            await self._guarded(f"dropping the adapter {name}", dropped, self.config.timeouts.update_s)

    @asynccontextmanager
    async def _received(self, published: PublishedWeights, step: Step) -> AsyncIterator[None]:
        """Brings the bytes of `published` into the engine; the block takes them. What fails there breaks this
        replica."""
        self._raise_if_broken()
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
                    yield
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
        # After a return to an older commit, prefixes of conversations that live on may be of weights that are gone.
        returned = self.identity is not None and self.identity.attempt != manifest.identity.attempt
        clears = returned or not self._keeps_kv
        await step("pause", self.pause(clear_cache=clears))
        still = time.monotonic()
        self.proof.check(manifest, await step("take", self._in_engine("take_weights", (self.proof.known,))))
        if manifest.adapter:
            from inference.adapter import POLICY  # imports vLLM

            self.adapter = POLICY
        self.proved.clear()
        self.identity = manifest.identity
        prefilled = self._cleared() if clears else 0
        label = self.engine.update_weight_version(str(manifest.identity))
        _, canary = await step("label", asyncio.gather(label, self._submit_canary(manifest)))
        await step("resume", self.resume())
        resumed = time.monotonic()
        drift = await step("canary", self._prove(manifest, canary))
        self.proved.set()
        await step("free memory", self._in_engine("free_memory"))
        seconds = time.monotonic() - started
        waited, paused = still - asked, resumed - still
        return UpdateReport(self.index, manifest.identity, drift, prefilled, seconds, waited, paused, self.node)

    def _cleared(self) -> int:
        """Returns how many tokens are prefilled again: prompt and answer of each request that has made a token.

        A request that only waits in the queue is left out, and one whose prompt is prefilled in chunks, until its last
        chunk. One that vLLM has preempted for want of space counts: vLLM does not say which, and it must be prefilled
        again too.
        """
        states = self.engine.output_processor.request_states.values()
        self.engine_stats.cache_cleared(len(states))
        made = ((state.prompt_len, state.detokenizer) for state in states)
        answers = ((prompt, tokens.num_output_tokens()) for prompt, tokens in made if tokens is not None)
        return sum(prompt + answer for prompt, answer in answers if answer)

    async def _submit_canary(
        self, manifest: WeightsManifest, adapter: LoRARequest | None = None
    ) -> RequestOutputCollector:
        """Adds the canary to the engine's queue. `adapter`: one beside the weights of updates."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        # The logprob of each token of the prompt, and the least that vLLM samples.
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        tokens, salt = manifest.canary.tokens, str(manifest.identity)
        return await self._add(CANARY_REQUEST, tokens, params, salt, CANARY_PRIORITY, adapter)

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
