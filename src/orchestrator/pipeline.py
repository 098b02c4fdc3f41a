"""From problems to minibatches: the loops between the ledger, the environments, the sampler and the trainer.

    mix  ----problem--> dispatch loop --group--> one task per group: group_size rollouts, group rewards
                            ^  ^                      | finished       | filtered, failed
             slots are free |  | resampled            v                v
                            |  +---- ledger <--- finished groups    (slot free immediately)
                            |                         |
     release + acknowledged |                         v
                            +----------------- next_minibatch --> trainer

  loop            consumes              waits for            unblocked by                            produces
  dispatch        free slots, problems  `_slots_changed`,    new weights, release, a group's end;    group tasks
                                        a permit             a rollout's end
  group (many)    one problem           sampler, env         the sampler; a drop cancels it          a settled group
  next_minibatch  finished groups       `_groups_changed`    a settled group, an error               a minibatch
  update          published weights     the replicas         all of them having it, or a failure     free slots
  evaluation      held-out problems     a permit             a rollout's end                         eval/* metrics
  load            nothing               the replicas         time                                    the gate's limit
  lag             nothing               its own clock        time                                    event_loop_lag

Back-pressure is the ledger's slots: when the trainer does not take or release, slots stay taken, dispatch stops, and
the replicas run dry. The gate (`admission.py`) limits the rollouts in flight to the number that the replicas can take.
The driver's next call, or the one that is waiting, raises an error of any loop.

Updates run one at a time, and meanwhile the driver trains on earlier samples. Its next update waits for the one before,
and for a running evaluation, which is of one version (`evaluation.py`). `begin_version` returns only when the update
has ended for the first and the last version of a run, and for every version when max_steps_off_policy = 0: there the
driver could not continue meanwhile, or no later call would raise a failure of the update.

State. The saved state is the state at the last boundary between two steps: groups taken for a step that is not released
count as finished, in their place. The state includes samples made since the boundary, but not in deterministic mode:
with them a resumed run would sample fewer groups, so the engines would compute other requests together. In
deterministic mode the saved state is the state that was recorded when the step was released.

Rollback. When the trainer or this process is lost, another pipeline begins with the checkpoint (`load`): groups that
were running then continue from their tokens in the checkpoint (`running.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from orchestrator.admission import Backpressure, Permit
from orchestrator.advantages import Keep, ScoredGroup, build_minibatch, is_constant
from orchestrator.cursor import Mix
from orchestrator.env import EnvGroupBuilder, RLDataset, Trajectory
from orchestrator.evaluation import Evaluator
from orchestrator.group_runner import GroupOutcome, GroupRunner
from orchestrator.ledger import Group, Ledger
from orchestrator.limits import BackgroundTasks, RunLimits
from orchestrator.lockstep import Lockstep, OwnPace
from orchestrator.metrics import StepMeter
from orchestrator.overdue import missing
from orchestrator.recorder import Decode, Recorder
from orchestrator.requests import Requests
from orchestrator.rollout import PromptTooLong, RolloutLimits
from orchestrator.running import RunningGroups
from orchestrator.state import OrchestratorState
from orchestrator.unfinished import GroupProgress
from orchestrator.waste import WastedTokens
from orchestrator.watch import watch_lag, watch_load
from trireme.config import Config
from trireme.core.errors import RoomFailed
from trireme.core.sampler import MakeSampler
from trireme.core.types import Minibatch, StepSummary
from trireme.core.weights import UpdateReport
from trireme.process import trace
from trireme.process.faults import fault_point

WITNESSED = ("problem", "index", "floor")


class Pipeline:
    """The orchestrator without its actor, on one event loop. The first `begin_version` starts the background tasks,
    such as the one that dispatches groups. `keep` decides where the tokens of minibatches are held; minibatches are
    then laid out in a thread, so that the event loop serves rollouts meanwhile. Without `keep` they are laid out on the
    event loop, and held in this process."""

    def __init__(
        self,
        config: Config,
        datasets: Sequence[RLDataset],
        make_sampler: MakeSampler,
        limits: RolloutLimits,
        held_out: Sequence[RLDataset] = (),
        decode: Decode | None = None,
        keep: Keep | None = None,
    ) -> None:
        self._config = config
        self._options = config.orchestrator
        by_env = {env.label: dataset for env, dataset in zip(config.env, datasets, strict=True)}
        self._mix = Mix(by_env, [env.weight for env in config.env], config.seed)
        self._ledger = Ledger(
            batch_size=self._options.batch_size,
            max_steps_off_policy=self._options.max_steps_off_policy,
            policy="wait" if config.deterministic else self._options.stale_policy,
            max_steps=config.max_steps,
            in_order=config.deterministic,
        )
        self._update: asyncio.Task[None] | None = None
        self._acknowledged: Mapping[int, int] = {}
        self._finished: dict[int, ScoredGroup] = {}
        self._running = RunningGroups(lambda problem: self._runners[self._mix.env_of(problem)])
        self._slots_changed = asyncio.Event()
        self._groups_changed = asyncio.Event()
        self.sampler = make_sampler(self._replicas_changed)
        self._background = BackgroundTasks(self._groups_changed.set)
        self._newest = -1
        if config.deterministic:
            self._pace: OwnPace = Lockstep(self._ledger.can_dispatch)
        else:
            self._pace = OwnPace()
        self._pressure = Backpressure(config)
        self._requests = requests = Requests(self.sampler)
        self._tokens = WastedTokens()
        self._runners = {
            env.label: GroupRunner(
                config, env, limits, requests.sample, self._pace, partial(self._note_error, env=env.label)
            )
            for env in config.env
        }
        gate = self._pressure.gate
        self.evaluator = Evaluator(config, held_out, requests.sample_to_evaluate, limits, gate)
        self._run_limits = RunLimits(config)
        self._recorder = Recorder(config, decode)
        self._meter = StepMeter(self._ledger.counts())
        self._boundary: OrchestratorState | None = None
        self._keep = keep

    # ---- the driver's verbs

    async def end_version(self) -> None:
        """Waits until the last update and the evaluation of its version have ended. Raises RoomFailed if the update is
        late, and errors of the update and the evaluation."""
        self._background.raise_error(but_limits=True)
        await self._update_ended()
        await self.evaluator.wait_idle()

    async def begin_version(self, version: int, update: Awaitable[Sequence[UpdateReport]]) -> None:
        """Begins `version`. The replicas take its weights, also while they sample; the awaitable `update` ends when all
        of them have done so (see Updates in the module's docstring). Call this method after `end_version`. If the
        update fails, the driver's next call raises its error."""
        first = self._newest < 0
        self._newest = version
        last = version == self._config.max_steps
        if first:
            self._requests.start()
        self._update = self._background.spawn(self._follow_update(version, update), f"update to version {version}")
        if first or last or not self._options.max_steps_off_policy:
            await self._update_ended()
        if self._config.deterministic or last:
            await self.evaluator.wait_idle()  # else it runs beside training
        if first:
            if self._config.deterministic:
                self._boundary = self._state()
            else:
                self._boundary = None
            lag = watch_lag(lambda late_s: self._meter.note_lag(late_s))
            loops = {"dispatch": self._dispatch_loop(), "load": watch_load(self.sampler, self._pressure), "lag": lag}
            for name, loop in loops.items():
                self._background.spawn(loop, f"{name} loop")

    async def finish_sampling(self) -> None:
        """Waits until the update and the evaluation of the version have ended, and all groups that the staleness bound
        allows have finished. The replicas then have nothing left to sample. Raises errors of background tasks. Raises
        RoomFailed, with the missing groups, after (K + 1) times `timeouts.batch_s`, where K is the staleness bound."""
        await self._update_ended()
        await self.evaluator.wait_idle()
        batches = self._options.max_steps_off_policy + 1
        async with self._batch_deadline(batches, f"the groups of {batches} batches from {self._ledger.batch} on"):
            with trace.span("wait", "minibatches", step=self._ledger.batch):
                self._background.raise_error()
                while not self._ledger.is_sampled:
                    await self._groups_change()
                    self._background.raise_error()

    async def evaluate(self, version: int, lines: Sequence[str]) -> dict[str, float]:
        """Evaluates weights that the replicas have loaded from disk, without training before or after. Returns the
        metrics. `lines`: groups that an earlier evaluation has sampled, as lines of JSON (see `Evaluator.evaluate`)."""
        self._requests.start()
        return await self._background.spawn(self.evaluator.evaluate(version, lines), "evaluation")

    async def next_minibatch(self, step: int, substep: int) -> Minibatch:
        """Returns the next minibatch of `substep` in `step` as soon as enough groups have finished.
        `config.groups_per_minibatch` has the minimum and the maximum number of groups of a minibatch. Raises
        RoomFailed, with the missing groups, after `timeouts.batch_s`; ValueError unless this substep is the next; and
        errors of background tasks."""
        fault_point("orchestrator.minibatch")
        per_substep = self._config.groups_per_substep
        assembled = self._ledger.assembled
        least, limit = (min(n, per_substep - assembled % per_substep) for n in self._config.groups_per_minibatch)
        if (step, substep) != (self._ledger.batch, assembled // per_substep):
            raise ValueError(
                f"asked for step {step}, substep {substep}; expected step {self._ledger.batch}, substep "
                f"{assembled // per_substep}"
            )
        async with self._batch_deadline(1, f"{least} finished groups of batch {step}"):
            with trace.span("wait", "minibatches", step=step, groups=least):
                groups, dropped = await self._take(step, least, limit)
        scored_P = [self._finished.pop(group.index) for group in groups]
        self._drop(dropped)
        self._meter.trained += scored_P
        last = (assembled + len(groups)) % per_substep == 0
        normalization = self._config.normalization
        build = partial(build_minibatch, step, scored_P, self._options, normalization, last)
        if self._keep is None:
            return build()
        with trace.span("lay_out", "layout"):
            return await asyncio.to_thread(build, self._keep)

    def release(self, step: int) -> StepSummary:
        """Records that `step` has been trained on. The slots of its groups become free once the replicas have
        acknowledged the version that the step made. Returns the step's row of metrics, the problem, index and floor of
        each of its groups, and its recorded rollouts.

        The row includes the metrics of the update to version `step`, with which the step began. The next update, to the
        version that the step made, may still be in progress.
        """
        fault_point("orchestrator.release")
        self._background.raise_error(but_limits=True)
        groups = self._ledger.release(step)
        self._slots_changed.set()
        records = self._recorder.lines(step, self._meter.trained)
        row = self._meter.take(step, self._ledger.counts(), self._requests.take_idle())
        row |= self.evaluator.take(step) | self._pressure.take() | self._tokens.take()
        if self._config.deterministic:
            self._boundary = self._state()
        else:
            self._boundary = None
        return StepSummary(row, [{name: getattr(g, name) for name in WITNESSED} for g in groups], records)

    def progress(self) -> str:
        """Returns a readable description of the progress of the current step or evaluation."""
        groups = f"{len(self._finished)} groups are finished, and {len(self._running)} are being sampled"
        lacks = missing(self._ledger, self._requests.in_training)
        return self.evaluator.progress or f"{groups}: {lacks}"

    async def stop(self) -> None:
        """Cancels all tasks and waits until they have ended and all environments are closed."""
        await self._background.stop()

    # ---- state

    def snapshot(self) -> OrchestratorState:
        """Returns the state at the last boundary between two steps (see State in the module's docstring). Raises
        ValueError once the update to the next version has begun."""
        return self._boundary or self._state()

    def load(self, state: OrchestratorState) -> str:
        """Continues from `state`; call it before the first `begin_version`. Returns a text on how many unfinished
        rollouts continue; "" if the state has none. Raises BadInput if the state belongs to other environments
        or other data."""
        if self._config.deterministic:  # all of a turn is sampled together
            state = replace(state, running=())
        self._mix.load_state_dict(state.cursor)
        self._finished, notice = self._running.load(self._ledger, state)
        self._tokens.load_state_dict(state.tokens)
        self._run_limits.load_state_dict(state.limits)
        self.evaluator.load_state_dict(state.evaluation)
        self._meter = StepMeter(dict(state.counts), filtered=list(state.filtered), errors=Counter(state.errors))
        return notice

    def _state(self) -> OrchestratorState:
        if self._newest > self._ledger.released:
            raise ValueError(
                f"the batches trained so far make version {self._ledger.released}, but the update of the replicas to "
                f"version {self._newest} has begun: the state can no longer be saved. Save it before this update"
            )
        # After a stop by a limit, the user repairs the cause and resumes: then the limits count anew.
        if self._config.deterministic:
            running = []
        else:
            running = [g for g in self._ledger.active.values() if not g.finished]
        if self._background.limit_reached:
            limits = RunLimits(self._config)
        else:
            limits = self._run_limits
        return OrchestratorState(
            cursor=self._mix.state_dict(),
            ledger=self._ledger.state_dict(),
            limits=limits.state_dict(),
            finished=(*self._meter.trained, *self._finished.values()),
            filtered=tuple(self._meter.filtered),
            errors=dict(self._meter.errors),
            counts=self._meter.counts,
            evaluation=self.evaluator.state_dict(),
            running=self._running.take(running),
            tokens=self._tokens.state_dict(),
        )

    # ---- updates and replicas

    async def _update_ended(self) -> None:
        """Waits until the last update has ended. Raises the error of the update, and RoomFailed when the update is
        late."""
        if self._update is None:
            return
        limit_s = self._config.update_deadline_s
        finished, _ = await asyncio.wait([self._update], timeout=limit_s)
        if not finished:
            raise RoomFailed(
                f"waited {limit_s:g} s for the {self._update.get_name()} (timeouts.update_s for each replica, and time "
                f"to restart a lost replica). Newest version that each replica has acknowledged: {self._acknowledged}. "
                "See the logs of the replicas that are behind, or raise timeouts.update_s"
            )
        self._update.result()

    async def _follow_update(self, version: int, update: Awaitable[Sequence[UpdateReport]]) -> None:
        now = asyncio.get_running_loop().time
        started = now()
        reports = await update
        self._meter.note_update(version, reports, now() - started)
        self._ledger.acknowledge(self._acknowledged)
        self.evaluator.begin(version, self._background.spawn)

    def _replicas_changed(self, acknowledged: Mapping[int, int]) -> None:
        """Stores the version that each live replica has acknowledged, and wakes the dispatch loop, which looks for
        slots that have become free."""
        self._acknowledged = acknowledged
        self._slots_changed.set()

    # ---- taking

    @asynccontextmanager
    async def _batch_deadline(self, batches: int, label: str) -> AsyncIterator[None]:
        """Gives the body of an `async with` at most `batches` times `timeouts.batch_s` seconds. If the body takes
        longer, raises RoomFailed with the missing groups and `label`, which says what the body waits for."""
        limit_s = batches * self._config.batch_deadline_s
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            lacks = missing(self._ledger, self._requests.in_training)
            raise RoomFailed(
                f"waited {limit_s:g} s (timeouts.batch_s) for {label}; {lacks}; first failed rollout: "
                f"{self._run_limits.first_failure}"
            ) from None

    async def _groups_change(self) -> None:
        """Waits until a group has ended, or a background task has failed."""
        self._groups_changed.clear()
        await self._groups_changed.wait()

    async def _take(self, step: int, least: int, limit: int) -> tuple[list[Group], list[Group]]:
        """Waits until `least` groups may be taken into batch `step`. Returns all groups that may be taken, at most
        `limit`, and the groups that the ledger dropped. Raises errors of background tasks."""
        while True:
            self._background.raise_error()
            # The ledger looks at all groups, so it is not asked before enough of them have finished.
            if len(self._finished) >= least:
                count = self._ledger.takeable(limit)
                if count >= least:
                    taken = self._ledger.take(step, count)
                else:
                    taken = None
                if taken:
                    return taken
            await self._groups_change()

    def _drop(self, dropped: Sequence[Group]) -> None:
        """Stops the rollouts of the groups that the ledger has dropped, and forgets the groups among them that had
        finished."""
        for group in dropped:
            self._tokens.drop(group.index, self._finished.pop(group.index, None))
            self._running.stop(group.index)
        self._slots_changed.set()

    # ---- loops

    async def _dispatch_loop(self) -> None:
        """First starts the groups that were running when the loaded state was saved. Then, without end, waits for a
        free slot and for the permit to run a group (`_permit`), and dispatches a group. The group's floor is the
        ledger's floor at that moment."""
        for group in [group for group in self._ledger.active.values() if not group.finished]:
            permit = await self._permit()
            if group.index in self._ledger.active:
                self._start_group(group, permit)
            else:  # evicted while it waited
                permit.close()
        while True:
            await self._slots_changed.wait()
            self._slots_changed.clear()
            self._ledger.acknowledge(self._acknowledged)
            while self._ledger.can_dispatch():
                permit = await self._permit()
                self._ledger.acknowledge(self._acknowledged)
                if self._ledger.can_dispatch():
                    self._start_group(self._ledger.dispatch(self._mix.next_problem), permit)
                else:  # the last replica was lost while it waited
                    permit.close()

    async def _permit(self) -> Permit:
        """Waits until the rollouts of one more group may be in flight, and returns the permit for them. Assumes the
        largest group size of any environment, because the environment of a group is known only when the group is
        dispatched."""
        return await self._pressure.gate.enter("train", self._config.largest_group)

    def _start_group(self, group: Group, permit: Permit) -> None:
        runner = self._runners[self._mix.env_of(group.problem)]
        permit.keep(runner.size)
        self._pace.enter(group.index, runner.size)
        builder = self._mix.builder(group.problem)
        progress = self._running.begin(group, builder.scores_in_any_process)
        work = self._run_group(group, builder, runner, permit, progress)
        task = self._background.spawn(work, f"group of problem {group.problem}")
        self._running.add_task(group, task)
        task.add_done_callback(permit.close)

    # ---- one group

    async def _run_group(
        self, group: Group, builder: EnvGroupBuilder, runner: GroupRunner, permit: Permit, progress: GroupProgress
    ) -> None:
        over = partial(self._running.ends, group)  # a drop must not interrupt the cleanup
        tokens = self._tokens.begin(group.index, runner.size)
        life = trace.life("group", group.index, problem=group.problem, floor=group.floor)
        with life as ending:
            outcome = await runner.run(group, builder, permit, tokens, over, progress)
            await self._pace.before_end(group.index)
            self._settle(group, outcome)
            ending["versions"] = outcome.scored.versions if outcome.scored else None

    def _note_error(self, error: Exception, env: str) -> None:
        self._meter.errors[type(error).__name__] += 1
        self._run_limits.note_failure(error, env)

    def _settle(self, group: Group, outcome: GroupOutcome) -> None:
        """Records in the ledger and the counts how a group ended, and wakes the loops that wait for a group's end.
        Raises LimitReached if the run has reached one of its limits."""
        for rollout in outcome.outcomes_G:
            if not isinstance(rollout, PromptTooLong):
                self._run_limits.judge_rollout(None if isinstance(rollout, Trajectory) else rollout)
        self._running.settle(group)
        if self._ledger.active.get(group.index) is not group:  # given up while its environments were cleaned up
            return
        scored = outcome.scored
        self._tokens.settle(group.index, scored)
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
