"""From problems to minibatches: the loops between the ledger, the environments, the sampler and the trainer.

    mix  ----problem--> dispatch loop --group--> one task per group: group_size rollouts, group rewards
                            ^  ^                      | finished       | filtered, failed
             slots are free |  | requeued             v                v
                            |  +---- ledger <--- finished groups    (slot free at once)
                            |                         |
     release + acknowledged |                         v
                            +----------------- next_minibatch --> trainer

  loop            consumes              waits for            unblocked by                            produces
  dispatch        free slots, problems  `_slots_changed`,    new weights, release, a group's end;    group tasks
                                        room at the gate     a rollout's end
  group (many)    one problem           sampler, env         the sampler; eviction cancels it        a settled group
  next_minibatch  finished groups       `_groups_changed`    a settled group, an error               a minibatch
  update          published weights     the replicas         all of them having it, or a failure     free slots
  evaluation      held-out problems     room at the gate     a rollout's end                         eval/* metrics
  load            nothing               the replicas         time                                    the gate's limit
  lag             nothing               its own clock        time                                    event_loop_lag

Back-pressure is the ledger's slots: when the trainer does not take or release, slots stay taken, dispatch stops, and
the replicas run dry. And the gate (`concurrency.py`): no more is sampled at once than the replicas can take. An error
in any loop is raised by the driver's next call, at once if one is waiting.

Updates. One at a time, and the driver goes on meanwhile: it trains on what was sampled before. Its next update waits
for the one before, and for an evaluation under way, which is of one version (`evaluation.py`), unless that has replicas
of its own. Where it could not go
on, and where nothing later would show a failure, the verb returns when the update has ended: the first and the last
version of a run, and every one when max_steps_off_policy = 0.

State. A snapshot is of the last boundary: what has been taken for a step that is not released is finished again, in its
place. What was sampled since then is kept, except in deterministic mode: the groups sampled afresh would be fewer, so
engines would work on other requests at once. There the snapshot is the one that was made when the step was released.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from orchestrator import leaks
from orchestrator.admission import Backpressure, Permit
from orchestrator.advantages import ScoredGroup, build_minibatch, group_to_rows, is_constant
from orchestrator.cursor import Mix
from orchestrator.env import EnvGroupBuilder, RLDataset, Trajectory
from orchestrator.evaluation import Evaluator
from orchestrator.group_runner import GroupRunner, GroupSettings
from orchestrator.ledger import Group, Ledger, Taken
from orchestrator.limits import RunLimits
from orchestrator.lockstep import Lockstep, OwnPace
from orchestrator.metrics import IdleClock, StepMeter, StepSummary, update_metrics
from orchestrator.recorder import Decode, Recorder
from orchestrator.rollout import PromptTooLong, RolloutLimits
from orchestrator.state import OrchestratorState
from trireme.config import Config
from trireme.config.schema import EnvConfig
from trireme.core.errors import LimitReached, ProvenanceError, RoomFailed
from trireme.core.sampler import Sampler
from trireme.core.types import Minibatch, SampledSequence, SampleRequest, WeightIdentity
from trireme.core.weights import PublishedWeights
from trireme.process import trace
from trireme.process.faults import fault_point

LAG_TICK_S = 0.25
LOAD_TICK_S = 1.0
ANSWER_S = 60.0
"""On top of the replicas' own deadlines for an update, so that their message, which says what was late, is first."""
WITNESSED = ("problem", "index", "requeues", "floor")


def update_deadline_s(config: Config) -> float:
    """How long an update of all replicas may take, at worst one after the other, and with a wait for a successor of the
    last one. Each keeps its own deadline."""
    return config.timeouts.update_s * config.inference.replicas + config.patience_s + ANSWER_S


class Pipeline:
    """The orchestrator without its actor, on one event loop. The first `update_weights` starts the loops."""

    def __init__(
        self,
        config: Config,
        datasets: Sequence[RLDataset],
        sampler: Sampler,
        limits: RolloutLimits,
        held_out: Sequence[RLDataset] = (),
        decode: Decode | None = None,
        reserved: Sampler | None = None,
    ) -> None:
        self._config, self._options, self._sampler, self._limits = config, config.orchestrator, sampler, limits
        names = [env.label for env in config.env]
        self._mix = Mix(dict(zip(names, datasets, strict=True)), [env.weight for env in config.env], config.seed)
        self._ledger = Ledger(
            batch_size=self._options.batch_size,
            max_steps_off_policy=self._options.max_steps_off_policy,
            policy="wait" if config.deterministic else self._options.stale_policy,
            max_requeues=self._options.max_requeues,
            max_steps=config.max_steps,
        )
        self._finished: dict[int, ScoredGroup] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._slots_changed, self._groups_changed = asyncio.Event(), asyncio.Event()
        self._error: BaseException | None = None
        self._update: asyncio.Task[None] | None = None
        self._newest = -1
        self._update_rows: dict[int, dict[str, float]] = {}
        self._pace = Lockstep(self._ledger.can_dispatch) if config.deterministic else OwnPace()
        self._pressure = Backpressure(config)
        self._players = {env.label: self._player(env) for env in config.env}
        self._samplers = [sampler, *([reserved] if reserved else [])]
        self._failures: dict[int, asyncio.Task[tuple[int, str]]] = {}
        self._evaluator = Evaluator(config, held_out, self._sample_to_evaluate, limits, self._pressure.gate, reserved)
        self._run_limits = RunLimits(config)
        self._recorder = Recorder(config, decode)
        self._meter = StepMeter()
        self._idle: IdleClock  # from the first weights on
        self._evaluating = 0  # of the requests in flight
        self._counts = self._ledger.counts()
        self._boundary: OrchestratorState | None = None

    # ---- the driver's verbs

    async def update_weights(self, weights: PublishedWeights) -> None:
        """Begins to bring all replicas to `weights`, in flight, once the update before has ended. See Updates, above.

        What an update fails with is raised by the next verb. Raises RoomFailed when the one before does not end.
        """
        self._raise_error(but_limits=True)
        await self._update_ended()
        await self._evaluator.before_update(weights.identity.version)
        first, self._newest = self._update is None, weights.identity.version
        if first:
            self._idle = IdleClock(asyncio.get_running_loop().time)
        self._update = self._spawn(self._update_replicas(weights), f"update to version {self._newest}")
        if first or self._newest == self._config.max_steps or not self._options.max_steps_off_policy:
            await self._update_ended()
        if self._config.deterministic or self._newest == self._config.max_steps:
            await self._evaluator.ended()  # else it goes on beside training
        if first:
            self._start()

    async def evaluate(self, identity: WeightIdentity) -> dict[str, float]:
        """The metrics of an evaluation of weights that the replicas have loaded by themselves: no training before or
        after it."""
        await self._sampler.adopt(identity)
        self._idle = IdleClock(asyncio.get_running_loop().time)
        return await self._evaluator.evaluate(identity.version)

    def give_up_evaluation(self) -> None:
        """Ends the evaluation under way, if there is one: it is due again after a resume."""
        self._evaluator.give_up()

    # ---- the supervisor's verbs

    async def join(self, index: int, client: Any, *, reserved: bool) -> None:
        """A replica serves from now on, once it has the newest weights; `reserved`: for evaluations alone. Raises what
        it fails with."""
        await self._samplers[reserved].join(index, client)
        self._replicas_changed()

    def leave(self, index: int, reason: str) -> None:
        """A replica is dead."""
        for sampler in self._samplers:
            sampler.leave(index, reason)
        self._replicas_changed()

    async def drain(self, index: int, timeout_s: float) -> None:
        """A replica gets no new requests, finishes those in flight within `timeout_s` or hands them over, and has left
        when this returns."""
        await asyncio.gather(*(sampler.drain(index, timeout_s) for sampler in self._samplers))
        self._replicas_changed()

    async def next_failure(self) -> tuple[int, str]:
        """Waits for the next replica that is found to have failed here: its number and the reason."""
        for i, sampler in enumerate(self._samplers):
            if i not in self._failures:
                self._failures[i] = asyncio.create_task(sampler.next_failure())
        await asyncio.wait(self._failures.values(), return_when=asyncio.FIRST_COMPLETED)
        found = next(i for i, task in self._failures.items() if task.done())
        self._replicas_changed()
        return self._failures.pop(found).result()

    def _replicas_changed(self) -> None:
        self._acknowledge()
        self._slots_changed.set()

    async def _update_ended(self) -> None:
        """Returns when no update is under way. Raises what the last one failed with."""
        if self._update is None:
            return
        limit = update_deadline_s(self._config)
        ended, _ = await asyncio.wait([self._update], timeout=limit)
        if not ended:
            raise RoomFailed(
                f"waited {limit:g} s (timeouts.update_s for each replica, the start of a successor, and {ANSWER_S:g}) "
                f"for the {self._update.get_name()}; versions acknowledged by replicas: {self._sampler.acknowledged()}"
            )
        self._update.result()

    async def _update_replicas(self, weights: PublishedWeights) -> None:
        now = asyncio.get_running_loop().time
        started = now()
        reports = await self._sampler.update_weights(weights)
        self._update_rows[weights.identity.version] = update_metrics(reports, now() - started)
        self._acknowledge()
        self._evaluator.begin(weights, self._spawn)
        self._slots_changed.set()

    def _start(self) -> None:
        """Begins the loops."""
        leaks.watch(asyncio.get_running_loop())
        self._note_boundary()
        self._spawn(self._dispatch_loop(), "dispatch loop")
        self._spawn(self._load_loop(), "load loop")
        self._spawn(self._lag_loop(), "lag loop")

    async def next_minibatch(self, step: int, substep: int) -> Minibatch:
        """The next minibatch of a substep, as soon as its groups are finished.

        Raises RoomFailed after `timeouts.step_s`, saying what is missing; and whatever went wrong in a loop.
        """
        fault_point("orchestrator.minibatch")
        count = self._config.groups_per_minibatch
        per_substep = self._options.batch_size // self._config.trainer.num_substeps
        done = self._ledger.assembled
        if (step, substep) != (self._ledger.batch, done // per_substep):
            raise ValueError(
                f"asked for step {step}, substep {substep}; next is {self._ledger.batch}, {done // per_substep}"
            )
        try:
            async with asyncio.timeout(self._config.timeouts.step_s):
                with trace.span("wait", "minibatches", step=step, groups=count):
                    taken = await self._take(step, count)
        except TimeoutError:
            raise RoomFailed(self._overdue(step, count)) from None
        scored_P = [self._finished.pop(group.index) for group in taken.groups]
        self._evict(taken.evicted)
        self._meter.trained += scored_P
        return self._minibatch(step, scored_P, last=(done + count) % per_substep == 0)

    def release(self, step: int) -> StepSummary:
        """Step `step` has been trained on: its slots are free once its version is acknowledged.

        The row tells of the update to version `step`, which it was trained with: the next one may still be under way.
        """
        fault_point("orchestrator.release")
        self._raise_error(but_limits=True)
        groups = self._ledger.release(step)
        self._slots_changed.set()
        counts = self._ledger.counts()
        row = self._meter.row(step, counts, self._counts, self._idle.take()) | self._update_rows.pop(step)
        row |= self._evaluator.take(step)
        row |= self._pressure.take()
        records = self._recorder.lines(step, self._meter.trained)
        self._meter, self._counts = StepMeter(), counts
        self._note_boundary()
        return StepSummary(row, [{name: getattr(g, name) for name in WITNESSED} for g in groups], records)

    def snapshot(self) -> OrchestratorState:
        """The last boundary, at any moment until the update to the next version begins. Raises ValueError then."""
        return self._boundary or self._snapshot()

    def load(self, snapshot: OrchestratorState) -> None:
        """Goes on from a snapshot; before the first `update_weights`. Raises BadInput when the dataset is another."""
        self._mix.load_state_dict(snapshot.cursor)
        self._ledger.load_state_dict(snapshot.ledger)
        self._run_limits.load_state_dict(snapshot.limits)
        self._evaluator.load_state_dict(snapshot.evaluation)
        groups = self._ledger.active
        self._finished = {
            s.group.index: replace(s, group=groups[s.group.index]) for s in snapshot.finished if s.group.index in groups
        }
        self._meter.filtered, self._meter.errors = list(snapshot.filtered), Counter(snapshot.errors)
        self._counts = dict(snapshot.counts)

    async def stop(self) -> None:
        """Cancels everything and waits for it; environments are cleaned up."""
        tasks = [*self._background, *self._failures.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- state

    def _note_boundary(self) -> None:
        if self._config.deterministic:
            self._boundary = self._snapshot()

    def _snapshot(self) -> OrchestratorState:
        if self._newest > self._ledger.released:
            raise ValueError(
                f"{self._ledger.released} batches are released, but the update to {self._newest} has begun"
            )
        stopped_by_limit = isinstance(
            self._error, LimitReached
        )  # then a resume, after what was wrong was mended, counts anew
        return OrchestratorState(
            cursor=self._mix.state_dict(),
            ledger=self._ledger.state_dict(),
            limits=(RunLimits(self._config) if stopped_by_limit else self._run_limits).state_dict(),
            finished=(*self._meter.trained, *self._finished.values()),
            filtered=tuple(self._meter.filtered),
            errors=dict(self._meter.errors),
            counts=self._counts,
            evaluation=self._evaluator.state_dict(),
        )

    # ---- taking

    async def _take(self, step: int, count: int) -> Taken:
        while True:
            self._raise_error()
            enough = len(self._finished) >= count  # the ledger would look at all groups to find out
            if enough and (taken := self._ledger.take(step, count)):
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
        rows_P = [group_to_rows(s, self._options.advantage, self._options.overlong_filter) for s in scored_P]
        return build_minibatch(step, scored_P, rows_P, last)

    def _overdue(self, step: int, count: int) -> str:
        running = [
            f"{g.problem} (dispatched at version {g.floor})" for g in self._ledger.active.values() if not g.finished
        ]
        in_flight = self._idle.in_flight - self._evaluating
        if in_flight and not self._sampler.acknowledged():
            holds = f"no inference replica serves, and {in_flight} requests wait for one"
        elif in_flight:
            holds = f"the inference replicas hold it, with {in_flight} requests"
        elif running:
            holds = "the environments hold it: no request is with a replica"
        else:
            holds = "no group is under way: its slots wait for a version that the replicas acknowledge"
        return (
            f"waited {self._config.timeouts.step_s:g} s (timeouts.step_s) for {count} finished groups of batch {step}; "
            f"{holds}. "
            f"Groups: {self._ledger.counts()}; oldest problem still sampling: {running[0] if running else 'none'}; "
            f"versions acknowledged by replicas: {self._ledger.replicas}; "
            f"first failed rollout: {self._run_limits.first_failure}"
        )

    # ---- loops

    async def _dispatch_loop(self) -> None:
        """First what was running when the state that was loaded was saved. Then a group for each slot that is free once
        there is room for it: it is dispatched when it starts, with the floor of that moment."""
        for group in [group for group in self._ledger.active.values() if not group.finished]:
            permit = await self._permit()
            if group.index in self._ledger.active:
                self._start_group(group, permit)
            else:  # evicted while it waited
                permit.close()
        while True:
            await self._slots_changed.wait()
            self._slots_changed.clear()
            self._acknowledge()
            while self._ledger.can_dispatch():
                permit = await self._permit()
                self._acknowledge()
                if self._ledger.can_dispatch():
                    self._start_group(self._ledger.dispatch(self._mix.next_problem), permit)
                else:  # the last replica was lost while it waited
                    permit.close()

    async def _permit(self) -> Permit:
        """For the largest group there may be: whose it is turns out when it is dispatched."""
        return await self._pressure.gate.enter("train", self._config.largest_group)

    def _acknowledge(self) -> None:
        self._ledger.acknowledge(self._sampler.acknowledged())

    def _start_group(self, group: Group, permit: Permit) -> None:
        player = self._players[self._mix.env_of(group.problem)]
        permit.keep(player.rules.size)
        self._pace.enter(group.index, player.rules.size)
        work = self._run_group(group, self._mix.builder(group.problem), player, permit)
        self._running[group.index] = task = self._spawn(work, f"group of problem {group.problem}")
        task.add_done_callback(permit.close)

    async def _load_loop(self) -> None:
        while True:
            self._pressure.look(await self._sampler.stats())
            await asyncio.sleep(LOAD_TICK_S)

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

    async def _run_group(self, group: Group, builder: EnvGroupBuilder, player: GroupRunner, permit: Permit) -> None:
        def over() -> None:
            self._running.pop(group.index, None)  # an eviction must not interrupt the cleaning up

        with trace.life("group", group.index, problem=group.problem, floor=group.floor) as ending:
            played = await player.play(group, builder, permit, over)
            await self._pace.before_end(group.index)
            self._settle(group, played.scored, played.outcomes_G)
            ending["versions"] = played.scored.versions if played.scored else None

    def _player(self, env: EnvConfig) -> GroupRunner:
        options, size = self._options, self._config.group_size(env)
        rules = GroupSettings(
            env=env.label,
            size=size,
            needed=max(math.ceil(options.min_viable_group * size), min(2, size)),  # one alone has advantage 0
            sampling=self._config.inference.sampling,
            limits=self._limits,
            seed=self._config.seed,
            retries=options.retries,
            timeout_s=options.generation_timeout_s,
        )
        return GroupRunner(rules, self._sample, self._pace, partial(self._note_error, env=env.label), self._check_floor)

    async def _sample(self, request: SampleRequest) -> SampledSequence:
        with self._idle:
            return await self._sampler.sample(request)

    async def _sample_to_evaluate(self, request: SampleRequest) -> SampledSequence:
        self._evaluating += 1
        try:
            return await self._sample(request)
        finally:
            self._evaluating -= 1

    def _note_error(self, error: Exception, env: str) -> None:
        self._meter.errors[type(error).__name__] += 1
        self._run_limits.note_failure(error, env)

    def _check_floor(self, group: Group, trajectories_G: Sequence[Trajectory]) -> None:
        """Raises ProvenanceError when a token is older than the group's floor promises."""
        turns = (turn for trajectory in trajectories_G for turn in trajectory.transitions)
        oldest = min(identity.version for turn in turns for identity in turn.identities)
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
        self._run_limits.judge_group(group.finished, self._ledger.tally)
        self._slots_changed.set()
        self._groups_changed.set()
        self._pace.leave(group.index)
