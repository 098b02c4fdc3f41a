"""Requests and outcomes wait some milliseconds to travel together (GATHER_S of `inference.batching_client` and
`inference.batching_server`), and the ends of answers wait for each other in the engine (END_SHARE of
`inference.coalescing`). For engines of 2 to 200 ms a step these waits cost a step of training at most 3 % of its
sampling."""

import asyncio
import math
import random

import numpy as np
import pytest
import virtual_time
from vllm.v1.engine import EngineCoreOutput, FinishReason

from inference import batching_client, batching_server, coalescing
from inference.batching_client import BatchingClient
from inference.batching_server import BatchingServer, Give
from inference.coalescing import HeldOutputs
from inference.handover import NOTHING
from inference.messages import Reply, pack_requests
from trireme.core.types import SampleRequest, SamplingParams

PLACES = 64
ROLLOUTS = 256
CONCURRENT = PLACES + PLACES // 4
"""Rollouts in flight, as `orchestrator.max_concurrent = "auto"` begins for this engine."""
TRAVEL_S = 0.0005
MOST_LOST = 0.03


class Engine:
    """Decodes PLACES sequences at once: each step of `step_s` seconds gives each of them a token. The `route_key` of a
    request says how many tokens its answer has. Its scheduler lets ends wait for each other as
    `inference.coalescing.CoalescingScheduler` does."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._waiting: list[tuple[SampleRequest, Give]] = []
        self._running: dict[str, int] = {}
        self._gives: dict[str, Give] = {}
        self._held_outputs = HeldOutputs()
        self._has_work = asyncio.Event()

    async def sample(self, requests: list[SampleRequest], give: Give) -> None:
        self._waiting += [(request, give) for request in requests]
        self._has_work.set()

    async def run(self) -> None:
        while True:
            await self._has_work.wait()
            while self._waiting and len(self._running) < PLACES:
                request, give = self._waiting.pop(0)
                self._running[request.request_id] = int(request.route_key)
                self._gives[request.request_id] = give
            await asyncio.sleep(self._step_s)
            now = asyncio.get_running_loop().time()
            self._send(self._held_outputs.pass_on(self._step(), lambda _: True, now))
            if len(self._waiting) + len(self._running) < coalescing.FEW:
                self._send(self._held_outputs.take_ended(math.inf))
            else:
                self._send(self._held_outputs.take_ended(now))
            if not self._waiting and not self._running:
                self._has_work.clear()

    def _step(self) -> list[EngineCoreOutput]:
        """Returns a token of each running request."""
        outputs = []
        running = self._running
        self._running = {}
        for name, remaining in running.items():
            if remaining == 1:
                outputs.append(EngineCoreOutput(name, [0], finish_reason=FinishReason.LENGTH))
            else:
                outputs.append(EngineCoreOutput(name, [0]))
                self._running[name] = remaining - 1
        return outputs

    def _send(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.finished:
                self._gives.pop(output.request_id)(output.request_id, NOTHING)


async def sampling_s(step_s: float, turns: int, mean_tokens: int) -> float:
    """Returns the seconds that ROLLOUTS conversations take."""
    draws = random.Random(0)
    engine = Engine(step_s)
    running = asyncio.ensure_future(engine.run())
    server = BatchingServer(engine.sample, lambda: None)

    async def exchange(caller: str, requests: list[SampleRequest], _: float) -> Reply:
        await asyncio.sleep(TRAVEL_S)
        reply = Reply.unpack(await server.exchange(caller, pack_requests(requests)))
        await asyncio.sleep(TRAVEL_S)
        return reply

    client = BatchingClient(exchange, name="replica", answer_s=1e6, gathers=True)
    gate = asyncio.Semaphore(CONCURRENT)

    async def rollout(index: int, lengths: list[int]) -> None:
        async with gate:
            for turn, tokens in enumerate(lengths):
                request = SampleRequest(f"{index}.{turn}", np.asarray([1]), SamplingParams(), str(tokens))
                assert [place async for place, _ in client.sample([request])] == [0]

    lengths = [[1 + int(draws.expovariate(1 / mean_tokens)) for _ in range(turns)] for _ in range(ROLLOUTS)]
    await asyncio.gather(*(rollout(index, its) for index, its in enumerate(lengths)))
    running.cancel()
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("turns", [1, 8])
@pytest.mark.parametrize("step_s", [0.002, 0.02, 0.2])
def test_waits_for_others_cost_little(monkeypatch: pytest.MonkeyPatch, step_s: float, turns: int) -> None:
    """With short answers, where a wait is longest beside them, and as many rollouts as keep the replica busy."""
    waiting = virtual_time.run(sampling_s(step_s, turns, 28))
    for module in (batching_client, batching_server):
        monkeypatch.setattr(module, "GATHER_S", 0.0)
    monkeypatch.setattr(coalescing, "END_SHARE", 0.0)
    at_once = virtual_time.run(sampling_s(step_s, turns, 28))
    assert waiting <= (1 + MOST_LOST) * at_once
