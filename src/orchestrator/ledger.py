"""The staleness ledger decides which group is dispatched, trained on or given up, and when. No clock, Ray or numpy.

    problems --dispatch--> running --finish--> finished --take--> in training --release--> trained --acknowledged-->
                 ^           | | |                 |                                                     slot free
                 |           | | +-- filter        |
                 |           | +---- fail          |
                 |           +------ drop ---------+
                 +---- resampled (only when a state is loaded)

Version v is the weights after v training steps; batch s consumes v = s and makes s + 1. B = groups per batch, K =
`max_steps_off_policy`. The *floor* of a group is the lowest version that any live replica had acknowledged when the
group was dispatched, so no token of it is older. Its *age* in batch s is s - floor. Its *deadline* is floor + K, the
last batch that may train on it.

Rules
  slots     At most (K + 1) B are taken. Dispatch takes one. It is freed when the group's batch has been released
            (trained on) and every live replica has acknowledged the version that the batch made; or immediately when
            the group is filtered, fails, or is dropped.
  replicas  The lowest acknowledged version never falls: a replica may leave at any time, and joins only with this
            version or a later one. When all have left, the lowest version does not change, and nothing is dispatched
            until a replica joins.
  take      Finished groups are tried in order of dispatch.
    wait    A finished group may be taken into batch s if afterwards, for every d >= s, at most L + (d - s) B active
            groups have a deadline <= d, where L is the number of places left in batch s. So no group is given up: a
            group overtakes only where every other group still has a place in time.
    drop    Every finished group may be taken. When batch s is cut (its last group is taken), every remaining group
            with deadline <= s is dropped, running or finished.
  in_order  (deterministic mode, under `wait`) Nothing overtakes: groups are taken in order of dispatch, and the take
            waits for a running one.

The bound: a group taken into batch s has age at most K, which says deadline >= s.

  At some moment let 0 .. F - 1 be the batches with free slots: they become free in order. Batch F - 1 became free only
  once the lowest acknowledged version was F, and that version never falls: so a group dispatched now has floor >= F,
  and deadline >= F + K.

  `wait`. Let A(d) be the number of active groups with deadline <= d. While batch s is assembled, with L places left:

      A(d) <= L + (d - s) B    for every d >= s                                            (feasible)

  Dispatch keeps it. The new deadline is >= F + K, so A(d) grows for d >= F + K alone. At most (K + 1) B slots are taken
  after the dispatch; batches F .. s - 1 hold (s - F) B of them, and batch s holds B - L. So all active groups together
  number at most (K + 1) B - (s - F) B - (B - L) = L + (F + K - s) B, which is the bound for d = F + K, and the bound
  grows with d. Filter and fail lower the left side. Take keeps it, by its rule. Cut: at L = 0 it says A(s) <= 0, so no
  remaining group is due, and for d >= s + 1 it says A(d) <= B + (d - s - 1) B, which is (feasible) for batch s + 1 with
  L = B. At d = s - 1 the same held when batch s - 1 was cut: no active group has a deadline below s. So a group taken
  into batch s has deadline >= s.

  `wait`, in_order. At its dispatch at most (K + 1) B - 1 other slots were taken. Every group of batch F or later that
  is taken before it held a slot at that moment, as later ones do not overtake. So it is at most the (K + 1) B-th group
  counted from the start of batch F; it lands in batch F + K or earlier.

  `drop`. If the group was active when batch s - 1 was cut, it was not dropped, so deadline >= s. If it was dispatched
  later, then batches F .. s - 1 were complete at its dispatch and held (s - F) B slots, and one more was free for it:
  (s - F) B <= (K + 1) B - 1. So s - F <= K, and deadline >= F + K >= s.

  `take` checks the bound nevertheless: a group of a greater age is a ProvenanceError.

No deadlock. When all batches before s are released and acknowledged, all (K + 1) B >= B slots belong to batch s and
later ones. While a replica is live, groups are dispatched into the free slots, and running groups end; a group that is
filtered, fails or is dropped frees its slot for another. Under `wait` let d be the smallest number for which (feasible)
is an equality: there are exactly as many groups with deadline <= d as places up to batch d, at least one of them is
active, and as soon as one of them has finished it may be taken, since every smaller d has places to spare. If there is
no such d every finished group may be taken. So the batch fills, unless from some moment on no group at all can be
trained on (then `limits.py` stops the run).

Resume. The saved state of a ledger is its state at the last boundary N, between two steps: N batches are released, and
no replica holds a later version than N (the update to N may be in progress). Groups taken since then are finished
again, in their place. When the state is loaded, all slots of batches before N are free, and F = N. Finished groups keep
their floors. So do running groups with tokens that the caller retained, all of them of versions up to N; the other
running groups are sampled again and get the floor N. A rollout of a retained group that starts again has younger tokens
than its floor says.

  Let the groups be in order of deadline (in_order: of dispatch), and p the place of a group in this order, counted from
  0. The group is accepted if p < (K + 1) B, so that there is a slot for it, and if N + p // B, the batch that takes it,
  is not beyond its deadline.
  (`drop`: batch N; the cuts of N, N + 1 .. see to the rest.) In order of deadline this is (feasible) for s = N, L = B.
  With unchanged options every group is accepted: batches that were taken since N and a feasible rest are a feasible
  schedule from N, and a group that gets the floor N has only a later deadline. With in_order the places are the same as
  without the resume, and a floor that becomes N is no older.

With other options a group may not be accepted. A running group with retained tokens that are too old drops them, and is
sampled again in its place. The problems of others go to the front of the dispatch queue, and are counted as
`resampled`. Under `wait` this, and a lost process, are the only reasons why anything is sampled twice.

Conservation, at every moment: dispatched = trained + in_training + filtered + resampled + dropped + failed + active
(active = running + finished). A problem is trained, filtered, dropped or failed exactly once, however often it is
resampled in between.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal, TypedDict

from trireme.core.errors import ProvenanceError
from trireme.core.staleness import deadline

StalePolicy = Literal["wait", "drop"]


class LedgerState(TypedDict):
    """The state of the ledger in a checkpoint."""

    released: int
    groups: Sequence[dict[str, Any]]
    """The fields of each Group, in order of dispatch."""
    resample: Sequence[str]
    tally: dict[str, int]


@dataclass
class Group:
    """A group as the ledger sees it: one dispatch of a problem."""

    index: int
    """The number of groups dispatched before it."""
    problem: str
    floor: int
    """The lowest version that any live replica had acknowledged at the dispatch; no token of the group is older."""
    finished: bool = False


@dataclass
class Tally:
    """Counts groups by how they ended, since the start of the run. `expired_running` and `expired_finished` count the
    dropped groups a second time, by their state when they were dropped."""

    dispatched: int = 0
    trained: int = 0
    filtered: int = 0
    resampled: int = 0
    dropped: int = 0
    failed: int = 0
    expired_running: int = 0
    expired_finished: int = 0


@dataclass
class Ledger:
    """Accounts for every group of a run, by the rules in the module's docstring. Problems are strings; the caller
    samples them and trains on them."""

    batch_size: int
    max_steps_off_policy: int
    policy: StalePolicy
    max_steps: int
    in_order: bool = False
    """True: no group overtakes another one; only with the policy `wait`."""
    batch: int = 0
    """The number of the batch that is being assembled; all earlier batches are complete."""
    released: int = 0
    """The number of batches that have been trained on."""
    floor: int = -1
    """The lowest version that any live replica has acknowledged; -1 before the first."""
    replicas: dict[int, int] = field(default_factory=dict)
    """The version that each live replica has acknowledged."""
    active: dict[int, Group] = field(default_factory=dict)
    """Running and finished groups by index, so in order of dispatch."""
    consumed: dict[int, list[Group]] = field(default_factory=dict)
    """The groups taken into each batch, by its number, until their slots are free."""
    resample: deque[str] = field(default_factory=deque)
    """Problems of groups for which a loaded state had no slot; they are dispatched before new ones."""
    tally: Tally = field(default_factory=Tally)

    @property
    def slots(self) -> int:
        return (self.max_steps_off_policy + 1) * self.batch_size

    @property
    def slots_taken(self) -> int:
        return len(self.active) + sum(map(len, self.consumed.values()))

    @property
    def assembled(self) -> int:
        """The number of groups taken so far into the batch that is being assembled."""
        return len(self.consumed.get(self.batch, ()))

    @property
    def lacking(self) -> int:
        """The number of places left in the batch that is being assembled."""
        return self.batch_size - self.assembled

    def deadline(self, group: Group) -> int:
        """Returns the last batch that may train on a group."""
        return deadline(group.floor, self.max_steps_off_policy)

    def can_dispatch(self) -> bool:
        """True if a slot is free, a replica is live, and the remaining batches of the run have a place for one more
        group."""
        return self._has_place and bool(self.replicas)

    @property
    def is_sampled(self) -> bool:
        """True if all groups that the staleness bound allows have finished: no group is running, and no other group can
        get both a free slot and a place in a batch of the run."""
        return not self._has_place and all(group.finished for group in self.active.values())

    @property
    def _has_place(self) -> bool:
        """True if a slot is free, and the remaining batches of the run have a place for one more group."""
        useful = len(self.active) + self.assembled < (self.max_steps - self.batch) * self.batch_size
        return useful and self.slots_taken < self.slots

    def dispatch(self, new_problem: Callable[[], str]) -> Group:
        """Takes a slot for a new group, and returns the group. The group's problem is the first problem that waits to
        be sampled again; if none waits, `new_problem()`. Raises ValueError unless `can_dispatch()`."""
        if not self.can_dispatch():
            raise ValueError(f"no group may be dispatched: {self.slots_taken} of {self.slots} slots taken")
        if self.resample:
            problem = self.resample.popleft()
        else:
            problem = new_problem()
        group = Group(self.tally.dispatched, problem, self.floor)
        self.active[group.index] = group
        self.tally.dispatched += 1
        return group

    def finish(self, group: Group) -> None:
        """Marks a running group as ready to be taken, after the end of its rollouts."""
        self._running(group).finished = True

    def filter(self, group: Group) -> None:
        """Removes a running group after the end of its rollouts, because training can learn nothing from them."""
        del self.active[self._running(group).index]
        self.tally.filtered += 1

    def fail(self, group: Group) -> None:
        """Removes a running group with too few successful rollouts."""
        del self.active[self._running(group).index]
        self.tally.failed += 1

    def _running(self, group: Group) -> Group:
        if group.index not in self.active or group.finished:
            raise ValueError(f"group {group.index} (problem {group.problem}) is not running")
        return group

    def take(self, step: int, count: int) -> tuple[list[Group], list[Group]] | None:
        """Takes the next `count` groups into batch `step`. Returns the taken groups and the dropped groups, or None
        while fewer than `count` groups may be taken. The caller stops the rollouts of the dropped groups.

        May be called several times for one batch. The call that takes the last group of the batch also drops the groups
        that would be too old for the next batch. Raises ProvenanceError for a group that is too old; ValueError if
        `step` is not the batch that is being assembled, or if `count` is below 1 or above the number of places left in
        this batch.
        """
        if step != self.batch or not 0 < count <= self.lacking:
            raise ValueError(
                f"asked for {count} groups of batch {step}; expected 1 to {self.lacking} groups of batch {self.batch}"
            )
        groups = self._takeable(count)
        if len(groups) < count:
            return None
        for group in groups:
            if step > self.deadline(group):
                raise ProvenanceError(
                    f"group {group.index} (problem {group.problem}) has floor {group.floor} and would be trained on at "
                    f"step {step}: age {step - group.floor}, above orchestrator.max_steps_off_policy = "
                    f"{self.max_steps_off_policy}. This is an error of the ledger, not of the configuration: report it"
                )
            del self.active[group.index]
        self.consumed.setdefault(step, []).extend(groups)
        return groups, self._cut() if self.lacking == 0 else []

    def takeable(self, limit: int) -> int:
        """Returns how many groups to take now, at most `limit`.

        If the stale policy is `wait`, this is the number of groups that may be taken. If it is `drop`, this is the
        number of finished groups. But if fewer than `limit` groups have finished under `drop`, the result is small
        enough to leave one place in the batch for each running group that is older (has a lower floor) than a group
        dispatched now would be. Without this place, such a group could be dropped as too old once the batch is
        complete.
        """
        count = len(self._takeable(limit))
        if self.policy == "wait" or count == limit:
            return count
        older = sum(not group.finished and group.floor < self.floor for group in self.active.values())
        return max(min(count, self.lacking - older), 0)

    def _takeable(self, count: int) -> list[Group]:
        """Returns at most `count` groups that may be taken now, in order of dispatch."""
        groups = list(self.active.values())
        if self.in_order:
            groups = list(takewhile(lambda group: group.finished, groups))
        finished = [group for group in groups if group.finished]
        if self.in_order or self.policy == "drop":
            return finished[:count]
        taken: list[Group] = []
        spare = self._spare_places()
        for group in finished:
            if len(taken) == count:
                break
            before_deadline = range(max(self.deadline(group) - self.batch, 0))
            # The place that this group takes is gone for the groups with earlier deadlines. One that has no room now
            # has none after further ones are taken, so one pass is enough.
            if all(spare[d] > 0 for d in before_deadline):
                taken.append(group)
                for d in before_deadline:
                    spare[d] -= 1
        return taken

    def _spare_places(self) -> list[int]:
        """Returns for each d = 0 .. K the number of spare places in the batches up to `batch + d`: the free places that
        remain if each active group whose deadline is at most `batch + d` takes one. No number is negative, by the
        inequality (feasible) in the module's docstring."""
        due = Counter(max(self.deadline(group) - self.batch, 0) for group in self.active.values())
        spare = []
        needed = 0
        for d in range(self.max_steps_off_policy + 1):
            needed += due[d]
            spare.append(self.lacking + d * self.batch_size - needed)
        return spare

    def _cut(self) -> list[Group]:
        """Completes the batch being assembled, and begins the next. Drops and returns the groups that would be too old
        for the next batch; under `wait` there are none."""
        self.batch += 1
        if self.policy == "wait":
            return []
        dropped = [group for group in self.active.values() if self.deadline(group) < self.batch]
        for group in dropped:
            del self.active[group.index]
            self.tally.expired_finished += group.finished
            self.tally.expired_running += not group.finished
        self.tally.dropped += len(dropped)
        return dropped

    def release(self, step: int) -> list[Group]:
        """Records that batch `step` has been trained on, and returns its groups. Their slots become free once all
        replicas have acknowledged the version that the batch made. Raises ValueError unless `step` is the next batch to
        release and is complete."""
        if step != self.released or step >= self.batch:
            raise ValueError(
                f"batch {step} cannot be recorded as trained; expected batch {self.released}, which must be complete. "
                f"The first batch that is not complete is batch {self.batch}"
            )
        groups = self.consumed[step]
        self.released += 1
        self.tally.trained += len(groups)
        self._free()
        return groups

    def acknowledge(self, replicas: Mapping[int, int]) -> None:
        """Sets the live replicas, with the version that each has acknowledged. Replicas that are missing in `replicas`
        have left.

        Raises ProvenanceError if a replica is below the version that all live replicas had acknowledged before.
        """
        for replica, version in replicas.items():
            if version < self.floor:
                raise ProvenanceError(
                    f"replica {replica} serves version {version}, but groups in flight were promised version "
                    f"{self.floor} or later: a replica may join only once it has that version"
                )
        self.replicas = dict(replicas)
        self.floor = min(replicas.values(), default=self.floor)
        self._free()

    def _free(self) -> None:
        first = min(self.released, self.floor)
        self.consumed = {step: groups for step, groups in self.consumed.items() if step >= first}

    def counts(self) -> dict[str, int]:
        """Returns by name the terms of the conservation equation (see the module's docstring), and the numbers of
        running groups, finished groups, problems to resample, and slots taken. Raises ProvenanceError unless the
        equation holds."""
        finished = sum(g.finished for g in self.active.values())
        counts = vars(self.tally) | {
            "in_training": len(self._in_training()),
            "active": len(self.active),
            "running": len(self.active) - finished,
            "finished": finished,
            "to_resample": len(self.resample),
            "slots_taken": self.slots_taken,
        }
        ends = ("trained", "in_training", "filtered", "resampled", "dropped", "failed", "active")
        if counts["dispatched"] != sum(counts[name] for name in ends):
            raise ProvenanceError(f"groups were lost or counted twice: {counts}")
        return counts

    def _in_training(self) -> list[Group]:
        return [group for step, groups in self.consumed.items() if step >= self.released for group in groups]

    def state_dict(self) -> LedgerState:
        """Returns the ledger's state at the last boundary between two steps, as JSON values (see Resume in the module's
        docstring). Raises ValueError if the replicas are ahead of this boundary: a live replica has acknowledged a
        later version, or all replicas had done so before they left. No run could continue from such a state."""
        ahead = {replica: version for replica, version in self.replicas.items() if version > self.released}
        if ahead or self.floor > self.released:
            if ahead:
                later = ", ".join(f"replica {replica} has version {version}" for replica, version in ahead.items())
            else:
                later = f"all replicas had at least version {self.floor} before they left"
            raise ValueError(
                f"the ledger's state cannot be saved: the batches trained so far make version {self.released}, but "
                f"{later}"
            )
        groups = sorted([*self._in_training(), *self.active.values()], key=lambda group: group.index)
        return {
            "released": self.released,
            "groups": [dict(vars(group)) for group in groups],
            "resample": list(self.resample),
            "tally": dict(vars(self.tally)),
        }

    def load_state_dict(self, state: LedgerState, retained: Collection[int] = ()) -> set[int]:
        """Continues from `state`, the result of `state_dict`; call it before any other method. Groups that are not
        accepted are resampled (see Resume in the module's docstring).

        `retained`: indices of the running groups whose sampled tokens the caller still has. Returns the part of
        `retained` whose groups keep their floors, and therefore their tokens. Raises ProvenanceError if the numbers of
        groups in the state violate the conservation equation.
        """
        self.batch = state["released"]
        self.released = state["released"]
        self.floor = state["released"]
        self.resample = deque(state["resample"])
        self.tally = Tally(**state["tally"])
        groups = [Group(**values) for values in state["groups"]]
        for group in groups:
            if not group.finished and (group.index not in retained or self.deadline(group) < self.batch):
                group.floor = self.floor
        accepted = self._accepted(groups)
        # A running group whose place comes after its deadline is sampled again, with the floor of now, before another
        # is refused.
        late = [g for g in groups if g.index not in accepted and not g.finished and g.floor < self.floor]
        for group in late:
            group.floor = self.floor
        if late:
            accepted = self._accepted(groups)
        self.active = {group.index: group for group in groups if group.index in accepted}
        refused = [group.problem for group in groups if group.index not in accepted]
        self.resample.extendleft(reversed(refused))
        self.tally.resampled += len(refused)
        self.counts()
        floors = {values["index"]: values["floor"] for values in state["groups"]}
        running = [group for group in self.active.values() if not group.finished]
        return {g.index for g in running if g.index in retained and g.floor == floors[g.index]}

    def _accepted(self, groups: list[Group]) -> set[int]:
        """Returns the indices of the groups that are accepted. An accepted group gets a slot, and a place in a batch
        that comes no later than its deadline. `groups`: the groups of a checkpoint, in order of dispatch."""
        if self.in_order:
            in_order = groups
        else:
            in_order = sorted(groups, key=lambda group: (group.floor, group.index))
        accepted: set[int] = set()
        for group in in_order:
            place = len(accepted)
            if self.policy == "drop":
                lands = self.batch
            else:
                lands = self.batch + place // self.batch_size
            if place < self.slots and lands <= self.deadline(group):
                accepted.add(group.index)
        return accepted
