"""The device mesh: which processes train together, on which device, and with which part of the batch and the model.
Only this module counts ranks.

Its dimensions are the fields of `trireme.config.trainer.MeshSizes`. A dimension of size 1 is left out, so it needs no
process groups.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trireme.config import CommonConfig
from trireme.core.errors import BadInput
from trireme.plan.memory import gpu_limit, gpu_room, host_room
from trireme.process.machine import this_machine

Value = TypeVar("Value")


SHARD = "shard"


class Mesh:
    """This process's place among all trainer processes, and its communication with them. Constructing it joins the
    process group: collective."""

    def __init__(self, config: CommonConfig, rank: int, store: dist.Store, device: torch.device) -> None:
        whole = config.trainer.mesh
        self.rank = rank
        self.size = whole.processes
        self.device = device
        self.is_first = rank == 0  # reads models, publishes weights and has the results of collectives
        backend = "nccl" if device.type == "cuda" else "gloo"
        # While ranks start, one may read the model for long; `limit_collectives` ends that.
        timeout = timedelta(seconds=max(config.timeouts.start_s, config.timeouts.collective_s))
        dist.init_process_group(backend, store=store, rank=rank, world_size=self.size, timeout=timeout)
        sizes = {name: n for name, n in whole._asdict().items() if n > 1 or name == SHARD}
        self.fsdp: DeviceMesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.dp_size = whole.data_parallel
        self.dp_rank = rank // (self.size // self.dp_size)

    def limit_collectives(self, timeout_s: float) -> None:
        """Sets the time limit of training's collectives: from now on a collective fails on a rank that waits
        `timeout_s` seconds for other ranks."""
        for group in {dist.group.WORLD, *self.fsdp.get_all_groups()}:
            # torch has no public way to change a limit; the groups of mesh dimensions else keep torch's own, 10 minutes
            # for NCCL and 30 for gloo, whatever the whole group was given.
            distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrites `tensor` in place with the first rank's values. Collective."""
        dist.broadcast(tensor, src=0)

    def broadcast_object(self, value: Value) -> Value:
        """Returns the first rank's `value`, which must be picklable, on all ranks. Collective."""
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def agree(self, refusal: BadInput | None) -> None:
        """Raises a BadInput on all ranks if any rank passes a `refusal`. If several ranks do, all raise the refusal of
        the lowest of these ranks. Collective."""
        if self.size == 1:
            if refusal:
                raise refusal
            return
        first = torch.tensor(self.rank if refusal else self.size, device=self.device)
        dist.all_reduce(first, dist.ReduceOp.MIN)
        if int(first) == self.size:
            return
        texts = [str(refusal)]
        dist.broadcast_object_list(texts, src=int(first), device=self.device)
        raise BadInput(texts[0])

    def sum_over_ranks(self, values: Tensor) -> None:
        """Replaces `values`, in place, by the sum over all ranks; int64 wraps around. Collective."""
        dist.all_reduce(values)

    def smallest_room(self, config: CommonConfig, replica_share: float) -> int:
        """Returns how many bytes of memory each shard may fill (`trireme.plan.memory`). This is the minimum over all
        ranks, so that all ranks make the same decisions. `replica_share`: the part of this rank's GPU, 0 to 1, that a
        replica takes. Collective."""
        if self.device.type == "cuda":
            free, memory = torch.cuda.mem_get_info(self.device)
            room = gpu_room(free, memory, replica_share)
        else:
            room = host_room(this_machine().memory_bytes, config)
        least = torch.tensor(room, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def leave_room(self, replica_share: float) -> None:
        """Keeps PyTorch from holding more of this rank's GPU than a replica leaves that takes `replica_share` of it, 0
        to 1. vLLM starts only where its whole share is free, and a lost replica has a successor while the trainer
        holds memory."""
        if self.device.type == "cuda" and replica_share:
            memory = torch.cuda.mem_get_info(self.device)[1]
            torch.cuda.set_per_process_memory_fraction(gpu_limit(memory, replica_share), self.device)

    def sum_over_shards(self, value: Tensor) -> float:
        """Returns the sum of `value` over the ranks that together hold one copy of the model. Collective."""
        value = value.to(self.device)
        dist.all_reduce(value, group=self.fsdp.get_group(SHARD))
        return float(value)

    def new_cpu_group(self, timeout_s: float) -> dist.ProcessGroup:
        """Returns a new gloo process group of all ranks, separate from training's group; its collectives fail after
        `timeout_s` seconds. Collective."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
