"""How many rollouts are in flight at most. No Ray, no clock.

    dispatch loop --a group--+
                             +--enter--> Gate --> rollouts in flight --each that ends--> room at the gate
    evaluation ----a group---+             ^
                                           | limit, when max_concurrent = "auto"
    replicas --load, each second--> Backpressure

The ledger's slots bound how far sampling runs ahead of training; the gate bounds what the replicas have to do at once.
A group that waits at the gate is not dispatched yet: it gets its floor, and its rollouts their time limit, once it
starts.

Fair: whoever has less in flight goes first, and waits until its request fits; nobody overtakes. So while training and
evaluation both want room each comes to half of it, and while only one wants it that one has all. Nobody starves: who
waits has, once its own rollouts have ended, less in flight than the other, and is first from then on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from trireme.config import Config
from trireme.core.sampler import ReplicaStats

KV_HIGH = 0.8
"""No more is let in while a replica uses more than this share of its KV cache."""
BACK_OFF = 0.8
"""After a preemption the limit is this share of what is in flight."""


class Kind(Enum):
    """Who wants room."""

    TRAIN = "train"
    EVAL = "eval"


class Gate:
    """Lets in as many rollouts as fit. `limit` none: all of them."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._in_flight = dict.fromkeys(Kind, 0)
        self._waiting: dict[Kind, deque[tuple[int, asyncio.Future[None]]]] = {kind: deque() for kind in Kind}

    @property
    def limit(self) -> int | None:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._admit()

    @property
    def in_flight(self) -> int:
        return sum(self._in_flight.values())

    @property
    def holds_back(self) -> bool:
        """Whether anybody waits."""
        return self._first() is not None

    async def enter(self, kind: Kind, rollouts: int) -> Room:
        """Room for so many rollouts, once there is. More than the limit get in alone."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[kind].append((rollouts, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # admitted in the same turn of the event loop
                self.leave(kind, rollouts)
            self._admit()
            raise
        return Room(self, kind, rollouts)

    def leave(self, kind: Kind, rollouts: int) -> None:
        """So many rollouts have ended."""
        self._in_flight[kind] -= rollouts
        self._admit()

    def _admit(self) -> None:
        while kind := self._first():
            rollouts, turn = self._waiting[kind][0]
            if self._limit is not None and self.in_flight and self.in_flight + rollouts > self._limit:
                return
            self._waiting[kind].popleft()
            self._in_flight[kind] += rollouts
            turn.set_result(None)

    def _first(self) -> Kind | None:
        """Whose turn it is: of those that wait the one that has less in flight."""
        for queue in self._waiting.values():
            while queue and queue[0][1].cancelled():
                queue.popleft()
        waiting = [kind for kind, queue in self._waiting.items() if queue]
        return min(waiting, key=self._in_flight.__getitem__) if waiting else None  # mostly nobody


@dataclass
class Room:
    """Room for `left` rollouts, given back as they end, and what is left of it when it is closed."""

    gate: Gate
    kind: Kind
    left: int

    def keep(self, rollouts: int) -> None:
        """No more are needed."""
        self._give_back(self.left - rollouts)

    def leave_one(self, *_task: object) -> None:
        self._give_back(min(self.left, 1))

    def close(self, *_task: object) -> None:
        self._give_back(self.left)

    def _give_back(self, rollouts: int) -> None:
        self.left -= rollouts
        self.gate.leave(self.kind, rollouts)


class Backpressure:
    """The gate of a run, and its limit when that is left to the replicas' load.

    It starts from what they decode at once and a little more. It falls when a replica has given up a sequence's KV for
    want of space, but not again before as many have ended; it grows by a group per replica while the gate holds
    somebody back, a replica has nothing waiting and none has much of its KV cache in use.
    """

    def __init__(self, cfg: Config) -> None:
        options, self._group_size = cfg.orchestrator, cfg.largest_group
        self._auto = options.max_concurrent == "auto" and not cfg.deterministic
        if cfg.deterministic:  # a batch is sampled at once, whatever the replicas report and when
            self.gate = Gate(None)
        elif options.max_concurrent == "auto":
            self.gate = Gate(cfg.enough_rollouts(cfg.training_replicas, on_gpus=cfg.cluster.device == "gpu"))
        else:
            self.gate = Gate(options.max_concurrent)
        self._preempted: dict[int, int] = {}
        self._kv_now = self._kv_used = 0.0
        self._preemptions = 0

    def look(self, loads: Mapping[int, ReplicaStats]) -> None:
        """Takes note of the live replicas' load, and sets the limit by it."""
        preemptions = sum(max(load.preemptions - self._preempted.get(replica, 0), 0) for replica, load in loads.items())
        self._preempted = {replica: load.preemptions for replica, load in loads.items()}
        kv_used = max(load.kv_used for load in loads.values())
        self._kv_now, self._kv_used = kv_used, max(self._kv_used, kv_used)
        self._preemptions += preemptions
        if self._auto:
            idle = any(load.waiting == 0 for load in loads.values())
            self._adapt(len(loads) * self._group_size, preemptions > 0, idle and kv_used < KV_HIGH)

    def _adapt(self, a_group_each: int, too_many: bool, too_few: bool) -> None:
        limit, in_flight = self.gate.limit, self.gate.in_flight
        assert limit is not None
        if too_many and in_flight <= limit:
            limit = int(BACK_OFF * in_flight)
        elif not too_many and too_few and self.gate.holds_back:
            limit += a_group_each
        self.gate.limit = max(limit, a_group_each)

    def take(self) -> dict[str, float]:
        """What a row says of it: the limit now, the largest share of a KV cache in use and the preemptions since the
        last call."""
        row = {"perf/kv_used": self._kv_used, "perf/preemptions": float(self._preemptions)}
        self._kv_used, self._preemptions = self._kv_now, 0
        return row | ({} if self.gate.limit is None else {"perf/max_concurrent": float(self.gate.limit)})
