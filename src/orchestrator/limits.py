"""Ends a run by itself: after the error of a background task, after too many failed rollouts, or after many groups in a
row that cannot be trained on."""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TypedDict, TypeVar

from orchestrator.ledger import Tally
from orchestrator.lifetimes import start_contained
from trireme.config import Config
from trireme.core.errors import LimitReached

T = TypeVar("T")

MIN_WINDOW = 32
"""The failure rate is computed over as many recent rollouts as a batch has, but at least over this number."""


class LimitsState(TypedDict):
    """The state of the run limits in a checkpoint."""

    failures: list[bool]
    """For each recent rollout True if it failed, oldest first."""
    unusable_in_a_row: int
    """The number of groups in a row, up to the newest, that could not be trained on."""
    first_failure: str
    """The first failure of the run, with its traceback."""


class RunLimits:
    """Counts failures, and raises LimitReached when there are too many."""

    def __init__(self, config: Config) -> None:
        self._options = config.orchestrator
        self._env = config.label
        window = max(MIN_WINDOW, self._options.batch_size * config.largest_group)
        self._failures: deque[bool] = deque(maxlen=window)
        self._failed = 0  # sum(self._failures), which would be slow for large batches
        self._unusable_in_a_row = 0
        self.first_failure = "none"

    def note_failure(self, error: Exception, env: str) -> None:
        """Stores `error` if it is the run's first failure; messages about reached limits show this failure. `env`: the
        label of the environment that raised it."""
        if self.first_failure == "none":
            cause = traceback.format_exception_only(error)[0].strip().partition("\n")[0]
            self.first_failure = f"{cause}, in environment {env}\n{''.join(traceback.format_exception(error))}"

    @property
    def _cause(self) -> str:
        """The first error on one line, without its traceback and notes."""
        return self.first_failure.partition("\n")[0]

    def judge_rollout(self, error: Exception | None) -> None:
        """Counts a rollout after all its retries. `error`: its last error if it failed, else None. Raises LimitReached
        if too large a share of the recent rollouts failed."""
        succeeded = error is None
        if len(self._failures) == self._failures.maxlen:
            self._failed -= self._failures[0]
        self._failures.append(not succeeded)
        self._failed += not succeeded
        rate = self._failed / len(self._failures)
        if len(self._failures) == self._failures.maxlen and rate > self._options.max_failure_rate:
            raise LimitReached(
                f"{rate:.0%} of the last {len(self._failures)} rollouts of environment {self._env} failed after "
                f"{self._options.retries} retries, the first by {self._cause}; expected at most "
                f"orchestrator.max_failure_rate = {self._options.max_failure_rate:.0%}. Repair it, or raise the limit. "
                f"The first failure:\n{self.first_failure}"
            )

    def judge_group(self, usable: bool, tally: Tally) -> None:
        """Counts a group that has ended. `usable`: True if the group can be trained on; `tally`: the ledger's counts of
        groups. Raises LimitReached when the groups of `max_filtered_batches` batches in a row were unusable."""
        if usable:
            self._unusable_in_a_row = 0
        else:
            self._unusable_in_a_row += 1
        limit = self._options.max_filtered_batches * self._options.batch_size
        if self._unusable_in_a_row >= limit and not tally.filtered:
            raise LimitReached(
                f"the last {limit} groups (orchestrator.max_filtered_batches = {self._options.max_filtered_batches} "
                f"batches) all failed, the first by {self._cause}\nThe first failed rollout: {self.first_failure}"
            )
        if self._unusable_in_a_row >= limit:
            raise LimitReached(
                f"the last {limit} groups (orchestrator.max_filtered_batches = {self._options.max_filtered_batches} "
                f"batches) held none to train on; so far {tally.filtered} had equal rewards throughout and "
                f"{tally.failed} failed. Choose problems that the model solves sometimes, or another base model. "
                f"The first failed rollout: {self.first_failure}"
            )

    def state_dict(self) -> LimitsState:
        return {
            "failures": list(self._failures),
            "unusable_in_a_row": self._unusable_in_a_row,
            "first_failure": self.first_failure,
        }

    def load_state_dict(self, state: LimitsState) -> None:
        self._failures.extend(state["failures"])
        self._failed = sum(self._failures)
        self._unusable_in_a_row = state["unusable_in_a_row"]
        self.first_failure = state["first_failure"]


class BackgroundTasks:
    """Starts tasks, and stores the first error that any of them raises. `failed` is called after each error."""

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[object]] = set()
        self._error: BaseException | None = None

    def spawn(self, work: Coroutine[object, object, T], name: str) -> asyncio.Task[T]:
        """Starts `work` as a task with this name, and returns the task. If `work` raises KeyboardInterrupt or
        SystemExit (a dataset may), the task raises EnvExited instead, because these exceptions would end the event
        loop."""
        task = start_contained(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._error = self._error or error
            self._failed()

    @property
    def limit_reached(self) -> bool:
        """True if the first error of any task is LimitReached: the run has reached one of its limits."""
        return isinstance(self._error, LimitReached)

    def raise_error(self, but_limits: bool = False) -> None:
        """Raises the first error of a task, if there is one. With `but_limits`, does not raise LimitReached, so that
        the present step can finish and the run can be saved. LimitReached is then raised when training next waits for
        groups."""
        if self._error and not (but_limits and self.limit_reached):
            raise self._error

    async def stop(self) -> None:
        """Cancels all tasks, and waits for them."""
        ending = list(self._tasks)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
