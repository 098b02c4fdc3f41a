"""From problems to minibatches: the loops between the ledger, the environments, the sampler and the trainer.

    cursor --problem--> dispatch loop --group--> one task per group: group_size rollouts, group rewards
                            ^  ^                      | finished       | filtered, failed
             slots are free |  | requeued             v                v
                            |  +---- ledger <--- finished groups    (slot free at once)
                            |                         |
     release + acknowledged |                         v
                            +----------------- next_minibatch --> trainer

  loop            consumes              waits for            unblocked by                            produces
  dispatch        free slots, problems  `_slots_changed`     new weights, release, a group's end     group tasks
  group (many)    one problem           sampler, env         the sampler; eviction cancels it        a settled group
  next_minibatch  finished groups       `_groups_changed`    a settled group, an error               a minibatch
  lag             nothing               its own clock        time                                    event_loop_lag

Back-pressure is the ledger's slots and nothing else: when the trainer does not take or release, slots stay taken,
dispatch stops, and the replicas run dry. An error in any loop is raised by the driver's next call, at once if one is
waiting.
"""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from orchestrator.cursor import Cursor
from orchestrator.data import ScoredGroup, build_minibatch, group_to_data, is_constant
from orchestrator.env import Env, EnvGroupBuilder, RLDataset, Trajectory
from orchestrator.ledger import Group, Ledger, Taken
from orchestrator.metrics import IdleClock, StepMeter
from orchestrator.rollout import PromptTooLong, RolloutError, RolloutKey, RolloutLimits, check_reward, run_rollout
from trireme.config import Config
from trireme.errors import LimitReached, ProvenanceError, RoomFailed, TriremeError
from trireme.faults import fault_point
from trireme.protocols import Sampler
from trireme.types import Minibatch, SampledSequence, SampleRequest
from trireme.weights import PublishedWeights, UpdateReport

LAG_TICK_S = 0.25
MIN_WINDOW = 32
"""The failure rate is judged over the last batch's worth of rollouts, but never over fewer than this."""

T = TypeVar("T")


class Pipeline:
    """The orchestrator without its actor, on one event loop. The first `update_weights` starts the loops."""

    def __init__(self, cfg: Config, dataset: RLDataset, sampler: Sampler, limits: RolloutLimits) -> None:
        self._cfg, self._options, self._sampler, self._limits = cfg, cfg.orchestrator, sampler, limits
        self._cursor = Cursor(dataset)
        self._ledger = Ledger(
            batch_size=self._options.batch_size,
            max_age=self._options.max_steps_off_policy,
            policy=self._options.stale_policy,
            max_requeues=self._options.max_requeues,
            max_steps=cfg.max_steps,
        )
        self._finished: dict[int, ScoredGroup] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._slots_changed, self._groups_changed = asyncio.Event(), asyncio.Event()
        self._error: BaseException | None = None
        self._first_failure = "none"
        window = max(MIN_WINDOW, self._options.batch_size * self._options.group_size)
        self._failures: deque[bool] = deque(maxlen=window)
        self._unusable_in_a_row = 0
        self._meter, self._idle = StepMeter(), IdleClock()
        self._counts = self._ledger.counts()

    # ---- the driver's verbs

    async def update_weights(self, weights: PublishedWeights) -> list[UpdateReport]:
        """Brings all replicas to `weights`, in flight, and notes their acknowledgements."""
        self._raise_error()
        reports = await self._sampler.update_weights(weights)
        self._ledger.acknowledge(self._sampler.acknowledged())
        if not self._background:
            self._spawn(self._dispatch_loop(), "dispatch loop")
            self._spawn(self._lag_loop(), "lag loop")
        self._slots_changed.set()
        return reports

    async def next_minibatch(self, step: int, substep: int) -> Minibatch:
        """The next minibatch of a substep, as soon as its groups are finished.

        Raises RoomFailed after `timeouts.step_s`, saying what is missing; and whatever went wrong in a loop.
        """
        fault_point("orchestrator.minibatch")
        count = self._cfg.groups_per_minibatch
        per_substep = self._options.batch_size // self._cfg.trainer.num_substeps
        done = self._ledger.consumed.get(self._ledger.batch, 0)
        if (step, substep) != (self._ledger.batch, done // per_substep):
            raise ValueError(
                f"asked for step {step}, substep {substep}; next is {self._ledger.batch}, {done // per_substep}"
            )
        try:
            async with asyncio.timeout(self._cfg.timeouts.step_s):
                taken = await self._take(step, count)
        except TimeoutError:
            raise RoomFailed(self._overdue(step, count)) from None
        scored_P = [self._finished.pop(group.index) for group in taken.groups]
        self._evict(taken.evicted)
        self._meter.trained += scored_P
        return self._minibatch(step, scored_P, last=(done + count) % per_substep == 0)

    def release(self, step: int) -> dict[str, float]:
        """Step `step` has been trained on: its slots are free once its version is acknowledged. Its row of metrics."""
        fault_point("orchestrator.release")
        self._raise_error()
        self._ledger.release(step)
        self._slots_changed.set()
        counts = self._ledger.counts()
        row = self._meter.row(step, counts, self._counts, self._idle.take())
        self._meter, self._counts = StepMeter(), counts
        return row

    async def stop(self) -> None:
        """Cancels everything and waits for it; environments are cleaned up."""
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- taking

    async def _take(self, step: int, count: int) -> Taken:
        while True:
            self._raise_error()
            if taken := self._ledger.take(step, count):
                return taken
            self._groups_changed.clear()
            await self._groups_changed.wait()

    def _evict(self, evicted: Sequence[Group]) -> None:
        """Stops the rollouts of groups that the ledger has given up, and forgets the finished ones."""
        for group in evicted:
            self._finished.pop(group.index, None)
            if task := self._running.pop(group.index, None):
                task.cancel()
        self._slots_changed.set()

    def _minibatch(self, step: int, scored_P: list[ScoredGroup], last: bool) -> Minibatch:
        temperature = self._cfg.inference.sampling.temperature
        data_P = [
            group_to_data(s, self._options.advantage, temperature, self._options.overlong_filter) for s in scored_P
        ]
        return build_minibatch(step, scored_P, data_P, last)

    def _overdue(self, step: int, count: int) -> str:
        running = [
            f"{g.problem} (dispatched at version {g.floor})" for g in self._ledger.active.values() if not g.finished
        ]
        return (
            f"waited {self._cfg.timeouts.step_s:g} s (timeouts.step_s) for {count} finished groups of batch {step}. "
            f"Groups: {self._ledger.counts()}; oldest problem still sampling: {running[0] if running else 'none'}; "
            f"versions acknowledged by replicas: {self._ledger.replicas}; first failed rollout: {self._first_failure}"
        )

    # ---- loops

    async def _dispatch_loop(self) -> None:
        while True:
            await self._slots_changed.wait()
            self._slots_changed.clear()
            self._ledger.acknowledge(self._sampler.acknowledged())
            while self._ledger.can_dispatch():
                group = self._ledger.dispatch(self._cursor.next_problem)
                work = self._run_group(group, self._cursor.builder(group.problem))
                self._running[group.index] = self._spawn(work, f"group of problem {group.problem}")

    async def _lag_loop(self) -> None:
        while True:
            started = time.monotonic()
            await asyncio.sleep(LAG_TICK_S)
            self._meter.lag_s = max(self._meter.lag_s, time.monotonic() - started - LAG_TICK_S)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._error = self._error or error
            self._groups_changed.set()

    def _raise_error(self) -> None:
        if self._error:
            raise self._error

    # ---- one group

    async def _run_group(self, group: Group, builder: EnvGroupBuilder) -> None:
        envs = asyncio.ensure_future(builder.make_envs())
        rollouts = [
            asyncio.ensure_future(self._rollout(group, builder, envs, sample))
            for sample in range(self._options.group_size)
        ]
        try:
            outcomes = await asyncio.gather(*rollouts)
            scored = await self._score(group, builder, [t for t in outcomes if t is not None])
            self._settle(group, scored)
        finally:
            for task in (envs, *rollouts):
                task.cancel()
            await self._attempt(builder.cleanup())

    async def _rollout(
        self, group: Group, builder: EnvGroupBuilder, envs: asyncio.Future[Sequence[Env]], sample: int
    ) -> Trajectory | None:
        """One rollout with its retries; none when all failed, or when its prompt was refused (no use in retrying)."""
        for retry in range(self._options.retries + 1):
            attempt = group.requeues * (self._options.retries + 1) + retry
            key = RolloutKey(self._cfg.env.label, group.problem, sample, attempt, f"{group.problem}/{group.requeues}")
            made = builder.make_envs() if retry else asyncio.shield(envs)
            outcome = await self._attempt(self._play(made, key))
            if isinstance(outcome, Trajectory):
                break
            if isinstance(outcome, PromptTooLong):
                return None
        self._judge_failures(isinstance(outcome, Trajectory))
        return outcome if isinstance(outcome, Trajectory) else None

    async def _play(self, made: Awaitable[Sequence[Env]], key: RolloutKey) -> Trajectory:
        envs = await made
        if len(envs) != self._options.group_size:
            raise RolloutError(
                f"environment {key.env}, problem {key.problem}: make_envs gave {len(envs)} environments, expected "
                f"group_size = {self._options.group_size}"
            )
        sampling = self._cfg.inference.sampling
        return await run_rollout(envs[key.sample], self._sample, key, self._limits, sampling, self._cfg.seed)

    async def _sample(self, request: SampleRequest) -> SampledSequence:
        with self._idle:
            return await self._sampler.sample(request)

    async def _attempt(self, work: Awaitable[T]) -> T | Exception:
        """The one place where what an environment raises is caught: counted, and returned. Errors of the rooms
        themselves (TriremeError) go on to the driver."""
        try:
            async with asyncio.timeout(self._options.generation_timeout_s):
                return await work
        except TriremeError:
            raise
        except Exception as error:
            self._meter.errors[type(error).__name__] += 1
            if self._first_failure == "none":
                self._first_failure = "".join(traceback.format_exception(error))
            return error

    def _judge_failures(self, succeeded: bool) -> None:
        """Raises LimitReached when too many of the recent rollouts failed after all retries."""
        self._failures.append(not succeeded)
        rate = sum(self._failures) / len(self._failures)
        if len(self._failures) == self._failures.maxlen and rate > self._options.max_failure_rate:
            raise LimitReached(
                f"{rate:.0%} of the last {len(self._failures)} rollouts of environment {self._cfg.env.label} failed "
                f"after {self._options.retries} retries; expected at most orchestrator.max_failure_rate = "
                f"{self._options.max_failure_rate:.0%}. Mend the environment, or raise the limit. The first failure:\n"
                f"{self._first_failure}"
            )

    async def _score(
        self, group: Group, builder: EnvGroupBuilder, trajectories_G: list[Trajectory]
    ) -> ScoredGroup | None:
        """The group with its rewards; none when too few rollouts succeeded or its rewards cannot be computed."""
        size = self._options.group_size
        needed = max(math.ceil(self._options.min_viable_group * size), min(2, size))  # one alone has advantage 0
        if len(trajectories_G) < needed:
            return None
        self._check_floor(group, trajectories_G)
        outcome = await self._attempt(self._group_rewards(group, builder, trajectories_G))
        return None if isinstance(outcome, Exception) else outcome

    async def _group_rewards(
        self, group: Group, builder: EnvGroupBuilder, trajectories_G: list[Trajectory]
    ) -> ScoredGroup:
        extra_G = await builder.compute_group_rewards(trajectories_G)
        rewards_G = [t.reward + reward for t, (reward, _) in zip(trajectories_G, extra_G, strict=True)]
        for reward in rewards_G:
            check_reward(reward, self._cfg.env.label, group.problem)
        return ScoredGroup(
            group=group,
            trajectories_G=tuple(trajectories_G),
            rewards_G=tuple(rewards_G),
            metrics_G=tuple(metrics for _, metrics in extra_G),
            tags=(self._cfg.env.label, *builder.logging_tags()),
        )

    def _check_floor(self, group: Group, trajectories_G: list[Trajectory]) -> None:
        """Raises ProvenanceError when a token is older than the group's floor promises."""
        oldest = min(int(np.min(turn.versions)) for t in trajectories_G for turn in t.transitions)
        if oldest < group.floor:
            raise ProvenanceError(
                f"problem {group.problem} was dispatched when all replicas had version {group.floor}, but a token of "
                f"it was sampled by version {oldest}"
            )

    def _settle(self, group: Group, scored: ScoredGroup | None) -> None:
        """Tells the ledger how a group ended, and whoever waits for it."""
        del self._running[group.index]
        if scored is None:
            self._ledger.fail(group)
        elif self._options.remove_constant_reward_groups and is_constant(scored.rewards_G):
            self._ledger.filter(group)
            self._meter.filtered.append(scored)
        else:
            self._ledger.finish(group)
            self._finished[group.index] = scored
        self._judge_unusable(usable=group.finished)
        self._slots_changed.set()
        self._groups_changed.set()

    def _judge_unusable(self, usable: bool) -> None:
        """Raises LimitReached after a long stretch of groups that cannot be trained on."""
        self._unusable_in_a_row = 0 if usable else self._unusable_in_a_row + 1
        limit = self._options.max_filtered_batches * self._options.batch_size
        if self._unusable_in_a_row >= limit:
            counts = self._ledger.counts()
            raise LimitReached(
                f"the last {limit} groups (orchestrator.max_filtered_batches = {self._options.max_filtered_batches} "
                f"batches) held not one to train on; so far {counts['filtered']} had equal rewards throughout and "
                f"{counts['failed']} failed. Choose problems that the model solves sometimes, or another base model. "
                f"The first failed rollout: {self._first_failure}"
            )
