"""Which samples run while replicas hold one set of weights: any order of arrivals, ends and renewals."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from service.tinker.turns import LoadWeights, StartSample, WeightTurns

Sample = tuple[str, int]
ACTIONS = st.lists(st.tuples(st.sampled_from(["add", "end", "renew", "step"]), st.sampled_from("abc")), max_size=60)


class Replicas:
    """Does what the turns say, and checks it."""

    def __init__(self) -> None:
        self.turns: WeightTurns[Sample] = WeightTurns()
        self.held: str | None = None
        self.running: list[Sample] = []
        self.ran: list[Sample] = []
        self.loads: list[str] = []
        self.renewed: set[str] = set()

    def step(self) -> bool:
        """Does one thing; returns False if there is nothing to do."""
        match self.turns.next():
            case LoadWeights(name):
                assert not self.running or name in self.renewed, "others' samples ran under these weights"
                self.held = name
                self.loads.append(name)
                self.renewed.discard(name)
            case StartSample(item):
                assert item[0] == self.held
                self.running.append(item)
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
        self.turns.ended(self.running.pop(0))


@settings(max_examples=200, deadline=None)
@given(ACTIONS)
def test_all_run_once_under_their_weights_and_in_order(actions: list[tuple[str, str]]) -> None:
    replicas, added = Replicas(), list[Sample]()
    for number, (action, name) in enumerate(actions):
        if action == "add":
            added.append((name, number))
            replicas.turns.add(name, (name, number))
        elif action == "end" and replicas.running:
            replicas.end()
        elif action == "renew":
            if name == replicas.turns.current:
                replicas.renewed.add(name)
            replicas.turns.renew(name)
        else:
            replicas.step()
    replicas.settle()
    assert sorted(replicas.ran) == sorted(added)
    for name in "abc":
        assert [item for item in replicas.ran if item[0] == name] == [item for item in added if item[0] == name]


def test_those_that_wait_for_the_same_weights_go_together_and_none_starves() -> None:
    replicas = Replicas()
    for number, name in enumerate("ababab"):
        replicas.turns.add(name, (name, number))
    replicas.step()
    replicas.step()
    replicas.turns.add("a", ("a", 6))  # comes while a runs, but b has waited for longer
    replicas.settle()
    assert replicas.loads == ["a", "b", "a"]
    assert [number for _, number in replicas.ran] == [0, 2, 4, 1, 3, 5, 6]


def test_renewed_weights_are_taken_while_samples_run() -> None:
    replicas = Replicas()
    replicas.turns.add("a", ("a", 0))
    replicas.step()
    replicas.step()
    replicas.turns.renew("b")
    assert not replicas.step()
    replicas.renewed.add("a")
    replicas.turns.renew("a")
    assert replicas.step()
    assert replicas.loads == ["a", "a"]
    assert replicas.turns.wanted == {"a"}
