"""Decides which samples run where replicas hold several adapters at once, each in a slot of its own.

A sample starts as soon as a slot has its weights. Those of the base need no slot. Weights that no slot has are loaded
into a free one, or in place of those that have been idle for the longest time. Where all are busy, one takes no new
samples until it is idle, so that no sampler waits for ever; it is the one whose samples began the longest time ago.

The values in a slot never change. When the weights of a name are renewed, samples that run finish with those of their
slot, which is then emptied, and later ones start with the new weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from service.tinker.turns import LoadWeights, StartSample

Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True)
class DropWeights:
    """The replicas are to empty a slot now."""

    slot: str


@dataclass(eq=False)
class Slot:
    """A place for one set of weights."""

    slot: str
    name: str
    """Of the weights in it; "" once they are no longer needed."""
    running: int = 0
    closing: bool = False
    """It takes no new samples: another set of weights is to have its place."""
    used: int = 0
    """When its last sample began, as a count of samples."""


class AdapterTurns(Generic[Item]):
    """The samples that wait and those that run, by the names of their weights, and the slots."""

    def __init__(self, capacity: int, base: str) -> None:
        """`capacity`: the number of slots, at least 1. `base`: the name of the weights that need none."""
        if capacity < 1:
            raise ValueError(f"{capacity} slots for adapters; expected at least 1")
        self._capacity, self._base = capacity, base
        self._slots: list[Slot] = []
        self._waiting: deque[tuple[str, Item]] = deque()
        self._running: dict[Item, Slot | None] = {}
        self._loads = self._starts = 0

    def add(self, name: str, item: Item) -> None:
        """Adds a sample from the weights `name`."""
        self._waiting.append((name, item))

    def renew(self, name: str) -> None:
        """Notes that the weights of this name have changed."""
        for slot in self._slots:
            if slot.name == name:
                slot.name = ""

    def ended(self, item: Item) -> None:
        """Notes that a sample has ended."""
        if slot := self._running.pop(item):
            slot.running -= 1

    @property
    def wanted(self) -> set[str]:
        """The names of weights that are held or waited for."""
        return {name for name, _ in self._waiting} | {slot.name for slot in self._slots if slot.name}

    def next(self) -> LoadWeights | DropWeights | StartSample[Item] | None:
        """Returns what is to be done now, as if it were done; None: nothing before something else ends or comes."""
        if done_with := next((slot for slot in self._slots if not (slot.name or slot.running)), None):
            self._slots.remove(done_with)
            return DropWeights(done_with.slot)
        for name, item in self._waiting:
            slot = next((slot for slot in self._slots if slot.name == name and not slot.closing), None)
            if slot or name == self._base:
                return self._start(name, item, slot)
        for name in dict.fromkeys(name for name, _ in self._waiting):
            if any(slot.name == name for slot in self._slots):
                continue  # it is closing: another one has waited for longer
            if step := self._make_room(name):
                return step
        return None

    def _start(self, name: str, item: Item, slot: Slot | None) -> StartSample[Item]:
        self._waiting.remove((name, item))
        self._running[item] = slot
        self._starts += 1
        if slot is None:
            return StartSample(item)
        slot.running, slot.used = slot.running + 1, self._starts
        return StartSample(item, slot.slot)

    def _make_room(self, name: str) -> LoadWeights | DropWeights | None:
        """Returns the next step towards a slot with these weights; None if one has to become idle first."""
        if len(self._slots) < self._capacity:
            self._loads += 1
            slot = Slot(f"{name}@{self._loads}", name, used=self._starts)
            self._slots.append(slot)
            return LoadWeights(name, slot.slot)
        if idle := [slot for slot in self._slots if not slot.running]:
            oldest = min(idle, key=lambda slot: slot.used)
            self._slots.remove(oldest)
            return DropWeights(oldest.slot)
        if not any(slot.closing or not slot.name for slot in self._slots):
            min(self._slots, key=lambda slot: slot.used).closing = True
        return None
