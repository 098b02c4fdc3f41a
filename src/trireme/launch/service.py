"""Starts the service of a run, and of the command `inference`."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from inference.handle import InferenceHandle
from inference.replica_set.handle import ReplicaSetHandle
from orchestrator.env import AGENT
from service.handle import ServiceHandle
from service.keys import ServiceKey, generate, read
from service.requests import ServedModels
from trireme.config import Config
from trireme.config.model_facts import ModelFacts
from trireme.core.agents import AgentSessions
from trireme.core.errors import BadInput
from trireme.core.refusals import Refusal
from trireme.core.types import WeightIdentity
from trireme.launch.common import StartProgress
from trireme.launch.starting import check_replicas, reserve_places
from trireme.plan.whole import Plan
from trireme.process import signals
from trireme.process.ray_cluster import PlacePool, Progress
from trireme.supervision.roster import Roster
from trireme.supervision.status import ScaleRequests
from trireme.supervision.supervisor import ElasticReplicas, Supervisor

KEYS = "service.keys"
SESSIONS = "sessions"
"""Name of the directory in the run directory that stores the service's sessions."""
POLICY = "policy"
TICK_S = 0.2


def check_port(config: Config) -> None:
    """Raises BadInput if the service cannot listen at `service.host` and `service.port`. (Another program may still
    take the port before the service does.)"""
    options = config.service
    if ":" in options.host:
        family = socket.AF_INET6
    else:
        family = socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((options.host, options.port or 0))
        except OSError as error:
            raise Refusal(
                f"service.host = {options.host} with service.port = {options.port}: {error}",
                "an address of this machine, and a port that is free",
                "set --service.port to another one, or to 0 for any that is free",
            ) from None


def keys_of(config: Config, directory: Path, say: Callable[[str], None], prefix: str = "tr") -> list[ServiceKey]:
    """Returns the keys of the service. Reads them from the file `service.keys` if it is set, else from a file in
    `directory`. If the file in `directory` is missing, makes it with new keys that begin with `prefix`; `say` then
    prints its path, not the keys, because others may read logs. Raises BadInput."""
    if config.service.keys:
        return read(Path(config.service.keys).expanduser())
    file = directory / KEYS
    if file.exists():
        return read(file)
    keys = generate(file, prefix)  # before it is named: whoever reads the line reads the file
    say(f"the service's new keys, one for clients and one for administrators, are in {file}, which only you can read")
    return keys


def sessions_factory(config: Config, facts: ModelFacts | None) -> Callable[[], AgentSessions] | None:
    """Returns a function, which can be pickled, that makes the service for the sessions of a run's agents; None if no
    environment is an agent. Raises BadInput if the longest sequence of the model is not known."""
    if not any(env.id.startswith(AGENT) for env in (*config.env, *config.eval_envs)):
        return None
    assert facts is not None, "what starts actors has read the model's config.json"
    from service.agents import LoopbackSessions  # brings FastAPI, which other runs need not import

    return partial(LoopbackSessions, config, served_models(config, facts, (POLICY,)))


def served_models(config: Config, facts: ModelFacts, names: tuple[str, ...]) -> ServedModels:
    """Returns what servers need to know of the model: `names` that clients may use, longest sequence, size of the
    vocabulary. Raises BadInput if the longest sequence is not known."""
    max_len = config.seq_limit(facts)
    if max_len is None:
        raise BadInput("the longest sequence of the model is not known: set --model.max-seq-len")
    return ServedModels(names, max_len, facts.vocab_size)


def serve(
    config: Config,
    plan: Plan,
    names: tuple[str, ...],
    keys: list[ServiceKey],
    identity: WeightIdentity,
    directory: Path,
    console: Console,
    say: Callable[[str], None],
) -> None:
    """Starts replicas with the weights on disk, which get the name `identity`, and serves the model under `names` until
    a signal comes. Replaces lost replicas. Ray must run. Logs and sessions are in `directory`. Raises Stopped,
    TriremeError."""
    assert plan.facts is not None, "what starts actors has read the model's config.json"
    config = plan.resolved(config)
    progress = StartProgress(console, directory)
    roster = Roster(time.time)
    roster.listen(lambda _roster, incident: say(f"! {incident.part}: {incident.what}") if incident else None)
    with ExitStack() as ending:
        reserved = reserve_places(plan, progress, console, ending).rooms
        inference = InferenceHandle.start(config, reserved["inference"], directory)
        ending.callback(inference.stop)
        service = ServiceHandle.start(
            config,
            inference.chat_router_factory(),
            served_models(config, plan.facts, names),
            keys,
            False,
            directory.absolute() / SESSIONS,
            directory,
            say,
            roster,
        )
        ending.callback(service.stop)
        places = PlacePool(plan.added_replica_options, ending)
        check_number = partial(check_replicas, plan)
        elastic = ElasticReplicas(config, inference, ScaleRequests(directory), places, check_number)
        replicas = ReplicaSetHandle(config, directory, adopt=identity)
        ending.callback(replicas.stop)
        replicas.followers.append(service.follow)
        service.follow(replicas.source)
        with Supervisor(config, roster, "service", elastic) as supervisor:
            supervisor.expect(replicas)
            supervisor.attach(replicas, replica_set=replicas)
            supervisor.await_replicas(directory, _ticking(supervisor, progress))
            say("all replicas serve; Ctrl-C ends this")
            _watch(supervisor, service)


def _watch(supervisor: Supervisor, service: ServiceHandle) -> None:
    """Watches replicas and service, and never returns: raises Stopped after a signal, or the error that ends the
    service."""
    while True:
        signals.check()
        supervisor.check()
        service.check()
        time.sleep(TICK_S)


def _ticking(supervisor: Supervisor, progress: Progress) -> Progress:
    def tick(names: list[str], waited_s: float) -> None:
        supervisor.check()
        progress(names, waited_s)

    return tick
