"""Shared by the benchmarks of publishing: shards and replicas that also do each part of the work bare.

Bare parts run in the same processes, groups and on the same cores as the measured parts. Each returns when it began and
ended, by the machine's monotonic clock. The classes have the names of the classes that they replace, by which `_common`
knows their processes.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import inference.actor
import trainer.actor

if TYPE_CHECKING:
    from trainer.shard import Shard

HOST = "127.0.0.1"
LIMIT_S = 120.0
Took = tuple[float, float]


class ShardActor(trainer.actor.ShardActor):
    """A shard of the trainer with `bare_gather` and `bare_cast`, and the root of a bare broadcast."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from trainer.shard import Shard

        for part in (bare_gather, bare_cast, bare_root):
            setattr(Shard, part.__name__, part)


@torch.no_grad()
def bare_gather(shard: Shard) -> Took:
    """Gathers the model unit by unit. Collective."""
    from trainer.model import fsdp_units

    started = time.monotonic()
    for unit in fsdp_units(shard._model):
        unit.unshard()
        unit.reshard()
    return started, time.monotonic()


@torch.no_grad()
def bare_cast(shard: Shard) -> Took:
    """Casts this rank's part of the master weights into new memory."""
    started = time.monotonic()
    for parameter in shard._model.parameters():
        parameter.to_local().to(shard._sharding.dtype, copy=True)
    return started, time.monotonic()


def bare_root(shard: Shard, port: int, size: int, nbytes: int) -> Took:
    """Sends n bytes to the others of the group at `port`."""
    return _broadcast(shard, port, 0, size, nbytes)


def bare_member(worker: Any, port: int, rank: int, size: int, nbytes: int) -> Took:
    """Receives them; a method of vLLM's worker."""
    return _broadcast(worker, port, rank, size, nbytes)


def _broadcast(owner: Any, port: int, rank: int, size: int, nbytes: int) -> Took:
    """Takes part in a broadcast over gloo. The group and the buffer are made once."""
    from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore

    if not hasattr(owner, "bare_group"):
        limit = timedelta(seconds=LIMIT_S)
        store = TCPStore(HOST, port, size, rank == 0, limit)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # its stub names another class
        options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = limit
        owner.bare_group = ProcessGroupGloo(store, rank, size, options)
        owner.bare_store = store
        owner.bare_buffer = torch.zeros(nbytes, dtype=torch.uint8)
    broadcast_options = BroadcastOptions()
    broadcast_options.rootRank = 0
    broadcast_options.rootTensor = 0
    owner.bare_group.barrier().wait()
    started = time.monotonic()
    owner.bare_group.broadcast([owner.bare_buffer], broadcast_options).wait()
    return started, time.monotonic()


class ReplicaActor(inference.actor.ReplicaActor):
    """A replica with an engine that has `bare_reload` and `bare_member`."""

    async def start(self) -> None:
        from inference.worker import WorkerExtension

        for part in (bare_reload, bare_member):
            setattr(WorkerExtension, part.__name__, part)  # the engine is forked from here
        await super().start()

    async def bare(self, part: str, *args: object) -> Took:
        """Does a part in rank 0 of the engine, and nothing in others: there are none."""
        (took,) = await self._in_engine(part, args)
        return took


def bare_reload(worker: Any, file: str) -> Took:
    """Loads the tensors of a file by vLLM's own layerwise reload, from bytes that are mapped and in memory."""
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

    if not hasattr(worker, "bare_tensors"):
        worker.bare_tensors = list(load_file(Path(file)).items())
    for _, tensor in worker.bare_tensors:
        tensor.view(torch.int16).sum()
    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config):
        started = time.monotonic()
        initialize_layerwise_reload(model)
        model.load_weights(iter(worker.bare_tensors))
        finalize_layerwise_reload(model, worker.vllm_config.model_config)
        return started, time.monotonic()
