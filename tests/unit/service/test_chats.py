"""Requests of a service are chats, and end in time."""

import asyncio

import numpy as np
import pytest

from service.chats import bounded
from service.requests import RequestRefused
from trireme.core.errors import RoomFailed
from trireme.core.sampler import OnProgress
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams

REQUEST = SampleRequest("r", np.arange(3, dtype=np.int32), SamplingParams(), "key")
ANSWER = SampledSequence(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", ())


class Replicas:
    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds, self.error = seconds, error
        self.requests: list[tuple[SampleRequest, OnProgress | None]] = []
        self.aborted = 0

    async def sample(self, request: SampleRequest, on_progress: OnProgress | None = None) -> SampledSequence:
        self.requests.append((request, on_progress))
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        if self.error:
            raise self.error
        return ANSWER


async def test_a_request_is_marked_as_a_chat() -> None:
    replicas = Replicas()
    sample, on_progress = bounded(replicas.sample, 30.0), lambda partial: None
    assert await sample(REQUEST, on_progress) is ANSWER
    ((request, heard),) = replicas.requests
    assert (request.chat, request.request_id, request.prompt is REQUEST.prompt) == (True, "r", True)
    assert heard is on_progress
    assert not REQUEST.chat


async def test_an_answer_that_takes_too_long_ends_with_what_it_waited_for() -> None:
    replicas = Replicas(seconds=3600.0)
    with pytest.raises(RequestRefused, match=r"after 0\.01 s \(inference\.answer_s\)") as late:
        await bounded(replicas.sample, 0.01)(REQUEST)
    assert (late.value.status, late.value.code, replicas.aborted) == (504, "answer_timeout", 1)


@pytest.mark.parametrize("error", [RoomFailed("it died"), TimeoutError("of something else")])
async def test_what_replicas_raise_is_passed_on(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        await bounded(Replicas(error=error).sample, 30.0)(REQUEST)
