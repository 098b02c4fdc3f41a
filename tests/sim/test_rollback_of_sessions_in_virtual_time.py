"""A run goes back to an earlier step while agents of the service work, and comes to the same versions again: a session
with weights that were given up is closed, whenever its next turn comes; every other one lives on."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import virtual_time
from config_support import small
from renderer_support import QWEN3, bpe
from service_support import KEYS, MAX_LEN

from service.actor import ServiceActor
from service.answering import TurnAnswering
from service.places import Places
from service.requests import RequestRefused, ServedModels, TurnRequest
from trireme.core.sampler import OnProgress, ReplicaStats
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity
from trireme.renderers import make_renderer

STEP_S = 10.0
LOST_AT_S, REBUILD_S = 125.0, 40.0
"""Version 12 is the newest; the checkpoint is of version 10."""
COMMIT = 10
TOKENIZER = bpe(QWEN3)


class Replica:
    """One replica, which has the newest weights of the run."""

    def __init__(self) -> None:
        self.weights = WeightIdentity(1, 0, "a0")

    async def stats(self) -> dict[int, ReplicaStats]:
        return {0: ReplicaStats(0, 0, 0.0, 0, 8, weights=self.weights)}

    async def sample(self, request: SampleRequest, on_progress: OnProgress | None = None) -> SampledSequence:
        await asyncio.sleep(1.0)
        tokens = np.asarray([*TOKENIZER.encode("yes"), TOKENIZER.eos_token_id], np.int32)
        span = VersionSpan(self.weights, 0, len(tokens))
        return SampledSequence(tokens, np.zeros(len(tokens), np.float32), "stop", (span,))


async def run_of(replica: Replica, tell: Callable[[int, int], Any]) -> None:
    """Trains for ever: a version each STEP_S, and the trainer is lost once."""
    await tell(1, 0)
    for version in range(1, 13):
        await asyncio.sleep(STEP_S)
        replica.weights = WeightIdentity(1, version, f"a{version}")
    await asyncio.sleep(LOST_AT_S - 12 * STEP_S)
    await tell(2, COMMIT)
    await asyncio.sleep(REBUILD_S)  # the replica has its old weights all the while
    version = COMMIT
    while True:
        replica.weights = WeightIdentity(2, version, f"b{version}")
        await asyncio.sleep(STEP_S)
        version += 1


def service_of(replica: Any, directory: Path, starts: Any = (), bound: int = 100) -> ServiceActor:
    config = small(
        model={"max_seq_len": MAX_LEN},
        orchestrator={"batch_size": 2, "group_size": 2, "max_steps_off_policy": bound},
        inference={"sampling": {"max_tokens": 300}},
    )
    models = ServedModels(("policy",), MAX_LEN, len(TOKENIZER))
    actor: Any = ServiceActor(config, lambda: replica, models, [], True, directory, None, starts)  # type: ignore[arg-type, return-value]
    actor._sampler = replica
    actor._places = Places(8, 8, 1000.0)
    turns = TurnAnswering(replica.sample, models, TOKENIZER, make_renderer("auto", TOKENIZER), actor._places)
    actor._gateway = actor._make_gateway(turns, KEYS)
    actor._started.set()
    return actor  # type: ignore[no-any-return]


async def turn(service: ServiceActor, session: str, words: str) -> None:
    message: Any = {"role": "user", "content": words}
    async for _ in service._gateway.pieces([TurnRequest((message,))], session=session):
        pass


async def one_agent(service: ServiceActor, opens_s: float, turns_s: list[float]) -> str:
    """Opens a session, and takes its turns at these times. Returns the reason why it was closed; "": it was not."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(opens_s)
    session = (await service._gateway.open()).name
    for number, at in enumerate(turns_s):
        await asyncio.sleep(at - loop.time())
        try:
            await turn(service, session, f"q{number}")
        except RequestRefused as error:
            return f"{error.status} {error.code}: {error.message}"
    return ""


SOON, LATER, LATE = LOST_AT_S + REBUILD_S + 5.0, LOST_AT_S + REBUILD_S + 2.5 * STEP_S, LOST_AT_S + 300.0
"""In version 10, 12 and 36 of the second attempt."""


@pytest.mark.virtual_time
@pytest.mark.parametrize("next_s", [SOON, LATER, LATE])
@pytest.mark.parametrize(
    ("opens_s", "first_s", "closed"),
    [
        (112.0, None, True),  # its floor is version 11 of the first attempt
        (121.0, 122.0, True),
        (95.0, 96.0, False),  # all that it has is of version 9
        (95.0, 121.0, True),  # its floor is version 9, and an answer of version 12
        (103.0, 104.0, False),  # the checkpoint's own version
        (LOST_AT_S + 3.0, None, True),  # the replica had still version 12
        (LOST_AT_S + 3.0, LOST_AT_S + 5.0, True),
        (LOST_AT_S + REBUILD_S + 1.0, LOST_AT_S + REBUILD_S + 2.0, False),
    ],
)
async def test_a_session_is_closed_by_its_weights_whenever_its_next_turn_comes(
    tmp_path: Path, opens_s: float, first_s: float | None, closed: bool, next_s: float
) -> None:
    replica = Replica()
    service = service_of(replica, tmp_path)
    running = asyncio.create_task(run_of(replica, service.attempt_begins))
    refusal = await one_agent(service, opens_s, [at for at in (first_s, next_s) if at is not None])
    running.cancel()
    await service._gateway.close("the run has ended")
    assert bool(refusal) == closed
    if closed:
        assert refusal.startswith("410 session_closed")
        assert "of the run began with version 10" in refusal


def test_a_service_that_starts_later_closes_them_too(tmp_path: Path) -> None:
    async def first() -> str:
        replica = Replica()
        replica.weights = WeightIdentity(1, 12, "a12")
        service = service_of(replica, tmp_path, [(1, 0)])
        session = (await service._gateway.open()).name
        await turn(service, session, "q0")
        await service._gateway.close("the run has ended")
        return session

    async def second(session: str) -> None:
        replica = Replica()
        replica.weights = WeightIdentity(2, 15, "b15")
        service = service_of(replica, tmp_path, [(1, 0), (2, COMMIT)])
        with pytest.raises(RequestRefused, match="attempt 2 of the run began with version 10") as refused:
            await turn(service, session, "q1")
        assert refused.value.status == 410
        export = service._gateway.registry.export(session)
        assert len(export.turns) == 1, "what was sampled until then is there"
        await service._gateway.close("the run has ended")

    virtual_time.run(second(virtual_time.run(first())))
