"""Plays rollouts of many turns against a replica that is an actor with ready answers (`turns.py`), in this process."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from pipeline import START_S, ReadyAnswers, drive, pipeline_of, ray_replica
from turns import GROUP_SIZE, Shape, answers, config_of, make_model

from inference.messages import Reply, unpack_requests
from trireme.core.types import SampledSequence
from trireme.core.weights import Drift, PublishedWeights, UpdateReport

if TYPE_CHECKING:
    from inference.handle import ReplicaClient

STEPS = 2
"""At K = 1 the rollouts of two steps are in flight at once, and they are all of the run."""


@dataclass(frozen=True)
class OverRay:
    """What a turn costs. CPU milliseconds: `caller_ms` of the orchestrator's process, its driver included, `callee_ms`
    of the replica's. Turns per second by the clock; answers in a message, on average; the load before."""

    caller_ms: float
    callee_ms: float
    turns_per_s: float
    answers_per_message: float
    load_before: float


class TurnsActor(ReadyAnswers):
    """The replica, like `inference.actor.ReplicaActor` from outside: at most `per_message` answers travel at once."""

    def __init__(self, per_message: int) -> None:
        super().__init__()
        self._per_message = per_message
        self._messages = 0
        self._delivered = 0
        self._ready = list[tuple[str, SampledSequence]]()
        self._waiting: asyncio.Future[None] | None = None

    async def exchange(self, _caller: str, message: bytes) -> bytes:
        for request in unpack_requests(message):
            answer = self._answers[len(self._ready) % len(self._answers)]
            self._ready.append((request.request_id, answer))
        if self._waiting and not self._waiting.done():
            self._waiting.set_result(None)
        if not self._ready:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        together = self._ready[: self._per_message]
        self._ready = self._ready[self._per_message :]
        self._messages, self._delivered = self._messages + bool(together), self._delivered + len(together)
        return Reply(together).pack()

    async def load_weights(self, weights: PublishedWeights) -> UpdateReport:
        self._answers = answers(weights.identity)
        return UpdateReport(0, weights.identity, Drift(0.0, 0.0), 0, 0.0)

    async def used(self) -> tuple[float, int, int]:
        """Returns its CPU seconds, messages and answers so far."""
        return time.process_time(), self._messages, self._delivered


def play(client: ReplicaClient, model: Path, shape: Shape, groups: int) -> OverRay:
    """Plays STEPS steps of `groups` groups."""
    from trireme.config import Config
    from trireme.process import waits

    actor: Any = client.handle

    def used() -> tuple[float, int, int]:
        usage: tuple[float, int, int] = waits.get(actor.used.remote(), owner="the replica", timeout_s=START_S)
        return usage

    config = Config.model_validate(config_of(model, shape, groups, STEPS, max_steps_off_policy=1))
    pipeline = pipeline_of(config, client)
    load_before = os.getloadavg()[0]
    before = used()
    started = time.monotonic()
    cpu_started = time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the loop that Ray gives its actors
        runner.run(drive(pipeline, STEPS))
    wall_s = time.monotonic() - started
    cpu_s = time.process_time() - cpu_started
    after = used()
    turns = STEPS * groups * GROUP_SIZE * shape.turns
    return OverRay(
        caller_ms=round(cpu_s / turns * 1000, 4),
        callee_ms=round((after[0] - before[0]) / turns * 1000, 4),
        turns_per_s=round(turns / wall_s, 1),
        answers_per_message=round((after[2] - before[2]) / (after[1] - before[1]), 2),
        load_before=load_before,
    )


def measure_here(shape: Shape, groups: int, per_message: int) -> OverRay:
    """Measures after a warm-up, with all threads of this process on one core, and the replica on the others."""
    from trireme.process.collector import spare_collector

    with ray_replica(TurnsActor, per_message) as client, tempfile.TemporaryDirectory(prefix="bench-") as directory:
        model = make_model(Path(directory))
        play(client, model, Shape(shape.context, shape.turns), 1)
        spare_collector()  # as in the actor
        return play(client, model, shape, groups)


def main(context: str, turns: str, groups: str, per_message: str) -> None:
    """Prints one measurement as a JSON object."""
    measured = measure_here(Shape(int(context), int(turns)), int(groups), int(per_message))
    print(json.dumps(vars(measured)), flush=True)
