"""The device mesh: ranks by dimension, and that nothing else of the trainer counts them."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks_support import run_ranks
from trainer_support import make_config

from trainer import mesh
from trainer.mesh import Mesh
from trireme.config.trainer import MeshSizes


def waits_for_the_other(rank, world_size, store, shards, copies):
    one = Mesh(make_config("m", trainer__shards=shards, trainer__replicate=copies), rank, store, torch.device("cpu"))
    dist.barrier()
    one.limit_collectives(0.5)
    if rank:
        store.wait(["failed"])
        return None
    failures = []
    for group in {None, *one.fsdp.get_all_groups()}:
        if dist.get_world_size(group) > 1:
            with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout") as failed:
                dist.all_reduce(torch.ones(1), group=group)
            failures.append(str(failed.value))
    store.set("failed", "1")
    return len(failures)


@pytest.mark.parametrize(("shards", "copies"), [(2, 1), (1, 2)])
def test_a_collective_fails_on_the_rank_that_waits_in_vain(shards, copies):
    """In the group of all ranks, and in that of the dimension, which is made apart where there are several."""
    assert run_ranks(2, waits_for_the_other, shards, copies)[0] in (1, 2)


def test_the_configuration_counts_processes_by_dimension(monkeypatch):
    """Those that compute different datums apart from all: a dimension may be one whose processes share a datum."""
    config = make_config("m", trainer__shards=3, trainer__replicate=2)
    sizes = config.trainer.mesh
    assert (sizes, sizes.processes, sizes.data_parallel, sizes.parts) == ((2, 3), 6, 6, 3)
    alike = config.model_copy(update={"orchestrator": config.orchestrator.model_copy(update={"batch_size": 40})})
    least, _ = alike.groups_per_minibatch
    monkeypatch.setattr(MeshSizes, "data_parallel", property(lambda sizes: sizes.replicate))
    assert (sizes.processes, sizes.data_parallel) == (6, 2)
    assert alike.groups_per_minibatch[0] < least


def test_only_the_mesh_counts_ranks():
    counting = re.compile(
        r"world_size|get_rank\(|init_device_mesh|init_process_group|new_group|\.replicate\b|\.shards\b"
    )
    sources = Path(mesh.__file__).parent.glob("*.py")
    assert [source.name for source in sources if counting.search(source.read_text())] == ["mesh.py"]
