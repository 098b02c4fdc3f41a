"""The age rule of sessions against the real ledger: a turn is refused exactly where the next cut could evict its
group."""

from __future__ import annotations

import copy

from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.ledger import Group, Ledger
from service.sessions.ages import TrainingStanding, too_old

ACTIONS = st.lists(st.tuples(st.sampled_from(["dispatch", "finish", "take", "train"]), st.integers(0, 7)), max_size=60)


def played(batch_size: int, most: int, actions: list[tuple[str, int]]) -> Ledger:
    """Returns a ledger after these actions, as far as they were possible."""
    ledger = Ledger(batch_size, most, "drop", max_requeues=0, max_steps=1000)
    ledger.acknowledge({0: 0})
    for action, choice in actions:
        running = [group for group in ledger.active.values() if not group.finished]
        if action == "dispatch" and ledger.can_dispatch():
            ledger.dispatch(lambda: "p")
        elif action == "finish" and running:
            ledger.finish(running[choice % len(running)])
        elif action == "take":
            ledger.take(ledger.batch, 1)
        elif action == "train" and ledger.released < ledger.batch:
            ledger.release(ledger.released)
            ledger.acknowledge({0: ledger.released})
    return ledger


def could_be_evicted(ledger: Ledger, index: int) -> bool:
    """Returns True if the next cut evicts a group when all others end before it."""
    ledger = copy.deepcopy(ledger)
    while ledger.can_dispatch():
        ledger.dispatch(lambda: "p")
    for group in list(ledger.active.values()):
        if group.index != index and not group.finished:
            ledger.finish(group)
    taken = ledger.take(ledger.batch, ledger.batch_size - ledger.assembled)
    return taken is not None and index in [group.index for group in taken[1]]


def standing_of(ledger: Ledger) -> TrainingStanding:
    others = len(ledger.active) - 1 + ledger.slots - ledger.slots_taken
    return TrainingStanding(ledger.batch, ledger.batch_size - ledger.assembled, others, ledger.max_steps_off_policy)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3), st.integers(0, 2), ACTIONS)
@example(1, 0, [("dispatch", 0)])
def test_a_turn_is_refused_where_the_next_cut_could_evict_its_group(
    batch_size: int, most: int, actions: list[tuple[str, int]]
) -> None:
    ledger = played(batch_size, most, actions)
    for group in [group for group in ledger.active.values() if not group.finished]:
        refused = too_old(group.floor, ledger.protected(group), standing_of(ledger)) is not None
        assert refused == could_be_evicted(ledger, group.index), (group, ledger)


def test_a_group_that_is_waited_for_is_never_too_old() -> None:
    old = Group(0, "p", 0, floor=0)
    standing = TrainingStanding(batch=3, lacking=1, others=4, max_steps_off_policy=3)
    assert too_old(old.floor, False, standing)
    assert not too_old(old.floor, True, standing)


def test_a_session_that_was_not_evicted_in_time_is_refused_whatever_is_lacking() -> None:
    assert too_old(0, False, TrainingStanding(batch=4, lacking=8, others=0, max_steps_off_policy=3))


def test_the_reason_says_what_is_allowed() -> None:
    reason = too_old(2, False, TrainingStanding(batch=5, lacking=1, others=1, max_steps_off_policy=3))
    assert reason is not None
    assert "version 2" in reason
    assert "age 4 in the next one, at most 3" in reason
