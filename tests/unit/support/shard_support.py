"""A rank of a trainer in this process: how it is made, its published tensors, and the save of its state."""

from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.shard import Shard
from trireme.checkpoint.files import FileRecord
from trireme.config import Config
from trireme.transports.packing import Packer, tensor_of


def make_rank(
    config: Config, rank: int, world_size: int, store: Any, attempt: int = 1, *, offloads: bool = False
) -> Shard:
    """Returns a rank whose published buckets are copies, which stay as they are when it trains on."""
    sender = Packer(lambda _, bucket: bucket.copy(), rank, world_size)
    return Shard(config, rank, store, sender, attempt, offloads=offloads)


def published_tensors(shard: Shard, version: int = 1) -> dict[str, Tensor]:
    """Publishes a version; returns its tensors by name, none on a rank that has no bucket."""
    weights: Any = shard.publish_weights(version)
    return {entry.name: tensor_of(entry, weights.source) for entry in weights.manifest.entries if weights.source}


def save(shard: Shard, path: Path) -> list[FileRecord]:
    """Saves the state of a shard, and waits until it is written."""
    shard.begin_save(path)
    return list(shard.finish_save(path))
