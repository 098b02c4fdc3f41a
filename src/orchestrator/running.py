"""The running groups: their tasks, and their progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

from orchestrator.advantages import ScoredGroup
from orchestrator.group_runner import GroupRunner
from orchestrator.ledger import Group, Ledger
from orchestrator.state import OrchestratorState
from orchestrator.unfinished import GroupProgress, UnfinishedGroup

RunnerOf = Callable[[str], GroupRunner]
"""Takes the id of a problem, and returns the runner of its environment."""


class RunningGroups:
    """Holds the task and the progress of each group, by the group's index, from its dispatch until the ledger has
    recorded its end."""

    def __init__(self, runner_of: RunnerOf) -> None:
        self._runner_of = runner_of
        self._tasks: dict[int, asyncio.Task[None]] = {}  # those that an eviction may cancel
        self._begun: dict[int, GroupProgress] = {}
        self._restored: dict[int, GroupProgress] = {}  # of groups that are not started yet

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, group: Group, keeps_finished: bool) -> GroupProgress:
        """Records that a group is started. Returns the group's progress so far, which the runner updates.
        `keeps_finished`: see GroupProgress."""
        progress = self._restored.pop(group.index, None) or GroupProgress(keeps_finished)
        self._begun[group.index] = progress
        return progress

    def add_task(self, group: Group, task: asyncio.Task[None]) -> None:
        """Stores the task of a group that has begun, so that `stop` can cancel the task."""
        self._tasks[group.index] = task

    def ends(self, group: Group) -> None:
        """Records that the rollouts of a group are over and that its task cleans up: `stop` no longer cancels this
        task."""
        self._tasks.pop(group.index, None)

    def settle(self, group: Group) -> None:
        """Forgets a group that has ended."""
        self._begun.pop(group.index, None)

    def stop(self, index: int) -> None:
        """Stops the rollouts of a group, and drops its progress."""
        self._restored.pop(index, None)
        self._begun.pop(index, None)
        task = self._tasks.pop(index, None)
        if task:
            task.cancel()

    # ---- checkpoints

    def take(self, groups: Iterable[Group]) -> tuple[UnfinishedGroup, ...]:
        """Returns the progress of the running `groups`, for a checkpoint. Leaves out a group if all its rollouts would
        start over after a resume."""
        return tuple(unfinished for group in groups if (unfinished := self._take(group)) and unfinished.trajectories_G)

    def _take(self, group: Group) -> UnfinishedGroup | None:
        progress = self._begun.get(group.index) or self._restored.get(group.index)
        if progress is None:
            return None
        runner = self._runner_of(group.problem)
        return progress.take(group, runner.size, runner.sampling.temperature)

    def load(self, ledger: Ledger, state: OrchestratorState) -> tuple[dict[int, ScoredGroup], str]:
        """Loads the `state` of a checkpoint into the ledger. Stores the progress of the groups that were running when
        the checkpoint was made; such a group continues from its progress when it is started. Returns the finished
        groups by index, and a message that says how many unfinished rollouts continue ("" if there were none)."""
        fitting = {unfinished.group.index: unfinished for unfinished in state.running if self._fits(unfinished)}
        usable = ledger.load_state_dict(state.ledger, fitting.keys())
        for index in usable:
            self._restored[index] = GroupProgress.of(fitting[index], self._runner_of(fitting[index].group.problem).size)
        finished = {scored.group.index: scored for scored in state.finished if scored.group.index in ledger.active}
        finished = {index: replace(scored, group=ledger.active[index]) for index, scored in finished.items()}
        running = [values for values in state.ledger["groups"] if not values["finished"]]
        rollouts = sum(self._runner_of(values["problem"]).size for values in running)
        restored = sum(len(fitting[index].trajectories_G) for index in usable)
        return finished, f"{restored} of {rollouts} unfinished rollouts were kept" if rollouts else ""

    def _fits(self, unfinished: UnfinishedGroup) -> bool:
        """Returns True if the rollouts of a group from a checkpoint may continue: they were sampled at the temperature
        of this run."""
        return unfinished.temperature == self._runner_of(unfinished.group.problem).sampling.temperature
