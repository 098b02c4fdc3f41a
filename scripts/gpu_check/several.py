"""Checks that need two devices or more: NCCL between processes, shards that agree with one, tensor-parallel ranks."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from gpu_check.checks import Check, Context, Failed, Figures
from gpu_check.engine import EAGER, SYSTEM
from gpu_check.rooms import open_rooms, take_turns, update_in_flight
from gpu_check.shapes import make_config, make_model

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from trainer.batching import ShardOutput

Result = TypeVar("Result")
RANKS = 2
BYTES_ON_GPU = 2**28
BYTES_ON_CPU = 2**20
BROADCAST_S = 60.0
LOST_S = 5.0


def _collective(context: Context) -> Figures:
    """Sums a tensor over two processes, by NCCL on GPUs and gloo on CPUs."""
    seconds = _on_ranks(context, _sum_on_rank)
    moved = BYTES_ON_GPU if context.on_gpu else BYTES_ON_CPU
    return {"all-reduce, GB/s": moved / max(seconds) / 1e9, "backend": "nccl" if context.on_gpu else "gloo"}


def _sum_on_rank(rank: int, port: int, device: str, _: str) -> float:
    """Returns the seconds of a sum over all ranks. Raises Failed when it is wrong."""
    import torch
    import torch.distributed as dist

    if device == "gpu":
        gpu = torch.device("cuda", 0)
    else:
        gpu = torch.device("cpu")
    dist.init_process_group("nccl" if device == "gpu" else "gloo", store=_store(port), rank=rank, world_size=RANKS)
    values = torch.full(((BYTES_ON_GPU if device == "gpu" else BYTES_ON_CPU) // 4,), float(rank + 1), device=gpu)
    dist.all_reduce(values)  # makes the connections
    wait = torch.cuda.synchronize if device == "gpu" else lambda: None
    wait()
    started = time.perf_counter()
    dist.all_reduce(values)
    wait()
    seconds = time.perf_counter() - started
    expected = RANKS * sum(range(1, RANKS + 1))
    if not bool((values == expected).all()):
        raise Failed(f"a sum over {RANKS} ranks is {float(values[0])}, expected {expected}")
    dist.destroy_process_group()
    return seconds


def _shards(context: Context) -> Figures:
    """Computes a step by two shards and by one: log-probabilities, and the gradient's norm."""
    from gpu_check.trainer import make_step, parity_batch
    from trainer.batching import scatter_outputs

    model = make_model(context.directory / "of shards", "small", context.device)
    alone = make_step(model, context.device, model__dtype="float32", trainer__packing="rows")
    outputs = _on_ranks(context, _step_on_rank, model)
    difference = np.abs(scatter_outputs(parity_batch(), [output for output, _ in outputs]) - alone.logprobs).max()
    norms = [abs(norm / alone.norm - 1) for _, norm in outputs]
    if not (difference < 1e-4 and max(norms) < 1e-4):
        raise Failed(
            f"two shards differ from one by {difference:.3g} nats, and {max(norms):.3g} of the gradient's norm"
        )
    return {"largest difference of logprobs": float(difference), "norm, relative": max(norms)}


def _step_on_rank(rank: int, port: int, device: str, model: str) -> tuple[ShardOutput, float]:
    """Returns what one of two shards computes of the batch, and the norm of the whole gradient."""
    from gpu_check.trainer import parity_batch
    from trainer.shard import Shard
    from trireme.core.types import AdamParams
    from trireme.transports.packing import Packer

    config = make_config(
        model, device, trainer__shards=RANKS, model__dtype="float32", trainer__packing="rows",
        trainer__micro_batch_tokens=40,
    )  # fmt: skip
    shard = Shard(config, rank, _store(port), Packer(lambda _, bucket: bucket.copy(), rank, RANKS))
    output = shard.forward_backward(parity_batch(), "importance_sampling", {}, None)
    return output, shard.optim_step(AdamParams(learning_rate=1e-3), 50.0).metrics["grad_norm"]


def _on_ranks(context: Context, work: Callable[..., Result], *args: str) -> list[Result]:
    """Returns the results of `work` in two processes; each sees one GPU. Raises Failed for a process that raises or is
    late, by its rank."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=context.left_s), wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    ends = []
    processes = []
    for rank in range(RANKS):
        parent_end, child_end = spawn.Pipe(duplex=False)
        rank_args = (child_end, rank, store.port, context.device, work, args or ("",))
        processes.append(spawn.Process(target=_run_rank, args=rank_args, daemon=True))
        processes[-1].start()
        ends.append(parent_end)
    results = []
    for rank, end in enumerate(ends):
        if not end.poll(context.left_s):
            raise Failed(f"rank {rank} did not answer for {context.left_s:.0f} s")
        outcome = end.recv()
        if isinstance(outcome, str):
            raise Failed(f"rank {rank}: {outcome}")
        results.append(outcome[0])
    for process in processes:
        process.join(10)
    return results


def _run_rank(
    end: Connection, rank: int, port: int, device: str, work: Callable[..., object], args: tuple[str, ...]
) -> None:
    if device == "gpu":
        from trireme.process.machine import VISIBLE

        visible = os.environ.get(VISIBLE, ",".join(map(str, range(RANKS)))).split(",")
        os.environ[VISIBLE] = visible[rank]
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        end.send((work(rank, port, device, *args),))
    except Exception as error:
        end.send(f"{type(error).__name__}: {error}")


def _store(port: int) -> TCPStore:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))


def _tensor_parallel(context: Context) -> Figures:
    """Has a replica of two ranks take weights in flight; the trainer has a GPU of its own."""
    shape = "0.6b" if context.on_gpu else "small"
    flags = ["--inference.tensor-parallel", str(RANKS), *([EAGER, "true"] if context.on_gpu else [])]
    with open_rooms(context, shape, *flags) as (rooms, start_s):
        return {"start, s": start_s, **update_in_flight(rooms, context, 8)}


def _turns(context: Context) -> Figures:
    """Has a replica of two ranks and two shards take turns on the same devices."""
    shape, turns = ("0.6b", 10) if context.on_gpu else ("small", 3)
    flags = ["--placement", "colocated", "--trainer.shards", str(RANKS), "--inference.tensor-parallel", str(RANKS)]
    with open_rooms(context, shape, *flags) as (rooms, start_s):
        return {"start, s": start_s, **take_turns(rooms, context, turns)}


def _broadcast(context: Context) -> Figures:
    """Sends bytes by the groups in which weights are broadcast; then the receiver goes away."""
    kind = "nccl" if context.on_gpu else "gloo"
    sent_s, noticed_s = _on_ranks(context, _broadcast_on_rank, kind)[0]
    moved = BYTES_ON_GPU if context.on_gpu else BYTES_ON_CPU
    return {"broadcast, GB/s": moved / sent_s / 1e9, "a lost receiver is noticed after, s": noticed_s, "by": kind}


def _broadcast_on_rank(rank: int, port: int, device: str, kind: str) -> tuple[float, float]:
    """Returns the seconds of a broadcast, and of one without a receiver. Raises Failed when bytes are wrong, or when
    the broadcast without a receiver does not fail."""
    import torch

    from trireme.core.errors import RoomFailed
    from trireme.transports.collective import join_group

    if device == "gpu":
        gpu = torch.device("cuda", 0)
    else:
        gpu = torch.device("cpu")
    size = BYTES_ON_GPU if device == "gpu" else BYTES_ON_CPU
    expected = torch.arange(size, dtype=torch.int64, device=gpu).to(torch.uint8)
    group = join_group(kind, _store(port), "check", rank, RANKS, BROADCAST_S, "127.0.0.1")
    if rank == 0:
        buffer = expected.clone()
    else:
        buffer = torch.zeros_like(expected)
    group.broadcast(buffer, BROADCAST_S)  # makes the connections
    started = time.perf_counter()
    group.broadcast(buffer, BROADCAST_S)
    seconds = time.perf_counter() - started
    if not torch.equal(buffer, expected):
        raise Failed(f"rank {rank} has other bytes after a broadcast by {kind}")
    if rank:
        group.finish(BROADCAST_S)
        group.abort()
        return seconds, 0.0
    started = time.perf_counter()
    try:
        group.broadcast(buffer, LOST_S)
    except RoomFailed:
        group.abort()
        return seconds, time.perf_counter() - started
    raise Failed(f"a broadcast by {kind} to a receiver that has gone did not fail")


CHECKS: tuple[Check, ...] = (
    Check("collectives", _collective, ("torch",), gpus=RANKS),
    Check("broadcasts of weights", _broadcast, SYSTEM[2:], gpus=RANKS),
    Check("two shards agree with one", _shards, SYSTEM[2:], gpus=RANKS),
    Check("shards and ranks in turns", _turns, SYSTEM, gpus=RANKS),
    Check("a tensor-parallel replica", _tensor_parallel, SYSTEM, gpus=RANKS + 1),
)
