"""Decides how long a batch that could be cut waits for groups that the cut would give up.

A group that is given up has been sampled in vain, and its problem takes as many tokens again. A wait lets replicas work
with fewer sequences, since nothing is dispatched into the batch's slots before it is cut and trained on. Both are
seconds of the replicas. So the wait is that for which

    sum over groups of P(the group ends within the wait) * seconds for its tokens so far  -  share that is lost * wait

is largest, and there is none if that is nowhere above 0. P follows from how long rollouts last (`survival.py`) and from
how long the group's running ones have lasted. The seconds for its tokens are those in which all replicas make as many
at their full rate. So a wait never costs more than what all these groups have taken.

The share that is lost is that of the full rate which the replicas will not have when the slots of the batch become
free: as late as the wait makes it, so much longer do they miss it. If the trainer did not wait for the batch, it is
slower than the replicas, and all that a wait takes is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from orchestrator.effort import Efforts, GroupEffort
from orchestrator.ledger import Ledger

CANDIDATES = 64
"""Waits that are compared."""


class CutWait:
    """Says for each batch that is complete if it is cut now. A wait is decided once, when the batch is complete, and
    ends earlier when no group is left to wait for."""

    def __init__(self, ledger: Ledger, efforts: Efforts) -> None:
        self._ledger, self._efforts = ledger, efforts
        self._batch, self._began, self._until = -1, 0.0, 0.0
        self._cut_at = self._in_training_s = 0.0
        self._waited_s = 0.0

    def until(self, count: int, trainer_waits: bool, latest: float) -> float | None:
        """Returns the time until which the last `count` groups of the batch, which have finished, are not to be taken
        yet, at most `latest`; None: take them now. `trainer_waits`: it had to wait before they had finished."""
        now, groups = self._efforts.now(), self._efforts.groups
        late = [groups[g.index] for g in self._ledger.late(count) if g.index in groups]  # not restored, and to start
        if late and self._batch != self._ledger.batch:
            self._batch, self._began = self._ledger.batch, now
            self._until = min(now + self._seconds(late, trainer_waits), latest)
        return self._until if late and now < self._until else None

    def _seconds(self, late: Sequence[GroupEffort], trainer_waits: bool) -> float:
        speed = self._efforts.speed
        full, lost_share = speed.rate(self._efforts.most_running), 1.0
        if not full:  # nothing is known yet
            return 0.0
        if trainer_waits:
            given_up = set(map(id, late))
            staying = (group for group in self._efforts.groups.values() if id(group) not in given_up)
            lost_share -= min(speed.rate(still_running(staying, self._in_training_s)) / full, 1.0)
        return seconds_to_wait(late, full, lost_share)

    def note_cut(self) -> None:
        """Takes note that the batch was cut now."""
        self._cut_at = self._efforts.now()
        if self._batch == self._ledger.batch - 1:
            self._waited_s += self._cut_at - self._began
        self._efforts.most_running = self._efforts.running

    def note_release(self) -> None:
        """Takes note that the batch has been trained on."""
        self._in_training_s = self._efforts.now() - self._cut_at

    def take(self) -> dict[str, float]:
        """Returns the metric of the seconds that batches have waited since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return {"perf/cut_wait_s": waited_s}


def seconds_to_wait(late: Sequence[GroupEffort], tokens_per_s: float, lost_share: float) -> float:
    """Returns how long to wait for `late` groups; 0 if cutting wastes less. `tokens_per_s`: the replicas' full rate."""
    waits = np.unique(np.concatenate([[0.0], *map(_ends, late)]))
    waits = waits[np.linspace(0, len(waits) - 1, min(len(waits), CANDIDATES)).astype(int)]
    saved = sum((group.tokens / tokens_per_s * ended_within(group, waits) for group in late), np.zeros_like(waits))
    saved[0] = 0.0  # without a wait none is saved
    return float(waits[np.argmax(saved - lost_share * waits)])


def ended_within(group: GroupEffort, waits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns the probability that all rollouts of a group end within each of `waits`; 0 where one has lasted longer
    than all that are known."""
    return np.prod([1 - still_there(group, age, waits) for age in group.ages], axis=0, initial=1.0) * np.ones_like(
        waits
    )


def still_there(group: GroupEffort, age: float, waits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns the probability that a rollout that has lasted `age` seconds is running after each of `waits`."""
    now = group.lasting.beyond(age)
    return group.lasting.beyond(age + waits) / now if now > 0 else np.ones_like(waits)


def _ends(group: GroupEffort) -> npt.NDArray[np.float64]:
    """Returns the waits after which its oldest rollout may end."""
    seen, _ = group.lasting.curve
    age = max(group.ages, default=0.0)
    return seen[np.searchsorted(seen, age, side="right") :] - age


def still_running(groups: Iterable[GroupEffort], seconds: float) -> float:
    """Returns how many rollouts of `groups` can be expected to run after `seconds`."""
    after = np.array([seconds])
    return sum(float(still_there(group, age, after)[0]) for group in groups for age in group.ages)
