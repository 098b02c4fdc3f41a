"""Limits how many rollouts are in flight. No Ray, no clock.

    dispatch loop --a group--+
                             +--enter--> Gate --Permit--> rollouts in flight --each that ends gives its place back
    evaluation ----a group---+             ^
                                           | limit, when max_concurrent = "auto"
    replicas --load, each second--> Backpressure

The ledger's slots bound how far sampling runs ahead of training; the gate bounds the replicas' load at any moment.
A group that waits at the gate is not dispatched yet: it gets its floor, and its rollouts their time limit, when it
starts.

Fairness between two kinds of requests, for training and for evaluations: the kind with fewer rollouts in flight is
first. Its oldest request waits until it fits, and no request of the other kind overtakes it. So while requests of both
kinds wait, each kind gets about half of the limit; a kind that is alone gets all of it. Neither starves: once the
rollouts of a kind have ended, it has fewer in flight than the other, and is first from then on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trireme.config import Config
from trireme.core.sampler import ReplicaStats

Kind = Literal["train", "eval"]
KINDS: tuple[Kind, ...] = ("train", "eval")
KV_HIGH = 0.8
"""The limit does not grow while a replica uses more than this share of its KV cache."""
LEAST_PLACES = 256
"""The least number of sequences that vLLM decodes in parallel on a GPU, where it chooses the number itself."""
BACK_OFF = 0.8
"""After a preemption the limit becomes this share of the most rollouts in flight since the last `Backpressure.look`."""


class Gate:
    """Limits the rollouts in flight to `limit` (None: no limit): a request waits in `enter` until its rollouts fit."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.peak = 0
        """The most rollouts in flight since this was set to 0."""
        self._in_flight: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self._waiting: dict[Kind, deque[tuple[int, asyncio.Future[None]]]] = {kind: deque() for kind in KINDS}

    def set_limit(self, limit: int) -> None:
        """Changes the limit, and lets in the requests that fit now."""
        self.limit = limit
        self._admit()

    @property
    def in_flight(self) -> int:
        return sum(self._in_flight.values())

    @property
    def is_full(self) -> bool:
        """True while at least one request waits in `enter`, because its rollouts do not fit within the limit."""
        return self._first() is not None

    async def enter(self, kind: Kind, rollouts: int) -> Permit:
        """Waits until `rollouts` more rollouts fit within the limit, and returns a permit for them. If `rollouts`
        exceeds the limit itself, waits until no rollout is in flight."""
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
        return Permit(self, kind, rollouts)

    def leave(self, kind: Kind, rollouts: int) -> None:
        """Records that `rollouts` of this kind have ended."""
        self._in_flight[kind] -= rollouts
        self._admit()

    def _admit(self) -> None:
        while kind := self._first():
            rollouts, turn = self._waiting[kind][0]
            if not self._fits(rollouts):
                return
            self._waiting[kind].popleft()
            self._in_flight[kind] += rollouts
            self.peak = max(self.peak, self.in_flight)
            turn.set_result(None)

    def _fits(self, rollouts: int) -> bool:
        return self.limit is None or not self.in_flight or self.in_flight + rollouts <= self.limit

    def _first(self) -> Kind | None:
        """Returns the kind of the request to let in next: among the kinds with a waiting request, the one with fewer
        rollouts in flight. None if no request waits."""
        for queue in self._waiting.values():
            while queue and queue[0][1].cancelled():
                queue.popleft()
        waiting = [kind for kind, queue in self._waiting.items() if queue]
        return min(waiting, key=self._in_flight.__getitem__, default=None)


@dataclass
class Permit:
    """Allows `remaining` rollouts in flight. Each rollout gives its place back by `leave_one` when it ends; `close`
    gives back all places that remain."""

    gate: Gate
    kind: Kind
    remaining: int

    def keep(self, rollouts: int) -> None:
        """Gives back all but `rollouts` places of this permit."""
        self._give_back(self.remaining - rollouts)

    def leave_one(self, *_task: object) -> None:
        self._give_back(min(self.remaining, 1))

    def close(self, *_task: object) -> None:
        self._give_back(self.remaining)

    def _give_back(self, rollouts: int) -> None:
        self.remaining -= rollouts
        self.gate.leave(self.kind, rollouts)


class Backpressure:
    """Holds the gate of a run. If `max_concurrent = "auto"`, adapts the gate's limit to the replicas' load.

    The limit starts a quarter above the number of sequences that the replicas decode in parallel. The configuration
    sets this number; if vLLM chooses it, the number is first LEAST_PLACES per replica, then the most that the replicas
    report. The limit falls when a replica has preempted a sequence (dropped its KV for lack of space). It falls again
    only after the rollouts in flight have come down to the limit. At each `look`, the limit grows by one group if a
    request waits at the gate, no replica has a queue, and no replica is near its KV capacity.

    A group should wait at the gate, not in a replica's queue: it gets its floor only when it starts, so it is younger
    when it is trained on.
    """

    def __init__(self, config: Config) -> None:
        limit = config.orchestrator.max_concurrent
        self._group_size = config.largest_group
        self._auto = limit == "auto" and not config.deterministic
        self._config = config
        self._places = 0
        if limit == "auto":
            per_replica = config.inference.sequences(on_gpus=config.cluster.device == "gpu") or LEAST_PLACES
            limit = config.enough_rollouts(config.inference.replicas * per_replica)
        # In deterministic mode there is no limit: the load that replicas report, and when, differs between runs.
        self.gate = Gate(None if config.deterministic else limit)
        self._preempted: dict[int, int] = {}
        self._kv_now = self._kv_used = 0.0
        self._preemptions = 0

    def look(self, loads: Mapping[int, ReplicaStats]) -> None:
        """Adjusts the limit to `loads`, the present load of each live replica."""
        preemptions = sum(max(load.preemptions - self._preempted.get(replica, 0), 0) for replica, load in loads.items())
        self._preempted = {replica: load.preemptions for replica, load in loads.items()}
        kv_used = max(load.kv_used for load in loads.values())
        self._kv_now, self._kv_used = kv_used, max(self._kv_used, kv_used)
        self._preemptions += preemptions
        if self._auto:
            self._take_places(sum(load.places or 0 for load in loads.values()))
            nothing_queued = all(load.waiting == 0 for load in loads.values())
            self._adapt(len(loads) * self._group_size, preemptions > 0, nothing_queued and kv_used < KV_HIGH)

    def _take_places(self, places: int) -> None:
        """Raises the limit if `places`, the number of sequences that the replicas decode in parallel, exceeds all
        earlier reports. Does nothing if `inference.max_num_seqs` sets the number. The number may grow during a run:
        vLLM derives it from the GPUs, and some replicas join late."""
        if self._config.inference.max_num_seqs is None and places > self._places:
            self._places = places
            assert self.gate.limit is not None
            self.gate.set_limit(max(self.gate.limit, self._config.enough_rollouts(places)))

    def _adapt(self, least: int, too_many: bool, too_few: bool) -> None:
        limit = self.gate.limit
        assert limit is not None
        peak = self.gate.peak
        self.gate.peak = self.gate.in_flight
        if too_many and self.gate.in_flight <= limit:
            limit = min(limit, int(BACK_OFF * peak))
        elif not too_many and too_few and self.gate.is_full:
            limit += self._group_size
        self.gate.set_limit(max(limit, least))

    def take(self) -> dict[str, float]:
        """Returns values for a step's row of metrics: the gate's present limit (if it has one), and the highest KV
        cache usage and the number of preemptions since the last call."""
        row = {"perf/kv_used": self._kv_used, "perf/preemptions": float(self._preemptions)}
        self._kv_used = self._kv_now
        self._preemptions = 0
        return row | ({} if self.gate.limit is None else {"perf/max_concurrent": float(self.gate.limit)})
