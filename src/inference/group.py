"""The inference room as the launcher holds it: its replicas as Ray actors, and how others sample from them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from inference.replica import Replica
from inference.router import Router
from trireme.config import Config
from trireme.errors import RoomFailed, TriremeError
from trireme.protocols import ReplicaLoad, Sampler
from trireme.types import SampledSequence, SampleRequest, WeightIdentity
from trireme.waits import get_all, get_async
from trireme.weights import PublishedWeights, UpdateReport

MAX_CALLS = 1000
GRACE_S = 30.0
STOP_S = 10.0


@dataclass
class RayReplica:
    """The router's client of one replica actor. The replica itself keeps `timeouts.update_s`, and says which step
    was late; this side waits a little longer, for a replica that can not answer at all."""

    handle: Any
    name: str
    log: Path | None
    step_s: float
    update_s: float

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, SampledSequence | TriremeError]]:
        stream = self.handle.sample.remote(requests)
        who = f"{self.name}, sampling"
        while True:
            try:
                reference = await get_async(anext(stream), who=who, timeout_s=self.step_s, log=self.log)
            except StopAsyncIteration:
                return
            for answer in await get_async(reference, who=who, timeout_s=self.step_s, log=self.log):
                yield answer

    async def update_weights(self, published: PublishedWeights) -> UpdateReport:
        reference = self.handle.update_weights.remote(published)
        who = f"{self.name}, taking version {published.identity.version}"
        return await get_async(reference, who=who, timeout_s=self.update_s + GRACE_S, log=self.log)

    async def adopt(self, identity: WeightIdentity) -> None:
        reference = self.handle.adopt.remote(identity)
        await get_async(reference, who=f"{self.name}, naming its weights", timeout_s=self.update_s, log=self.log)

    async def load(self) -> ReplicaLoad:
        who = f"{self.name}, asked for its load"
        return await get_async(self.handle.load.remote(), who=who, timeout_s=self.update_s, log=self.log)

    async def abort(self, request_ids: Sequence[str]) -> None:
        reference = self.handle.abort.remote(list(request_ids))
        await get_async(reference, who=f"{self.name}, aborting", timeout_s=self.update_s, log=self.log)


def make_router(clients: dict[int, RayReplica], fixed: bool, max_updating: int | None) -> Sampler:
    return Router(clients, fixed=fixed, max_updating=max_updating)


class InferenceGroup:
    """Handle of all replicas: `replicas` {number: actor handle}."""

    def __init__(self, cfg: Config, replicas: dict[int, Any], log_dir: Path | None) -> None:
        self.cfg = cfg
        self.replicas = replicas
        self.log_dir = log_dir
        self._ready = {index: handle.start.remote() for index, handle in replicas.items()}

    @classmethod
    def start(cls, cfg: Config, options_N: list[dict[str, Any]], log_dir: Path | None) -> InferenceGroup:
        """Creates one replica actor per entry of `options_N` (Ray's actor options) and returns at once."""
        actor = ray.remote(Replica)
        replicas = {
            index: actor.options(max_concurrency=MAX_CALLS, **options).remote(cfg, index, log_dir)
            for index, options in enumerate(options_N)
        }
        return cls(cfg, replicas, log_dir)

    def ready_refs(self) -> tuple[list[Any], list[str]]:
        """References that resolve (to `Health`) when the replicas can take weights, and the replicas' names."""
        return list(self._ready.values()), [self._name(index) for index in self._ready]

    def router_factory(self) -> Callable[[], Sampler]:
        """Makes the sampler of the replicas that sample for training, in the process that will use it; picklable."""
        return self._factory(self._indices[: len(self.replicas) - self.cfg.eval.replicas])

    def reserved_factory(self) -> Callable[[], Sampler] | None:
        """The same of those that only evaluate; None when there are none."""
        reserved = self.cfg.eval.replicas
        return self._factory(self._indices[-reserved:]) if reserved else None

    @property
    def _indices(self) -> list[int]:
        return sorted(self.replicas)

    def _factory(self, indices: Sequence[int]) -> Callable[[], Sampler]:
        timeouts = self.cfg.timeouts
        clients = {
            i: RayReplica(self.replicas[i], self._name(i), self._log(i), timeouts.step_s, timeouts.update_s)
            for i in indices
        }
        return partial(make_router, clients, self.cfg.deterministic, self.cfg.inference.max_updating)

    def stop(self) -> None:
        """Ends all replicas and their engine processes, the unwilling ones by force."""
        stopping = [handle.stop.remote() for handle in self.replicas.values()]
        names = [self._name(index) for index in self.replicas]
        with suppress(RoomFailed):  # dead or hanging ones are killed below, and their engine processes with them
            get_all(stopping, who=names, timeout_s=STOP_S, log=self.log_dir)
        for handle in self.replicas.values():
            ray.kill(handle)

    def _name(self, index: int) -> str:
        return f"inference replica {index}"

    def _log(self, index: int) -> Path | None:
        return self.log_dir / f"inference_{index}.log" if self.log_dir else None
