"""Each request of a batching client has one outcome, whatever travels together. In virtual time."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import virtual_time
from hypothesis import given, settings
from hypothesis import strategies as st

from inference import batching_server as server_module
from inference.batching_client import FEW, GATHER_S, BatchingClient
from inference.batching_server import BatchingServer, Give
from inference.handover import NOTHING, Outcome
from inference.messages import Reply, pack_requests
from trireme.core.errors import RoomFailed, TriremeError, WeightsRefused
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan, WeightIdentity

pytestmark = pytest.mark.virtual_time

IDENTITY = WeightIdentity(1, 0, "d")
ANSWER_S = 100.0


def request(name: str, seconds: float = 1.0, prompt: Sequence[int] = (1, 2), **options: Any) -> SampleRequest:
    return SampleRequest(name, np.asarray(prompt), SamplingParams(), str(seconds), **options)


def answer(prompt: Sequence[int]) -> SampledSequence:
    """Returns one token, the sum of the prompt, so that a wrong prompt is seen."""
    tokens = np.asarray([sum(prompt) % 1000], np.int32)
    return SampledSequence(tokens, -tokens.astype(np.float32), "stop", (VersionSpan(IDENTITY, 0, 1),))


class Replica:
    """A batching server in front of an engine that takes the seconds that requests say.
    `messages`: the names of the requests that each call brought."""

    def __init__(self, travel_s: Sequence[float] = (0.0,)) -> None:
        self.server = BatchingServer(self.sample, lambda: self.broken)
        self.broken: TriremeError | None = None
        self.dead: TriremeError | None = None
        self.refuses: TriremeError | None = None
        self.entering = asyncio.Event()
        self.entering.set()
        self.messages: list[list[str]] = []
        self.replies: list[list[str]] = []
        self.flying = 0
        self._travel_s = travel_s

    async def exchange(self, caller: str, requests: list[SampleRequest], timeout_s: float) -> Reply:
        self.messages.append([sampled_request.request_id for sampled_request in requests])
        outward, back = (self._travel_s[(2 * len(self.messages) + way) % len(self._travel_s)] for way in (0, 1))
        await asyncio.sleep(outward)
        if self.dead:
            raise self.dead
        try:
            async with asyncio.timeout(timeout_s):
                reply = Reply.unpack(await self.server.exchange(caller, pack_requests(requests)))
        except TimeoutError:
            raise RoomFailed("no answer") from None
        await asyncio.sleep(back)
        self.replies.append([name for name, _ in reply.outcomes])
        return reply

    async def sample(self, requests: list[SampleRequest], give: Give) -> None:
        await self.entering.wait()
        if self.refuses:
            raise self.refuses
        loop = asyncio.get_running_loop()
        for sampled_request in requests:
            outcome: Outcome = NOTHING if self.broken else answer(sampled_request.prompt.tolist())
            loop.call_later(float(sampled_request.route_key), give, sampled_request.request_id, outcome)

    def line(self, gathers: bool = True) -> BatchingClient:
        return BatchingClient(self.exchange, name="replica", answer_s=ANSWER_S, gathers=gathers)


async def sampled(line: BatchingClient, *requests: SampleRequest) -> list[Any]:
    by_place = {place: outcome async for place, outcome in line.sample(requests)}
    assert sorted(by_place) == list(range(len(requests)))
    return [by_place[place] for place in sorted(by_place)]


async def test_one_request_is_one_call_and_learns_if_it_cannot_be_made() -> None:
    replica = Replica()
    line = replica.line()
    for name in "ab":
        (got,) = await sampled(line, request(name))
        assert got.tokens.tolist() == [3]
    assert replica.messages == [["a"], ["b"]]
    assert asyncio.get_running_loop().time() == pytest.approx(2.0), "neither side waits for others"
    impossible = request("impossible")
    object.__setattr__(impossible, "prompt", lambda: None)
    with pytest.raises(RoomFailed, match=r"replica, sampling: .* pickle"):
        await sampled(line, impossible)


async def test_answers_that_end_close_together_travel_together_while_many_are_in_flight() -> None:
    replica = Replica()
    last = 40
    await sampled(replica.line(), *(request(str(n), 1.0 + 0.001 * n) for n in range(last)))
    assert len(replica.replies) < 2 + last / 4
    assert max(map(len, replica.replies)) >= 4
    assert asyncio.get_running_loop().time() < 1.0 + 0.001 * last + server_module.GATHER_S


async def test_requests_wait_for_others_only_while_the_replica_has_many() -> None:
    replica = Replica()
    line = replica.line()
    groups = [asyncio.create_task(sampled(line, request(str(n)))) for n in range(FEW + 3)]
    await asyncio.sleep(GATHER_S / 2)
    assert replica.messages == [[str(n)] for n in range(FEW - 1)]
    await asyncio.sleep(GATHER_S)
    assert replica.messages[FEW - 1 :] == [[str(n) for n in range(FEW - 1, FEW + 3)]]
    await asyncio.gather(*groups)


async def test_where_runs_are_repeatable_each_group_travels_by_itself_and_at_once() -> None:
    replica = Replica()
    line = replica.line(gathers=False)
    names = [[f"{group}.{n}" for n in range(5)] for group in range(6)]
    groups = [asyncio.create_task(sampled(line, *map(request, group))) for group in names]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert replica.messages == names
    await asyncio.gather(*groups)


async def test_a_slow_entry_holds_up_no_answers() -> None:
    """With `drain` new requests enter after an update, which waits for those before them."""
    replica = Replica()
    line = replica.line()
    before = asyncio.create_task(sampled(line, request("before")))
    await asyncio.sleep(0.5)
    replica.entering.clear()
    after = asyncio.create_task(sampled(line, request("after")))
    await before
    replica.entering.set()
    await after


async def test_a_broken_replica_gives_what_it_has_and_then_says_why() -> None:
    replica = Replica()
    line = replica.line()
    replica.broken = WeightsRefused("canary")
    results: list[Outcome] = []

    async def sample() -> None:
        async for _, outcome in line.sample([request("a"), request("b")]):
            results.append(outcome)

    with pytest.raises(WeightsRefused, match="canary"):
        await sample()
    assert [type(outcome) for outcome in results] == [type(NOTHING)] * 2
    with pytest.raises(WeightsRefused, match="canary"):
        await sampled(line, request("later"))
    assert len(replica.messages) == 1


@pytest.mark.parametrize("how", ["dead", "refuses"])
async def test_all_that_wait_learn_of_a_failure(how: str) -> None:
    replica = Replica()
    line = replica.line()
    waiting = [asyncio.create_task(sampled(line, request(name))) for name in "ab"]
    await asyncio.sleep(0.1)
    setattr(replica, how, RoomFailed("it died"))
    waiting.append(asyncio.create_task(sampled(line, request("c"))))
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(error) for error in results] == ["it died"] * 3


async def test_a_request_that_is_never_answered_is_noticed_also_while_others_are() -> None:
    replica = Replica()
    line = replica.line()
    lost = asyncio.create_task(sampled(line, request("lost", 1e4)))

    async def other_requests() -> None:
        for n in range(1000):
            await sampled(line, request(str(n)))

    going = asyncio.create_task(other_requests())
    with pytest.raises(RoomFailed):
        await lost
    assert ANSWER_S <= asyncio.get_running_loop().time() < ANSWER_S + 2
    with pytest.raises(RoomFailed):
        await going


async def test_callers_are_apart_and_those_that_are_gone_are_forgotten() -> None:
    replica = Replica()
    one, other = replica.line(), replica.line()
    long = asyncio.create_task(sampled(one, request("a", 50.0)))
    await sampled(other, request("b"))
    for n in range(2 * server_module.CALLERS):
        await sampled(replica.line(), request(str(n)))
    assert len(replica.server._outboxes) <= server_module.CALLERS + 1
    await long


async def test_requests_that_have_not_left_yet_can_be_withdrawn() -> None:
    replica = Replica()
    line = replica.line()
    sent = asyncio.create_task(sampled(line, *(request(str(n)) for n in range(FEW))))
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(sampled(line, request("a"), request("b")))
    await asyncio.sleep(GATHER_S / 2)
    assert line.withdraw(["0", "a"]) == ["0"]
    (a, b), _ = await asyncio.gather(waiting, sent)
    assert a is NOTHING
    assert b.tokens.tolist() == [3]
    assert not any("a" in message for message in replica.messages)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(0, 2)), st.booleans()), max_size=4), st.booleans())
def test_a_group_ends_with_an_outcome_of_each_request_or_with_an_error(
    replies: list[tuple[set[int], bool]], gathers: bool
) -> None:
    """Whatever the replies bring, the router need not look for requests without an outcome. `replies`: the requests
    that each one answers, and whether it says that the replica is broken; after the last one nothing answers."""
    left = list(replies)

    async def exchange(_caller: str, _requests: list[SampleRequest], _timeout_s: float) -> Reply:
        if not left:
            raise RoomFailed("it died")
        answered, broken = left.pop(0)
        outcomes: list[tuple[str, Outcome]] = [(str(number), NOTHING) for number in answered]
        return Reply(outcomes, RoomFailed("it is broken") if broken else None)

    async def run() -> None:
        client = BatchingClient(exchange, name="replica", answer_s=ANSWER_S, gathers=gathers)
        answered = set().union(*(reply[0] for reply in replies))
        complete = answered == {0, 1, 2} and not any(broken for _, broken in replies)
        with suppress(RoomFailed) if not complete else nullcontext():
            await sampled(client, *(request(str(number)) for number in range(3)))

    virtual_time.run(run())


CONVERSATIONS = st.lists(
    st.tuples(
        st.floats(0, 2),  # when it begins
        st.lists(st.tuples(st.sampled_from([0.0, 0.001, 0.004, 0.3]), st.booleans()), min_size=1, max_size=5),
        st.booleans(),  # its caller leaves in the middle of its last turn
    ),
    min_size=1,
    max_size=25,
)


@settings(deadline=None, max_examples=50)
@given(CONVERSATIONS, st.lists(st.sampled_from([0.0, 0.0005, 0.01, 0.2]), min_size=1, max_size=5), st.booleans())
def test_each_request_has_one_outcome_with_its_own_prompt_however_messages_overtake_each_other(
    conversations: list[tuple[float, list[tuple[float, bool]], bool]], travel_s: list[float], gathers: bool
) -> None:
    """Turns take some time or none, and go on from each other or not."""

    async def talk(
        line: BatchingClient, name: str, begin_s: float, turns: list[tuple[float, bool]], leaves: bool
    ) -> None:
        await asyncio.sleep(begin_s)
        prompt = [7, len(name)]
        for number, (seconds, goes_on) in enumerate(turns):
            task = asyncio.create_task(sampled(line, request(f"{name}.{number}", seconds, prompt)))
            if leaves and number == len(turns) - 1:
                await asyncio.sleep(seconds / 2)
                task.cancel()
                return
            (got,) = await task
            assert got.tokens.tolist() == [sum(prompt) % 1000]
            prompt = [*prompt, *got.tokens.tolist(), number] if goes_on else [number, len(name)]

    async def run() -> None:
        replica = Replica(travel_s)
        line = replica.line(gathers)
        await asyncio.gather(
            *(talk(line, f"c{number}", *prompts) for number, prompts in enumerate(conversations)),
        )
        assert not line._waiting
        await asyncio.sleep(60.0)
        assert line._calls == 0, "no call waits when nothing is left"

    virtual_time.run(run())
