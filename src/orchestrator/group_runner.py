"""Runs a group: all rollouts of one problem, with their retries, and their rewards. Training and evaluation share this;
they differ in problems, sampling, pace, and in how many rollouts must succeed.

Tasks that environments start (a tool that runs beside the model, a connection) belong to their group: a rollout that is
cancelled, because it is too late or too old, may never get to ending them. What is still running once the group has
been cleaned up is cancelled and counted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestrator.admission import Permit
from orchestrator.advantages import ScoredGroup
from orchestrator.env import Env, EnvGroupBuilder, Trajectory
from orchestrator.ledger import Group
from orchestrator.lockstep import OwnPace
from orchestrator.rollout import (
    BadStep,
    EnvCancelled,
    EnvExited,
    PromptTooLong,
    RolloutError,
    RolloutKey,
    RolloutLimits,
    Sample,
    check_report,
    run_rollout,
)
from trireme.config import Config
from trireme.config.schema import EnvConfig, SamplingConfig
from trireme.core.errors import ProvenanceError, TriremeError
from trireme.core.types import SampledSequence, SampleRequest
from trireme.process import trace

T = TypeVar("T")

_owner: ContextVar[set[asyncio.Task[Any]] | None] = ContextVar("owner", default=None)


class LeakedTasks(Exception):
    """An environment left tasks behind."""


class TaskOwner:
    """Context manager: tasks that are started within the block, and within these, belong to `tasks` until they end;
    with None to no group. Not a generator, which would take three times as long."""

    __slots__ = ("_tasks", "_token")

    def __init__(self, tasks: set[asyncio.Task[Any]] | None) -> None:
        self._tasks = tasks

    def __enter__(self) -> None:
        self._token = _owner.set(self._tasks)

    def __exit__(self, *_error: object) -> None:
        _owner.reset(self._token)

    @staticmethod
    def watch(loop: asyncio.AbstractEventLoop) -> None:
        """Makes the loop note the owner of each task from now on."""

        def start(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
            task = asyncio.Task(work, loop=loop, **options)
            if (tasks := _owner.get()) is not None:
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            return task

        loop.set_task_factory(start)


@dataclass(frozen=True)
class GroupOutcome:
    """The result of a group."""

    outcomes_G: Sequence[Trajectory | Exception]
    """One per rollout: its trajectory, or its last error if it failed for good."""
    scored: ScoredGroup | None
    """None when too few rollouts succeeded, or when their rewards could not be computed."""


@dataclass(frozen=True)
class GroupRunner:
    """Runs groups of one environment."""

    config: Config
    env: EnvConfig
    limits: RolloutLimits
    sample: Sample
    pace: OwnPace
    note: Callable[[Exception], None]
    """Called with each error of the environment."""
    evaluates: bool = False
    """True: groups of evaluations, all of whose tokens must be of the version `group.floor`."""

    @property
    def size(self) -> int:
        """Rollouts in a group."""
        return self.config.eval.samples if self.evaluates else self.config.group_size(self.env)

    @property
    def _sampling(self) -> SamplingConfig:
        return self.config.eval_sampling if self.evaluates else self.config.inference.sampling

    @property
    def _needed(self) -> int:
        """Rollouts that must succeed; in training two, as one alone in its group has advantage 0."""
        share = self.config.orchestrator.min_viable_group
        return 1 if self.evaluates else max(math.ceil(share * self.size), min(2, self.size))

    async def run(
        self, group: Group, builder: EnvGroupBuilder, permit: Permit, over: Callable[[], object]
    ) -> GroupOutcome:
        """Runs all rollouts, scores them and cleans up. Each rollout that ends gives its place of `permit` back; `over`
        is called before cleaning up, however the group ended."""
        started: set[asyncio.Task[Any]] = set()
        try:
            with TaskOwner(started):
                outcomes_G = await self._rollouts(group, builder, permit, started)
                scored = await self._score(group, builder, [t for t in outcomes_G if isinstance(t, Trajectory)])
        finally:
            over()
            with TaskOwner(started):
                await self._attempt(builder.cleanup(), self._deadline())
            self._end_leaked(started, group.problem)
        return GroupOutcome(outcomes_G, scored)

    def _end_leaked(self, tasks: set[asyncio.Task[Any]], problem: str) -> None:
        left = sorted(task.get_coro().__qualname__ for task in tasks)  # type: ignore[union-attr]
        for task in list(tasks):
            task.cancel()
        if left:
            self.note(
                LeakedTasks(
                    f"environment {self.env.label}, problem {problem}: {len(left)} tasks were still running after "
                    f"cleanup(), and were cancelled: {', '.join(left[:5])}. End them in cleanup()"
                )
            )

    async def _rollouts(
        self, group: Group, builder: EnvGroupBuilder, permit: Permit, started: set[asyncio.Task[Any]]
    ) -> list[Trajectory | Exception]:
        envs = asyncio.ensure_future(self._make_envs(group, builder))
        try:
            await asyncio.sleep(0)  # most environments are made by then, and no rollout has to wait for them
        except asyncio.CancelledError:
            envs.cancel()
            raise
        rollouts = [asyncio.ensure_future(self._rollout(group, builder, envs, sample)) for sample in range(self.size)]
        started.difference_update((envs, *rollouts))
        for rollout in rollouts:
            rollout.add_done_callback(permit.leave_one)
        try:
            return await asyncio.gather(*rollouts)
        finally:
            for task in (envs, *rollouts):
                task.cancel()

    async def _rollout(
        self, group: Group, builder: EnvGroupBuilder, envs: asyncio.Future[Sequence[Env]], sample: int
    ) -> Trajectory | Exception:
        """Runs one rollout with its retries. A prompt that was refused is not tried again."""
        tries = self.config.orchestrator.retries + 1
        for retry in range(tries):
            attempt = group.requeues * tries + retry
            key = RolloutKey(self.env.label, group.problem, sample, attempt, f"{group.problem}/{group.requeues}")
            if retry:
                made: Awaitable[Sequence[Env]] = self._make_envs(group, builder)
            else:  # shared by all rollouts, any of which may be cancelled
                made = envs if envs.done() else asyncio.shield(envs)
            deadline = self._deadline()
            outcome = await self._attempt(self._play(group, made, key, deadline), deadline)
            if isinstance(outcome, Trajectory | PromptTooLong):
                break
        self.pace.rollout_over(group.index)
        return outcome

    async def _make_envs(self, group: Group, builder: EnvGroupBuilder) -> Sequence[Env]:
        with trace.overlapping("make_envs", "environment", problem=group.problem):
            try:
                return await builder.make_envs()
            except SystemExit as exit:  # in a task of its own it would end the whole process
                raise self._exited(exit) from exit

    async def _play(
        self, group: Group, made: Awaitable[Sequence[Env]], key: RolloutKey, deadline: asyncio.Timeout
    ) -> Trajectory:
        envs = await made
        if len(envs) != self.size:
            raise RolloutError(f"{key}: make_envs gave {len(envs)} environments, expected group_size = {self.size}")

        async def sample(request: SampleRequest) -> SampledSequence:
            await self.pace.before_sample(group.index, key.sample, deadline)
            with TaskOwner(None):
                return await self.sample(request)

        return await run_rollout(envs[key.sample], sample, key, self.limits, self._sampling, self.config.seed)

    def _deadline(self) -> asyncio.Timeout:
        return asyncio.timeout(self.config.orchestrator.generation_timeout_s)

    async def _attempt(self, work: Awaitable[T], deadline: asyncio.Timeout) -> T | Exception:
        """Returns the result of an environment's work, or notes and returns what it raises: the one place that catches
        it. Errors of the rooms themselves (TriremeError) are raised, for the driver."""
        try:
            async with deadline:
                return await work
        except TriremeError:
            raise
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task and task.cancelling():  # by this process
                raise
            error: Exception = EnvCancelled(f"environment {self.env.label}: raised CancelledError by itself")
            error.__cause__ = cancelled
        except SystemExit as exit:
            error = self._exited(exit)
        except Exception as raised:
            error = raised
        self.note(error)
        # The traceback is not read any more. It and its frames hold each other, and all data of the rollout, until the
        # cycle collector runs, which is after thousands of rollouts.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return error

    def _exited(self, exit: SystemExit) -> EnvExited:
        error = EnvExited(
            f"environment {self.env.label}: called sys.exit({exit.code!r}), which would have ended the orchestrator"
        )
        error.__cause__ = exit
        return error

    async def _score(
        self, group: Group, builder: EnvGroupBuilder, trajectories_G: list[Trajectory]
    ) -> ScoredGroup | None:
        if len(trajectories_G) < self._needed:
            return None
        self._check_versions(group, trajectories_G)
        outcome = await self._attempt(self._rewards(group, builder, trajectories_G), self._deadline())
        return None if isinstance(outcome, Exception) else outcome

    def _check_versions(self, group: Group, trajectories_G: Sequence[Trajectory]) -> None:
        """Raises ProvenanceError when a token is of a version that the group must not have."""
        versions = sorted(set().union(*(trajectory.versions for trajectory in trajectories_G)))
        if self.evaluates and versions != [group.floor]:
            raise ProvenanceError(
                f"problem {group.problem} was to be evaluated under version {group.floor} alone, but its tokens were "
                f"sampled by versions {versions}: the replicas took other weights before the end"
            )
        if versions[0] < group.floor:
            raise ProvenanceError(
                f"problem {group.problem} was dispatched when all replicas had version {group.floor}, but a token of "
                f"it was sampled by version {versions[0]}"
            )

    async def _rewards(self, group: Group, builder: EnvGroupBuilder, trajectories_G: list[Trajectory]) -> ScoredGroup:
        env = self.env.label
        with trace.overlapping("compute_group_rewards", "environment", problem=group.problem):
            extra_G = await builder.compute_group_rewards(trajectories_G)
        for reward, metrics in extra_G:
            check_report(reward, metrics, f"environment {env}, problem {group.problem}")
        tags = builder.logging_tags()
        if isinstance(tags, str) or not all(isinstance(tag, str) for tag in tags):
            raise BadStep(f"environment {env}: logging_tags() gave {tags!r}; expected a list of names")
        return ScoredGroup(
            group=group,
            trajectories_G=tuple(trajectories_G),
            rewards_G=tuple(float(t.reward + reward) for t, (reward, _) in zip(trajectories_G, extra_G, strict=True)),
            metrics_G=tuple(metrics for _, metrics in extra_G),
            tags=(env, *tags),
            temperature=self._sampling.temperature,
        )
