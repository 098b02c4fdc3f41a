"""Decides which samples run: replicas hold one set of weights at a time, and samplers may want several.

Weights have names. A turn begins with the weights of the sample that has waited longest; all that wait for the same
weights then go along, and later ones too as long as nothing else waits. So no sampler starves, and weights change no
more often than needed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class LoadWeights:
    """The replicas are to take these weights now."""

    name: str
    slot: str = ""
    """Where they hold several: the name of the slot that gets them; "": they are all that replicas hold."""


@dataclass(frozen=True)
class StartSample(Generic[Item]):
    """A sample is to begin now."""

    item: Item
    slot: str = ""
    """The slot that has its weights; "": those that all replicas hold."""


class WeightTurns(Generic[Item]):
    """The samples that wait and those that run, by the names of their weights."""

    def __init__(self) -> None:
        self.current: str | None = None
        """The name of the weights that the replicas hold; None: none of these."""
        self._stale = False
        self._going: deque[tuple[str, Item]] = deque()
        self._waiting: deque[tuple[str, Item]] = deque()
        self._running = 0

    def add(self, name: str, item: Item) -> None:
        """Adds a sample from the weights `name`."""
        self._waiting.append((name, item))

    def renew(self, name: str) -> None:
        """Notes that the weights of this name have changed: running samples continue under the new ones."""
        self._stale = self._stale or name == self.current

    def ended(self, _item: Item) -> None:
        """Notes that a sample has ended."""
        self._running -= 1

    @property
    def wanted(self) -> set[str]:
        """The names of weights that are held or waited for."""
        names = {name for name, _ in (*self._going, *self._waiting)}
        return names | ({self.current} if self.current is not None else set())

    def next(self) -> LoadWeights | StartSample[Item] | None:
        """Returns what is to be done now, as if it were done; None: nothing before something else ends or comes."""
        if self._stale:
            self._stale = False
            assert self.current is not None, "only held weights are stale"
            return LoadWeights(self.current)
        if not self._going:
            if (name := self._turn()) is None:
                return None
            if name != self.current:
                self.current = name
                return LoadWeights(name)
        self._running += 1
        return StartSample(self._going.popleft()[1])

    def _turn(self) -> str | None:
        """Lets those go who may; returns the name of their weights, None if none may."""
        if not self._waiting:
            return None
        name = self._waiting[0][0]
        if name != self.current and self._running:
            return None
        self._going.extend(entry for entry in self._waiting if entry[0] == name)
        others = [entry for entry in self._waiting if entry[0] != name]
        self._waiting.clear()
        self._waiting.extend(others)
        return name
