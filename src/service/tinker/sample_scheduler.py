"""Decides which samples run: replicas hold few sets of weights at a time, and samplers may want more.

Weights have names. Each set that replicas hold is in a slot. A sample starts as soon as a slot has its weights. Weights
that no slot has take a free slot, or the one that has been idle for the longest time. If all are busy, the slot that
began its last sample the longest time ago accepts no new samples until it is idle, so that no sampler waits for ever.
All samples that wait when their weights are loaded start together, so that weights change only as often as needed.

Adapters have several slots; the base needs none. The values in such a slot never change: when the weights of a name are
renewed, the running samples end with the old ones, the slot is emptied, and later samples start with the new ones.
Whole models have one slot. Its values are replaced in place, also under running samples.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from service.tinker.promises import Promise


@dataclass(frozen=True)
class LoadWeights:
    """An action: the replicas load the weights `name` into a `Slot`, one of their places for weights."""

    name: str
    slot: str = ""
    """The name of the slot that gets the weights; "": replicas hold one whole model, which the weights replace."""


@dataclass(frozen=True)
class DropWeights:
    """An action: the replicas drop the weights in a `Slot`."""

    slot: str


@dataclass(frozen=True)
class StartSample:
    """An action: a sample starts."""

    item: Promise
    slot: str = ""
    """The slot with the weights of the sample; "": the weights that replicas hold outside of slots for adapters."""


@dataclass(eq=False)
class Slot:
    """A place for one set of weights in all replicas, with the samples that use these weights."""

    slot: str
    name: str
    """The name of the weights in it; "" once they are no longer needed."""
    ready: deque[Promise] = field(default_factory=deque)
    """The samples that may start."""
    running: int = 0
    closing: bool = False
    """True if it accepts no new samples, because another set of weights waits for its place."""
    stale: bool = False
    """True if newer weights of the same name have to be loaded in their place."""
    used: int = 0
    """When its last sample began: the number of samples that had begun by then."""

    @property
    def busy(self) -> bool:
        """True while samples from this slot run or may start."""
        return bool(self.ready or self.running)


class SampleScheduler:
    """Decides which samples start, and which weights replicas load. Holds the waiting and running samples, by the names
    of their weights, and the slots for weights."""

    def __init__(self, adapters: int = 0, base: str = "") -> None:
        """`adapters`: the number of slots for adapters; 0: replicas hold one whole model instead. `base`: the name of
        the base's weights, which replicas hold in addition to adapters."""
        self._in_place = adapters == 0
        self._capacity = max(adapters, 1)
        self._base = Slot("", base if adapters else "")
        self._slots: list[Slot] = []
        self._waiting: deque[tuple[str, Promise]] = deque()  # samples whose weights are in no slot that accepts them
        self._running: dict[Promise, Slot] = {}
        self._loads = 0
        self._starts = 0

    def add(self, name: str, item: Promise) -> None:
        """Adds the sample `item`, which needs the weights `name`."""
        if not self._accept(name, item):
            self._waiting.append((name, item))
            self._close_one()

    def renew(self, name: str) -> None:
        """Records that the weights `name` have changed, so that slots with the old ones are reloaded or emptied."""
        for slot in [slot for slot in self._slots if slot.name == name]:
            if self._in_place:
                slot.stale = True
                continue
            slot.name = ""
            self._waiting.extendleft((name, item) for item in reversed(slot.ready))
            slot.ready.clear()

    def finish(self, item: Promise) -> None:
        """Records that a sample has ended."""
        self._running.pop(item).running -= 1

    @property
    def needed(self) -> set[str]:
        """The names of weights that are in a slot, or that a sample waits for."""
        return {name for name, _ in self._waiting} | {slot.name for slot in self._slots if slot.name}

    def next(self) -> LoadWeights | DropWeights | StartSample | None:
        """Returns the next action, and counts it as done; None if there is nothing to do until a sample is added or
        ends."""
        for slot in self._slots:
            if slot.stale:
                slot.stale = False
                return LoadWeights(slot.name, slot.slot)
            if not (slot.name or slot.busy):
                self._slots.remove(slot)
                return DropWeights(slot.slot)
        for slot in (self._base, *self._slots):
            if slot.ready:
                return self._start(slot)
        if self._waiting:
            return self._make_room(self._waiting[0][0])
        return None

    def _start(self, slot: Slot) -> StartSample:
        item = slot.ready.popleft()
        self._running[item] = slot
        self._starts += 1
        slot.running += 1
        slot.used = self._starts
        return StartSample(item, slot.slot)

    def _make_room(self, name: str) -> LoadWeights | DropWeights | None:
        """Returns the next action towards a slot with the weights `name`: a load, or the drop of an idle slot; None if
        all slots are busy."""
        if len(self._slots) == self._capacity:
            idle = [slot for slot in self._slots if not slot.busy]
            if not idle:
                return None
            oldest = min(idle, key=lambda slot: slot.used)
            self._slots.remove(oldest)
            if not self._in_place:
                return DropWeights(oldest.slot)
        self._loads += 1
        slot = Slot("" if self._in_place else f"{name}@{self._loads}", name, used=self._starts)
        self._slots.append(slot)
        for other in self._slots:
            other.closing = False  # the one for which it closed has a slot now
        self._waiting = deque(entry for entry in self._waiting if not self._accept(*entry))
        self._close_one()
        return LoadWeights(name, slot.slot)

    def _accept(self, name: str, item: Promise) -> bool:
        """If an open slot has the weights `name`, lets the sample `item` start there and returns True; else False."""
        for slot in (self._base, *self._slots):
            if slot.name == name and not slot.closing:
                slot.ready.append(item)
                return True
        return False

    def _close_one(self) -> None:
        """Closes one slot to new samples, so that it becomes idle and can take the weights that other samples wait for.
        Does nothing if no sample waits, if a slot is free, or if a slot is already closing or about to be emptied."""
        leaving = any(slot.closing or not slot.name for slot in self._slots)
        if self._waiting and len(self._slots) == self._capacity and not leaving:
            min(self._slots, key=lambda slot: (slot.busy, slot.used)).closing = True
