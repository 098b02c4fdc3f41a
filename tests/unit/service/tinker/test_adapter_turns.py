"""Which samples run where replicas hold several adapters: any order of arrivals, ends and renewals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.tinker.adapter_turns import AdapterTurns, DropWeights
from service.tinker.turns import LoadWeights, StartSample

Sample = tuple[str, int]
ACTIONS = st.lists(st.tuples(st.sampled_from(["add", "end", "renew", "step"]), st.sampled_from("abcd0")), max_size=80)
BASE = "0"


class Replicas:
    """Does what the turns say, and checks it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.turns: AdapterTurns[Sample] = AdapterTurns(capacity, BASE)
        self.version = dict.fromkeys("abcd", 0)
        self.slots: dict[str, tuple[str, int]] = {}
        self.running: list[tuple[Sample, str]] = []
        self.ran: list[Sample] = []
        self.under: dict[Sample, int] = {}
        self.loads: list[str] = []

    def step(self) -> bool:
        """Does one thing; returns False if there is nothing to do."""
        match self.turns.next():
            case LoadWeights(name, slot):
                assert slot not in self.slots
                self.slots[slot] = name, self.version[name]
                self.loads.append(name)
                assert len(self.slots) <= self.capacity
            case DropWeights(slot):
                assert all(used != slot for _, used in self.running), "a sample runs from it"
                del self.slots[slot]
            case StartSample(item, slot):
                assert (item[0] == BASE) == (slot == "")
                if slot:
                    name, version = self.slots[slot]
                    assert name == item[0]
                    assert version == self.version[name], "older weights than there are"
                self.running.append((item, slot))
                self.ran.append(item)
            case None:
                return False
        return True

    def settle(self) -> None:
        """Does all that can be done, and ends samples when nothing else can."""
        while self.step() or self.running:
            if self.running:
                self.end()

    def end(self) -> None:
        self.turns.ended(self.running.pop(0)[0])

    def renew(self, name: str) -> None:
        self.version[name] += 1
        self.turns.renew(name)


@settings(max_examples=300, deadline=None)
@given(ACTIONS, st.integers(1, 3))
def test_all_run_once_under_their_newest_weights_and_in_order(actions: list[tuple[str, str]], capacity: int) -> None:
    replicas, added = Replicas(capacity), list[Sample]()
    for number, (action, name) in enumerate(actions):
        if action == "add":
            added.append((name, number))
            replicas.turns.add(name, (name, number))
        elif action == "end" and replicas.running:
            replicas.end()
        elif action == "renew" and name != BASE:
            replicas.renew(name)
        else:
            replicas.step()
    replicas.settle()
    assert sorted(replicas.ran) == sorted(added)
    for name in "abcd0":
        assert [item for item in replicas.ran if item[0] == name] == [item for item in added if item[0] == name]


def test_several_adapters_and_the_base_run_side_by_side() -> None:
    replicas = Replicas(2)
    for number, name in enumerate("ab0ab0"):
        replicas.turns.add(name, (name, number))
    while replicas.step():
        pass
    assert len(replicas.running) == 6
    assert sorted(replicas.loads) == ["a", "b"]
    assert replicas.turns.wanted == {"a", "b"}


def test_one_that_waits_for_a_slot_gets_one_though_others_always_come() -> None:
    replicas = Replicas(2)
    for number, name in enumerate("ab"):
        replicas.turns.add(name, (name, number))
    while replicas.step():
        pass
    replicas.turns.add("c", ("c", 99))
    for number in range(2, 30):
        replicas.turns.add("ab"[number % 2], ("ab"[number % 2], number))
        while replicas.step():
            pass
        replicas.end()
        if ("c", 99) in replicas.ran:
            break
    assert number < 10
    replicas.settle()
    assert len(replicas.ran) == number + 2


def test_the_slot_that_was_idle_for_the_longest_time_is_given_up_and_loaded_again_on_demand() -> None:
    replicas = Replicas(2)
    for number, name in enumerate("abacb"):
        replicas.turns.add(name, (name, number))
        replicas.settle()
    assert replicas.loads == ["a", "b", "c", "b"]


def test_renewed_weights_do_not_wait_for_samples_of_the_old_ones() -> None:
    replicas = Replicas(2)
    replicas.turns.add("a", ("a", 0))
    while replicas.step():
        pass
    replicas.renew("a")
    replicas.turns.add("a", ("a", 1))
    while replicas.step():
        pass
    assert [item for item, _ in replicas.running] == [("a", 0), ("a", 1)]
    replicas.end()
    assert replicas.step()
    assert len(replicas.slots) == 1


def test_no_slots_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0 slots.*at least 1"):
        AdapterTurns(0, BASE)
