"""Sampling without an event loop: what is asked of the router, what comes back, and what a prompt's log-probabilities
are made of. The router is a stand-in."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.sampling_client import SamplingClient
from trireme.core.errors import RoomFailed
from trireme.core.types import ModelInput, SampledSequence, SampleRequest, SamplingParams

BASE = Path(__file__).parents[3] / "assets" / "sort-base"
PROMPT = ModelInput.from_ints([5, 6, 7])


class Router:
    """Answers with `answer`, or with the request's seed, the last one asked first."""

    def __init__(self) -> None:
        self.requests: list[SampleRequest] = []
        self.fails = False
        self.answer: list[int] | None = None

    async def sample(self, request: SampleRequest) -> SampledSequence:
        self.requests.append(request)
        await asyncio.sleep(0.02 / len(self.requests))
        if self.fails:
            raise RoomFailed("no inference replica is left")
        options = {"prompt_logprobs": [None, -1.0, -2.0]} if request.prompt_logprobs else {}
        tokens = np.array(self.answer or [request.params.seed or 0])
        return SampledSequence(tokens, np.zeros(len(tokens), np.float32), "stop", (), **options)

    async def update(self, weights: Any) -> list[Any]:
        self.asleep = False
        return [weights, "taken"]

    async def sleep(self) -> None:
        self.asleep = True


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def client(router: Router) -> Iterator[SamplingClient]:
    opened: Any = SamplingClient(router, lambda: router, str(BASE))  # type: ignore[arg-type,return-value]
    yield opened
    opened.close()


def test_replicas_sleep_until_an_update(client: SamplingClient, router: Router) -> None:
    client.sleep()
    assert router.asleep
    weights: Any = "version 3"
    assert client.update_weights(weights) == ["version 3", "taken"], "they are there when the call returns"
    assert not router.asleep


def test_samples_of_a_prompt_go_to_one_replica_with_a_seed_each(client: SamplingClient, router: Router) -> None:
    first = client.sample(PROMPT, 3, SamplingParams(max_tokens=4, seed=10))
    second = client.sample(PROMPT, 2, SamplingParams(max_tokens=4))
    assert [int(s.tokens[0]) for s in first.result(10).sequences] == [10, 11, 12]
    assert len(second.result(10).sequences) == 2
    assert first.result().prompt_logprobs is None
    by_route: dict[str, list[SampleRequest]] = {}
    for request in router.requests:
        by_route.setdefault(request.route_key, []).append(request)
    assert sorted(len(requests) for requests in by_route.values()) == [2, 3]
    assert len({request.request_id for request in router.requests}) == 5
    assert {tuple(request.prompt.tolist()) for request in router.requests} == {(5, 6, 7)}
    router.requests.clear()
    future = client.sample(
        PROMPT, 3, SamplingParams(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=2
    )
    assert future.result(10).prompt_logprobs == [None, -1.0, -2.0]
    assert sorted((r.prompt_logprobs, r.topk_prompt_logprobs) for r in router.requests) == [(False, 0)] * 2 + [
        (True, 2)
    ]


def test_strings_end_answers_whether_the_replica_stopped_there_or_not(client: SamplingClient, router: Router) -> None:
    text = client._tokenizer.encode("412 12", add_special_tokens=False)
    router.answer = text
    for stop, length in (("12", 3), (["9", "2 "], 4), (["9"], 6), (text[:1], 6)):
        (answer,) = client.sample(PROMPT, 1, SamplingParams(stop=stop)).result(10).sequences
        assert answer.tokens.tolist() == text[:length]
    assert [request.params.stop for request in router.requests] == ["12", ["9", "2 "], ["9"], text[:1]]


def test_what_cannot_be_sampled_is_refused_and_what_fails_is_raised(client: SamplingClient, router: Router) -> None:
    for prompt, number in ((PROMPT, 0), (ModelInput(), 1)):
        with pytest.raises(ValueError, match="expected both to be at least 1"):
            client.sample(prompt, number, SamplingParams())
    router.fails = True
    with pytest.raises(RoomFailed, match="no inference replica is left"):
        client.sample(PROMPT, 2, SamplingParams()).result(10)


def test_closing_ends_every_task(router: Router) -> None:
    """A task that is still pending when its loop goes away is reported as destroyed; its caller waits for ever."""
    client = SamplingClient(router, lambda: router, str(BASE))  # type: ignore[arg-type,return-value]
    finished = threading.Event()

    async def follow() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            finished.set()

    waiting = client._begin(follow())
    client._begin(asyncio.sleep(0)).result(10)  # it has begun
    client.close()
    assert finished.wait(10)
    with pytest.raises(CancelledError):
        waiting.result(10)
    assert not client._thread.is_alive()
    assert client._loop.is_closed()
