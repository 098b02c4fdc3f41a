"""Sessions of clients while a run trains in steps of .05 to 10 s: a turn begins only while its replica's version is at
most `max_steps_off_policy` above the session's oldest token, and no token of a later version is in the loss."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import virtual_time
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollback_of_sessions_in_virtual_time import TOKENIZER, Replica, service_of, turn

from service.requests import RequestRefused
from trireme.core.sampler import OnProgress
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity

TURNS = 30


class TrainedReplica(Replica):
    """Samples a token at a time, each by the weights of its moment; keeps the versions of each answer."""

    def __init__(self, answer_s: float) -> None:
        super().__init__()
        self.answer_s = answer_s
        self.record: list[list[int]] = []

    async def sample(self, request: SampleRequest, on_progress: OnProgress | None = None) -> SampledSequence:
        tokens = np.asarray([*TOKENIZER.encode("yes and no"), TOKENIZER.eos_token_id], np.int32)
        spans = []
        for place in range(len(tokens)):
            await asyncio.sleep(self.answer_s / len(tokens))
            spans.append(VersionSpan(self.weights, place, place + 1))
        self.record.append([span.identity.version for span in spans])
        return SampledSequence(tokens, np.zeros(len(tokens), np.float32), "stop", tuple(spans))

    async def train(self, step_s: float) -> None:
        while True:
            await asyncio.sleep(step_s)
            version = self.weights.version + 1
            self.weights = WeightIdentity(1, version, f"a{version}")


@settings(deadline=None, max_examples=60)
@given(
    bound=st.integers(0, 8),
    step_s=st.floats(0.05, 10.0),
    answer_s=st.floats(0.01, 12.0),
    pause_s=st.floats(0.0, 12.0),
    opens_s=st.floats(0.0, 30.0),
    waits_s=st.floats(0.0, 100.0),
)
def test_a_turn_begins_within_the_bound_and_later_tokens_are_not_in_the_loss(
    bound: int, step_s: float, answer_s: float, pause_s: float, opens_s: float, waits_s: float
) -> None:
    async def scenario(directory: Path) -> None:
        replica = TrainedReplica(answer_s)
        service = service_of(replica, directory, bound=bound)
        tasks = [asyncio.create_task(replica.train(step_s)), asyncio.create_task(service._fit_places())]
        await asyncio.sleep(opens_s)
        opened = await service._gateway.open()
        await asyncio.sleep(waits_s)
        refused: Any = None
        for _ in range(TURNS):
            try:
                await turn(service, opened.name, "q")
            except RequestRefused as error:
                refused = error
                break
            await asyncio.sleep(pause_s)
        answered = replica.record
        newest = replica.record[0][0] + bound
        if refused:
            assert refused.status == 410
            assert replica.record[-1][0] > newest, "it was refused by the version that sampled it"
            answered = replica.record[:-1]
        await service._gateway.registry.end(opened.name, "done")
        turns = service._gateway.registry.export(opened.name).turns
        assert len(turns) == len(answered)
        for versions, exported in zip(answered, turns, strict=True):
            assert opened.floor <= versions[0] <= newest
            assert exported.in_bound == (max(versions) <= newest)
        for task in tasks:
            task.cancel()
        await service._gateway.close("the run has ended")

    with tempfile.TemporaryDirectory() as directory:
        virtual_time.run(scenario(Path(directory)))
