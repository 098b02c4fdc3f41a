"""Records of the requests and adapters that an engine has."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from inference.handover import Progress
from trireme.core.types import SampledSequence, WeightIdentity

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.output_processor import RequestOutputCollector

Answer = TypeVar("Answer", SampledSequence, Progress)


@dataclass(frozen=True)
class HeldAdapter:
    """An adapter that the engine holds for requests that name it. The policy's own adapter is not a HeldAdapter: each
    update replaces its values."""

    request: LoRARequest
    """vLLM's object by which a request names the adapter."""
    identity: WeightIdentity


@dataclass(frozen=True)
class EngineRequest:
    """A request that has entered the engine, and where its answer will come."""

    oldest: WeightIdentity
    """The oldest weights that may have computed keys and values in the request's KV cache: with `inference.on_update` =
    keep_kv the cache outlives updates."""
    collector: RequestOutputCollector
    """Where vLLM puts the request's answer."""
    adapter: HeldAdapter | None = None
    """The adapter that samples the request; None: the weights of updates sample it."""

    def named(self, answer: Answer) -> Answer:
        """Returns `answer` with the identity of the request's adapter in all version spans. If the request names no
        adapter, returns `answer` unchanged: its spans already name the weights that sampled them."""
        if self.adapter is None:
            return answer
        spans = tuple(replace(span, identity=self.adapter.identity, mixed=False) for span in answer.spans)
        return replace(answer, spans=spans)


@dataclass(frozen=True, eq=False)
class InFlight:
    """A request in the engine, with the task that waits for its answer."""

    task: asyncio.Task[SampledSequence | Progress]
    """Waits for the answer and returns it."""
    entry: EngineRequest
