"""How long a complete batch waits for groups that its cut would give up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cut_wait import CutWait, ended_within, seconds_to_wait, still_running
from orchestrator.effort import Efforts, GroupEffort, Speed
from orchestrator.ledger import Ledger

LATEST = 1e3
"""Later than any wait."""


class Clock:
    """A clock that is set by hand, and the accounts that use it. Each rollout samples one token in a second."""

    def __init__(self, lasting: Sequence[float]) -> None:
        """`lasting`: the seconds of rollouts that have ended."""
        self.now = 0.0
        self.efforts = Efforts(lambda: self.now)
        self.efforts.speed.note(tokens=1, seconds=1.0, rollouts=1)
        for seconds in lasting:
            self.efforts.lasting["env"].note(seconds, ended=True)

    def group(self, index: int, rollouts: int, age: float, over: Sequence[float] = ()) -> GroupEffort:
        """A group that began `age` seconds ago; the first rollouts were stopped after the seconds `over`."""
        now = self.now
        self.now = now - age
        group = self.efforts.begin(index, "env", [0] * rollouts)
        for rollout in group.rollouts_G:
            rollout.ask()
        for rollout, seconds in zip(group.rollouts_G, over, strict=False):
            self.now = now - age + seconds
            rollout.stop()
        self.now = now
        return group


def test_a_group_has_ended_when_its_last_rollout_has() -> None:
    clock = Clock([10, 10, 20, 40])
    waits = np.array([0.0, 5.0, 15.0, 35.0])
    assert ended_within(clock.group(0, 1, 5), waits).tolist() == [0, 0.5, 0.75, 1]
    assert ended_within(clock.group(1, 2, 5), waits).tolist() == [0, 0.25, 0.5625, 1]
    assert ended_within(clock.group(2, 1, 15), waits).tolist() == [0, 0.5, 0.5, 1]
    assert ended_within(clock.group(3, 2, 50), waits).tolist() == [0, 0, 0, 0], "longer than all that are known"
    assert ended_within(clock.group(4, 1, 5, over=[3]), waits).tolist() == [1, 1, 1, 1], "all are over"


@pytest.mark.parametrize(
    ("lost_share", "expected"),
    [(0.01, 12.0), (0.7, 2.0), (0.8, 0.0)],
    ids=["little is lost", "it ends soon in most cases", "too much is lost"],
)
def test_the_wait_is_worth_what_it_saves(lost_share: float, expected: float) -> None:
    """Of rollouts that last 8 s three of four end at 10, one at 20. The group has one left, and 80 tokens: 2 s."""
    group = Clock([4, 10, 10, 10, 20]).group(0, 10, 8.0, over=[8.0] * 9)
    assert group.tokens == 80
    assert seconds_to_wait([group], 40.0, lost_share) == expected


def test_several_groups_together_are_worth_a_wait_that_none_alone_is() -> None:
    clock = Clock([10.0])
    groups = [clock.group(index, 2, 6.0, over=[4.0]) for index in range(3)]
    assert seconds_to_wait(groups[:2], 10.0, 0.6) == 0
    assert seconds_to_wait(groups, 10.0, 0.6) == 4


def test_there_is_no_wait_before_anything_is_known_or_for_what_lasts_longer_than_all() -> None:
    assert seconds_to_wait([Clock([]).group(0, 2, 5.0)], 1.0, 0.0) == 0
    assert seconds_to_wait([Clock([1, 2]).group(0, 2, 5.0)], 1.0, 0.0) == 0
    assert seconds_to_wait([], 1.0, 1.0) == 0


@given(
    lasting=st.lists(st.floats(1, 100), min_size=1, max_size=200),
    groups=st.lists(st.tuples(st.integers(1, 8), st.floats(0, 100)), max_size=6),
    lost_share=st.floats(0.01, 1),
    rate=st.floats(0.1, 1000),
)
def test_a_wait_never_costs_more_than_what_the_groups_have_taken(
    lasting: list[float], groups: list[tuple[int, float]], lost_share: float, rate: float
) -> None:
    clock = Clock(lasting)
    late = [clock.group(index, rollouts, age) for index, (rollouts, age) in enumerate(groups)]
    cost = lost_share * seconds_to_wait(late, rate, lost_share)
    assert 0 <= cost <= sum(group.tokens for group in late) / rate + 1e-9


def test_who_stays_becomes_fewer() -> None:
    clock = Clock([10, 10, 20, 40])
    staying = [clock.group(0, 4, 5.0), clock.group(1, 2, 15.0)]
    assert still_running(staying, 0.0) == 6
    assert still_running(staying, 10.0) == 4 * 0.5 + 2 * 0.5


def complete_batch(clock: Clock) -> tuple[Ledger, CutWait]:
    """A complete batch 1 of two groups that are young, and one late group of eight with one rollout left."""
    ledger = Ledger(2, 1, "requeue", 2, 100)
    ledger.acknowledge({0: 0})
    names = iter("abcdefg")
    late, *others = [ledger.dispatch(lambda: next(names)) for _ in range(4)]
    for group in others[:2]:
        ledger.finish(group)
    ledger.take(0, 2)
    ledger.release(0)
    ledger.acknowledge({0: 1})
    ledger.fail(others[2])
    for _ in range(3):
        if ledger.can_dispatch():
            ledger.finish(ledger.dispatch(lambda: next(names)))
    clock.group(late.index, 8, 8.0, over=[8.0] * 7)
    return ledger, CutWait(ledger, clock.efforts)


def test_a_wait_is_decided_once_and_ends_with_the_last_late_group() -> None:
    clock = Clock([10.0])
    ledger, wait = complete_batch(clock)
    assert wait.until(2, trainer_waits=True, latest=LATEST) == 2.0
    clock.now = 1.0
    assert wait.until(2, trainer_waits=True, latest=LATEST) == 2.0
    clock.now = 2.0
    assert wait.until(2, trainer_waits=True, latest=LATEST) is None, "it did not end in time"
    clock.now = 1.5
    ledger.finish(ledger.active[0])
    assert wait.until(2, trainer_waits=True, latest=LATEST) is None, "it has ended"
    taken = ledger.take(1, 2)
    assert taken is not None
    assert 0 in [group.index for group in taken[0]]
    wait.note_cut()
    assert wait.take() == {"perf/cut_wait_s": 1.5}
    assert wait.take() == {"perf/cut_wait_s": 0.0}


@pytest.mark.parametrize(
    ("staying", "trainer_waits", "expected"),
    [(1, True, None), (2, True, 20.0), (2, False, None)],
    ids=["half of the places stand empty", "none does", "the trainer could work meanwhile"],
)
def test_a_wait_costs_what_is_lost_meanwhile(staying: int, trainer_waits: bool, expected: float | None) -> None:
    """The late group has 64 tokens, which take 4 s at the full rate, and lasts 20 s longer."""
    clock = Clock([28.0])
    _, wait = complete_batch(clock)
    for index in range(staying):
        clock.group(100 + index, 8, 1.0)
    clock.efforts.most_running = 16
    assert wait.until(2, trainer_waits, LATEST) == expected


def test_without_a_known_speed_nothing_waits() -> None:
    clock = Clock([10.0])
    _, wait = complete_batch(clock)
    clock.efforts.speed = Speed()
    assert wait.until(2, trainer_waits=True, latest=LATEST) is None


@pytest.mark.parametrize(("latest", "expected"), [(0.5, 0.5), (0.0, None), (-1.0, None)])
def test_a_wait_ends_in_time_for_the_deadline_however_late_the_batch_is_complete(
    latest: float, expected: float | None
) -> None:
    _, wait = complete_batch(Clock([10.0]))
    assert wait.until(2, trainer_waits=True, latest=latest) == expected
