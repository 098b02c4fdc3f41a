"""Sessions for the agents that play a run's rollouts: a port on loopback, in the orchestrator's process.

    agent --HTTP--> app --> Gateway --> SessionRegistry --sample--> the rollout that the session belongs to

The rollout samples the answers, so that seeds, time limits and ages work as for any other rollout. Nothing is stored,
because an agent of a rollout does not outlive the orchestrator. The port has no route for rewards: the environment
returns them.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from math import inf

from service.answering import TurnAnswering
from service.app import make_app
from service.gateway import Gateway
from service.guard import Limits
from service.keys import ServiceKey, ServiceKeys
from service.places import Places
from service.ports import http_server
from service.requests import ServedModels
from service.sessions.registry import SessionRegistry
from service.sessions.session import SessionLimits
from trireme.config import Config
from trireme.core.agents import AgentAccess, PlayedSession
from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.sampler import OnProgress, Sample
from trireme.core.tokenizer import load_tokenizer
from trireme.core.types import SampledSequence, SampleRequest, WeightIdentity
from trireme.renderers import make_renderer

HOST = "127.0.0.1"
MANY = 1 << 30


class RolloutSampler:
    """A sampler that hands each request to the rollout that the request's session belongs to."""

    def __init__(self) -> None:
        self.rollouts: dict[str, Sample] = {}

    async def sample(self, request: SampleRequest, on_progress: OnProgress | None = None, /) -> SampledSequence:
        """Samples one sequence with the `Sample` function of the rollout that the request's session belongs to. Raises
        that function's TriremeError unchanged, RoomFailed for any other error of the function, and RoomFailed if the
        rollout has ended."""
        sample = self.rollouts.get(request.route_key)
        if sample is None:
            raise RoomFailed("the rollout of this session has ended")
        try:
            return await (sample(request, on_progress) if on_progress else sample(request))
        except TriremeError:
            raise
        except Exception as error:
            raise RoomFailed(f"{type(error).__name__}: {error}") from error


class LoopbackSessions:
    """Sessions for agents of rollouts, on a loopback port: implements `trireme.core.agents.AgentSessions`."""

    def __init__(self, config: Config, models: ServedModels) -> None:
        self._config = config
        self._models = models
        self._sampler = RolloutSampler()

    async def start(self) -> None:
        """Opens a free port on loopback. Raises RoomFailed if no port can be opened."""
        options = self._config.service
        defaults = self._config.inference.sampling
        tokenizer = load_tokenizer(self._config.tokenizer_name)
        renderer = make_renderer(**self._config.renderer.model_dump(), tokenizer=tokenizer)
        turns = TurnAnswering(self._sampler.sample, self._models, tokenizer, renderer, Places(MANY, MANY, MANY))
        limits = SessionLimits(options.sessions.turns, options.sessions.tokens, inf, inf, inf)
        sampling = replace(defaults.params(0, tuple(defaults.stop), self._models.max_len), seed=None, max_tokens=None)
        # The ledger evicts a group that has become too old, and with it its sessions.
        self._registry = SessionRegistry(turns, None, limits, sampling, time.monotonic)
        keys = ServiceKeys([ServiceKey("admin", secrets.token_urlsafe())])  # which only signs
        self._gateway = Gateway(turns, self._registry, keys, _no_floor, MANY)
        bounds = replace(Limits.of(options), per_minute=None)
        self._server = http_server(make_app(self._gateway, keys, bounds, owners=False), HOST, 0)
        await self._server.open()

    async def open(self, sample: Sample) -> tuple[str, AgentAccess]:
        """Opens a session for one rollout; `sample` samples its answers. Returns the session's name, and the URLs and
        the key for the agent."""
        opened = await self._gateway.open()
        self._sampler.rollouts[opened.name] = sample
        base = f"{self._server.address_at(HOST)}/sessions/{opened.name}"
        return opened.name, AgentAccess(f"{base}/v1", base, opened.key)

    async def close(self, session: str) -> PlayedSession:
        """Ends a session and forgets it. Returns its turns and metrics."""
        await self._registry.end(session, "its rollout has ended")
        self._sampler.rollouts.pop(session, None)
        export = self._registry.export(session)
        self._registry.forget(session)
        return PlayedSession(export.turns, export.metrics)

    async def stop(self) -> None:
        """Closes the port, and cancels the turns that are being sampled."""
        await self._gateway.close("the run has ended")
        await self._server.close()


async def _no_floor() -> WeightIdentity:
    """Returns version 0 as the floor of every session. Every version is at least 0, so the service accepts answers of
    all versions. The orchestrator checks the versions instead, because it knows the floor of the rollout's group."""
    return WeightIdentity(0, 0, "")
