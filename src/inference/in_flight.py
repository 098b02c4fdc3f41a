"""The requests in an engine."""

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
    """An adapter that the engine has in addition to the updated one."""

    request: LoRARequest
    """The LoRA request that names it."""
    identity: WeightIdentity


@dataclass(frozen=True)
class EngineRequest:
    """A request in the engine."""

    oldest: WeightIdentity
    """The oldest weights that may have made keys and values that it reads, if its cache outlives them (`keep_kv`)."""
    collector: RequestOutputCollector
    """Where its answer will come."""
    adapter: HeldAdapter | None = None
    """The adapter that samples it; None: the weights of updates do."""

    def named(self, answer: Answer) -> Answer:
        """Returns the request's tokens with the name of its adapter: the engine names the updated weights."""
        if self.adapter is None:
            return answer
        spans = tuple(replace(span, identity=self.adapter.identity, mixed=False) for span in answer.spans)
        return replace(answer, spans=spans)


@dataclass(frozen=True, eq=False)
class InFlight:
    """A request that is being sampled."""

    task: asyncio.Task[SampledSequence | Progress]
    """It brings the answer."""
    entry: EngineRequest
