"""Runs a group: all rollouts of one problem, with their retries, and their rewards. Training and evaluation share this
code; they differ in problems, sampling, pace, and in how many rollouts must succeed. An environment is closed when its
rollout ends, and the resources that a group shares are released when the group ends (`lifetimes.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from orchestrator.admission import Permit
from orchestrator.advantages import ScoredGroup
from orchestrator.agents import play_session
from orchestrator.env import AgentEnv, EnvGroupBuilder, Trajectory, result_of
from orchestrator.ledger import Group
from orchestrator.lifetimes import GroupEnvs, start_contained, uninterrupted
from orchestrator.lockstep import OwnPace
from orchestrator.rollout import (
    AnswerTimeout,
    BadStep,
    EnvCancelled,
    PromptTooLong,
    RolloutKey,
    RolloutLimits,
    check_report,
    run_rollout,
)
from orchestrator.unfinished import GroupProgress, RolloutProgress
from orchestrator.waste import GroupTokens
from trireme.config import Config
from trireme.config.schema import EnvConfig, SamplingConfig
from trireme.core.errors import BadRequest, ProvenanceError, TriremeError
from trireme.core.sampler import OnProgress, Sample
from trireme.core.types import SampledSequence, SampleRequest
from trireme.process import trace

T = TypeVar("T")


@dataclass(frozen=True)
class GroupOutcome:
    """The result of a group."""

    outcomes_G: Sequence[Trajectory | Exception]
    """For each rollout its trajectory, or its last error if all its tries failed."""
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
    """Called with each error of a rollout, of the group's rewards, and of closing the environments."""
    evaluates: bool = False
    """True: groups of evaluations. All their tokens must be of the version `group.floor`."""

    @property
    def size(self) -> int:
        """The number of rollouts in a group."""
        if self.evaluates:
            return self.config.eval.samples
        return self.config.group_size(self.env)

    @property
    def sampling(self) -> SamplingConfig:
        """The sampling settings of the runner's rollouts: for evaluations or for training."""
        if self.evaluates:
            return self.config.eval_sampling
        return self.config.inference.sampling

    @property
    def _seed(self) -> int | None:
        """In evaluations and in deterministic mode: the run's seed, from which the seed of each request is made.
        Otherwise None, because without seeds vLLM can draw the tokens of all sequences of a decode step at once, which
        is faster."""
        if self.evaluates or self.config.deterministic:
            return self.config.seed
        return None

    @property
    def _needed(self) -> int:
        """The number of rollouts that must succeed. In training at least two, because a single rollout of a group has
        advantage 0."""
        share = self.config.orchestrator.min_viable_group
        if self.evaluates:
            return 1
        return max(math.ceil(share * self.size), min(2, self.size))

    async def run(
        self,
        group: Group,
        builder: EnvGroupBuilder,
        permit: Permit,
        tokens: GroupTokens,
        over: Callable[[], object],
        progress: GroupProgress | None = None,
    ) -> GroupOutcome:
        """Runs all rollouts of `group`, scores them and cleans up. Rollouts that have progress in `progress` continue
        from it. `permit` holds the group's places within the limit on rollouts in flight; each rollout that ends gives
        one place back. `tokens` counts the sampled tokens. `over` is called when the rollouts have been scored, before
        the cleanup, and also after an error. A cancellation does not interrupt the cleanup."""
        progress = progress or GroupProgress(keeps_finished=False)
        place = f"environment {self.env.label}, problem {group.problem}"
        envs = GroupEnvs(builder, self.size, place, self.env.close_s, self.note)
        try:
            outcomes_G = await self._rollouts(group, envs, permit, tokens, progress)
            scored = await self._score(group, builder, [t for t in outcomes_G if isinstance(t, Trajectory)])
        finally:
            over()
            await uninterrupted(envs.end())
        return GroupOutcome(outcomes_G, scored)

    async def _rollouts(
        self, group: Group, envs: GroupEnvs, permit: Permit, tokens: GroupTokens, progress: GroupProgress
    ) -> list[Trajectory | Exception]:
        """Runs all rollouts. Returns for each rollout its trajectory, or its last error if it failed. If a rollout
        raises an error instead of returning it (see `_attempt`), or if this call is cancelled, cancels the unfinished
        rollouts, waits at most `env.close_s` seconds for them, and raises that error or CancelledError."""
        rollouts = [
            start_contained(self._rollout(group, envs, sample, permit, tokens, progress)) for sample in range(self.size)
        ]
        for rollout in rollouts:
            rollout.add_done_callback(permit.leave_one)
        try:
            finished, _ = await asyncio.wait(rollouts, return_when=asyncio.FIRST_EXCEPTION)
            for rollout in finished:
                rollout.result()
        finally:
            envs.give_up()
            unfinished = [rollout for rollout in rollouts if not rollout.done()]
            if unfinished:
                for rollout in unfinished:
                    rollout.cancel()
                await uninterrupted(asyncio.wait(unfinished, timeout=self.env.close_s))
            for rollout in rollouts:  # only the first error is raised: asyncio would log all others, with tracebacks
                if rollout.done() and not rollout.cancelled():
                    rollout.exception()
        return [rollout.result() for rollout in rollouts]

    async def _rollout(
        self,
        group: Group,
        envs: GroupEnvs,
        sample: int,
        permit: Permit,
        tokens: GroupTokens,
        progress: GroupProgress,
    ) -> Trajectory | Exception:
        """Runs one rollout with its retries, each with an environment of its own. Returns the trajectory, or the last
        error. All tries share one time limit, so that an environment that hangs delays a batch by at most
        `generation_timeout_s`. A PromptTooLong or BadRequest is not retried."""
        if sample in progress.finished:
            return progress.finished[sample]
        tries = self.config.orchestrator.retries + 1
        begun = progress.waiting.get(sample)
        closing: asyncio.Task[None] | None = None
        due = self._due()
        for retry in range(min(begun.retry, tries - 1) if begun else 0, tries):
            if closing:  # a rollout has one environment at a time
                await asyncio.wait([closing])
            key = RolloutKey(self.env.label, group.problem, sample, retry, group.problem)
            deadline = asyncio.timeout_at(due)
            try:
                play = self._play(group, envs, key, deadline, tokens, progress.begin(sample, retry))
                outcome = await self._attempt(play, deadline, key)
            finally:
                closing = envs.close(sample)
            progress.end(sample, outcome)
            due = deadline.when()  # later than before, where requests have waited for their turn
            if isinstance(outcome, Trajectory):
                break
            tokens.fail(sample)
            if isinstance(outcome, PromptTooLong | BadRequest) or deadline.expired():
                break
        self.pace.rollout_over(group.index)
        return outcome

    async def _play(
        self,
        group: Group,
        envs: GroupEnvs,
        key: RolloutKey,
        deadline: asyncio.Timeout,
        tokens: GroupTokens,
        progress: RolloutProgress,
    ) -> Trajectory:
        with trace.overlapping("make_env", "environment", problem=group.problem):
            env = await envs.make(key.sample)
        sample = partial(self._answer, group, envs, key, deadline, tokens)
        if isinstance(env, AgentEnv):
            return await play_session(env, sample, key, self.limits, self.sampling, self._seed)
        return await run_rollout(env, sample, key, self.limits, self.sampling, self._seed, progress)

    async def _answer(
        self,
        group: Group,
        envs: GroupEnvs,
        key: RolloutKey,
        deadline: asyncio.Timeout,
        tokens: GroupTokens,
        request: SampleRequest,
        *on_progress: OnProgress,
    ) -> SampledSequence:
        """Returns the sampled answer to `request`, a request of the rollout `key`. `deadline`: the common deadline of
        all tries of the rollout. Raises AnswerTimeout after `inference.answer_s` seconds, errors of the sampler, and
        CancelledError if the rollout was cancelled and its environment ignored that."""
        envs.check()
        limit_s = self.config.inference.answer_s
        await self.pace.before_sample(group.index, key.sample, deadline)
        try:
            async with asyncio.timeout(limit_s) as waiting:
                sampled = await self.sample(replace(request, floor=group.floor), *on_progress)
        except TimeoutError:
            if not waiting.expired():
                raise
            raise AnswerTimeout(
                f"{key}: an answer took longer than {limit_s:g} s (inference.answer_s); shorten answers "
                "(inference.sampling.max_tokens), or raise the limit"
            ) from None
        tokens.respond(key.sample, len(sampled.tokens))
        return sampled

    def _due(self) -> float | None:
        """Returns the deadline of a rollout that begins now, by the event loop's clock in seconds:
        `generation_timeout_s` from now."""
        return asyncio.get_running_loop().time() + self.config.orchestrator.generation_timeout_s

    async def _attempt(
        self, work: Coroutine[object, object, T], deadline: asyncio.Timeout, place: object
    ) -> T | Exception:
        """Awaits `work`, a coroutine of an environment, until `deadline`, and returns its result. If `work` fails or is
        late, reports the error by `note` and returns it. Raises errors that the driver handles: all TriremeErrors
        except BadRequest. `work` runs in a task of its own: a CancelledError that `work` itself raises is therefore not
        taken for a cancellation of this call. `place` names the work in messages."""
        try:
            async with deadline:
                return await start_contained(work)
        except BadRequest as raised:
            error: Exception = raised
        except TriremeError:
            raise
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task and task.cancelling():  # by this process
                raise
            error = EnvCancelled(f"environment {self.env.label}: raised CancelledError by itself")
            error.__cause__ = cancelled
        except TimeoutError as raised:
            if deadline.expired():
                error = TimeoutError(
                    f"{place}, of {self.env.id}: took longer than orchestrator.generation_timeout_s = "
                    f"{self.config.orchestrator.generation_timeout_s:g} s, answers included"
                )
            else:
                error = raised
            error.__cause__ = raised.__cause__  # it shows where the environment was
        except Exception as raised:
            error = raised
        self.note(error)
        # The traceback is not read any more. It and its frames hold each other, and all data of the rollout, until the
        # cycle collector runs, which is after thousands of rollouts.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return error

    async def _score(
        self, group: Group, builder: EnvGroupBuilder, trajectories_G: list[Trajectory]
    ) -> ScoredGroup | None:
        if len(trajectories_G) < self._needed:
            return None
        self._check_versions(group, trajectories_G)
        place = f"environment {self.env.label}, problem {group.problem}"
        deadline = asyncio.timeout_at(self._due())
        outcome = await self._attempt(self._rewards(group, builder, trajectories_G), deadline, place)
        if isinstance(outcome, Exception):
            return None
        return outcome

    def _check_versions(self, group: Group, trajectories_G: Sequence[Trajectory]) -> None:
        """Raises ProvenanceError if a token was sampled by a version below the group's floor, or in an evaluation by
        any version but the floor."""
        versions = sorted(set().union(*(trajectory.versions for trajectory in trajectories_G)))
        if self.evaluates and versions != [group.floor]:
            raise ProvenanceError(
                f"problem {group.problem} was to be evaluated under version {group.floor} alone, but its tokens were "
                f"sampled by versions {versions}: the replicas took other weights before the end"
            )
        if versions[0] < group.floor:
            raise ProvenanceError(
                f"problem {group.problem} was dispatched when every replica had version {group.floor} or a later one, "
                f"but one of its tokens was sampled by version {versions[0]}. This is an error of the router: report it"
            )

    async def _rewards(self, group: Group, builder: EnvGroupBuilder, trajectories_G: list[Trajectory]) -> ScoredGroup:
        env = self.env.label
        with trace.overlapping("compute_group_rewards", "environment", problem=group.problem):
            extra_G = await result_of(builder.compute_group_rewards, trajectories_G)
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
            temperature=self.sampling.temperature,
        )
