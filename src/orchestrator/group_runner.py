"""Playing a group: all rollouts of one problem, tried again where they fail, and their rewards. Training and evaluation
play alike; they differ in problems, sampling, pace, and in what counts as enough."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from orchestrator import leaks
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
    check_metrics,
    check_reward,
    run_rollout,
)
from trireme.config.schema import SamplingConfig
from trireme.core.errors import TriremeError
from trireme.core.types import SampledSequence, SampleRequest
from trireme.process import trace

T = TypeVar("T")


@dataclass(frozen=True)
class GroupSettings:
    """How groups are played: `env` is the environment's name, `needed` how many rollouts of `size` must succeed,
    `timeout_s` the limit for one rollout, `retries` how often a failed one is tried again."""

    env: str
    size: int
    needed: int
    sampling: SamplingConfig
    limits: RolloutLimits
    seed: int
    retries: int
    timeout_s: float


@dataclass(frozen=True)
class GroupOutcome:
    """What became of a group: in place of a rollout that failed for good, its last error; `scored` is none when too few
    succeeded, or when their rewards could not be computed."""

    outcomes_G: Sequence[Trajectory | Exception]
    scored: ScoredGroup | None


def _exited(env: str, exit: SystemExit) -> EnvExited:
    error = EnvExited(f"environment {env}: called sys.exit({exit.code!r}), which would have ended the orchestrator")
    error.__cause__ = exit
    return error


def _shared(work: asyncio.Future[T]) -> Awaitable[T]:
    """What many wait for, any of whom may be cancelled."""
    return work if work.done() else asyncio.shield(work)


def _checked_tags(tags: Sequence[str], env: str) -> Sequence[str]:
    if isinstance(tags, str) or not all(isinstance(tag, str) for tag in tags):
        raise BadStep(f"environment {env}: logging_tags() gave {tags!r}; expected a list of names")
    return tags


@dataclass(frozen=True)
class GroupRunner:
    """Plays groups. `note` is told each error of an environment, `check` may refuse the rollouts of a group."""

    rules: GroupSettings
    sample: Sample
    pace: OwnPace
    note: Callable[[Exception], None]
    check: Callable[[Group, Sequence[Trajectory]], None]

    async def play(
        self, group: Group, builder: EnvGroupBuilder, permit: Permit, over: Callable[[], None]
    ) -> GroupOutcome:
        """Plays all rollouts, scores and cleans up. Each one that ends leaves `room`; `over` is called before cleaning
        up, however the group ended."""
        started: leaks.Tasks = set()
        try:
            with leaks.owned_by(started):
                outcomes_G = await self._rollouts(group, builder, permit)
                scored = await self._score(group, builder, [t for t in outcomes_G if isinstance(t, Trajectory)])
        finally:
            over()
            with leaks.owned_by(started):
                await self._attempt(builder.cleanup(), self._deadline())
            if leaked := leaks.end(started, self.rules.env, group.problem):
                self.note(leaked)
        return GroupOutcome(outcomes_G, scored)

    async def _rollouts(self, group: Group, builder: EnvGroupBuilder, permit: Permit) -> list[Trajectory | Exception]:
        envs = asyncio.ensure_future(self._make_envs(group, builder))
        try:
            await asyncio.sleep(0)  # most are made by then, and nobody has to wait for them
        except asyncio.CancelledError:
            envs.cancel()
            raise
        rollouts = [
            asyncio.ensure_future(self._rollout(group, builder, envs, sample)) for sample in range(self.rules.size)
        ]
        leaks.disown(envs, *rollouts)
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
        """One rollout with its retries. A prompt that was refused is not tried again."""
        for retry in range(self.rules.retries + 1):
            attempt = group.requeues * (self.rules.retries + 1) + retry
            key = RolloutKey(self.rules.env, group.problem, sample, attempt, f"{group.problem}/{group.requeues}")
            made, deadline = self._make_envs(group, builder) if retry else _shared(envs), self._deadline()
            outcome = await self._attempt(self._play_one(group, made, key, deadline), deadline)
            if isinstance(outcome, Trajectory | PromptTooLong):
                break
        self.pace.rollout_over(group.index)
        return outcome

    async def _make_envs(self, group: Group, builder: EnvGroupBuilder) -> Sequence[Env]:
        with trace.overlapping("make_envs", "environment", problem=group.problem):
            try:
                return await builder.make_envs()
            except SystemExit as exit:  # in a task of its own it would end the whole process
                raise _exited(self.rules.env, exit) from exit

    async def _play_one(
        self, group: Group, made: Awaitable[Sequence[Env]], key: RolloutKey, deadline: asyncio.Timeout
    ) -> Trajectory:
        rules, envs = self.rules, await made
        if len(envs) != rules.size:
            raise RolloutError(
                f"environment {key.env}, problem {key.problem}: make_envs gave {len(envs)} environments, expected "
                f"group_size = {rules.size}"
            )

        async def sample(request: SampleRequest) -> SampledSequence:
            await self.pace.before_sample(group.index, key.sample, deadline)
            with leaks.owned_by(None):
                return await self.sample(request)

        return await run_rollout(envs[key.sample], sample, key, rules.limits, rules.sampling, rules.seed)

    def _deadline(self) -> asyncio.Timeout:
        return asyncio.timeout(self.rules.timeout_s)

    async def _attempt(self, work: Awaitable[T], deadline: asyncio.Timeout) -> T | Exception:
        """The one place where what an environment raises is caught: noted, and returned. Errors of the rooms
        themselves (TriremeError) go on to the driver."""
        try:
            async with deadline:
                return await work
        except TriremeError:
            raise
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task and task.cancelling():  # by us
                raise
            error: Exception = EnvCancelled(f"environment {self.rules.env}: raised CancelledError by itself")
            error.__cause__ = cancelled
        except SystemExit as exit:
            error = _exited(self.rules.env, exit)
        except Exception as raised:
            error = raised
        self.note(error)
        # Nobody reads the traceback any more. It and its frames hold each other, and all that the rollout had, until
        # the cycle collector comes, which is after thousands of them.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return error

    async def _score(
        self, group: Group, builder: EnvGroupBuilder, trajectories_G: list[Trajectory]
    ) -> ScoredGroup | None:
        if len(trajectories_G) < self.rules.needed:
            return None
        self.check(group, trajectories_G)
        outcome = await self._attempt(self._rewards(group, builder, trajectories_G), self._deadline())
        return None if isinstance(outcome, Exception) else outcome

    async def _rewards(self, group: Group, builder: EnvGroupBuilder, trajectories_G: list[Trajectory]) -> ScoredGroup:
        with trace.overlapping("compute_group_rewards", "environment", problem=group.problem):
            extra_G = await builder.compute_group_rewards(trajectories_G)
        for reward, metrics in extra_G:
            check_reward(reward, self.rules.env, group.problem)
            check_metrics(metrics, self.rules.env, group.problem)
        rewards_G = [float(t.reward + reward) for t, (reward, _) in zip(trajectories_G, extra_G, strict=True)]
        return ScoredGroup(
            group=group,
            trajectories_G=tuple(trajectories_G),
            rewards_G=tuple(rewards_G),
            metrics_G=tuple(metrics for _, metrics in extra_G),
            tags=(self.rules.env, *_checked_tags(builder.logging_tags(), self.rules.env)),
            temperature=self.rules.sampling.temperature,
        )
