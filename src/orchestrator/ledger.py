"""The staleness ledger decides which group is dispatched, trained on or given up, and when. No clock, Ray or numpy.

    problems --dispatch--> running --finish--> finished --take--> in training --release--> trained --acknowledged-->
                 ^          | | |                  |                                                    slot free
                 |          | | +-- filter         |
                 |          | +---- fail           |
                 |          +------ evict ---------+
                 |                    |
                 +---- requeued ------+------ dropped

Version v is the weights after v training steps; batch s consumes v = s and makes s + 1. B = groups per batch,
K = `max_steps_off_policy`. The *floor* of a group is the lowest version that any live replica had acknowledged when the
group was dispatched, so no token of it is older. Its *age* in batch s is s - floor.

Rules
  slots     At most (K + 1) B are taken. Dispatch takes one. It is freed when the group's batch has been released
            (trained on) and every live replica has acknowledged the version that the batch made; or immediately when
            the group is filtered, fails, or is evicted.
  replicas  The lowest acknowledged version never falls: a replica may leave at any time, and joins only at or above it.
            When all have left the version stays what it was, and nothing is dispatched until one joins.
  order     Finished groups are taken in order of dispatch, but none overtakes a protected group. `wait` protects all
            groups (first in, first out), `requeue` those whose problem has been requeued `max_requeues` times, `drop`
            none.
  eviction  When batch s is cut (its last group is taken), every remaining unprotected group with floor < s + 1 - K,
            which would be too old for the next batch, is evicted, running or finished. `requeue` puts its problem at
            the front of those to dispatch, `drop` gives it up.

The bound: a group taken into batch s has age at most K.

  At some moment let batches 0 .. F - 1 be those whose slots are free: they become free in order. Batch F - 1 became
  free only once the lowest acknowledged version was F, and that version never falls: so a group dispatched now has
  floor >= F.

  Unprotected group, taken into batch s. If it was there when batch s - 1 was cut, it was not evicted, so
  floor >= s - K. If it was dispatched later, then batches F .. s - 1 were complete at its dispatch and held (s - F) B
  slots, and one more was free for it: (s - F) B <= (K + 1) B - 1. So s - F <= K, and floor >= F >= s - K.

  Protected group. At its dispatch at most (K + 1) B - 1 other slots were taken. Every group of batch F or later that
  is taken before it held a slot at that moment: it had been taken already (into a batch that is not free), or it was
  active, since those dispatched later do not overtake. So it is at most the (K + 1) B-th group counted from the start
  of batch F; it lands in batch F + K or earlier, and its age there is at most F + K - floor <= K.

  When batch s is cut, once enough groups have finished, is nowhere used: the caller may wait with `take` for groups
  that the cut would evict (`late`, `cut_wait.py`). What finishes meanwhile is taken in its order.

  `take` checks it nevertheless: an older group is a ProvenanceError.

No deadlock: when all batches before s are released and acknowledged, all (K + 1) B >= B slots belong to batch s and
what comes after it. While a replica is live, groups are dispatched into the free ones; while running groups end,
no wait is in vain; and a group that is filtered, fails or is evicted frees its slot for another. So the batch fills,
unless from some moment on no group at all can be trained on (then `limits.py` stops the run).

Resume. The state of a ledger is that of the last boundary N: N batches released, no replica holds more than N (the
update to N may be in progress). Groups taken since then are finished again, in their place. When it is loaded all slots
of batches before N are free, and F = N. Finished groups keep their floors. So do running groups of which the caller has
kept tokens, all of them of versions up to N; the others are sampled again and get the floor N. A rollout of a kept
group that starts again has younger tokens than its floor says. With unchanged options the proof continues where it was:

  Unprotected group. As above, with s = N (it was there when batch N - 1 was cut, or dispatched later, or had been taken
  into batch N or a later one): its old floor is >= N - K. From here on the cuts of batches N, N + 1 .. see to it,
  whether it is finished or still running: they ask for its floor alone.

  Protected group, with p groups before it, counted from the first of batch N. None had overtaken it, and none does
  while it runs, so these are the same as without the resume, and it lands in batch N + p // B or earlier, as it would
  have: its old floor is young enough there. If it is sampled again its floor is N, and p < (K + 1) B.

With other options a group may not fit: no slot is left for it (the youngest go first), its floor is below N - K, or it
is protected and would be too old in batch N + p // B. A running group with tokens that are too old gives them up, and
is sampled again. For others that do not fit the problem goes to the front of those to dispatch, counted as requeued
whatever the policy. For what is left both cases hold with the new B and K.

Conservation, at every moment: dispatched = trained + in_training + filtered + requeued + dropped + failed + active
(active = running + finished). A problem is trained, filtered, dropped or failed exactly once, however often it is
requeued in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.core.errors import ProvenanceError

StalePolicy = Literal["requeue", "drop", "wait"]


@dataclass
class Group:
    """One dispatch of a problem."""

    index: int
    """Counts dispatches."""
    problem: str
    requeues: int
    """How often the problem was requeued before."""
    floor: int
    """No token of the group is of an older version."""
    finished: bool = False


@dataclass
class Tally:
    """Counts groups by how they ended, since the start of the run. `expired_*` count the evicted ones once more."""

    dispatched: int = 0
    trained: int = 0
    filtered: int = 0
    requeued: int = 0
    dropped: int = 0
    failed: int = 0
    expired_running: int = 0
    expired_finished: int = 0


@dataclass
class Ledger:
    """See the module's docstring. Problems are strings; the caller samples them and trains on them."""

    batch_size: int
    max_steps_off_policy: int
    policy: StalePolicy
    max_requeues: int
    max_steps: int
    batch: int = 0
    """The batch that is being assembled: all before it are cut."""
    released: int = 0
    """Batches that have been trained on."""
    floor: int = -1
    """The lowest version that any live replica has acknowledged; -1 before the first."""
    replicas: dict[int, int] = field(default_factory=dict)
    """The version that each live replica has acknowledged."""
    active: dict[int, Group] = field(default_factory=dict)
    """Running and finished groups by index, so in order of dispatch."""
    consumed: dict[int, list[Group]] = field(default_factory=dict)
    """Groups taken into each batch whose slots are not free yet."""
    requeue: deque[tuple[str, int]] = field(default_factory=deque)
    """Problems to sample afresh, with how often they have been requeued."""
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

    def can_dispatch(self) -> bool:
        """True if a slot is free, a replica is live, and one more group can still be used before the last batch."""
        useful = len(self.active) + self.assembled < (self.max_steps - self.batch) * self.batch_size
        return useful and bool(self.replicas) and self.slots_taken < self.slots

    def dispatch(self, new_problem: Callable[[], str]) -> Group:
        """Takes a slot for the oldest requeued problem, or for a new one. Raises ValueError unless `can_dispatch()`."""
        if not self.can_dispatch():
            raise ValueError(f"no group may be dispatched: {self.slots_taken} of {self.slots} slots taken")
        problem, requeues = self.requeue.popleft() if self.requeue else (new_problem(), 0)
        group = Group(self.tally.dispatched, problem, requeues, self.floor)
        self.active[group.index] = group
        self.tally.dispatched += 1
        return group

    def finish(self, group: Group) -> None:
        """Marks a running group, whose rollouts are done, as ready to be taken."""
        self._running(group).finished = True

    def filter(self, group: Group) -> None:
        """Removes a running group whose rollouts are done, but give nothing to learn."""
        del self.active[self._running(group).index]
        self.tally.filtered += 1

    def fail(self, group: Group) -> None:
        """Removes a running group of which too few rollouts succeeded."""
        del self.active[self._running(group).index]
        self.tally.failed += 1

    def _running(self, group: Group) -> Group:
        if group.index not in self.active or group.finished:
            raise ValueError(f"group {group.index} (problem {group.problem}) is not running")
        return group

    def take(self, step: int, count: int) -> tuple[list[Group], list[Group]] | None:
        """Takes the next `count` groups of batch `step`, in order of dispatch; None while fewer are finished.

        Returns them and the groups that were evicted, whose rollouts the caller stops. May be called several times for
        one batch; the call that completes it cuts it. Raises ProvenanceError for a group that is too old, ValueError
        for another batch than the one being assembled or more groups than it lacks.
        """
        lacking = self.batch_size - self.assembled
        if step != self.batch or not 0 < count <= lacking:
            raise ValueError(f"asked for {count} groups of batch {step}; batch {self.batch} lacks {lacking}")
        groups = self._takeable(count)
        if len(groups) < count:
            return None
        for group in groups:
            if step - group.floor > self.max_steps_off_policy:
                raise ProvenanceError(
                    f"group {group.index} (problem {group.problem}) has floor {group.floor} and would be trained on at "
                    f"step {step}: age {step - group.floor}, at most {self.max_steps_off_policy} is allowed"
                )
            del self.active[group.index]
        self.consumed.setdefault(step, []).extend(groups)
        return groups, self._cut() if count == lacking else []

    def takeable(self, most: int) -> int:
        """Returns how many groups to take now, at most `most`: as many as have finished, and if those are fewer than
        `most`, only as many as leave room in the batch for the running groups of older weights."""
        count = len(self._takeable(most))
        older = sum(not group.finished and group.floor < self.floor for group in self.active.values())
        return count if count == most else max(min(count, self.batch_size - self.assembled - older), 0)

    def _takeable(self, count: int) -> list[Group]:
        """Returns at most `count` finished groups in order of dispatch, up to the first protected running one."""
        groups: list[Group] = []
        for group in self.active.values():
            if group.finished:
                groups.append(group)
            if len(groups) == count or (not group.finished and self.protected(group)):
                break
        return groups

    def late(self, count: int) -> list[Group]:
        """Returns the running groups for which the cut may wait: it would evict them if the next `count` groups were
        taken now, and would take them if they finished before, in place of groups that the next batch can take. Empty
        if `take` would not cut the batch."""
        groups = self._takeable(count)
        if len(groups) < count or count < self.batch_size - self.assembled:
            return []
        oldest = self.batch + 1 - self.max_steps_off_policy
        late = [g for g in self.active.values() if not g.finished and g.floor < oldest and not self.protected(g)]
        in_order = sorted([*groups, *late], key=lambda group: group.index)
        young = sum(group.floor >= oldest for group in groups)
        return [group for group in in_order[:count] if not group.finished][:young]

    def protected(self, group: Group) -> bool:
        """True if no group may overtake this one, and it may not be evicted."""
        return self.policy == "wait" or (self.policy == "requeue" and group.requeues >= self.max_requeues)

    def _cut(self) -> list[Group]:
        """Closes the batch being assembled; evicts and returns the groups that would be too old for the next."""
        self.batch += 1
        oldest = self.batch - self.max_steps_off_policy
        evicted = [g for g in self.active.values() if g.floor < oldest and not self.protected(g)]
        for group in evicted:
            del self.active[group.index]
            self.tally.expired_finished += group.finished
            self.tally.expired_running += not group.finished
        if self.policy == "requeue":
            self._requeue(evicted)
        else:
            self.tally.dropped += len(evicted)
        return evicted

    def _requeue(self, groups: Sequence[Group]) -> None:
        self.requeue.extendleft((g.problem, g.requeues + 1) for g in reversed(groups))
        self.tally.requeued += len(groups)

    def release(self, step: int) -> list[Group]:
        """Takes note that batch `step` has been trained on; returns its groups."""
        if step != self.released or step >= self.batch:
            raise ValueError(f"batch {step} cannot be released: {self.released} are, {self.batch} are cut")
        groups = self.consumed[step]
        self.released += 1
        self.tally.trained += len(groups)
        self._free()
        return groups

    def acknowledge(self, replicas: Mapping[int, int]) -> None:
        """Takes note of the live replicas, each with the version that it acknowledged. Those not in it have left.

        Raises ProvenanceError when one of them is below what all live ones had acknowledged before.
        """
        for replica, version in replicas.items():
            if version < self.floor:
                raise ProvenanceError(
                    f"replica {replica} serves version {version}, but groups in flight were promised version "
                    f"{self.floor} or later: a replica may join only once it holds that"
                )
        self.replicas = dict(replicas)
        self.floor = min(replicas.values(), default=self.floor)
        self._free()

    def _free(self) -> None:
        first = min(self.released, self.floor)
        self.consumed = {step: groups for step, groups in self.consumed.items() if step >= first}

    def counts(self) -> dict[str, int]:
        """Returns the terms of the conservation equation, and what `active` and the queue consist of. Raises
        ProvenanceError unless the equation holds."""
        finished = sum(g.finished for g in self.active.values())
        counts = vars(self.tally) | {
            "in_training": len(self._in_training()),
            "active": len(self.active),
            "running": len(self.active) - finished,
            "finished": finished,
            "to_requeue": len(self.requeue),
            "slots_taken": self.slots_taken,
        }
        ends = ("trained", "in_training", "filtered", "requeued", "dropped", "failed", "active")
        if counts["dispatched"] != sum(counts[name] for name in ends):
            raise ProvenanceError(f"groups were lost or counted twice: {counts}")
        return counts

    def _in_training(self) -> list[Group]:
        return [group for step, groups in self.consumed.items() if step >= self.released for group in groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns the last boundary as JSON values, see the module's docstring. Raises ValueError when a replica has a
        later version already, so that there is no way back."""
        ahead = {replica: version for replica, version in self.replicas.items() if version > self.released}
        if ahead:
            raise ValueError(f"{self.released} batches are released, but replicas hold later versions: {ahead}")
        groups = sorted([*self._in_training(), *self.active.values()], key=lambda group: group.index)
        return {
            "released": self.released,
            "groups": [dict(vars(group)) for group in groups],
            "requeue": [list(entry) for entry in self.requeue],
            "tally": dict(vars(self.tally)),
        }

    def load_state_dict(self, state: Mapping[str, Any], kept: Collection[int] = ()) -> set[int]:
        """Continues from a boundary; call it before anything else. Requeues groups that do not fit (see the module's
        docstring).

        `kept`: indices of groups with kept tokens. Returns those of running ones that may use them: they have their old
        floors. Raises ProvenanceError when the state's groups do not add up.
        """
        self.batch = self.released = self.floor = state["released"]
        self.requeue = deque((problem, requeues) for problem, requeues in state["requeue"])
        self.tally = Tally(**state["tally"])
        groups = [Group(**values) for values in state["groups"]]
        usable: set[int] = set()
        for group in groups:
            if not group.finished and group.index in kept and self._fits(group):
                usable.add(group.index)
            elif not group.finished:
                group.floor = self.floor
            if self._fits(group):
                self.active[group.index] = group
        self._requeue([group for group in groups if group.index not in self.active])
        self.counts()
        return usable

    def _fits(self, group: Group) -> bool:
        """True if a loaded group has a slot after those that are active, and will be young enough."""
        place = len(self.active)
        latest = self.batch + (place // self.batch_size if self.protected(group) else 0)
        return place < self.slots and latest - group.floor <= self.max_steps_off_policy
