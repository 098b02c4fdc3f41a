"""Replicas that do what turns say, whatever they hold, and a list of what happens to them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Sample = tuple[str, int]
"""The name of its weights, and its number."""
Action = tuple[str, str]


def actions(names: str, limit: int) -> SearchStrategy[list[Action]]:
    """Arrivals, ends, renewals of the weights of these names, and steps, at limit so many."""
    kinds = st.sampled_from(["add", "end", "renew", "step"])
    return st.lists(st.tuples(kinds, st.sampled_from(names)), max_size=limit)


class TurningReplicas(ABC):
    """The part that is alike: a subclass does one step, and checks it."""

    def __init__(self, turns: Any) -> None:
        self.turns = turns
        self.running: list[Sample] = []
        self.ran: list[Sample] = []
        self.loads: list[str] = []
        """The names of the weights that were loaded, in that order."""

    @abstractmethod
    def do(self, step: Any) -> None:
        """Does what the turns say, and checks it; a sample that starts is noted by `started`."""

    @abstractmethod
    def renew(self, name: str) -> None:
        """Changes the weights of a name."""

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
