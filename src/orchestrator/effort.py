"""Keeps account of what groups take of the replicas: places for a time, and tokens, also those of stopped rollouts.

    Efforts --begin--> GroupEffort --one for each rollout--> RolloutEffort --end--> how long rollouts last (`Survival`)

A replica says how many tokens an answer has when it is whole. Of one that is stopped before, they are estimated from
its seconds, at the rate of the last answers.

Tokens, and why they were wasted, are part of commits. How fast replicas sample and how many seconds rollouts last are
not: after a resume the machines may be others.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.advantages import ScoredGroup
from orchestrator.survival import Survival
from orchestrator.trajectory import Trajectory

WASTE = ("expired_running", "expired_finished", "failed")
"""Why tokens are not trained on; `metrics.py` adds those of filtered groups."""
FADING = 0.999
"""Each answer counts so much of the one after it."""
SAME = 1e-6
"""Numbers of rollouts whose variance is below this share of their square are one number."""


class RolloutEffort:
    """Keeps account of what one rollout has taken."""

    __slots__ = ("_answered", "_asked", "_began", "_ended", "_env", "_of", "_restored")

    def __init__(self, of: Efforts, env: str, earlier: int = 0) -> None:
        """`earlier`: tokens that it had when it was restored from a commit."""
        self._of, self._env = of, env
        self._began = of.now()
        self._ended: float | None = None
        self._asked: float | None = None  # when it asked for the answer that it waits for
        self._answered = earlier
        self._restored = earlier > 0

    @property
    def running(self) -> bool:
        return self._ended is None

    @property
    def seconds(self) -> float:
        return (self._of.now() if self._ended is None else self._ended) - self._began

    @property
    def tokens(self) -> int:
        """Tokens of the answers of this try so far; of one that it waits for as estimated."""
        seconds = 0.0 if self._asked is None else self._of.now() - self._asked
        return self._answered + self._of.tokens_within(seconds)

    def ask(self) -> None:
        """Takes note that it asks for an answer."""
        self._asked = self._of.now()

    def answer(self, tokens: int) -> None:
        """Takes note of the answer that it asked for."""
        assert self._asked is not None
        if tokens:  # else the rollout refuses it
            self._of.speed.note(tokens, self._of.now() - self._asked, self._of.running)
        self._answered, self._asked = self._answered + tokens, None

    def fail(self) -> None:
        """Takes note that a try has failed: what it sampled is lost, and an answer that it waited for is stopped."""
        self._of.note_failure(self.tokens)
        self._answered, self._asked = 0, None

    def end(self, task: asyncio.Task[Any]) -> None:
        """Takes note that its task is done."""
        self._end(not task.cancelled() and not task.exception() and isinstance(task.result(), Trajectory))

    def stop(self) -> None:
        """Takes note that it is stopped, if it runs."""
        self._end(whole=False)

    def _end(self, whole: bool) -> None:
        if self.running:
            self._answered, self._asked, self._ended = self.tokens, None, self._of.now()
            self._of.note_end(self._env, self, whole, timed=not self._restored)


@dataclass(frozen=True)
class GroupEffort:
    """Adds up what a group has taken so far."""

    rollouts_G: Sequence[RolloutEffort]
    lasting: Survival
    """How many seconds rollouts of its environment last."""

    @property
    def ages(self) -> list[float]:
        """Seconds that each of its running rollouts has lasted."""
        return [rollout.seconds for rollout in self.rollouts_G if rollout.running]

    @property
    def seconds(self) -> float:
        """Seconds that all its rollouts have lasted, added up."""
        return sum(rollout.seconds for rollout in self.rollouts_G)

    @property
    def tokens(self) -> int:
        return sum(rollout.tokens for rollout in self.rollouts_G)

    def close(self) -> None:
        """Stops the rollouts that still run."""
        for rollout in self.rollouts_G:
            rollout.stop()


class Speed:
    """Learns from answers how fast replicas sample, by how many rollouts run: a step of an engine takes longer the more
    sequences are in it, so that seconds per token = a + b * rollouts, by least squares over tokens."""

    def __init__(self) -> None:
        self._sums = np.zeros(
            5
        )  # of tokens; and weighted by them: rollouts, their squares, seconds per token, products

    def note(self, tokens: int, seconds: float, rollouts: int) -> None:
        """Takes note of an answer that came while so many rollouts ran."""
        pace = seconds / tokens
        weighted = (1.0, rollouts, rollouts * rollouts, pace, rollouts * pace)
        self._sums = FADING * self._sums + np.multiply(tokens, weighted)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of one sequence in a second; 0 before the first answer."""
        tokens, _, _, pace, _ = self._sums
        return float(tokens / pace) if pace else 0.0

    def rate(self, rollouts: float) -> float:
        """Returns how many tokens in a second so many rollouts get together, as far as a straight line tells."""
        tokens, *sums = self._sums
        if not tokens or not sums[2]:
            return 0.0
        mean, square, pace, product = (total / tokens for total in sums)
        variance = square - mean * mean
        slope = (product - mean * pace) / variance if variance > SAME * square else 0.0
        slope = min(max(slope, 0.0), pace / mean)  # neither part takes less than no time
        return float(rollouts / (pace + slope * (rollouts - mean)))


class Efforts:
    """The accounts of all groups of a run, and what follows from them."""

    def __init__(self, now: Callable[[], float], *, repeatable: bool = False) -> None:
        """`now`: the event loop's clock. `repeatable`: no metric may depend on what an earlier process has seen."""
        self.now, self._repeatable = now, repeatable
        self.groups: dict[int, GroupEffort] = {}
        """The groups that run, by index."""
        self.lasting: defaultdict[str, Survival] = defaultdict(Survival)
        """How many seconds rollouts last, by environment."""
        self.lengths = Survival()
        """How many tokens rollouts sample."""
        self.running = self.most_running = 0
        """Rollouts that run now; the most since `most_running` was set."""
        self.speed = Speed()
        self._wasted: Counter[str] = Counter()

    def begin(self, index: int, env: str, earlier_G: Sequence[int]) -> GroupEffort:
        """Opens the account of a group that starts. `earlier_G`: tokens that each of its rollouts has from a commit."""
        effort = GroupEffort([RolloutEffort(self, env, earlier) for earlier in earlier_G], self.lasting[env])
        self.groups[index] = effort
        self.running += len(earlier_G)
        self.most_running = max(self.most_running, self.running)
        return effort

    def tokens_within(self, seconds: float) -> int:
        """Returns about how many tokens a sequence gets in so many seconds; 0 where metrics have to be repeatable."""
        return 0 if self._repeatable else int(seconds * self.speed.tokens_per_s)

    def note_failure(self, tokens: int) -> None:
        """Takes note of a try that has failed after so many tokens."""
        self._wasted["failed"] += tokens
        self.lengths.note(tokens, ended=False)

    def note_end(self, env: str, rollout: RolloutEffort, whole: bool, timed: bool) -> None:
        """Takes note of a rollout that is over; `whole`: it was not stopped, and did not fail; `timed`: all its seconds
        are known, those before a resume are not."""
        self.running -= 1
        if timed:
            self.lasting[env].note(rollout.seconds, ended=whole)
        self.lengths.note(rollout.tokens, ended=whole)

    def settle(self, index: int, scored: ScoredGroup | None) -> None:
        """Takes note of a group whose rollouts have ended; None: it failed."""
        group = self.groups.pop(index)
        if scored is None:
            self._wasted["failed"] += group.tokens

    def evict(self, index: int, scored: ScoredGroup | None) -> None:
        """Takes note of a group that is given up; None: while it ran."""
        if scored:
            self._wasted["expired_finished"] += scored.tokens
        elif group := self.groups.pop(index, None):  # one that was restored may not have been started yet
            group.close()
            self._wasted["expired_running"] += group.tokens

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next rows have to know, as JSON values. What running groups have is not in it."""
        return {"wasted": dict(self._wasted), "lengths": self.lengths.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a commit."""
        self._wasted = Counter(state["wasted"])
        self.lengths.load_state_dict(state["lengths"])

    def take(self) -> dict[str, float]:
        """Returns metrics of what was sampled since the last call."""
        wasted, self._wasted = self._wasted, Counter()
        row = {f"waste/{cause}": float(wasted[cause]) for cause in WASTE}
        return row if self._repeatable else row | {"length/sampled": self.lengths.mean()}
