"""The device mesh: the processes that train together, the device and the part of each. Only this module counts ranks.

Its dimensions are those of `trireme.config.trainer.MeshSizes`. One of size 1 is left out, so it needs no process
groups.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trireme.config import CommonConfig
from trireme.core.errors import BadInput
from trireme.plan.memory import gpu_room, host_room
from trireme.process.machine import this_machine

SHARD = "shard"


class Mesh:
    """The place of this process among all trainer processes. Constructing it joins the process group: collective."""

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
        """From now on a collective of training fails on a rank that has waited `timeout_s` seconds for the others."""
        for group in {dist.group.WORLD, *self.fsdp.get_all_groups()}:
            # torch has no public way to change a limit; the groups of mesh dimensions else keep torch's own, 10 minutes
            # for NCCL and 30 for gloo, whatever the whole group was given.
            distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrites `tensor` with the first rank's. Collective."""
        dist.broadcast(tensor, src=0)

    def broadcast_object(self, value: Any) -> Any:
        """Returns the `value` of the first rank, which must be picklable. Collective."""
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def agree(self, refusal: BadInput | None) -> None:
        """Raises on all ranks the refusal of the first that has one; without one, does nothing. Collective."""
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
        """Adds up the values of all ranks, in place; int64 wraps around. Collective."""
        dist.all_reduce(values)

    def smallest_room(self, config: CommonConfig, replica_share: float) -> int:
        """Returns the bytes that a shard may fill (`trireme.plan.memory`): the least of all ranks, so that all make the
        same decision. A replica takes `replica_share` of this rank's GPU. Collective."""
        if self.device.type == "cuda":
            free, memory = torch.cuda.mem_get_info(self.device)
            room = gpu_room(free, memory, replica_share)
        else:
            room = host_room(this_machine().memory_bytes, config)
        least = torch.tensor(room, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def sum_over_shards(self, value: Tensor) -> float:
        """Sums a number over the ranks that hold the parts of one copy of the model. Collective."""
        value = value.to(self.device)
        dist.all_reduce(value, group=self.fsdp.get_group(SHARD))
        return float(value)

    def new_cpu_group(self, timeout_s: float) -> dist.ProcessGroup:
        """Makes a gloo group of all ranks, separate from the group for training. Collective."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
