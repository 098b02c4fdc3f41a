"""The ledger under any order of events: the age bound, conservation, no lost problem, no deadlock."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.ledger import Group, Ledger, StalePolicy
from trireme.core.errors import ProvenanceError

ENDS = ("trained", "in_training", "filtered", "requeued", "dropped", "failed", "active")


def make(
    policy: StalePolicy = "requeue",
    batch_size: int = 2,
    max_steps_off_policy: int = 1,
    max_requeues: int = 2,
    max_steps: int = 100,
) -> Ledger:
    ledger = Ledger(batch_size, max_steps_off_policy, policy, max_requeues, max_steps)
    ledger.acknowledge({0: 0})
    return ledger


def fill(ledger: Ledger) -> list[Group]:
    groups = []
    while ledger.can_dispatch():
        groups.append(ledger.dispatch(lambda: f"p{ledger.tally.dispatched}"))
    return groups


def took(taken: tuple[list[Group], list[Group]] | None) -> tuple[list[int], list[int]]:
    assert taken is not None
    groups, evicted = taken
    return [g.index for g in groups], [g.index for g in evicted]


def saved(ledger: Ledger) -> Any:
    return json.loads(json.dumps(ledger.state_dict()))


POLICIES = st.sampled_from(["requeue", "drop", "wait"])
BATCHES = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (6, 3)])


class LedgerMachine(RuleBasedStateMachine):
    """Drives a ledger as pipeline and driver do, in any order, and keeps books of its own: what the ledger says of
    floors, slots and protection is compared with them, never taken from it."""

    @initialize(
        policy=POLICIES,
        batches=BATCHES,
        max_steps_off_policy=st.integers(0, 8),
        max_requeues=st.integers(0, 3),
        max_steps=st.sampled_from([3, 1000]),
        replicas=st.integers(1, 3),
    )
    def begin(
        self,
        policy: StalePolicy,
        batches: tuple[int, int],
        max_steps_off_policy: int,
        max_requeues: int,
        max_steps: int,
        replicas: int,
    ) -> None:
        batch_size, self.count = batches[0], batches[0] // batches[1]
        self.ledger = Ledger(batch_size, max_steps_off_policy, policy, max_requeues, max_steps)
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
        self.ended: dict[str, str] = {}
        self.taken: list[tuple[int, list[Group]]] = []
        self.released = self.published = 0

    def new_problem(self) -> str:
        self.problems += 1
        return f"p{self.problems}"

    def end(self, group: Group, how: str) -> None:
        assert group.problem not in self.ended, "a problem ended twice"
        self.ended[group.problem] = how

    def protected(self, group: Group) -> bool:
        tired = group.requeues >= self.ledger.max_requeues
        return {"wait": True, "requeue": tired, "drop": False}[self.ledger.policy]

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
            assert group.problem == expected, "requeued problems come first, in their order"
            assert self.resized or group.requeues <= self.ledger.max_requeues
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
        waited_for = min(
            (i for i, g in self.running.items() if self.protected(g)), default=self.ledger.tally.dispatched
        )
        due = [index for index in sorted(self.finished) if index < waited_for][: self.count]
        self.check_late()
        taken = self.ledger.take(step, self.count)
        if taken is None:
            assert len(due) < self.count, "there was enough to take"
            return False
        groups, evicted = taken
        assert [group.index for group in groups] == due, "in order of dispatch, and nobody overtakes the protected"
        for group in groups:
            assert 0 <= step - self.floors[group.index] <= self.ledger.max_steps_off_policy
            del self.finished[group.index]
        self.taken.append((step, groups))
        self.evict(evicted)
        return True

    def check_late(self) -> None:
        """Checks on copies that a cut without waiting gives the late groups up, and one after their end takes them."""
        now, then = copy.deepcopy(self.ledger), copy.deepcopy(self.ledger)
        late = {group.index for group in self.ledger.late(self.count)}
        taken = now.take(now.batch, self.count)
        if taken is None or now.batch == self.ledger.batch:
            assert not late, "the batch is not cut"
            return
        assert late <= {group.index for group in taken[1] if not group.finished}
        for index in late:
            then.finish(then.active[index])
        later = then.take(then.batch, self.count)
        assert later is not None
        assert late <= {group.index for group in later[0]}
        assert len(later[1]) <= len(taken[1]), "what they displace is not given up in their place"

    def evict(self, groups: list[Group]) -> None:
        for group in groups:
            assert not self.protected(group)
            assert self.ledger.batch - self.floors[group.index] > self.ledger.max_steps_off_policy
            self.running.pop(group.index, None)
            self.finished.pop(group.index, None)
            if self.ledger.policy == "drop":
                self.end(group, "dropped")
        if self.ledger.policy == "requeue":
            self.pending = [g.problem for g in groups] + self.pending
        for group in (*self.running.values(), *self.finished.values()):
            young_enough = self.ledger.batch - self.floors[group.index] <= self.ledger.max_steps_off_policy
            assert young_enough or self.protected(group), "what is too old for the next batch is evicted at the cut"

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
        """Some do, perhaps all."""
        gone = data.draw(st.sets(st.sampled_from(sorted(self.acknowledged)), min_size=1))
        self.tell({replica: version for replica, version in self.acknowledged.items() if replica not in gone})

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
        kept = self.draw_kept(data)
        given_back, usable = self.load(self.fresh(), saved(self.ledger), kept)
        assert given_back == [], "with unchanged options everything fits"
        assert usable == kept, "with the floor that it has"

    @precondition(lambda self: self.is_boundary())
    @rule(
        policy=POLICIES,
        batches=BATCHES,
        max_steps_off_policy=st.integers(0, 8),
        max_requeues=st.integers(0, 3),
        data=st.data(),
    )
    def resume_with_other_options(
        self,
        policy: StalePolicy,
        batches: tuple[int, int],
        max_steps_off_policy: int,
        max_requeues: int,
        data: st.DataObject,
    ) -> None:
        self.resized = True
        self.count = batches[0] // batches[1]
        fresh = Ledger(batches[0], max_steps_off_policy, policy, max_requeues, self.ledger.max_steps)
        given_back, _ = self.load(fresh, saved(self.ledger), self.draw_kept(data))
        self.pending = [group.problem for group in given_back] + self.pending
        self.commit = None

    @precondition(lambda self: self.is_boundary())
    @rule()
    def take_commit(self) -> None:
        """What is there now is what a later rollback finds."""
        self.commit = saved(self.ledger), self.books()

    @precondition(lambda self: self.commit is not None)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """The trainer is lost, and the run goes back."""
        assert self.commit is not None
        state, books = self.commit
        vars(self).update(copy.deepcopy(books))
        kept = self.draw_kept(data)
        given_back, usable = self.load(self.fresh(), copy.deepcopy(state), kept)
        assert given_back == []
        assert usable == kept

    @property
    def commit(self) -> tuple[Any, dict[str, Any]] | None:
        return vars(self).get("_commit")

    @commit.setter
    def commit(self, commit: tuple[Any, dict[str, Any]] | None) -> None:
        self._commit = commit

    def books(self) -> dict[str, Any]:
        """Returns a copy of all that this machine knows of the groups, without the ledger."""
        names = ("acknowledged", "promised", "floors", "running", "finished", "problems", "pending", "ended", "taken")
        return copy.deepcopy({name: getattr(self, name) for name in (*names, "released", "published")})

    def draw_kept(self, data: st.DataObject) -> set[int]:
        """Draws the running groups that keep what they have sampled."""
        return data.draw(st.sets(st.sampled_from(sorted(self.running)))) if self.running else set()

    def fresh(self) -> Ledger:
        old = self.ledger
        return Ledger(old.batch_size, old.max_steps_off_policy, old.policy, old.max_requeues, old.max_steps)

    def is_boundary(self) -> bool:
        return all(version <= self.released for version in self.acknowledged.values())

    @precondition(lambda self: not self.is_boundary())
    @rule()
    def no_state_beyond_a_boundary(self) -> None:
        with pytest.raises(ValueError, match="replicas hold later versions"):
            self.ledger.state_dict()

    def load(self, fresh: Ledger, state: Any, kept: set[int]) -> tuple[list[Group], set[int]]:
        """Replaces the ledger by `fresh`, which continues from a state. Returns the groups that were given back, and
        those that may use the tokens that they have."""
        before = sorted([*self.in_training, *self.finished.values(), *self.running.values()], key=lambda g: g.index)
        boundary, requeued = self.released, state["tally"]["requeued"]
        running = set(self.running)
        self.ledger = fresh
        usable = self.ledger.load_state_dict(state, kept)
        assert usable <= kept & running & set(fresh.active)
        given_back = [group for group in before if group.index not in fresh.active]
        assert fresh.tally.requeued == requeued + len(given_back)
        for group in (group for group in before if group.index in fresh.active):
            if group.index in running and group.index not in usable:
                self.floors[group.index] = boundary
            floor, finished = self.floors[group.index], group.index not in running
            assert fresh.active[group.index] == Group(group.index, group.problem, group.requeues, floor, finished)
        self.finished = {index: group for index, group in fresh.active.items() if group.finished}
        self.running = {index: group for index, group in fresh.active.items() if not group.finished}
        self.taken = []
        self.published = self.promised = boundary
        self.num_replicas += 1
        self.tell({self.num_replicas: boundary})
        self.all_is_young_enough()
        return given_back, usable

    def all_is_young_enough(self) -> None:
        """Checks on a copy that kept groups can be trained on, even if their turn comes as late as possible."""
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
        if not hasattr(self, "ledger"):
            return
        counts = self.ledger.counts()
        assert counts["dispatched"] == sum(counts[name] for name in ENDS)
        assert counts["running"] == len(self.running)
        assert counts["finished"] == len(self.finished)
        assert counts["in_training"] == len(self.in_training)
        for how in ("trained", "filtered", "failed", "dropped"):
            assert counts[how] == list(self.ended.values()).count(how)
        alive = [g.problem for g in (*self.running.values(), *self.finished.values(), *self.in_training)] + self.pending
        assert sorted([*alive, *self.ended]) == sorted(f"p{i + 1}" for i in range(self.problems))
        useful = (self.ledger.max_steps - self.released) * self.ledger.batch_size
        assert self.resized or counts["in_training"] + counts["active"] <= useful

    @invariant()
    def slots_agree(self) -> None:
        """A slot is free once its group's batch is released and all live replicas have the version that it made."""
        if not hasattr(self, "ledger"):
            return
        held = [group for step, groups in self.taken if step >= min(self.released, self.promised) for group in groups]
        assert self.ledger.slots_taken == len(self.running) + len(self.finished) + len(held)
        assert self.ledger.slots_taken <= (self.ledger.max_steps_off_policy + 1) * self.ledger.batch_size

    @invariant()
    def no_deadlock(self) -> None:
        """From here, whatever happened: when running groups end and versions are acknowledged, the batch that is being
        assembled fills. On a copy: the machine itself goes on from where it is."""
        if not hasattr(self, "ledger") or self.ledger.batch == self.ledger.max_steps:
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


def test_synchronous_dispatches_nothing_before_release_and_acknowledgement() -> None:
    ledger = make(max_steps_off_policy=0)
    for group in fill(ledger):
        ledger.finish(group)
    assert took(ledger.take(0, 2)) == ([0, 1], [])
    assert fill(ledger) == []
    ledger.acknowledge({0: 1})
    assert fill(ledger) == []
    ledger.release(0)
    assert [g.floor for g in fill(ledger)] == [1, 1]


def test_slots_wait_for_the_slowest_live_replica() -> None:
    ledger = make(max_steps_off_policy=0)
    ledger.acknowledge({0: 0, 1: 0})
    for group in fill(ledger):
        ledger.finish(group)
    ledger.take(0, 2)
    ledger.release(0)
    ledger.acknowledge({0: 1, 1: 0})
    assert not ledger.can_dispatch()
    ledger.acknowledge({0: 1})
    assert ledger.can_dispatch()


def test_requeue_evicts_what_would_be_too_old_and_samples_it_first() -> None:
    ledger = make("requeue", batch_size=2, max_steps_off_policy=1, max_requeues=1)
    a, b, c, d = fill(ledger)
    ledger.finish(b)
    ledger.finish(c)
    assert took(ledger.take(0, 2)) == ([1, 2], [])
    ledger.release(0)
    ledger.acknowledge({0: 1})
    e, f = fill(ledger)
    ledger.finish(e)
    ledger.finish(f)
    assert took(ledger.take(1, 2)) == ([4, 5], [0, 3])
    ledger.release(1)
    ledger.acknowledge({0: 2})
    again = fill(ledger)[:2]
    assert [(g.problem, g.requeues, g.floor) for g in again] == [(a.problem, 1, 2), (d.problem, 1, 2)]
    assert ledger.counts()["expired_running"] == 2
    assert all(ledger.protected(g) for g in again), "requeued once, at most once: now the batch waits for them"


def test_late_groups_are_those_that_a_cut_gives_up_and_an_end_before_it_saves() -> None:
    ledger = make("requeue", batch_size=2, max_steps_off_policy=1)
    first, second, third, fourth = fill(ledger)
    ledger.finish(second)
    assert ledger.late(2) == [], "the batch is not complete"
    ledger.finish(third)
    assert ledger.late(2) == [], "the next batch can take them all"
    assert took(ledger.take(0, 2)) == ([1, 2], [])
    ledger.release(0)
    ledger.acknowledge({0: 1})
    fifth, sixth = fill(ledger)
    ledger.finish(fifth)
    assert ledger.late(1) == [], "one more is missing, so that it is not cut"
    ledger.finish(sixth)
    assert ledger.late(2) == [first, fourth]
    ledger.finish(fourth)
    assert ledger.late(2) == [first]
    ledger.finish(first)
    assert took(ledger.take(1, 2)) == ([0, 3], [])


def test_no_group_waits_for_one_that_would_displace_another_of_its_age() -> None:
    ledger = make("drop", batch_size=2, max_steps_off_policy=1)
    old = fill(ledger)
    ledger.acknowledge({0: 0})
    ledger.finish(old[1])
    ledger.finish(old[2])
    ledger.take(0, 2)
    ledger.release(0)
    ledger.acknowledge({0: 1})
    young = fill(ledger)
    ledger.finish(old[3])
    ledger.finish(young[0])
    assert ledger.late(2) == [old[0]], "it takes the place of the young one"
    ledger.finish(old[0])
    assert ledger.late(2) == []


def test_no_group_is_waited_for_that_would_have_one_evicted_which_is_as_old() -> None:
    """As after a resume with a smaller bound: more groups are of the oldest version than the batch can take."""
    ledger = make("drop", batch_size=1, max_steps_off_policy=1)
    first, second = fill(ledger)
    first.floor = second.floor = -1
    ledger.finish(second)
    assert ledger.late(1) == []
    assert took(ledger.take(0, 1)) == ([1], [0])


def test_evicted_groups_are_counted_by_how_far_they_were() -> None:
    ledger = make("drop", batch_size=1, max_steps_off_policy=0)
    ledger.max_steps_off_policy = 3
    groups = fill(ledger)
    ledger.finish(groups[1])
    ledger.finish(groups[2])
    ledger.finish(groups[3])
    ledger.max_steps_off_policy = 0
    assert took(ledger.take(0, 1)) == ([1], [0, 2, 3])
    assert (ledger.counts()["expired_running"], ledger.counts()["expired_finished"]) == (1, 2)


def test_a_protected_group_is_not_evicted() -> None:
    ledger = make("requeue", batch_size=1, max_steps_off_policy=1, max_requeues=1)
    first, second = fill(ledger)
    first.requeues = 1
    ledger.finish(first)
    second.requeues = 1
    second.floor = -5
    assert took(ledger.take(0, 1)) == ([0], [])
    assert list(ledger.active) == [1]


def test_a_batch_is_released_once_it_is_cut_and_in_order() -> None:
    ledger = make("drop", batch_size=2, max_steps_off_policy=1)
    for group in fill(ledger):
        ledger.finish(group)
    ledger.take(0, 1)
    with pytest.raises(ValueError, match="batch 0 cannot be released: 0 are, 0 are cut"):
        ledger.release(0)
    ledger.take(0, 1)
    with pytest.raises(ValueError, match="batch 1 cannot be released: 0 are, 1 are cut"):
        ledger.release(1)
    assert [group.index for group in ledger.release(0)] == [0, 1]


def test_a_resume_knows_no_replica_until_one_acknowledges() -> None:
    ledger = Ledger(2, 1, "requeue", 2, 100)
    ledger.load_state_dict(saved(make()))
    assert not ledger.can_dispatch()
    ledger.acknowledge({1: 0})
    assert ledger.can_dispatch()


def test_drop_gives_up_and_wait_never_evicts() -> None:
    for policy, evicted in (("drop", [0]), ("wait", [])):
        ledger = make(policy, batch_size=1, max_steps_off_policy=1)  # type: ignore[arg-type]
        _, second = fill(ledger)
        ledger.finish(second)
        taken = ledger.take(0, 1)
        if policy == "wait":
            assert taken is None, "nobody overtakes"
            continue
        assert took(taken) == ([1], [])
        ledger.release(0)
        ledger.acknowledge({0: 1})
        (third,) = fill(ledger)
        ledger.finish(third)
        assert took(ledger.take(1, 1)) == ([2], evicted)
        assert ledger.counts()["dropped"] == 1


def test_a_streamed_batch_is_cut_once() -> None:
    ledger = make("drop", batch_size=2, max_steps_off_policy=0)
    first, second = fill(ledger)
    ledger.finish(second)
    assert took(ledger.take(0, 1)) == ([1], [])
    assert ledger.batch == 0
    with pytest.raises(ValueError, match="lacks 1"):
        ledger.take(0, 2)
    ledger.finish(first)
    assert took(ledger.take(0, 1)) == ([0], [])
    assert ledger.batch == 1


def test_a_part_of_a_batch_leaves_room_for_groups_of_older_weights() -> None:
    ledger = make("requeue", batch_size=4, max_steps_off_policy=1)
    old = fill(ledger)
    for group in old[:3]:
        ledger.finish(group)
    assert [ledger.takeable(most) for most in (2, 4)] == [2, 3], "all are of the same weights"
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
    assert ledger.takeable(3) == 3, "the batch is complete: `late` tells for whom it may wait"


def test_a_group_beyond_the_bound_is_refused_even_if_the_rules_were_broken() -> None:
    ledger = make(batch_size=1, max_steps_off_policy=1)
    group = fill(ledger)[0]
    ledger.finish(group)
    group.floor = -2
    with pytest.raises(ProvenanceError, match="age 2, at most 1"):
        ledger.take(0, 1)


def test_lost_groups_are_noticed() -> None:
    ledger = make()
    fill(ledger)
    del ledger.active[0]
    with pytest.raises(ProvenanceError, match="lost"):
        ledger.counts()


def test_nothing_is_dispatched_that_no_step_will_use() -> None:
    assert len(fill(make(batch_size=2, max_steps_off_policy=8, max_steps=3))) == 6


def test_no_replica_no_dispatch() -> None:
    ledger = Ledger(1, 0, "wait", 0, 1)
    assert not ledger.can_dispatch()
    ledger.acknowledge({0: 0})
    assert ledger.can_dispatch()
    ledger.acknowledge({})
    assert not ledger.can_dispatch()


def test_a_boundary_is_that_before_the_step_under_way() -> None:
    ledger = make("requeue", batch_size=2, max_steps_off_policy=1)
    groups = fill(ledger)
    for group in groups[1:]:
        ledger.finish(group)
    assert took(ledger.take(0, 2)) == ([1, 2], [])
    state = saved(ledger)
    assert state["released"] == 0
    assert [(g["index"], g["finished"]) for g in state["groups"]] == [(0, False), (1, True), (2, True), (3, True)]
    ledger.release(0)
    assert [g["index"] for g in saved(ledger)["groups"]] == [0, 3]
    resumed = Ledger(2, 1, "requeue", 2, 100)
    resumed.load_state_dict(saved(ledger))
    assert [(g.index, g.floor) for g in resumed.active.values()] == [(0, 1), (3, 0)], "0 is sampled again"


def test_after_the_next_version_is_published_there_is_no_way_back() -> None:
    ledger = make(max_steps_off_policy=0)
    for group in fill(ledger):
        ledger.finish(group)
    ledger.take(0, 2)
    ledger.acknowledge({0: 1})
    with pytest.raises(ValueError, match=r"0 batches are released, but replicas hold later versions: \{0: 1\}"):
        ledger.state_dict()


def test_replicas_must_hold_the_boundary_before_anything_is_dispatched() -> None:
    ledger = make(max_steps_off_policy=0)
    for group in fill(ledger):
        ledger.finish(group)
    ledger.take(0, 2)
    ledger.acknowledge({0: 1})
    ledger.release(0)
    resumed = Ledger(2, 0, "requeue", 2, 100)
    resumed.load_state_dict(saved(ledger))
    assert not resumed.can_dispatch()
    with pytest.raises(ProvenanceError, match="promised version 1"):
        resumed.acknowledge({0: 0})
    resumed.acknowledge({0: 1})
    assert [(g.index, g.floor) for g in fill(resumed)] == [(2, 1), (3, 1)]


def stale_state() -> Any:
    """Boundary 1 of K = 2, B = 2 under `wait`: groups 2 .. 5 are finished with floor 0, 6 and 7 run with floor 1."""
    ledger = make("wait", batch_size=2, max_steps_off_policy=2)
    for group in fill(ledger):
        ledger.finish(group)
    ledger.take(0, 2)
    ledger.acknowledge({0: 1})
    ledger.release(0)
    assert [g.index for g in fill(ledger)] == [6, 7]
    return saved(ledger)


@pytest.mark.parametrize(
    ("batch_size", "max_steps_off_policy", "policy", "kept"),
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
    batch_size: int, max_steps_off_policy: int, policy: StalePolicy, kept: list[int]
) -> None:
    ledger = Ledger(batch_size, max_steps_off_policy, policy, 2, 100)
    ledger.load_state_dict(stale_state())
    assert list(ledger.active) == kept
    back = [index for index in range(2, 8) if index not in kept]
    assert list(ledger.requeue) == [(f"p{index}", 1) for index in back]
    assert ledger.counts()["requeued"] == len(back)


def test_more_steps_than_before_are_used() -> None:
    ledger = make(batch_size=2, max_steps_off_policy=0, max_steps=1)
    for group in fill(ledger):
        ledger.finish(group)
    ledger.take(0, 2)
    ledger.acknowledge({0: 1})
    ledger.release(0)
    assert fill(ledger) == []
    longer = Ledger(3, 0, "requeue", 2, max_steps=2)
    longer.load_state_dict(saved(ledger))
    longer.acknowledge({0: 1})
    assert len(fill(longer)) == 3, "as many as a batch now has, whatever it had before"


def test_a_state_that_does_not_add_up_is_refused() -> None:
    state = stale_state()
    del state["groups"][0]
    with pytest.raises(ProvenanceError, match="lost"):
        Ledger(2, 2, "wait", 2, 100).load_state_dict(state)
