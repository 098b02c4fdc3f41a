"""The tokens that groups sample, and how many of them are wasted."""

import pytest

from orchestrator.advantages import ScoredGroup
from orchestrator.ledger import Group
from orchestrator.waste import RolloutTokens, TokenCounts

TOKEN_S = 0.5


class Sampling:
    """Counts under a clock that is set by hand; each response gets a token in `TOKEN_S`."""

    def __init__(self, repeatable: bool = False) -> None:
        self.now = 0.0
        self.counts = TokenCounts(lambda: self.now, repeatable=repeatable)

    def respond(self, rollout: RolloutTokens, tokens: int) -> None:
        rollout.request()
        self.now += tokens * TOKEN_S
        rollout.respond(tokens)


class GroupOfTokens(ScoredGroup):
    """A group whose rollouts have this many tokens together."""

    tokens = 0


def scored(tokens: int, rollouts: int = 1) -> ScoredGroup:
    group = GroupOfTokens(Group(0, "p", 0), (None,) * rollouts, (), (), (), 1.0)  # type: ignore[arg-type]
    object.__setattr__(group, "tokens", tokens)
    return group


def test_tokens_of_a_response_in_flight_are_estimated_from_its_seconds() -> None:
    sampling = Sampling()
    group = sampling.counts.begin(0, [0, 0])
    first, second = group.rollouts_G
    first.request()
    second.request()
    sampling.now += 10 * TOKEN_S
    assert group.total == 0, "no response has ended, so the pace is unknown"
    first.respond(10)
    assert (first.total, second.total) == (10, 10)
    first.request()
    sampling.now += 4 * TOKEN_S
    assert (first.total, second.total, group.total) == (14, 14, 28)
    second.fail()
    assert second.total == 0
    sampling.respond(second, 1)
    group.close()
    sampling.now += 100
    assert group.total == 15 + 1, "a stopped response gets no more"
    assert sampling.counts.take()["waste/failed"] == 14, "with the response in flight"


def test_waste_is_counted_by_cause_until_it_is_taken() -> None:
    sampling = Sampling()
    counts = sampling.counts
    failing, failed, running = (counts.begin(index, [0]).rollouts_G[0] for index in range(3))
    sampling.respond(failing, 2)
    failing.fail()
    sampling.respond(failing, 10)
    sampling.respond(failed, 20)
    sampling.respond(running, 30)
    counts.settle(0, scored(10), filtered=False)
    counts.settle(1, None, filtered=False)
    counts.drop(2, None)
    counts.drop(0, scored(10))
    counts.drop(3, None)  # it was restored, and has not been started
    row = counts.take()
    assert row == {
        "waste/failed": 2 + 20,
        "waste/expired_running": 30,
        "waste/expired_finished": 10,
        "length/sampled": (10 + 30) / 2,
    }
    assert counts.take() == {"waste/failed": 0, "waste/expired_running": 0, "waste/expired_finished": 0}


def test_filtered_and_failed_groups_have_no_length() -> None:
    counts = Sampling().counts
    for index in range(3):
        counts.begin(index, [0, 0])
    counts.settle(0, scored(100, 2), filtered=True)
    counts.settle(1, None, filtered=False)
    counts.settle(2, scored(8, 2), filtered=False)
    assert counts.take()["length/sampled"] == 4


def test_tokens_from_a_checkpoint_count() -> None:
    sampling = Sampling()
    group = sampling.counts.begin(0, [6, 4])
    sampling.respond(group.rollouts_G[1], 5)
    sampling.counts.settle(0, None, filtered=False)
    assert sampling.counts.take()["waste/failed"] == 15


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_repeatable_row_does_not_depend_on_seconds(repeatable: bool) -> None:
    sampling = Sampling(repeatable)
    (rollout,) = sampling.counts.begin(0, [0]).rollouts_G
    sampling.respond(rollout, 3)
    rollout.request()
    sampling.now += 5 * TOKEN_S
    assert rollout.total == (3 if repeatable else 8)
    sampling.counts.settle(0, scored(3), filtered=False)
    assert ("length/sampled" in sampling.counts.take()) is not repeatable
