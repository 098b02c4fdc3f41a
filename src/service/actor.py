"""The service as a Ray actor: a process of its own, which shares nothing with the training loop.

Its sampler sends requests to the replica set of the run's present attempt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from service.answering import TurnAnswering
from service.app import make_app
from service.chats import bounded
from service.console.run_reader import RunReader
from service.gateway import Gateway
from service.guard import Limits
from service.keys import ServiceKey, ServiceKeys
from service.places import Places
from service.ports import http_server
from service.requests import ServedModels
from service.sessions.records import FORMAT
from service.sessions.registry import SessionRegistry
from service.sessions.run_history import AttemptStart, RunHistory
from service.sessions.session import SessionLimits
from service.store import Store
from trireme.config import Config
from trireme.core.actors import remote_method
from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.sampler import Heartbeat, Sampler
from trireme.core.tokenizer import load_tokenizer, one_text_at_a_time
from trireme.core.types import WeightIdentity
from trireme.process.collector import spare_collector
from trireme.process.environ import redirect_output
from trireme.renderers import make_renderer

LOOK_S = 5.0
log = logging.getLogger(__name__)


class ServiceActor:
    """An async Ray actor that runs the service. Call `start` first, then `follow` with each attempt's replica set."""

    def __init__(
        self,
        config: Config,
        sampler_factory: Callable[[], Sampler],
        models: ServedModels,
        keys: list[ServiceKey],
        trains: bool,
        sessions: Path,
        log_dir: Path | None,
        starts: Sequence[AttemptStart] = (),
    ) -> None:
        """`trains`: True if the replicas get weights from a trainer; ages of sessions are bounded only then.
        `sessions`: the directory of the session store, directly below the run directory (the console shows that run).
        `starts`: for each attempt of the run so far, its number and the version that it began with."""
        redirect_output(log_dir, "service_0")
        self._config = config
        self._sampler_factory = sampler_factory
        self._models = models
        self._keys = keys
        self._trains = trains
        self._directory = sessions
        self._history = RunHistory(starts)
        self._tasks: list[asyncio.Task[object]] = []
        self._started = asyncio.Event()

    @remote_method
    async def start(self) -> str:
        """Restores the stored sessions and opens the port. Returns the URL of the service. Raises RoomFailed if the
        port is taken, and StorageFailed if the stored sessions cannot be read."""
        options = self._config.service
        renderer_config = self._config.renderer
        self._sampler = self._sampler_factory()
        one_text_at_a_time()
        tokenizer = load_tokenizer(self._config.tokenizer_name)
        renderer = make_renderer(**renderer_config.model_dump(), tokenizer=tokenizer)
        self._places = Places(1, options.max_waiting, options.wait_s)
        sample = bounded(self._sampler.sample, self._config.inference.answer_s)
        turns = TurnAnswering(sample, self._models, tokenizer, renderer, self._places)
        keys = ServiceKeys(self._keys)
        self._gateway = await asyncio.to_thread(self._make_gateway, turns, keys)
        run = RunReader(self._directory.parent, lambda: tokenizer, lambda: self._gateway.registry.book)
        app = make_app(self._gateway, keys, Limits.of(options), run)
        self._server = http_server(app, options.host, options.port or 0)
        await self._server.open()
        address = self._server.address_at(options.host)
        beside = (self._fit_places(), self._gateway.keep_swept())
        self._tasks = [self._server.serving, *(asyncio.create_task(coroutine) for coroutine in beside)]
        self._started.set()
        spare_collector()  # requests and sessions are many objects too
        return address

    def _make_gateway(self, turns: TurnAnswering, keys: ServiceKeys) -> Gateway:
        """Opens the store of sessions, and returns a gateway that continues the sessions in it. Raises StorageFailed if
        the store cannot be opened or read."""
        options = self._config.service.sessions
        defaults = self._config.inference.sampling
        sampling = replace(defaults.params(0, tuple(defaults.stop), self._models.max_len), seed=None)
        if not self._trains:  # the command `inference`: max_tokens is the longest answer that a run trains on
            sampling = replace(sampling, max_tokens=None)
        registry = SessionRegistry(
            turns,
            Store(self._directory, FORMAT),
            SessionLimits(options.turns, options.tokens, options.seconds, options.idle_s, options.kept_s),
            sampling,
            time.time,  # it continues over a restart
            self._config.orchestrator.max_steps_off_policy if self._trains else None,
            self._history,
        )
        restored = registry.restore()
        if restored:
            log.info("%d sessions are continued from %s", restored, self._directory)
        return Gateway(turns, registry, keys, self._floor, options.max_open)

    async def _floor(self) -> WeightIdentity:
        """Returns the oldest weights that any replica has. Raises RoomFailed if no replica has weights, or if no
        replica reports within LOOK_S seconds which weights it has."""
        try:
            async with asyncio.timeout(LOOK_S):
                stats = await self._sampler.stats()
        except TimeoutError:  # it waits for the first replica that serves
            raise RoomFailed(f"no replica said within {LOOK_S:g} s which weights it has: none serves yet") from None
        weights = [replica.weights for replica in stats.values() if replica.weights is not None]
        if not weights:
            raise RoomFailed("no replica has weights yet")
        return min(weights, key=lambda identity: (identity.version, identity.attempt))

    async def _fit_places(self) -> None:
        """Every LOOK_S seconds, sets how many answers to clients may be sampled at the same time: the fraction
        `service.share` of the sequences that all replicas together can decode at the same time."""
        while True:
            with suppress(TriremeError):
                stats = await self._sampler.stats()
                decoded = sum(replica.places or 0 for replica in stats.values())
                self._places.resize(max(1, int(self._config.service.share * decoded)))
            await asyncio.sleep(LOOK_S)

    @remote_method
    async def follow(self, source: Any) -> None:
        """Sends all requests from now on to the replica set `source`, which the run's newest attempt has started."""
        await self._started.wait()
        self._sampler.follow(source)

    @remote_method
    async def attempt_begins(self, attempt: int, version: int) -> None:
        """Records that attempt number `attempt` of the run begins with the weights `version`. Versions above
        `version` that earlier attempts made are thereby given up. Ends each session that has such a version as its
        floor or in its tokens."""
        await self._started.wait()
        await self._gateway.registry.attempt_begins(attempt, version)

    @remote_method
    async def heartbeat(self) -> Heartbeat:
        """Returns this actor's process id and node, without waiting. Raises RoomFailed if its HTTP server has ended."""
        if not self._tasks or self._tasks[0].done():
            raise RoomFailed("the server has ended")
        return Heartbeat((os.getpid(),), ray.get_runtime_context().get_node_id())

    @remote_method
    async def stop(self) -> None:
        """Closes the port; answers in flight end with an error that says why."""
        for task in self._tasks[1:]:
            task.cancel()
        if self._tasks:
            await self._gateway.close("the run has ended, and its service with it")
            await self._server.close()
