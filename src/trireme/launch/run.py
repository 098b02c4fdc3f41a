"""Runs a training command from start to end, the same for `rl` and `sft`: directory, cluster, supervision, attempts,
checkpoints."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from trainer.handle import TrainerHandle
from trainer.schedule import learning_rate_schedule
from trireme.checkpoint.manifest import Manifest
from trireme.checkpoint.parts import CheckpointSource
from trireme.config import CommonConfig
from trireme.config.model_facts import ModelFacts
from trireme.core.actors import ActorOptions
from trireme.core.errors import BadInput, LimitReached, LockLost, RoomFailed, ServicesLost, TriremeError
from trireme.launch.common import StartProgress
from trireme.launch.starting import await_ready, joined, reserve_places
from trireme.launch.writers import FarNodes, check_writers
from trireme.plan.whole import Plan
from trireme.process import signals, trace
from trireme.process.environ import cluster_address
from trireme.process.ray_cluster import await_places, check_services, nodes_of
from trireme.run.checkpoints import Checkpoints
from trireme.run.metrics import Journal
from trireme.run.remote import RemoteRun
from trireme.run.rooms import StatefulRoom
from trireme.run.rundir import RunDir, resume_command
from trireme.run.sink import MetricsSink, metrics_sinks
from trireme.supervision.replica_manager import ReplicaSetRoom
from trireme.supervision.restarts import Restarts
from trireme.supervision.roster import Roster
from trireme.supervision.status import StatusWriter
from trireme.supervision.supervisor import ElasticReplicas, Room, Supervisor
from trireme.train.guards import RefusedSteps
from trireme.train.steps import Attempt

CLUSTER = "cluster"
"""The name under which the roster records incidents of Ray's services."""


@dataclass(frozen=True)
class Core:
    """The rooms that an attempt starts, and the other objects that have a part in each checkpoint."""

    trainer: TrainerHandle
    other_rooms: Mapping[str, StatefulRoom]
    """{name of a part of each checkpoint: the room that saves and loads it}, without the trainer. For `sft` the data
    take the place of a room."""
    rooms: Sequence[Room]
    """The handles of all rooms that the attempt starts."""
    replica_set: ReplicaSetRoom | None = None
    """The handle of the replica set: the actor that brings weights to the replicas and says which serve. Ready replicas
    join it. None: the command has no replicas."""


class TrainingRun(ABC):
    """The part of a run that differs between commands: which rooms there are, and the training loop. `fixed`: the
    values that a resume must find unchanged."""

    core: str
    """The name, in messages, of the rooms that are built again together."""
    places: Mapping[str, list[ActorOptions]]
    """{room: Ray's options of each of its actors, with the actor's place}; set once the places are reserved."""
    lasting: frozenset[str] = frozenset()
    """The rooms that outlive attempts."""
    saving: tuple[str, ...] = ("trainer",)
    """The rooms with actors that write parts of checkpoints."""
    far: FarNodes | None = None
    """The nodes that write parts of checkpoints but do not see the run directory; None: there is no such node."""
    guard: type[RefusedSteps] = RefusedSteps
    """The class of the guard of an attempt, which stops the run when its training goes wrong
    (`trireme.train.guards`)."""

    def __init__(self, config: CommonConfig, facts: ModelFacts, plan: Plan, fixed: Mapping[str, object]) -> None:
        self.config = config
        self.facts = facts
        self.plan = plan
        self.fixed = fixed

    @property
    def decided(self) -> Mapping[str, object]:
        """{key: the value that this run decided} for keys with the value auto. A resume keeps these values."""
        return {}

    def enter(self, run: RunDir) -> None:  # noqa: B027  most commands need nothing here
        """Prepares the run before Ray starts. May change `config` to suit the state of the run directory `run`."""

    def start_lasting(self, run: RunDir, roster: Roster, ending: ExitStack) -> ElasticReplicas | None:
        """Starts the actors that outlive attempts. Returns the replicas, or None if the command has none. `roster` gets
        the health of actors that the supervisor does not watch; `ending` gets the calls that stop all started
        actors."""
        return None

    @abstractmethod
    def start(self, run: RunDir, ending: ExitStack) -> Core:
        """Starts the rooms of an attempt in parallel, and returns them before they are ready. `ending` gets the calls
        that stop them."""

    @abstractmethod
    def train(self, core: Core, attempt: Attempt, journal: Journal) -> None:
        """Runs the training loop of `attempt` with the rooms `core` to its last step. `journal` writes the metrics and
        other results of each step."""

    @abstractmethod
    def step_line(self, row: Mapping[str, object]) -> str:
        """Returns the text for the terminal about a step, from its metrics in `row`."""


def launch(training: TrainingRun, console: Console) -> Path | None:
    """Trains to the last step. If the services of Ray end meanwhile, starts Ray again and continues. Returns the run's
    directory; None if the run was at its last step already. Raises TriremeError, Stopped."""
    say = console.print
    roster = Roster(time.time)
    note_store = partial(roster.note, "store")
    url = training.config.run.url
    if url:
        remote = RemoteRun(url, training.config, say)
    else:
        remote = None
    with (
        RunDir.open(training.config, training.fixed) as opened,
        resume_hint(opened),
        remote.mirrored(opened, note_store) if remote else nullcontext(opened) as run,
    ):
        for note in run.start.notes:
            say(note)
        training.enter(run)
        config = training.config
        if run.start.step >= config.max_steps:
            say(f"{run.root} is at step {run.start.step} of {config.max_steps}: nothing to do")
            return None
        roster.attempt = run.start.attempt
        roster.step = run.start.step
        roster.listen(lambda _roster, incident: say(f"! {incident.part}: {incident.what}") if incident else None)
        with StatusWriter(run.root, roster), signals.as_stopped():
            restarts = Restarts(config.cluster.max_restarts, config.cluster.restart_window_s)
            newest = Newest(run)
            while True:
                try:
                    in_cluster(training, newest, roster, console)
                    return run.root
                except ServicesLost as lost:
                    roster.note(CLUSTER, str(lost))
                    restarts.take(CLUSTER, lost, died=True, step=roster.step, now=time.monotonic())
                newest.begin_next(training, say)


def in_cluster(training: TrainingRun, newest: Newest, roster: Roster, console: Console) -> None:
    """Starts Ray here or joins a cluster, and runs attempts there until the last step. Updates `newest` at each new
    attempt. Raises ServicesLost if Ray has to be started again for the next attempt."""
    config = training.config
    run = newest.run
    with joined(replace(training.plan, config=config, run_dir=run.root)) as training.plan:
        signals.arm()
        roster.start_s = training.plan.start_s
        if not newest.rebuilt:
            console.print(training.plan.render(whole=training.plan.verbose))
        with (
            metrics_sinks(config, run.head.run_id, run.root, roster, console.print) as sinks,
            supervised(training, run, roster, console) as (supervisor, place),
        ):
            if newest.rebuilt:
                start = run.start
                roster.note(CLUSTER, f"Ray was started again; attempt {start.attempt} begins at step {start.step}")

            def work(run: RunDir) -> None:
                with attempt(training, run, supervisor, place, console) as core:
                    train_and_save(training, run, core, supervisor, sinks, console)

            attempts(training, newest, supervisor, work, console.print)


@dataclass
class Newest:
    """Holds the newest attempt of a run. Each new attempt replaces the one before."""

    run: RunDir
    rebuilt: bool = False
    """True: it is not the first attempt of this command."""

    def begin_next(self, training: TrainingRun, say: Callable[[str], None]) -> None:
        """Begins the next attempt, from the newest checkpoint, and prints notes on it with `say`."""
        self.run = self.run.next_attempt(training.config, training.fixed)
        self.rebuilt = True
        for note in self.run.start.notes:
            say(note)


@contextmanager
def resume_hint(run: RunDir) -> Iterator[None]:
    """Context manager: if an error in the `with` block ends the run early, adds a note to the error. The note names the
    newest checkpoint, and the command that resumes from it."""
    try:
        yield
    except (TriremeError, signals.Stopped) as error:
        if not isinstance(error, BadInput | LockLost):
            checkpoints = run.store.checkpoints()
            if checkpoints:
                newest = f"The newest checkpoint is {checkpoints[-1].name}"
            else:
                newest = "There is no checkpoint yet"
            if isinstance(error, LimitReached):
                newest += ". As it is, the run would stop again: change what is said above first"
            error.add_note(f"{newest}; resume the run with:\n  {resume_command(run.root, trusted=True)}")
        raise


@contextmanager
def supervised(
    training: TrainingRun, run: RunDir, roster: Roster, console: Console
) -> Iterator[tuple[Supervisor, str]]:
    """Context manager: reserves places for all actors, examines the nodes of these places, starts the replicas, and
    runs a supervisor until the end of the `with` block. Yields the supervisor, and a text that says how many nodes
    there are. Raises BadInput if the nodes cannot work together."""
    with ExitStack() as ending:
        places = reserve_places(training.plan, StartProgress(console), console, ending)
        training.places = places.rooms
        elastic = training.start_lasting(run, roster, ending)
        config = training.plan.resolved(training.config)
        with Supervisor(config, roster, training.core, elastic) as supervisor:
            yield supervisor, places.text


def attempts(
    training: TrainingRun,
    newest: Newest,
    supervisor: Supervisor,
    work: Callable[[RunDir], None],
    say: Callable[[str], None],
) -> None:
    """Calls `work` with the run of the newest attempt. When a room fails, begins the next attempt and calls `work`
    again. Raises the room's error when `supervisor` allows no further attempt. Raises ServicesLost if Ray has to be
    started again first."""
    while True:
        try:
            work(newest.run)
            return
        except RoomFailed as failure:
            check_services()
            supervisor.may_rebuild(failure)
        newest.begin_next(training, say)


@contextmanager
def attempt(training: TrainingRun, run: RunDir, supervisor: Supervisor, place: str, console: Console) -> Iterator[Core]:
    """Context manager: starts the rooms of an attempt and makes them load the attempt's checkpoint. Yields the rooms
    when they can train. Stops them at the end of the `with` block, also after an error. Waits for all replicas if this
    is the first attempt of the command or the run is deterministic; otherwise waits for one replica. `place`: a text
    that says where the rooms are."""
    started = time.monotonic()
    log_dir = run.logs
    start = run.start
    progress = StartProgress(console, log_dir, supervisor.roster)
    supervisor.roster.attempt = start.attempt
    supervisor.roster.at_step(start.step)

    def tick(names: list[str], waited_s: float) -> None:
        supervisor.check()
        progress(names, waited_s)

    await_own_places(training, supervisor, console)
    if cluster_address(training.config):
        limit_s = training.config.timeouts.checkpoint_s
        rooms = nodes_of(training.places)
        training.far = check_writers(run, rooms, training.saving, training.plan.start_s, limit_s, tick)
        if training.far:
            console.print(training.far.text)
    with ExitStack() as ending:
        core = training.start(run, ending)
        ending.push(lambda _kind, error, _traceback: supervisor.detach(error))
        supervisor.expect(*core.rooms)
        await_ready([room.ready_refs() for room in core.rooms], training.plan, log_dir, tick)
        supervisor.attach(*core.rooms, replica_set=core.replica_set)
        text, notice = core.trainer.shown()
        console.print(text)
        if notice:
            supervisor.roster.note("trainer_0", notice)
        supervisor.await_replicas(log_dir, progress)
        unfinished: list[str] = []
        if start.checkpoint and start.manifest:
            if training.far:
                source = training.far.source(start.checkpoint, start.manifest)
            else:
                source = None
            unfinished = load(core, start.checkpoint, start.manifest, source, supervisor.roster, console)
        run.checkout()
        console.print(f"rooms on {place} ready after {time.monotonic() - started:.1f} s")
        supervisor.goes_on(*unfinished)
        yield core


def await_own_places(training: TrainingRun, supervisor: Supervisor, console: Console) -> None:
    """Waits until the cluster has a place for each actor that an attempt starts. If a node was lost, its actors have no
    place until another node joins. Raises RoomFailed after `timeouts.place_s`."""
    progress = StartProgress(console)

    def tick(names: list[str], waited_s: float) -> None:
        supervisor.check()
        if not waited_s:
            supervisor.roster.note(training.core, f"waits for {' and '.join(names)}; add a node to the cluster")
        progress(names, waited_s)

    rooms = {room: options for room, options in training.places.items() if room not in training.lasting}
    await_places(rooms, training.config.timeouts.place_s, tick)


def load(
    core: Core, checkpoint: Path, manifest: Manifest, source: CheckpointSource | None, roster: Roster, console: Console
) -> list[str]:
    """Makes all rooms load their parts of `checkpoint`. On nodes that cannot see its directory, rooms read their parts
    from `source`. Returns, for each room (except the trainer) that continues unfinished work, its message about this
    work."""
    unfinished = []
    message = core.trainer.load_state(checkpoint / "trainer", manifest.identities, source)
    if message:
        roster.note("trainer_0", message)
    for name, other in core.other_rooms.items():
        continued = other.load_state(checkpoint / name, source)
        if continued:
            console.print(f"{name}: {continued}")
            unfinished.append(continued)
    return unfinished


def train_and_save(
    training: TrainingRun,
    run: RunDir,
    core: Core,
    supervisor: Supervisor,
    sinks: Sequence[MetricsSink],
    console: Console,
) -> None:
    """Runs the training loop of an attempt, and takes a last checkpoint: at the last step, after a signal, or when the
    run reaches one of its limits. `sinks`: the trackers that get the metrics of each step."""
    config = training.config
    facts = training.facts
    say = console.print
    with ExitStack() as ending:
        trace.start(run.logs, "driver_0", config.trace.max_mb)
        ending.callback(trace.stop)
        note = partial(supervisor.roster.note, "commits")
        checkpoints = Checkpoints(
            config, run, training.fixed, training.decided, core.trainer, core.other_rooms, note, training.far
        )
        journal = ending.enter_context(closing(Journal(run.root, training.step_line, sys.stdout, sinks, checkpoints)))
        stop = ending.enter_context(signals.Stop(config.checkpoint.grace_s))
        ending.enter_context(checkpoints)
        surroundings = Attempt(
            config,
            number=run.start.attempt,
            start=run.start.step,
            learning_rate=learning_rate_schedule(config, facts.model_type, facts.hidden_size),
            checkpoints=checkpoints,
            guard=training.guard(config, say),
            stop=stop,
            roster=supervisor.roster,
            check_rooms=supervisor.check,
        )
        training.train(core, surroundings, journal)
