"""The driver's side of the orchestrator. Every call has a deadline; an exception of the actor is raised here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import ray

from orchestrator.actor import OrchestratorActor
from orchestrator.lifetimes import end_deadline_s
from trireme.checkpoint.files import FileRecord
from trireme.checkpoint.parts import CheckpointSource
from trireme.config import Config
from trireme.core.actors import ActorOptions, ActorProxy, Ref
from trireme.core.agents import AgentSessions
from trireme.core.batch import Assign
from trireme.core.errors import TriremeError
from trireme.core.sampler import Heartbeat, MakeSampler
from trireme.core.types import Minibatch, StepSummary, WeightIdentity
from trireme.process import waits
from trireme.process.ray_cluster import create_actor

ANSWER_S = 30.0
"""Seconds added to a deadline that the actor enforces too, so that the actor's more precise message comes first."""
STOP_S = 10.0
PROGRESS_S = 30.0
EVALUATION_PROGRESS_S = 5.0
"""Seconds between two lines in the log: PROGRESS_S for a long wait of a run, EVALUATION_PROGRESS_S for an evaluation
without training (`trireme eval`)."""
Value = TypeVar("Value")
log = logging.getLogger(__name__)


class OrchestratorHandle:
    """The orchestrator as the driver sees it: each method calls the orchestrator's actor."""

    def __init__(self, config: Config, actor: ActorProxy[OrchestratorActor], log: Path | None) -> None:
        self._config = config
        self._actor = actor
        self._log = log
        self._started = actor.start.remote()

    @classmethod
    def start(
        cls,
        config: Config,
        make_sampler: MakeSampler,
        options: ActorOptions,
        log_dir: Path | None,
        assign: Assign | None = None,
        sessions_factory: Callable[[], AgentSessions] | None = None,
    ) -> OrchestratorHandle:
        """Creates the actor without waiting; wait for `ready_refs` before any other call. `assign` says which datums
        each process of the trainer computes: a minibatch then holds Ray references to the datums of each process.
        Without `assign` a minibatch holds its tokens. `sessions_factory` makes the object that opens sessions for
        agents; None if no environment is an agent."""
        create = create_actor(OrchestratorActor, **options)
        actor = create(config, make_sampler, assign, log_dir, sessions_factory)
        return cls(config, actor, log_dir and log_dir / "orchestrator_0.log")

    def ready_refs(self) -> tuple[list[Ref[object]], list[str]]:
        """Returns Ray references that resolve once the actor is ready, and for each of them the name of the process
        that is then ready."""
        return [self._started], ["orchestrator"]

    def end_version(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """Waits until the last update of the replicas has ended. If the version of this update is being evaluated, then
        waits for the evaluation too. Raises the error of the update or the evaluation. `on_tick` is called about once a
        second. If it raises, the wait ends with its error."""
        self._await_update(self._actor.end_version.remote(), on_tick)

    def begin_version(self, identity: WeightIdentity, on_tick: Callable[[], None] = lambda: None) -> None:
        """Tells the orchestrator that the replicas' update to a new version begins. `identity`: the weights of this
        version. If the version is the first or the last of the run, or if `max_steps_off_policy` is 0 (always so in
        deterministic mode), waits until the update has ended. If the version is the last, or in deterministic mode,
        then also waits for the version's evaluation. In all other cases returns at once. `on_tick`: see
        `end_version`."""
        self._await_update(self._actor.begin_version.remote(identity), on_tick)

    def follow(self, source: Any) -> None:
        """Switches the orchestrator's sampling to the replicas of a new replica set, which replaces the previous set.
        `source`: the object through which a router reads the new set. Does not wait."""
        self._actor.follow.remote(source)

    def give_up_evaluation(self) -> None:
        """Cancels the running evaluation, if there is one, without waiting. The evaluation is due again after a
        resume."""
        self._actor.give_up_evaluation.remote()

    def _await_update(self, begun: Ref[None], on_tick: Callable[[], None]) -> None:
        limit_s = self._config.update_deadline_s + ANSWER_S
        if self._config.eval.every:
            limit_s += self._config.batch_deadline_s
        self._wait(begun, "the replicas' update", limit_s, on_tick)

    def evaluate(
        self, version: int, lines: Sequence[str], on_lines: Callable[[Sequence[str]], object]
    ) -> dict[str, float]:
        """Evaluates the weights that the replicas have, version `version`, without training. Returns the metrics. About
        once a second `on_lines` gets a line of JSON for each group that has ended since its last call. `lines`: lines
        from an earlier evaluation of the same weights with the same options; their groups are not sampled again.
        Raises RoomFailed when the evaluation takes longer than `timeouts.batch_s`, and the errors of `on_lines`."""
        evaluated = self._actor.evaluate.remote(version, lines)

        def tick() -> None:
            taken = self._actor.take_evaluated.remote()
            owners = ["orchestrator (an evaluation)"]
            on_lines(waits.get_all([taken], owners=owners, timeout_s=ANSWER_S, log=self._log)[0])

        limit_s = self._config.batch_deadline_s
        return self._wait(evaluated, "an evaluation", limit_s, tick, every_s=EVALUATION_PROGRESS_S)

    def finish_sampling(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """Waits until all groups that the staleness bound allows are sampled, and the evaluation of the version has
        ended. `on_tick`: see `end_version`."""
        limit_s = (
            self._config.update_deadline_s + (self._config.max_steps_off_policy + 2) * self._config.batch_deadline_s
        )
        self._wait(self._actor.finish_sampling.remote(), "the end of sampling", limit_s, on_tick)

    def minibatches(self, step: int, substep: int, on_tick: Callable[[], None] = lambda: None) -> Iterator[Minibatch]:
        """Yields the minibatches of a substep, each as soon as enough groups have finished. There are several
        minibatches when streaming, else one. During each wait `on_tick` is called about once a second. If `on_tick`
        raises, the step cannot continue: do not request another minibatch of this step."""
        last = False
        while not last:
            ref = self._actor.next_minibatch.remote(step, substep)
            label = f"a minibatch of step {step + 1}"
            minibatch = self._wait(ref, label, self._config.batch_deadline_s, on_tick)
            last = minibatch.last
            yield minibatch

    def release(self, step: int) -> StepSummary:
        """Records in the orchestrator that `step` has been trained on. Returns the step's metrics and records."""
        released = self._actor.release.remote(step)
        return self._wait(released, f"the release of step {step + 1}", self._config.timeouts.step_s)

    def save_state(self, path: Path) -> waits.Pending[FileRecord]:
        """Saves the orchestrator's state in the directory `path`, so that a resumed run continues after the last
        completed step. The state is copied before this call returns; the copy is written in the background.

        May be called until the next update begins, also in the middle of a step that will not be finished. Waiting for
        the returned Pending gives the FileRecords of the written files, or raises StorageFailed.
        """
        self._wait(self._actor.take_snapshot.remote(), "a snapshot of its state", self._config.timeouts.checkpoint_s)
        return waits.Pending(
            [self._actor.write_snapshot.remote(path)], ["orchestrator (its part of a checkpoint)"], self._log
        )

    def load_state(self, path: Path, source: CheckpointSource | None = None) -> str:
        """Continues from a state that `save_state` wrote to `path`. If the orchestrator's node cannot see `path`, the
        state is read from the object storage `source`. Call it when the actor is ready, before the first
        `begin_version`. Returns a message that says how many unfinished rollouts continue ("" if there were none).
        Raises BadInput when the dataset lacks a problem of the state."""
        loaded = self._actor.load_state.remote(path, source)
        return self._wait(loaded, f"its state from {path}", self._config.timeouts.checkpoint_s)

    # ---- for the supervisor: references, which it waits for

    def heartbeats(self) -> Mapping[str, Callable[[], Ref[Heartbeat]]]:
        """Returns {name of a process: a function that requests a `Heartbeat` from the process, and returns the Ray
        reference to it}."""
        return {"orchestrator_0": self._actor.heartbeat.remote}

    def stop(self) -> None:
        """Cancels all rollouts, closes their environments, and ends the actor, even if it hangs. An actor that is still
        starting is ended at once: it has no rollouts, and may be busy with imports."""
        if waits.ready({self._started: "orchestrator"}, 0):
            with suppress(TriremeError):  # it is dead or hangs already
                limit_s = STOP_S + end_deadline_s(self._config)
                waits.get(self._actor.stop.remote(), owner="orchestrator (its end)", timeout_s=limit_s, log=self._log)
        ray.kill(self._actor)

    def _wait(
        self,
        ref: Ref[Value],
        label: str,
        timeout_s: float,
        on_tick: Callable[[], None] = lambda: None,
        every_s: float = PROGRESS_S,
    ) -> Value:
        """Waits at most `timeout_s` + ANSWER_S seconds for `ref`, the answer to a call of the actor, and returns the
        answer. Logs every `every_s` seconds how far the orchestrator is. `label` names the call in messages.
        `on_tick`: see `end_version`."""
        report = waits.LongWait(f"waiting for {label}", every_s, self._actor.progress.remote)

        def tick(names: list[str], waited_s: float) -> None:
            on_tick()
            report(names, waited_s)

        owners = [f"orchestrator ({label})"]
        limit_s = timeout_s + ANSWER_S
        return waits.get_all([ref], owners=owners, timeout_s=limit_s, log=self._log, on_tick=tick)[0]
