"""Writes the tables of docs/internals/wire.md (`python scripts/wire_table.py`): how long published weights of known
models are on the wire, by a model of the network.

Nothing is measured here. Every byte of a version is counted at each interface that it passes; a way takes as long as
the busiest interface.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from memory import facts_of
from page_parts import with_part
from trireme.core.transport import Session, servers_of

TARGET = Path(__file__).parents[1] / "docs" / "internals" / "wire.md"
GB = 10**9
BYTES_PER_PARAMETER = 2
GPUS_PER_NODE = 8
TRAINING_SHARE = 4
"""One node in n trains, but at least one."""
NODES = (2, 4, 8, 16, 32, 64)
MODELS = {"Qwen3-4B": 1, "Qwen3-8B": 1, "Qwen3-30B-A3B": 2, "Llama-3-70B": 4}
"""The GPUs of a replica: the fewest of 80 GB on which docs/internals/memory.md has its weights and a KV cache fit."""
NODE_GBIT = 100
GPU_GBIT = 400
"""Rates of a node's only network card, and of the card that each GPU has in nodes made for training."""
NODE_CARD = NODE_GBIT * 1e9 / 8
GPU_CARD = GPU_GBIT * 1e9 / 8
"""The same in bytes per second."""

Hop = tuple[int, int]
"""From which rank of a group to which; rank 0 is the root."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of eight GPUs: the first of them train, the others sample."""

    nodes: int
    replica_gpus: int

    @property
    def training(self) -> int:
        return max(1, self.nodes // TRAINING_SHARE)

    @property
    def sampling(self) -> int:
        return self.nodes - self.training

    @property
    def ranks(self) -> int:
        return self.training * GPUS_PER_NODE

    @property
    def replicas(self) -> int:
        return self.sampling * GPUS_PER_NODE // self.replica_gpus

    def replica_gpu(self, replica: int) -> int:
        """Returns the number of the GPU of a replica's rank 0."""
        return self.ranks + replica * self.replica_gpus

    def groups(self) -> Iterator[list[int]]:
        """Yields, for each trainer rank that serves replicas, the GPUs of its group, its own first."""
        nodes = {replica: str(self.replica_gpu(replica) // GPUS_PER_NODE) for replica in range(self.replicas)}
        session = Session(1, 0, servers_of(nodes, range(0, self.ranks, GPUS_PER_NODE)))
        for rank in range(self.ranks):
            served = session.served_by(rank)
            if served:
                yield [rank, *map(self.replica_gpu, served)]


def chain(size: int) -> Iterator[Hop]:
    """Yields the hops of a broadcast in which each passes the pieces on to the next.

    >>> list(chain(4))
    [(0, 1), (1, 2), (2, 3)]
    """
    yield from ((to - 1, to) for to in range(1, size))


def busiest(hops: Iterable[Hop], gpus_per_card: int) -> int:
    """Returns how many copies the busiest card sends or receives, of hops between GPUs. Within a node none passes."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for start, end in hops:
        if start // GPUS_PER_NODE != end // GPUS_PER_NODE:
            sent[start // gpus_per_card] += 1
            received[end // gpus_per_card] += 1
    return max((*sent.values(), *received.values()))


def broadcast_copies(cluster: Cluster, gpus_per_card: int) -> int:
    """Returns the copies that pass the busiest card when each trainer rank sends along its group."""
    groups = list(cluster.groups())
    return busiest(((group[a], group[b]) for group in groups for a, b in chain(len(group))), gpus_per_card)


def seconds(cluster: Cluster, nbytes: float) -> dict[str, float]:
    """Returns the seconds of each way to send `nbytes`, and of gathering them.

    Between nodes gathering passes what a node lacks through its only card. Ray moves an object over TCP to each node
    once. When all sampling nodes ask at once, they ask the nodes that train, as each puts its share.
    """
    card = nbytes / NODE_CARD
    return {
        "gather": (1 - 1 / cluster.training) * card,
        "object store": max(1, cluster.sampling / cluster.training) * card,
        "chain": broadcast_copies(cluster, GPUS_PER_NODE) * card,
        "chain, GPU cards": broadcast_copies(cluster, 1) * nbytes / GPU_CARD,
    }


def rows(name: str) -> Iterator[str]:
    """Yields the lines of one model's table."""
    nbytes = BYTES_PER_PARAMETER * facts_of(name).num_parameters
    clusters = [Cluster(nodes, MODELS[name]) for nodes in NODES]
    ways = [seconds(cluster, nbytes) for cluster in clusters]
    gpus = MODELS[name]
    yield f"**{name}**, {nbytes / GB:.1f} GB, replicas of {gpus} GPU{'s' if gpus > 1 else ''}:\n"
    yield f"| nodes: train + sample | replicas | {' | '.join(ways[0])} |"
    yield "|---" * (2 + len(ways[0])) + "|"
    for cluster, way in zip(clusters, ways, strict=True):
        texts = [f"{value:.2f}" for value in way.values()]
        yield f"| {cluster.training} + {cluster.sampling} | {cluster.replicas} | {' | '.join(texts)} |"
    yield ""


def render() -> str:
    """The whole page."""
    tables = "\n".join(line for name in MODELS for line in rows(name))
    return with_part(TARGET.read_text(encoding="utf-8"), "seconds", tables)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
