"""The ledger under any order of events: the age bound, conservation, no lost problem, no deadlock."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.ledger import Group, Ledger, StalePolicy
from trireme.core.errors import ProvenanceError

ENDS = ("trained", "in_training", "filtered", "resampled", "dropped", "failed", "active")


def make(
    policy: StalePolicy = "wait", batch_size: int = 2, max_steps_off_policy: int = 1, max_steps: int = 100
) -> Ledger:
    ledger = Ledger(batch_size, max_steps_off_policy, policy, max_steps)
    ledger.acknowledge({0: 0})
    return ledger


def fill(ledger: Ledger) -> list[Group]:
    groups = []
    while ledger.can_dispatch():
        groups.append(ledger.dispatch(lambda: f"p{ledger.tally.dispatched}"))
    return groups


def finish_all(ledger: Ledger) -> None:
    """Begins all groups that may begin, and finishes them."""
    for group in fill(ledger):
        ledger.finish(group)


def train(ledger: Ledger) -> None:
    """Takes the first batch, of two groups, and releases it once its version is acknowledged."""
    ledger.take(0, 2)
    ledger.acknowledge({0: 1})
    ledger.release(0)


def took(taken: tuple[list[Group], list[Group]] | None) -> tuple[list[int], list[int]]:
    assert taken is not None
    groups, evicted = taken
    return [g.index for g in groups], [g.index for g in evicted]


def saved(ledger: Ledger) -> Any:
    return json.loads(json.dumps(ledger.state_dict()))


ORDERS = st.sampled_from([("wait", False), ("wait", True), ("drop", False)])
"""Policies, and whether nothing may overtake."""
BATCHES = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (6, 3)])


class LedgerMachine(RuleBasedStateMachine):
    """Drives a ledger as pipeline and driver do, in any order, and keeps records of its own: the ledger's floors, slots
    and takes are compared with them."""

    @initialize(
        order=ORDERS,
        batches=BATCHES,
        max_steps_off_policy=st.integers(0, 8),
        max_steps=st.sampled_from([3, 1000]),
        replicas=st.integers(1, 3),
    )
    def begin(
        self,
        order: tuple[StalePolicy, bool],
        batches: tuple[int, int],
        max_steps_off_policy: int,
        max_steps: int,
        replicas: int,
    ) -> None:
        batch_size, self.count = batches[0], batches[0] // batches[1]
        self.ledger = Ledger(batch_size, max_steps_off_policy, order[0], max_steps, order[1])
        self.resized = False
        self.acknowledged = dict.fromkeys(range(replicas), 0)
        self.num_replicas = replicas
        self.ledger.acknowledge(self.acknowledged)
        self.promised = 0
        self.floors: dict[int, int] = {}
        self.running: dict[int, Group] = {}
        self.finished: dict[int, Group] = {}
        self.problems = 0
        self.pending: list[str] = []
        self.outcomes: dict[str, str] = {}
        self.taken: list[tuple[int, list[Group]]] = []
        self.released = self.published = 0

    def new_problem(self) -> str:
        self.problems += 1
        return f"p{self.problems}"

    def end(self, group: Group, how: str) -> None:
        assert group.problem not in self.outcomes, "a problem ended twice"
        self.outcomes[group.problem] = how

    def fits_without(self, taken: list[int]) -> bool:
        ledger = self.ledger
        rest = [index for index in (*self.running, *self.finished) if index not in taken]
        return self.fit(rest, ledger.batch_size - ledger.assembled - len(taken))

    def fit(self, groups: list[int], remaining: int) -> bool:
        """True if these groups can all be trained on in time, however late they finish: in order of deadline, each has
        a place in a batch up to its own deadline. `remaining`: the places left in the batch being assembled."""
        ledger = self.ledger
        floors = sorted(self.floors[index] for index in groups)
        batches = (
            ledger.batch if n < remaining else ledger.batch + 1 + (n - remaining) // ledger.batch_size
            for n in range(len(floors))
        )
        return all(batch - floor <= ledger.max_steps_off_policy for batch, floor in zip(batches, floors, strict=False))

    def may_take(self) -> list[int]:
        """Returns the indices of the groups that the next take must take, at most `count`."""
        first_running = min(self.running, default=self.ledger.tally.dispatched)
        taken: list[int] = []
        for index in sorted(self.finished)[:]:
            overtakes = self.ledger.in_order and index > first_running
            fits = self.ledger.in_order or self.ledger.policy == "drop" or self.fits_without([*taken, index])
            if len(taken) < self.count and not overtakes and fits:
                taken.append(index)
        return taken

    @property
    def in_training(self) -> list[Group]:
        return [group for step, groups in self.taken if step >= self.released for group in groups]

    # ---- groups

    @precondition(lambda self: self.ledger.can_dispatch())
    @rule(count=st.integers(1, 20))
    def dispatch(self, count: int) -> None:
        for _ in range(count):
            if not self.ledger.can_dispatch():
                return
            assert self.acknowledged, "somebody must sample it"
            expected = self.pending[0] if self.pending else f"p{self.problems + 1}"
            group = self.ledger.dispatch(self.new_problem)
            assert group.problem == expected, "problems to resample come first, in their order"
            self.pending = self.pending[1:]
            self.floors[group.index] = min(self.acknowledged.values())
            self.running[group.index] = group

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["finish", "finish", "finish", "filter", "fail"]))
    def settle(self, data: st.DataObject, how: str) -> None:
        self.settle_one(data.draw(st.sampled_from(sorted(self.running))), how)

    @precondition(lambda self: self.acknowledged and self.ledger.batch < self.ledger.max_steps)
    @rule(stragglers=st.integers(0, 6), steps=st.integers(1, 4), all_acknowledge=st.booleans(), release=st.booleans())
    def days_pass(self, stragglers: int, steps: int, all_acknowledge: bool, release: bool) -> None:
        """Does the usual several times: all but the oldest groups finish, and a batch is trained on. The
        last one is perhaps not released yet."""
        for step in range(steps):
            self.dispatch(1000)
            for index in sorted(self.running)[stragglers:]:
                self.settle_one(index, "finish")
            batch = self.ledger.batch
            while self.ledger.batch == batch < self.ledger.max_steps and self.take():
                pass
            if self.published == self.released < self.ledger.batch:
                self.publish()
            if release or step + 1 < steps:
                while self.released < self.ledger.batch:
                    self.release()
            self.tell(self.acknowledged | {max(self.acknowledged): self.published})
            if all_acknowledge:
                self.acknowledge_all()

    def settle_one(self, index: int, how: str) -> None:
        group = self.running.pop(index)
        if how == "finish":
            self.ledger.finish(group)
            self.finished[group.index] = group
        elif how == "filter":
            self.ledger.filter(group)
            self.end(group, "filtered")
        else:
            self.ledger.fail(group)
            self.end(group, "failed")

    @precondition(lambda self: self.ledger.batch < self.ledger.max_steps)
    @rule()
    def take_some(self) -> None:
        self.take()

    def take(self) -> bool:
        step = self.ledger.batch
        due = self.may_take()
        taken = self.ledger.take(step, self.count)
        if taken is None:
            assert len(due) < self.count, "there was enough to take"
            return False
        groups, dropped = taken
        assert [group.index for group in groups] == due, "in order of dispatch, as far as nothing becomes too old"
        for group in groups:
            assert 0 <= step - self.floors[group.index] <= self.ledger.max_steps_off_policy
            del self.finished[group.index]
        self.taken.append((step, groups))
        self.drop(dropped)
        return True

    def drop(self, groups: list[Group]) -> None:
        assert self.ledger.policy == "drop" or not groups, "`wait` gives nothing up"
        for group in groups:
            assert self.ledger.batch - self.floors[group.index] > self.ledger.max_steps_off_policy
            self.running.pop(group.index, None)
            self.finished.pop(group.index, None)
            self.end(group, "dropped")

    @invariant()
    def everything_is_young_enough(self) -> None:
        """Nothing that is left is too old for the batch being assembled, and under `wait` all can be trained on."""
        for group in (*self.running.values(), *self.finished.values()):
            assert self.ledger.batch - self.floors[group.index] <= self.ledger.max_steps_off_policy
        if self.ledger.policy == "wait" and not self.ledger.in_order:
            assert self.fits_without([])

    # ---- versions and replicas

    @precondition(lambda self: self.published == self.released < self.ledger.batch)
    @rule()
    def publish(self) -> None:
        """The batch has been trained on; its version is acknowledged by some before the batch is released, or after."""
        self.published += 1

    @precondition(lambda self: self.released < self.ledger.batch)
    @rule()
    def release(self) -> None:
        groups = self.ledger.release(self.released)
        assert [g for step, part in self.taken if step == self.released for g in part] == groups
        for group in groups:
            self.end(group, "trained")
        self.released += 1
        self.published = max(self.published, self.released)

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        """One replica has got some later version; it may be several behind what is published."""
        replica = data.draw(st.sampled_from(sorted(self.acknowledged)))
        version = data.draw(st.integers(self.acknowledged[replica], self.published))
        self.tell(self.acknowledged | {replica: version})

    @precondition(lambda self: self.acknowledged)
    @rule()
    def acknowledge_all(self) -> None:
        self.tell(dict.fromkeys(self.acknowledged, self.published))

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        lost = data.draw(st.sets(st.sampled_from(sorted(self.acknowledged)), min_size=1))
        self.tell({replica: version for replica, version in self.acknowledged.items() if replica not in lost})

    @rule(behind=st.integers(0, 3))
    def join(self, behind: int) -> None:
        self.join_at(self.published - behind)

    @precondition(lambda self: not self.acknowledged)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        self.join_at(data.draw(st.integers(self.promised, self.published)))

    def join_at(self, version: int) -> None:
        joined = self.acknowledged | {self.num_replicas: version}
        if version < self.promised:
            with pytest.raises(ProvenanceError, match=f"replica {self.num_replicas} serves version {version}"):
                self.ledger.acknowledge(joined)
            return
        self.num_replicas += 1
        self.tell(joined)

    def tell(self, acknowledged: dict[int, int]) -> None:
        self.acknowledged = acknowledged
        self.ledger.acknowledge(acknowledged)
        self.promised = min(acknowledged.values(), default=self.promised)

    # ---- resume

    @precondition(lambda self: self.is_boundary())
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """A new process continues from the last boundary: nothing that was finished is lost, and no token of running
        groups that it has."""
        retained = self.draw_retained(data)
        resampled, usable = self.load(self.fresh(), saved(self.ledger), retained)
        assert resampled == [], "with unchanged options everything fits"
        assert usable == retained, "with the floor that it has"

    @precondition(lambda self: self.is_boundary())
    @rule(order=ORDERS, batches=BATCHES, bound=st.integers(0, 8), more=st.integers(0, 3), data=st.data())
    def resume_with_other_options(
        self,
        order: tuple[StalePolicy, bool],
        batches: tuple[int, int],
        bound: int,
        more: int,
        data: st.DataObject,
    ) -> None:
        self.resized = True
        self.count = batches[0] // batches[1]
        fresh = Ledger(batches[0], bound, order[0], self.ledger.max_steps + more, order[1])
        resampled, _ = self.load(fresh, saved(self.ledger), self.draw_retained(data))
        self.pending = [group.problem for group in resampled] + self.pending

    def draw_retained(self, data: st.DataObject) -> set[int]:
        return data.draw(st.sets(st.sampled_from(sorted(self.running)))) if self.running else set()

    def fresh(self) -> Ledger:
        old = self.ledger
        return Ledger(old.batch_size, old.max_steps_off_policy, old.policy, old.max_steps, old.in_order)

    def is_boundary(self) -> bool:
        return max([self.promised, *self.acknowledged.values()]) <= self.released

    @precondition(lambda self: not self.is_boundary())
    @rule()
    def no_state_beyond_a_boundary(self) -> None:
        with pytest.raises(ValueError, match="the batches trained so far make version"):
            self.ledger.state_dict()

    def load(self, fresh: Ledger, state: Any, retained: set[int]) -> tuple[list[Group], set[int]]:
        """Replaces the ledger by `fresh`, which continues from a state. Returns the groups whose problems are to be
        resampled, and the indices of those that keep their tokens."""
        before = sorted([*self.in_training, *self.finished.values(), *self.running.values()], key=lambda g: g.index)
        boundary, resampled = self.released, state["tally"]["resampled"]
        running = set(self.running)
        self.ledger = fresh
        usable = self.ledger.load_state_dict(state, retained)
        assert not fresh.can_dispatch(), "no replica has said that it has the boundary"
        assert usable <= retained & running & set(fresh.active)
        refused = [group for group in before if group.index not in fresh.active]
        assert fresh.tally.resampled == resampled + len(refused)
        for group in (group for group in before if group.index in fresh.active):
            if group.index in running and group.index not in usable:
                self.floors[group.index] = boundary
            floor, finished = self.floors[group.index], group.index not in running
            assert fresh.active[group.index] == Group(group.index, group.problem, floor, finished)
        for group in refused if len(fresh.active) < fresh.slots else []:
            assert group.index not in running, "it could have been sampled again in its place"
            in_time = fresh.policy == "wait" and self.fit([*fresh.active, group.index], fresh.batch_size)
            assert fresh.in_order or not in_time, "there was a place for it"
        self.finished = {index: group for index, group in fresh.active.items() if group.finished}
        self.running = {index: group for index, group in fresh.active.items() if not group.finished}
        self.taken = []
        self.published = self.promised = boundary
        self.num_replicas += 1
        self.tell({self.num_replicas: boundary})
        self.all_is_young_enough()
        return refused, usable

    def all_is_young_enough(self) -> None:
        """Checks on a copy that accepted groups can be trained on, even if they are taken as late as possible."""
        ledger = copy.deepcopy(self.ledger)
        for group in ledger.active.values():
            group.finished = True
        while ledger.batch < ledger.max_steps and (taken := ledger.take(ledger.batch, ledger.batch_size)):
            assert all(ledger.batch - 1 - g.floor <= ledger.max_steps_off_policy for g in taken[0])
            ledger.acknowledge({0: ledger.batch})
            ledger.release(ledger.batch - 1)

    # ---- what holds at every moment

    @invariant()
    def books_agree(self) -> None:
        counts = self.ledger.counts()
        assert counts["dispatched"] == sum(counts[name] for name in ENDS)
        assert counts["running"] == len(self.running)
        assert counts["finished"] == len(self.finished)
        assert counts["in_training"] == len(self.in_training)
        for how in ("trained", "filtered", "failed", "dropped"):
            assert counts[how] == list(self.outcomes.values()).count(how)
        alive = [g.problem for g in (*self.running.values(), *self.finished.values(), *self.in_training)] + self.pending
        assert sorted([*alive, *self.outcomes]) == sorted(f"p{i + 1}" for i in range(self.problems))
        useful = (self.ledger.max_steps - self.released) * self.ledger.batch_size
        assert self.resized or counts["in_training"] + counts["active"] <= useful

    @invariant()
    def slots_agree(self) -> None:
        """A slot is free once its group's batch is released and all live replicas have the version that it made."""
        reserved = [
            group for step, groups in self.taken if step >= min(self.released, self.promised) for group in groups
        ]
        assert self.ledger.slots_taken == len(self.running) + len(self.finished) + len(reserved)
        assert self.ledger.slots_taken <= (self.ledger.max_steps_off_policy + 1) * self.ledger.batch_size

    @invariant()
    def all_is_sampled_when_no_group_runs_or_may_begin(self) -> None:
        """While no replica is live some may still begin."""
        ledger = self.ledger
        if not self.acknowledged:
            ledger = copy.deepcopy(ledger)
            ledger.acknowledge({self.num_replicas: self.promised})
        assert self.ledger.is_sampled == (not self.running and not ledger.can_dispatch())

    @invariant()
    def no_deadlock(self) -> None:
        """From here, whatever happened: when running groups end and versions are acknowledged, the batch that is being
        assembled fills. On a copy: the machine itself goes on from where it is."""
        if self.ledger.batch == self.ledger.max_steps:
            return
        ledger = copy.deepcopy(self.ledger)
        while ledger.released < ledger.batch:
            ledger.release(ledger.released)
        ledger.acknowledge(dict.fromkeys(self.acknowledged or [self.num_replicas], ledger.released))
        fill(ledger)
        for group in ledger.active.values():
            group.finished = True
        while ledger.batch == self.ledger.batch:
            assert ledger.take(ledger.batch, self.count), "everybody waits"


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)


def test_evicted_groups_are_counted_by_how_far_they_were() -> None:
    ledger = make("drop", batch_size=1, max_steps_off_policy=0)
    ledger.max_steps_off_policy = 3
    groups = fill(ledger)
    for group in groups[1:]:
        ledger.finish(group)
    ledger.max_steps_off_policy = 0
    assert took(ledger.take(0, 1)) == ([1], [0, 2, 3])
    assert (ledger.counts()["expired_running"], ledger.counts()["expired_finished"]) == (1, 2)


def test_a_batch_is_released_once_it_is_cut_and_in_order() -> None:
    ledger = make("drop", batch_size=2, max_steps_off_policy=1)
    finish_all(ledger)
    ledger.take(0, 1)
    with pytest.raises(ValueError, match="expected 1 to 1 groups of batch 0"):
        ledger.take(0, 2)
    with pytest.raises(ValueError, match=r"batch 0 cannot .* expected batch 0, .*not complete is batch 0"):
        ledger.release(0)
    ledger.take(0, 1)
    with pytest.raises(ValueError, match=r"batch 1 cannot .* expected batch 0, .*not complete is batch 1"):
        ledger.release(1)
    ledger.take(1, 2)
    for step in (1, -1):  # another batch than the next, though batch 1 is cut by now
        with pytest.raises(ValueError, match=rf"batch {step} cannot .* expected batch 0, .*not complete is batch 2"):
            ledger.release(step)
    assert [group.index for group in ledger.release(0)] == [0, 1]
    with pytest.raises(ValueError, match=r"batch 0 cannot .* expected batch 1, .*not complete is batch 2"):
        ledger.release(0)


def test_wait_does_not_overtake_two_groups_that_are_due_for_one_place() -> None:
    """With K = 2 and B = 1, "overtake while nothing due is left out" lets two groups become due for the last place."""
    ledger = make("wait", batch_size=1, max_steps_off_policy=2)
    first, second, third = fill(ledger)
    ledger.finish(third)
    assert took(ledger.take(0, 1)) == ([2], [])
    ledger.release(0)
    ledger.acknowledge({0: 1})
    (fourth,) = fill(ledger)
    ledger.finish(fourth)
    assert ledger.take(1, 1) is None, "groups 0 and 1 need batches 1 and 2"
    ledger.finish(second)
    assert took(ledger.take(1, 1)) == ([1], [])
    assert ledger.take(2, 1) is None
    ledger.finish(first)
    assert took(ledger.take(2, 1)) == ([0], [])


def test_a_part_of_a_batch_leaves_room_for_groups_of_older_weights() -> None:
    ledger = make("drop", batch_size=4, max_steps_off_policy=1)
    old = fill(ledger)
    for group in old[:3]:
        ledger.finish(group)
    assert [ledger.takeable(limit) for limit in (2, 4)] == [2, 3], "all are of the same weights"
    ledger.finish(old[3])
    assert took(ledger.take(0, 4)) == ([0, 1, 2, 3], [])
    ledger.release(0)
    ledger.acknowledge({0: 1})
    young = fill(ledger)
    for group in young[:2]:
        ledger.finish(group)
    assert ledger.takeable(4) == 0, "there are four old ones, and the batch has four places"
    assert ledger.takeable(2) == 2, "a part of that size is there"
    ledger.finish(old[4])
    assert ledger.takeable(4) == 1
    assert took(ledger.take(1, 1)) == ([4], [])
    assert ledger.takeable(3) == 0
    ledger.finish(old[5])
    assert ledger.takeable(3) == 3, "the batch is complete"


def test_a_group_beyond_the_bound_is_refused_even_if_the_rules_were_broken() -> None:
    ledger = make("drop", batch_size=1, max_steps_off_policy=1)
    group = fill(ledger)[0]
    ledger.finish(group)
    group.floor = -2
    with pytest.raises(ProvenanceError, match=r"age 2, above .*max_steps_off_policy = 1\."):
        ledger.take(0, 1)


@pytest.mark.parametrize("how", [Ledger.finish, Ledger.filter, Ledger.fail])
def test_a_group_ends_once(how: Callable[[Ledger, Group], None]) -> None:
    ledger = make()
    group = fill(ledger)[0]
    ledger.finish(group)
    with pytest.raises(ValueError, match=r"group 0 .* is not running"):
        how(ledger, group)
    assert group.finished
    assert ledger.active[0] is group


def test_nothing_is_dispatched_that_no_step_will_use() -> None:
    assert len(fill(make(batch_size=2, max_steps_off_policy=8, max_steps=3))) == 6


def stale_state() -> Any:
    """Boundary 1 of K = 2, B = 2 under `wait`: groups 2 .. 5 are finished with floor 0, 6 and 7 run with floor 1."""
    ledger = make("wait", batch_size=2, max_steps_off_policy=2)
    finish_all(ledger)
    train(ledger)
    assert [g.index for g in fill(ledger)] == [6, 7]
    return saved(ledger)


@pytest.mark.parametrize(
    ("batch_size", "max_steps_off_policy", "policy", "retained"),
    [
        (2, 2, "wait", [2, 3, 4, 5, 6, 7]),
        (2, 3, "wait", [2, 3, 4, 5, 6, 7]),
        (2, 1, "wait", [2, 3, 6, 7]),
        (2, 1, "drop", [2, 3, 4, 5]),
        (2, 0, "wait", [6, 7]),
        (1, 2, "wait", [2, 3, 6]),
        (1, 2, "drop", [2, 3, 4]),
        (4, 1, "wait", [2, 3, 4, 5, 6, 7]),
    ],
)
def test_what_other_options_have_no_room_for_is_sampled_afresh(
    batch_size: int, max_steps_off_policy: int, policy: StalePolicy, retained: list[int]
) -> None:
    ledger = Ledger(batch_size, max_steps_off_policy, policy, 100)
    ledger.load_state_dict(stale_state())
    assert list(ledger.active) == retained
    back = [index for index in range(2, 8) if index not in retained]
    assert list(ledger.resample) == [f"p{index}" for index in back]
    assert ledger.counts()["resampled"] == len(back)


def test_tokens_that_would_land_too_late_are_sampled_again_in_their_group() -> None:
    """Two running groups of floor 0 have tokens; batches of one group have a place for one of them in time."""
    ledger = make("wait", batch_size=2, max_steps_off_policy=1)
    for group in fill(ledger)[:2]:
        ledger.finish(group)
    train(ledger)
    resumed = Ledger(1, 1, "wait", 100)
    assert resumed.load_state_dict(saved(ledger), {2, 3}) == {2}
    assert [(group.index, group.floor) for group in resumed.active.values()] == [(2, 0), (3, 1)]
    assert not resumed.resample


def test_a_state_that_does_not_add_up_is_refused() -> None:
    state = stale_state()
    del state["groups"][0]
    with pytest.raises(ProvenanceError, match="lost"):
        Ledger(2, 2, "wait", 100).load_state_dict(state)


def test_a_state_behind_all_replicas_that_left_is_not_saved() -> None:
    ledger = make()
    finish_all(ledger)
    ledger.take(0, 2)
    ledger.acknowledge({0: 1})
    ledger.acknowledge({})
    with pytest.raises(ValueError, match="all replicas had at least version 1 before they left"):
        ledger.state_dict()
