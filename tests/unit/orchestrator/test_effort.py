"""What groups take of the replicas, and what of it is wasted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable

import pytest

from orchestrator.advantages import ScoredGroup
from orchestrator.effort import Efforts, Speed
from orchestrator.ledger import Group
from orchestrator.trajectory import Trajectory

TOKEN_S = 0.5


class Sampling:
    """Accounts under a clock that is set by hand; each answer has a token in `TOKEN_S`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.efforts = Efforts(lambda: self.now)

    def wait(self, tokens: int) -> int:
        self.now += tokens * TOKEN_S
        return tokens


class OfTokens(ScoredGroup):
    """A group whose rollouts have so many tokens."""

    tokens = 0


def scored(tokens: int) -> ScoredGroup:
    group = OfTokens(Group(0, "p", 0, 0), (), (), (), (), 1.0)
    object.__setattr__(group, "tokens", tokens)
    return group


def test_tokens_of_an_answer_in_flight_are_estimated_from_its_seconds() -> None:
    sampling = Sampling()
    group = sampling.efforts.begin(0, "env", [0, 0])
    first, second = group.rollouts_G
    first.ask()
    second.ask()
    assert group.tokens == 0, "no answer has said how fast it goes"
    sampling.wait(10)
    assert group.tokens == 0
    first.answer(10)
    assert (first.tokens, second.tokens) == (10, 10)
    first.ask()
    sampling.wait(4)
    assert (first.tokens, second.tokens, group.tokens) == (14, 14, 28)
    assert group.seconds == 2 * 14 * TOKEN_S
    assert group.ages == [7.0, 7.0]
    second.fail()
    second.ask()
    sampling.wait(1)
    second.answer(1)
    assert second.tokens == 1
    group.close()
    sampling.wait(100)
    assert (group.tokens, group.ages, sampling.efforts.running) == (16, [], 0)
    assert sampling.efforts.take()["waste/failed"] == 14, "the answer that never came counts too"


def ended(work: Awaitable[object]) -> asyncio.Task[object]:
    async def to_its_end() -> asyncio.Task[object]:
        task = asyncio.ensure_future(work)
        await asyncio.wait([task])
        return task

    return asyncio.run(to_its_end())  # type: ignore[return-value]


async def gives(result: object) -> object:
    if isinstance(result, BaseException):
        raise result
    return result


@pytest.mark.parametrize(
    ("result", "whole"),
    [(object.__new__(Trajectory), True), (ValueError(), False), (asyncio.CancelledError(), False)],
)
def test_only_whole_rollouts_say_how_long_they_last(result: object, whole: bool) -> None:
    sampling = Sampling()
    (rollout,) = sampling.efforts.begin(0, "env", [0]).rollouts_G
    sampling.now = 3.0
    rollout.end(ended(gives(result)))
    sampling.now = 9.0
    rollout.stop()
    assert rollout.seconds == 3.0, "it ends once"
    assert sampling.efforts.lasting["env"].beyond(5.0) == (0 if whole else 1)
    assert sampling.efforts.running == 0


def test_waste_is_counted_by_cause_until_it_is_taken() -> None:
    sampling = Sampling()
    for index in range(3):
        (rollout,) = sampling.efforts.begin(index, "env", [0]).rollouts_G
        for tokens in (2, 10 * (index + 1)) if index == 0 else (10 * (index + 1),):
            rollout.fail()
            rollout.ask()
            rollout.answer(sampling.wait(tokens))
    assert sampling.efforts.most_running == 3
    sampling.efforts.settle(0, scored(10))
    sampling.efforts.settle(1, None)
    sampling.efforts.evict(2, None)
    sampling.efforts.evict(0, scored(10))
    row = sampling.efforts.take()
    wasted = {name.removeprefix("waste/"): tokens for name, tokens in row.items() if name.startswith("waste/")}
    assert wasted == {"failed": 2 + 20, "expired_running": 30, "expired_finished": 10}
    assert set(sampling.efforts.take().values()) <= {0.0, sampling.efforts.lengths.mean()}
    assert not sampling.efforts.groups


def test_tokens_from_a_commit_count_and_its_seconds_do_not() -> None:
    sampling = Sampling()
    for index in range(2):
        finished, continued = sampling.efforts.begin(index, "env", [6, 4]).rollouts_G
        finished.end(ended(gives(object.__new__(Trajectory))))
        continued.ask()
        continued.answer(sampling.wait(5))
        continued.end(ended(gives(object.__new__(Trajectory))))
    assert sampling.efforts.lasting["env"].beyond(100.0) == 1, "how long they lasted is not known"
    sampling.efforts.settle(0, scored(15))
    sampling.efforts.settle(1, None)
    sampling.efforts.evict(2, None)  # it was not started
    row = sampling.efforts.take()
    assert (row["waste/failed"], row["waste/expired_running"]) == (15, 0)


def test_the_next_row_is_the_same_from_a_commit() -> None:
    """Also as to a try that has failed in a group that still runs."""
    sampling, after = Sampling(), Sampling()
    for index, tokens in enumerate((10, 40, 20)):
        (rollout,) = sampling.efforts.begin(index, "env", [0]).rollouts_G
        rollout.ask()
        rollout.answer(sampling.wait(tokens))
        if index < 2:
            rollout.end(ended(gives(object.__new__(Trajectory))))
        else:
            rollout.fail()
    sampling.efforts.settle(0, None)
    sampling.efforts.settle(1, scored(40))
    after.efforts.load_state_dict(json.loads(json.dumps(sampling.efforts.state_dict())))
    row = sampling.efforts.take()
    assert after.efforts.take() == row
    assert (row["waste/failed"], row["length/sampled"]) == (30, pytest.approx(10 + 30 * 2 / 3))


def test_a_repeatable_row_has_nothing_that_an_earlier_process_knew() -> None:
    assert "length/sampled" in Efforts(lambda: 0.0).take()
    assert "length/sampled" not in Efforts(lambda: 0.0, repeatable=True).take()


def test_the_speed_of_a_crowd_is_learned() -> None:
    speed = Speed()
    assert (speed.rate(4), speed.tokens_per_s) == (0, 0)
    for rollouts in (1, 8, 64, 20, 33):
        speed.note(10, 10 * (0.01 + 0.001 * rollouts), rollouts)
    for rollouts in (1, 16, 100):
        assert speed.rate(rollouts) == pytest.approx(rollouts / (0.01 + 0.001 * rollouts))


@pytest.mark.parametrize("others", [[(0.02, 4)], [(0.02, 8), (0.01, 2)], [(0.01, 8), (0.03, 2)]])
def test_a_rate_is_that_of_none_and_never_falls_with_more(others: list[tuple[float, int]]) -> None:
    """Also where all answers came beside as many others, and where a crowd was faster by chance."""
    speed = Speed()
    for pace, rollouts in others:
        speed.note(10, 10 * pace, rollouts)
    rates = [speed.rate(rollouts) for rollouts in range(0, 40, 4)]
    assert rates[0] == 0
    assert rates == sorted(rates)
