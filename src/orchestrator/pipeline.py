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

State. A snapshot is of the last boundary: what has been taken for a step that is not released is finished again, in its
place. What was sampled since then is kept, except in deterministic mode: the groups sampled afresh would be fewer, so
engines would work on other requests at once. There the snapshot is the one that was made when the step was released.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from orchestrator.cursor import Cursor
from orchestrator.data import ScoredGroup, build_minibatch, group_to_data, is_constant
from orchestrator.env import Env, EnvGroupBuilder, RLDataset, Trajectory
from orchestrator.ledger import Group, Ledger, Taken
from orchestrator.limits import RunLimits
from orchestrator.lockstep import Lockstep, OwnPace
from orchestrator.metrics import IdleClock, Released, StepMeter
from orchestrator.rollout import PromptTooLong, RolloutError, RolloutKey, RolloutLimits, check_reward, run_rollout
from orchestrator.snapshot import Snapshot
from trireme.config import Config
from trireme.errors import LimitReached, ProvenanceError, RoomFailed, TriremeError
from trireme.faults import fault_point
from trireme.protocols import Sampler
from trireme.types import Minibatch, SampledSequence, SampleRequest
from trireme.weights import PublishedWeights, UpdateReport

LAG_TICK_S = 0.25
WITNESSED = ("problem", "index", "requeues", "floor")

T = TypeVar("T")


class Pipeline:
    """The orchestrator without its actor, on one event loop. The first `update_weights` starts the loops."""

    def __init__(self, cfg: Config, dataset: RLDataset, sampler: Sampler, limits: RolloutLimits) -> None:
        self._cfg, self._options, self._sampler, self._limits = cfg, cfg.orchestrator, sampler, limits
        self._cursor = Cursor(dataset)
        self._ledger = Ledger(
            batch_size=self._options.batch_size,
            max_age=self._options.max_steps_off_policy,
            policy="wait" if cfg.deterministic else self._options.stale_policy,
            max_requeues=self._options.max_requeues,
            max_steps=cfg.max_steps,
        )
        self._finished: dict[int, ScoredGroup] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._slots_changed, self._groups_changed = asyncio.Event(), asyncio.Event()
        self._error: BaseException | None = None
        self._pace = Lockstep(self._ledger.can_dispatch) if cfg.deterministic else OwnPace()
        self._run_limits = RunLimits(cfg)
        self._meter = StepMeter()
        self._idle: IdleClock  # from the start of the loops on
        self._counts = self._ledger.counts()
        self._boundary: Snapshot | None = None

    # ---- the driver's verbs

    async def update_weights(self, weights: PublishedWeights) -> list[UpdateReport]:
        """Brings all replicas to `weights`, in flight, and notes their acknowledgements."""
        self._raise_error(but_limits=True)
        reports = await self._sampler.update_weights(weights)
        self._ledger.acknowledge(self._sampler.acknowledged())
        if not self._background:
            self._start()
        self._slots_changed.set()
        return reports

    def _start(self) -> None:
        """Begins the loops, and samples again what was running when the state that was loaded was saved."""
        self._note_boundary()
        self._idle = IdleClock(asyncio.get_running_loop().time)
        for group in self._ledger.active.values():
            if not group.finished:
                self._start_group(group)
        self._spawn(self._dispatch_loop(), "dispatch loop")
        self._spawn(self._lag_loop(), "lag loop")

    async def next_minibatch(self, step: int, substep: int) -> Minibatch:
        """The next minibatch of a substep, as soon as its groups are finished.

        Raises RoomFailed after `timeouts.step_s`, saying what is missing; and whatever went wrong in a loop.
        """
        fault_point("orchestrator.minibatch")
        count = self._cfg.groups_per_minibatch
        per_substep = self._options.batch_size // self._cfg.trainer.num_substeps
        done = self._ledger.assembled
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

    def release(self, step: int) -> Released:
        """Step `step` has been trained on: its slots are free once its version is acknowledged."""
        fault_point("orchestrator.release")
        self._raise_error(but_limits=True)
        groups = self._ledger.release(step)
        self._slots_changed.set()
        counts = self._ledger.counts()
        row = self._meter.row(step, counts, self._counts, self._idle.take())
        self._meter, self._counts = StepMeter(), counts
        self._note_boundary()
        return Released(row, [{name: getattr(g, name) for name in WITNESSED} for g in groups])

    def snapshot(self) -> Snapshot:
        """The last boundary, at any moment until the next version is published. Raises ValueError after that."""
        return self._boundary or self._snapshot()

    def load(self, snapshot: Snapshot) -> None:
        """Goes on from a snapshot; before the first `update_weights`. Raises BadInput when the dataset is another."""
        self._cursor.load_state_dict(snapshot.cursor)
        self._ledger.load_state_dict(snapshot.ledger)
        self._run_limits.load_state_dict(snapshot.limits)
        groups = self._ledger.active
        self._finished = {
            s.group.index: replace(s, group=groups[s.group.index]) for s in snapshot.finished if s.group.index in groups
        }
        self._meter.filtered, self._meter.errors = list(snapshot.filtered), Counter(snapshot.errors)
        self._counts = dict(snapshot.counts)

    async def stop(self) -> None:
        """Cancels everything and waits for it; environments are cleaned up."""
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- state

    def _note_boundary(self) -> None:
        if self._cfg.deterministic:
            self._boundary = self._snapshot()

    def _snapshot(self) -> Snapshot:
        stopped_by_limit = isinstance(
            self._error, LimitReached
        )  # then a resume, after what was wrong was mended, counts anew
        return Snapshot(
            cursor=self._cursor.state_dict(),
            ledger=self._ledger.state_dict(),
            limits=(RunLimits(self._cfg) if stopped_by_limit else self._run_limits).state_dict(),
            finished=(*self._meter.trained, *self._finished.values()),
            filtered=tuple(self._meter.filtered),
            errors=dict(self._meter.errors),
            counts=self._counts,
        )

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
        data_P = [group_to_data(s, self._options.advantage, self._options.overlong_filter) for s in scored_P]
        return build_minibatch(step, scored_P, data_P, last)

    def _overdue(self, step: int, count: int) -> str:
        running = [
            f"{g.problem} (dispatched at version {g.floor})" for g in self._ledger.active.values() if not g.finished
        ]
        return (
            f"waited {self._cfg.timeouts.step_s:g} s (timeouts.step_s) for {count} finished groups of batch {step}. "
            f"Groups: {self._ledger.counts()}; oldest problem still sampling: {running[0] if running else 'none'}; "
            f"versions acknowledged by replicas: {self._ledger.replicas}; "
            f"first failed rollout: {self._run_limits.first_failure}"
        )

    # ---- loops

    async def _dispatch_loop(self) -> None:
        while True:
            await self._slots_changed.wait()
            self._slots_changed.clear()
            self._ledger.acknowledge(self._sampler.acknowledged())
            while self._ledger.can_dispatch():
                self._start_group(self._ledger.dispatch(self._cursor.next_problem))

    def _start_group(self, group: Group) -> None:
        self._pace.enter(group.index, self._options.group_size)
        work = self._run_group(group, self._cursor.builder(group.problem))
        self._running[group.index] = self._spawn(work, f"group of problem {group.problem}")

    async def _lag_loop(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            started = now()
            await asyncio.sleep(LAG_TICK_S)
            self._meter.lag_s = max(self._meter.lag_s, now() - started - LAG_TICK_S)

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

    def _raise_error(self, but_limits: bool = False) -> None:
        """`but_limits`: a limit of the run waits for the next minibatch, so that the step in hand is finished and the
        run can be committed where it stops."""
        if self._error and not (but_limits and isinstance(self._error, LimitReached)):
            raise self._error

    # ---- one group

    async def _run_group(self, group: Group, builder: EnvGroupBuilder) -> None:
        try:
            outcomes_G = await self._play_group(group, builder)
            scored = await self._score(group, builder, [t for t in outcomes_G if isinstance(t, Trajectory)])
        finally:
            self._running.pop(group.index, None)  # an eviction must not interrupt the cleaning up
            await self._attempt(builder.cleanup(), self._deadline())
        await self._pace.before_end(group.index)
        self._settle(group, scored, outcomes_G)

    async def _play_group(self, group: Group, builder: EnvGroupBuilder) -> list[Trajectory | Exception]:
        """All rollouts of a group; in place of one that failed for good, its last error."""
        envs = asyncio.ensure_future(builder.make_envs())
        rollouts = [
            asyncio.ensure_future(self._rollout(group, builder, envs, sample))
            for sample in range(self._options.group_size)
        ]
        try:
            return await asyncio.gather(*rollouts)
        finally:
            for task in (envs, *rollouts):
                task.cancel()

    async def _rollout(
        self, group: Group, builder: EnvGroupBuilder, envs: asyncio.Future[Sequence[Env]], sample: int
    ) -> Trajectory | Exception:
        """One rollout with its retries. A prompt that was refused is not tried again."""
        for retry in range(self._options.retries + 1):
            attempt = group.requeues * (self._options.retries + 1) + retry
            key = RolloutKey(self._cfg.env.label, group.problem, sample, attempt, f"{group.problem}/{group.requeues}")
            made, deadline = builder.make_envs() if retry else asyncio.shield(envs), self._deadline()
            outcome = await self._attempt(self._play(group, made, key, deadline), deadline)
            if isinstance(outcome, Trajectory | PromptTooLong):
                break
        self._pace.rollout_over(group.index)
        return outcome

    async def _play(
        self, group: Group, made: Awaitable[Sequence[Env]], key: RolloutKey, deadline: asyncio.Timeout
    ) -> Trajectory:
        envs = await made
        if len(envs) != self._options.group_size:
            raise RolloutError(
                f"environment {key.env}, problem {key.problem}: make_envs gave {len(envs)} environments, expected "
                f"group_size = {self._options.group_size}"
            )

        async def sample(request: SampleRequest) -> SampledSequence:
            await self._pace.before_sample(group.index, key.sample, deadline)
            with self._idle:
                return await self._sampler.sample(request)

        sampling = self._cfg.inference.sampling
        return await run_rollout(envs[key.sample], sample, key, self._limits, sampling, self._cfg.seed)

    def _deadline(self) -> asyncio.Timeout:
        return asyncio.timeout(self._options.generation_timeout_s)

    async def _attempt(self, work: Awaitable[T], deadline: asyncio.Timeout) -> T | Exception:
        """The one place where what an environment raises is caught: counted, and returned. Errors of the rooms
        themselves (TriremeError) go on to the driver."""
        try:
            async with deadline:
                return await work
        except TriremeError:
            raise
        except Exception as error:
            self._meter.errors[type(error).__name__] += 1
            self._run_limits.note_failure(error)
            return error

    async def _score(
        self, group: Group, builder: EnvGroupBuilder, trajectories_G: list[Trajectory]
    ) -> ScoredGroup | None:
        """The group with its rewards; none when too few rollouts succeeded or its rewards cannot be computed."""
        size = self._options.group_size
        needed = max(math.ceil(self._options.min_viable_group * size), min(2, size))  # one alone has advantage 0
        if len(trajectories_G) < needed:
            return None
        self._check_floor(group, trajectories_G)
        outcome = await self._attempt(self._group_rewards(group, builder, trajectories_G), self._deadline())
        return None if isinstance(outcome, Exception) else outcome

    async def _group_rewards(
        self, group: Group, builder: EnvGroupBuilder, trajectories_G: list[Trajectory]
    ) -> ScoredGroup:
        extra_G = await builder.compute_group_rewards(trajectories_G)
        rewards_G = [float(t.reward + reward) for t, (reward, _) in zip(trajectories_G, extra_G, strict=True)]
        for reward in rewards_G:
            check_reward(reward, self._cfg.env.label, group.problem)
        return ScoredGroup(
            group=group,
            trajectories_G=tuple(trajectories_G),
            rewards_G=tuple(rewards_G),
            metrics_G=tuple(metrics for _, metrics in extra_G),
            tags=(self._cfg.env.label, *builder.logging_tags()),
            temperature=self._cfg.inference.sampling.temperature,
        )

    def _check_floor(self, group: Group, trajectories_G: list[Trajectory]) -> None:
        """Raises ProvenanceError when a token is older than the group's floor promises."""
        oldest = min(int(np.min(turn.versions)) for t in trajectories_G for turn in t.transitions)
        if oldest < group.floor:
            raise ProvenanceError(
                f"problem {group.problem} was dispatched when all replicas had version {group.floor}, but a token of "
                f"it was sampled by version {oldest}"
            )

    def _settle(self, group: Group, scored: ScoredGroup | None, outcomes_G: Sequence[Trajectory | Exception]) -> None:
        """Tells the ledger how a group ended, and whoever waits for it. Raises LimitReached."""
        for outcome in outcomes_G:
            if not isinstance(outcome, PromptTooLong):
                self._run_limits.judge_rollout(isinstance(outcome, Trajectory))
        if group.index not in self._ledger.active:  # evicted while its environments were cleaned up
            return
        if scored is None:
            self._ledger.fail(group)
        elif self._options.remove_constant_reward_groups and is_constant(scored.rewards_G):
            self._ledger.filter(group)
            self._meter.filtered.append(scored)
        else:
            self._ledger.finish(group)
            self._finished[group.index] = scored
        self._run_limits.judge_group(group.finished, self._ledger.counts())
        self._slots_changed.set()
        self._groups_changed.set()
        self._pace.leave(group.index)
