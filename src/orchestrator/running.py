"""The groups that are being sampled: their tasks, and what they have so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.advantages import ScoredGroup
from orchestrator.group_runner import GroupRunner
from orchestrator.ledger import Group, Ledger
from orchestrator.state import OrchestratorState
from orchestrator.unfinished import GroupProgress, UnfinishedGroup
from trireme.core.types import WeightIdentity


@dataclass(frozen=True)
class KeptShare:
    """Says what was kept of the rollouts of groups that ran when a commit was taken."""

    rollouts: int = 0
    """All of them."""
    living: int = 0
    """Those that live on, or have ended since, in the same process."""
    restored: int = 0
    """Those that continue from what the commit has of them, or were finished in it."""

    def __str__(self) -> str:
        """Says it in words.

        >>> str(KeptShare(64, 0, 37))
        '37 of 64 unfinished rollouts were kept'
        """
        lived = f" ({self.living} of them live on)" if self.living else ""
        return f"{self.living + self.restored} of {self.rollouts} unfinished rollouts were kept{lived}"


RunnerOf = Callable[[str], GroupRunner]
"""Returns the runner of a problem."""


class RunningGroups:
    """Groups by index, from their dispatch until they are settled. `runner_of` gives the runner of a problem."""

    def __init__(self, runner_of: RunnerOf) -> None:
        self._runner_of = runner_of
        self._tasks: dict[int, asyncio.Task[None]] = {}  # those that an eviction may cancel
        self._begun: dict[int, tuple[Group, GroupProgress]] = {}
        self._restored: dict[int, GroupProgress] = {}  # of groups that are not started yet

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, index: object) -> bool:
        """True if group `index` was started and is not settled."""
        return index in self._begun

    def begin(self, group: Group, keeps_finished: bool) -> GroupProgress:
        """Takes note that a group is started. Returns what it has already, for its runner to keep up to date."""
        progress = self._restored.pop(group.index, None) or GroupProgress(keeps_finished)
        self._begun[group.index] = (group, progress)
        return progress

    def add_task(self, group: Group, task: asyncio.Task[None]) -> None:
        """Takes the task of a group that has begun."""
        self._tasks[group.index] = task

    def ends(self, group: Group) -> None:
        """Takes note that the rollouts of a group are over: what follows is not to be cancelled."""
        if self._is_begun(group):
            self._tasks.pop(group.index, None)

    def settle(self, group: Group) -> None:
        """Forgets a group that has ended."""
        if self._is_begun(group):
            del self._begun[group.index]

    def stop(self, index: int) -> None:
        """Stops the rollouts of a group, and forgets what it has."""
        self._restored.pop(index, None)
        self._begun.pop(index, None)
        if task := self._tasks.pop(index, None):
            task.cancel()

    def _is_begun(self, group: Group) -> bool:
        """False for a group that was stopped, in whose place another one may run."""
        return group.index in self._begun and self._begun[group.index][0] is group

    # ---- commits and rollbacks

    def take(self, groups: Iterable[Group]) -> tuple[UnfinishedGroup, ...]:
        """Returns what a commit keeps of these running groups; those that have nothing are left out."""
        return tuple(kept for group in groups if (kept := self._take(group)) and kept.trajectories_G)

    def _take(self, group: Group) -> UnfinishedGroup | None:
        _, progress = self._begun.get(group.index, (group, self._restored.get(group.index)))
        if progress is None:
            return None
        runner = self._runner_of(group.problem)
        return progress.take(group, runner.size, runner.sampling.temperature)

    def load(
        self,
        ledger: Ledger,
        state: OrchestratorState,
        scored_P: Iterable[ScoredGroup],
        known: Collection[WeightIdentity],
    ) -> tuple[dict[int, ScoredGroup], KeptShare]:
        """Loads a commit into the ledger. A group that was running then continues in this process if all its tokens
        were sampled by weights that are `known`, else from what the commit has of it. `scored_P` are groups that have
        finished in this process. All other groups are stopped. Returns the finished groups by index, and what was
        kept."""
        running = {values["index"]: values for values in state.ledger["groups"] if not values["finished"]}

        def lives_on(group: Group, identities: set[WeightIdentity]) -> bool:
            values = running.get(group.index, {})
            same = (values.get("problem"), values.get("requeues")) == (group.problem, group.requeues)
            return same and identities <= set(known)

        living = {i: group for i, (group, progress) in self._begun.items() if lives_on(group, progress.identities)}
        over = {scored.group.index: scored for scored in scored_P if lives_on(scored.group, scored.identities)}
        self._restored = {}
        kept = {unfinished.group.index: unfinished for unfinished in state.running if self._fits(unfinished)}
        usable = ledger.load_state_dict(state.ledger, living.keys() | over.keys() | kept.keys())
        for index in self._begun.keys() - (living.keys() & usable):
            self.stop(index)
        finished = {scored.group.index: scored for scored in state.finished if scored.group.index in ledger.active}
        finished = {index: replace(scored, group=ledger.active[index]) for index, scored in finished.items()}
        for index in usable:
            if index in living or index in over:
                ledger.live_on(living[index] if index in living else over[index].group)
            else:
                self._restored[index] = GroupProgress.of(kept[index], self._runner_of(kept[index].group.problem).size)
            if index in over:
                ledger.finish(over[index].group)
                finished[index] = over[index]
        return finished, self._share(running, kept, usable & (living.keys() | over.keys()))

    def _fits(self, unfinished: UnfinishedGroup) -> bool:
        """True if the rollouts of a group from a commit may be continued: its tokens are sampled as they were."""
        return unfinished.temperature == self._runner_of(unfinished.group.problem).sampling.temperature

    def _share(
        self, running: Mapping[int, Mapping[str, Any]], kept: Mapping[int, UnfinishedGroup], living: Collection[int]
    ) -> KeptShare:
        sizes = {index: self._runner_of(values["problem"]).size for index, values in running.items()}
        restored = [len(kept[index].trajectories_G) for index in self._restored]
        return KeptShare(sum(sizes.values()), sum(sizes[index] for index in living), sum(restored))
