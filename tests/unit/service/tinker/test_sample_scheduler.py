"""Which samples run, on replicas that hold one model or several adapters: any order of arrivals, ends, renewals."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from service.tinker.sample_scheduler import DropWeights, LoadWeights, SampleScheduler, StartSample

BASE = "0"
Sample = tuple[str, int]
"""The name of its weights, and its number."""
Action = tuple[str, str]


def actions(names: str, limit: int) -> SearchStrategy[list[Action]]:
    """Arrivals, ends, renewals of the weights of these names, and steps, at limit so many."""
    kinds = st.sampled_from(["add", "end", "renew", "step"])
    return st.lists(st.tuples(kinds, st.sampled_from(names)), max_size=limit)


class TurningReplicas(ABC):
    """Replicas that do what turns say, whatever they hold. A subclass does one step, checks it, and renews weights."""

    def __init__(self, turns: SampleScheduler) -> None:
        self.turns = turns
        self.running: list[Sample] = []
        self.ran: list[Sample] = []
        self.loads: list[str] = []
        """The names of the weights that were loaded, in that order."""

    @abstractmethod
    def do(self, step: Any) -> None:
        """Does one step, and checks that it may be done."""

    @abstractmethod
    def renew(self, name: str) -> None:
        """Renews the weights `name`."""

    def step(self) -> bool:
        """Does one thing; returns False if there is nothing to do."""
        if (step := self.turns.next()) is None:
            return False
        self.do(step)
        return True

    def started(self, item: Sample) -> None:
        self.running.append(item)
        self.ran.append(item)

    def add(self, *items: Sample) -> None:
        for item in items:
            self.turns.add(item[0], item)

    def end(self) -> None:
        self.turns.finish(self.running.pop(0))

    def go(self) -> None:
        """Does all that can be done while no sample ends."""
        while self.step():
            pass

    def settle(self) -> None:
        """Does all that can be done, and ends samples when nothing else can."""
        while self.step() or self.running:
            if self.running:
                self.end()

    def play(self, happens: Sequence[Action]) -> None:
        """Lets all of it happen, and asserts that each sample ran once, those of a name in their order."""
        added = list[Sample]()
        for number, (action, name) in enumerate(happens):
            if action == "add":
                added.append((name, number))
                self.add((name, number))
            elif action == "end" and self.running:
                self.end()
            elif action == "renew":
                self.renew(name)
            else:
                self.step()
        self.settle()
        assert sorted(self.ran) == sorted(added)
        for name in {name_of_item for name_of_item, _ in added}:
            assert [item for item in self.ran if item[0] == name] == [item for item in added if item[0] == name]


class ModelReplicas(TurningReplicas):
    def __init__(self) -> None:
        super().__init__(SampleScheduler(base=BASE))
        self.loaded: str | None = None
        self.renewed: set[str] = set()

    def do(self, step: Any) -> None:
        match step:
            case LoadWeights(name):
                assert not self.running or name in self.renewed, "others' samples ran under these weights"
                self.loaded = name
                self.loads.append(name)
                self.renewed.discard(name)
            case StartSample(item):
                assert item[0] == self.loaded
                self.started(item)

    def renew(self, name: str) -> None:
        if name == self.loaded:
            self.renewed.add(name)
        self.turns.renew(name)


@settings(max_examples=200, deadline=None)
@given(actions("abc0", 60))
def test_all_run_once_under_their_weights_and_in_order(happens: list[Action]) -> None:
    ModelReplicas().play(happens)


def test_those_that_wait_for_the_same_weights_go_together_and_none_starves() -> None:
    replicas = ModelReplicas()
    replicas.add(*[(name, number) for number, name in enumerate("ababab")])
    replicas.step()
    replicas.step()
    replicas.add(("a", 6))  # comes while a runs, but b has waited for longer
    replicas.settle()
    assert replicas.loads == ["a", "b", "a"]
    assert [number for _, number in replicas.ran] == [0, 2, 4, 1, 3, 5, 6]


def test_renewed_weights_are_taken_while_samples_run() -> None:
    replicas = ModelReplicas()
    replicas.add(("a", 0))
    replicas.step()
    replicas.step()
    replicas.renew("b")
    assert not replicas.step()
    replicas.renew("a")
    assert replicas.step()
    assert replicas.loads == ["a", "a"]
    assert replicas.turns.needed == {"a"}


class AdapterReplicas(TurningReplicas):
    def __init__(self, capacity: int) -> None:
        super().__init__(SampleScheduler(capacity, BASE))
        self.capacity = capacity
        self.version = dict.fromkeys("abcd", 0)
        self.slots: dict[str, tuple[str, int]] = {}
        self.used: dict[Sample, str] = {}

    def do(self, step: Any) -> None:
        match step:
            case LoadWeights(name, slot):
                assert slot not in self.slots
                self.slots[slot] = name, self.version[name]
                self.loads.append(name)
                assert len(self.slots) <= self.capacity
            case DropWeights(slot):
                assert all(self.used[item] != slot for item in self.running), "a sample runs from it"
                del self.slots[slot]
            case StartSample(item, slot):
                assert (item[0] == BASE) == (slot == "")
                if slot:
                    name, version = self.slots[slot]
                    assert name == item[0]
                    assert version == self.version[name], "older weights than there are"
                self.used[item] = slot
                self.started(item)

    def renew(self, name: str) -> None:
        if name != BASE:
            self.version[name] += 1
            self.turns.renew(name)


@settings(max_examples=300, deadline=None)
@given(actions("abcd0", 80), st.integers(1, 3))
def test_all_run_once_under_their_newest_weights_and_in_order(happens: list[Action], capacity: int) -> None:
    AdapterReplicas(capacity).play(happens)


def test_several_adapters_and_the_base_run_side_by_side() -> None:
    replicas = AdapterReplicas(2)
    replicas.add(*[(name, number) for number, name in enumerate("ab0ab0")])
    replicas.go()
    assert len(replicas.running) == 6
    assert sorted(replicas.loads) == ["a", "b"]
    assert replicas.turns.needed == {"a", "b"}


def test_one_that_waits_for_a_slot_gets_one_though_others_always_come() -> None:
    replicas = AdapterReplicas(2)
    replicas.add(("a", 0), ("b", 1))
    replicas.go()
    replicas.add(("c", 99))
    for number in range(2, 30):
        replicas.add(("ab"[number % 2], number))
        replicas.go()
        replicas.end()
        if ("c", 99) in replicas.ran:
            break
    assert number < 10
    replicas.settle()
    assert len(replicas.ran) == number + 2


def test_the_slot_that_was_idle_for_the_longest_time_is_given_up_and_loaded_again_on_demand() -> None:
    replicas = AdapterReplicas(2)
    for number, name in enumerate("abacb"):
        replicas.add((name, number))
        replicas.settle()
    assert replicas.loads == ["a", "b", "c", "b"]


def test_renewed_weights_do_not_wait_for_samples_of_the_old_ones() -> None:
    replicas = AdapterReplicas(2)
    replicas.add(("a", 0))
    replicas.go()
    replicas.renew("a")
    replicas.add(("a", 1))
    replicas.go()
    assert replicas.running == [("a", 0), ("a", 1)]
    replicas.end()
    assert replicas.step()
    assert len(replicas.slots) == 1
