"""Which samples run while replicas hold one set of weights: any order of arrivals, ends and renewals."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from turns_support import Action, Sample, TurningReplicas, actions

from service.tinker.turns import LoadWeights, StartSample, WeightTurns


class Replicas(TurningReplicas):
    """They hold one set of weights."""

    def __init__(self) -> None:
        super().__init__(WeightTurns[Sample]())
        self.held: str | None = None
        self.renewed: set[str] = set()

    def do(self, step: Any) -> None:
        match step:
            case LoadWeights(name):
                assert not self.running or name in self.renewed, "others' samples ran under these weights"
                self.held = name
                self.loads.append(name)
                self.renewed.discard(name)
            case StartSample(item):
                assert item[0] == self.held
                self.started(item)

    def renew(self, name: str) -> None:
        if name == self.turns.current:
            self.renewed.add(name)
        self.turns.renew(name)


@settings(max_examples=200, deadline=None)
@given(actions("abc", 60))
def test_all_run_once_under_their_weights_and_in_order(happens: list[Action]) -> None:
    Replicas().play(happens)


def test_those_that_wait_for_the_same_weights_go_together_and_none_starves() -> None:
    replicas = Replicas()
    replicas.add(*[(name, number) for number, name in enumerate("ababab")])
    replicas.step()
    replicas.step()
    replicas.add(("a", 6))  # comes while a runs, but b has waited for longer
    replicas.settle()
    assert replicas.loads == ["a", "b", "a"]
    assert [number for _, number in replicas.ran] == [0, 2, 4, 1, 3, 5, 6]


def test_renewed_weights_are_taken_while_samples_run() -> None:
    replicas = Replicas()
    replicas.add(("a", 0))
    replicas.step()
    replicas.step()
    replicas.renew("b")
    assert not replicas.step()
    replicas.renew("a")
    assert replicas.step()
    assert replicas.loads == ["a", "a"]
    assert replicas.turns.wanted == {"a"}
