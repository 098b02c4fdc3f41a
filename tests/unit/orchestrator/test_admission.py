"""How many rollouts are in flight: the gate's bound and its fairness, and the limit that follows the replicas."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from config_support import small
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from orchestrator_fakes import small_config
from waiting import turns

from orchestrator.admission import BACK_OFF, KINDS, KV_HIGH, LEAST_PLACES, Backpressure, Gate, Kind, Permit
from trireme.config.inference import CPU_SEQUENCES
from trireme.core.sampler import ReplicaStats

LIMIT = 12


class GateMachine(RuleBasedStateMachine):
    """Requests of both kinds come, are given up and end in any order; the model is who waits and who has how much."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.gate = Gate(LIMIT)
        self.limit = LIMIT
        self.waiting: dict[Kind, deque[tuple[int, asyncio.Task[Permit]]]] = {kind: deque() for kind in KINDS}
        self.permits: list[Permit] = []

    def teardown(self) -> None:
        """Everything ends in the end: nobody starves, and no place is lost."""
        for _ in range(1000):
            if not self.permits:
                break
            self.permits.pop().close()
            self.settle()
        assert not any(self.waiting.values())
        assert self.gate.in_flight == 0
        self.loop.close()

    def settle(self) -> None:
        """Lets the tasks run, and checks that whoever got in was first in his queue, and in his right."""
        before = {kind: self.in_use(kind) for kind in KINDS}
        for _ in range(5):
            self.loop.run_until_complete(asyncio.sleep(0))
        for kind in KINDS:
            waited = False
            for _, task in self.waiting[kind]:
                assert not (waited and task.done()), "overtaken"
                waited = waited or not task.done()
            while self.waiting[kind] and self.waiting[kind][0][1].done():
                rollouts, task = self.waiting[kind].popleft()
                other = "eval" if kind == "train" else "train"
                if self.waiting[other] and not self.waiting[other][0][1].done():
                    assert before[kind] <= before[other], "the other had less, and was to be first"
                before[kind] += rollouts
                self.permits.append(task.result())

    def in_use(self, kind: Kind) -> int:
        return sum(permit.remaining for permit in self.permits if permit.kind == kind)

    @rule(kind=st.sampled_from(KINDS), rollouts=st.integers(1, LIMIT + 2))
    def ask(self, kind: Kind, rollouts: int) -> None:
        self.waiting[kind].append((rollouts, self.loop.create_task(self.gate.enter(kind, rollouts))))
        self.settle()

    @precondition(lambda self: self.permits)
    @rule(data=st.data())
    def a_rollout_ends(self, data: st.DataObject) -> None:
        permit = data.draw(st.sampled_from(self.permits))
        permit.leave_one()
        self.permits = [permit for permit in self.permits if permit.remaining]
        self.settle()

    @precondition(lambda self: self.permits)
    @rule(data=st.data())
    def a_group_ends(self, data: st.DataObject) -> None:
        permit = self.permits.pop(data.draw(st.integers(0, len(self.permits) - 1)))
        permit.close()
        permit.leave_one()
        self.settle()

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data(), ends=st.booleans())
    def a_request_is_given_up(self, data: st.DataObject, ends: bool) -> None:
        """Also in the very turn in which it is let in, when something ends just before."""
        kind = data.draw(st.sampled_from([kind for kind in KINDS if self.waiting[kind]]))
        index = data.draw(st.integers(0, len(self.waiting[kind]) - 1))
        _, task = self.waiting[kind][index]
        if ends and self.permits:
            self.permits.pop().close()
        task.cancel()
        del self.waiting[kind][index]
        self.settle()

    @rule(limit=st.integers(LIMIT, 2 * LIMIT))
    def more_fit(self, limit: int) -> None:
        self.limit = max(self.limit, limit)
        self.gate.set_limit(self.limit)
        self.settle()

    @invariant()
    def the_bound_holds(self) -> None:
        assert self.gate.in_flight == sum(self.in_use(kind) for kind in KINDS)
        assert self.gate.in_flight <= self.limit or len(self.permits) == 1, "what is larger than it gets in alone"

    @invariant()
    def nobody_waits_without_need(self) -> None:
        heads = {kind: queue[0][0] for kind, queue in self.waiting.items() if queue}
        if heads:
            first = min(heads, key=self.in_use)
            assert self.gate.in_flight
            assert self.gate.in_flight + heads[first] > self.limit


GateMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGate = GateMachine.TestCase


def entered(gate: Gate, kind: Kind, rollouts: int) -> asyncio.Task[Permit]:
    return asyncio.get_running_loop().create_task(gate.enter(kind, rollouts))


async def test_without_a_limit_nobody_waits_not_even_a_turn() -> None:
    task = entered(Gate(None), "train", 1000)
    await asyncio.sleep(0)
    assert task.done()


def load(waiting: int = 0, kv_used: float = 0.1, preemptions: int = 0) -> ReplicaStats:
    return ReplicaStats(running=8, waiting=waiting, kv_used=kv_used, preemptions=preemptions)


class Looked:
    """A `Backpressure` whose gate is full, with somebody waiting unless `held_back` is false."""

    def __init__(self, held_back: bool = True, **options: object) -> None:
        self.pressure = Backpressure(small_config(**options))
        self.held_back = held_back

    async def __aenter__(self) -> Looked:
        assert self.pressure.gate.limit
        self.permit = await self.pressure.gate.enter("train", self.pressure.gate.limit)
        self.waiting = [entered(self.pressure.gate, "train", 2)] if self.held_back else []
        await turns()
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self.waiting:
            task.cancel()


FIRST = CPU_SEQUENCES + CPU_SEQUENCES // 4
"""One replica on a CPU decodes 256 sequences at the same time; a quarter more are admitted."""


@pytest.mark.parametrize(
    ("loads", "held_back", "then"),
    [
        ({0: load(), 1: load()}, True, FIRST + 2),
        ({0: load(), 1: load(waiting=9)}, True, FIRST),
        ({0: load()}, False, FIRST),
        ({0: load(waiting=1)}, True, FIRST),
        ({0: load(), 1: load(kv_used=KV_HIGH)}, True, FIRST),
        ({0: load(preemptions=1)}, True, int(BACK_OFF * FIRST)),
        ({0: load(), 1: load(preemptions=7)}, False, int(BACK_OFF * FIRST)),
    ],
)
async def test_the_limit_follows_the_replicas(loads: dict[int, ReplicaStats], held_back: bool, then: int) -> None:
    async with Looked(held_back) as looked:
        assert looked.pressure.gate.limit == FIRST
        looked.pressure.look(loads)
        assert looked.pressure.gate.limit == then


def stats(*places: int | None) -> dict[int, ReplicaStats]:
    return {i: ReplicaStats(0, 0, 0.0, 0, count) for i, count in enumerate(places)}


def test_where_vllm_decides_by_its_gpu_the_limit_is_what_the_replicas_say() -> None:
    pressure = Backpressure(small(cluster={"device": "gpu"}, inference={"replicas": 2}))
    first = 2 * LEAST_PLACES * 5 // 4
    limits = [pressure.gate.limit]
    for loads in (stats(None, None), stats(1024), stats(1024, 1024), stats(1024)):
        pressure.look(loads)
        limits.append(pressure.gate.limit)
    assert limits == [first, first, 1024 * 5 // 4, 2048 * 5 // 4, 2048 * 5 // 4], "one that leaves lowers nothing"


def test_a_number_of_sequences_that_was_given_decides_the_limit() -> None:
    pressure = Backpressure(small(cluster={"device": "gpu"}, inference={"max_num_seqs": 8}))
    pressure.look(stats(1024))
    assert pressure.gate.limit == 10


async def test_only_new_preemptions_count_and_not_again_before_what_was_too_much_has_ended() -> None:
    async with Looked() as looked:
        pressure, limits = looked.pressure, []
        for preemptions, finished in [(5, 0), (6, 0), (6, FIRST // 5), (7, 0), (0, 0)]:  # last: it was started again
            for _ in range(finished):
                looked.permit.leave_one()
            pressure.look({0: load(waiting=1, preemptions=preemptions)})
            limits.append(pressure.gate.limit)
        assert limits == [256, 256, 256, 204, 204]
        row = {"perf/kv_used": 0.1}
        assert pressure.take() == row | {"perf/preemptions": 7.0, "perf/max_concurrent": 204.0}
        assert pressure.take() == row | {"perf/preemptions": 0.0, "perf/max_concurrent": 204.0}


async def test_after_a_preemption_the_limit_is_a_share_of_the_most_that_was_in_flight() -> None:
    async with Looked(held_back=False) as looked:
        looked.pressure.look({0: load()})
        for _ in range(FIRST - 8):
            looked.permit.leave_one()
        looked.pressure.look({0: load(preemptions=1)})
        assert looked.pressure.gate.limit == int(BACK_OFF * FIRST)
        looked.pressure.look({0: load(preemptions=2)})
        assert looked.pressure.gate.limit == int(BACK_OFF * 8), "since then there were no more than these"


async def test_each_live_replica_keeps_a_group() -> None:
    async with Looked() as looked:
        for preemptions in range(1, 40):
            while looked.permit.remaining > (looked.pressure.gate.limit or 0):
                looked.permit.leave_one()
            looked.pressure.look({0: load(preemptions=preemptions), 1: load()})
        assert looked.pressure.gate.limit == 4


def test_a_fixed_limit_stays_and_a_deterministic_run_has_none() -> None:
    for pressure, limit in [
        (Backpressure(small_config(max_concurrent=6)), 6),
        (Backpressure(small_config(deterministic=True, max_steps_off_policy=0)), None),
        (Backpressure(small_config(deterministic=True, max_steps_off_policy=0, max_concurrent=4)), None),
    ]:
        pressure.look({0: load(preemptions=3, kv_used=0.5)})
        assert pressure.gate.limit == limit
        row = {"perf/kv_used": 0.5, "perf/preemptions": 3.0}
        assert pressure.take() == row | ({"perf/max_concurrent": 6.0} if limit else {})
