"""The contribution of one room to a plan: its actors, memory and rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from trireme.config.model_facts import ModelFacts
from trireme.config.schema import CommonConfig
from trireme.core.transport import DEFAULT, TRANSPORTS, TransportKind
from trireme.plan.needs import ASSUMED_GPU, BUCKET_BYTES, Need
from trireme.process.environ import Resources


@dataclass(frozen=True)
class Part(ABC):
    """The part of a plan that belongs to one room (or to the data): its actors, the memory that they need, and the rows
    that are printed about it."""

    config: CommonConfig
    """The configuration of the run."""
    facts: ModelFacts | None
    """Sizes of the model; None if they are unknown."""
    resources: Resources
    """The machines."""
    shares_gpu: bool = field(default=False, kw_only=True)
    """True: each GPU of the part's actors is also used by an actor of another room. `Plan.parts` decides it."""
    colocated: bool = field(default=False, kw_only=True)
    """True: trainer and replicas take turns on the same devices; `Plan.parts` decides it."""
    receives_on_gpu: bool = field(default=False, kw_only=True)
    """True: a version that arrives at a replica has a second buffer on each of its GPUs. `Plan.parts` decides it."""
    auto_transport: str = field(default=DEFAULT, kw_only=True)
    """The meaning of the value auto of `inference.transport`. `Plan.parts` decides it."""
    taken_share: float = field(default=0.0, kw_only=True)
    """The share of each shared GPU that the actor of the other room takes while this part's actor works; 0 if no GPU is
    shared. `Plan.parts` decides it."""
    saved_s: float = field(default=0.0, kw_only=True)
    """The estimated seconds that a colocated run saves in each sampling phase because AdamW's moments leave the GPU for
    it, less the seconds that this takes; 0: they stay. `Plan.parts` decides it."""

    room: ClassVar[str]
    """The name of the room, the key of its values in `Plan.by_room`."""
    size_key: ClassVar[str] = ""
    """The key of the configuration that says how many of the part's actors hold a model; empty: none of them does."""

    @property
    def actors(self) -> list[str]:
        """Names of the part's actors."""
        return []

    @property
    def ranks(self) -> int:
        """Number of processes that compute in each actor; each process has a GPU if it holds a part of a model."""
        return 1

    @property
    def block(self) -> int:
        """Number of consecutive processes of the part that must be on one node: a multiple of `ranks`."""
        return self.ranks

    @property
    def on_gpus(self) -> bool:
        """True if models compute on GPUs."""
        return self.resources.compute_on_gpus(self.config)

    @property
    def dtype_bytes(self) -> int:
        """Size, in bytes, of one number in the dtype in which trainer and replicas compute."""
        return self.config.model.dtype_bytes(on_gpus=self.on_gpus)

    @property
    def published_bytes(self) -> int:
        """Bytes of one published version: all weights, or adapters; 0 if the sizes are unknown."""
        if self.facts:
            return self.facts.trained_parameters(self.config.trainer.lora) * self.dtype_bytes
        return 0

    @property
    def transport_name(self) -> str:
        """The value of `inference.transport`, with auto decided."""
        if self.config.transport != "auto":
            return self.config.transport
        return self.auto_transport

    @property
    def transport(self) -> TransportKind:
        """The kind of transport: how published weights travel, and where they are held in memory."""
        return TRANSPORTS[self.transport_name]

    @property
    def within_gpu(self) -> bool:
        """True if weights travel to the replica within the GPU that it shares with the trainer."""
        return self.shares_gpu and self.transport.slabs

    def largest_bucket(self, facts: ModelFacts, *, embeddings: bool) -> int:
        """Returns the bytes of the largest bucket of published weights that a rank sends. This is BUCKET_BYTES, or more
        if a single tensor is larger, or if the gate and up projections of a layer together are larger (replicas fuse
        the two, so they share a bucket). It is at most the bytes of a whole version. `embeddings`: True if the buckets
        contain the embeddings, or an output matrix that is not tied to them."""
        columns = 0
        if not self.config.trainer.lora.on:
            if embeddings:
                columns = facts.vocab_size
            if not facts.num_chosen:  # experts are published one by one
                columns = max(columns, 2 * facts.mlp_size)
        return min(max(BUCKET_BYTES, columns * facts.hidden_size * self.dtype_bytes), self.published_bytes)

    @property
    def gpu_bytes(self) -> int:
        """Bytes of memory of the smallest GPU."""
        gpus = [node.smallest_gpu for node in self.resources.nodes if node.smallest_gpu]
        return min((gpu.memory_bytes for gpu in gpus), default=ASSUMED_GPU.memory_bytes)

    @property
    def resting(self) -> Mapping[str, int]:
        """Bytes that an actor of the part keeps on its GPU, by purpose, while a colocated run lets it rest."""
        return {}

    @property
    def turn_s(self) -> float:
        """Estimated seconds of a colocated run's turn of sampling and training that depend on `saved_s`."""
        return 0.0

    @property
    def encoding(self) -> str:
        """The value of `inference.encoding`, with auto decided. On a single machine auto is not delta, because nothing
        is gained by sending less."""
        chosen = self.config.encoding
        if chosen != "auto":
            return chosen
        few_change = self.dtype_bytes == 2 and not self.config.trainer.lora.on
        if few_change and len(self.resources.nodes) > 1 and self.transport_name == "object_store":
            return "delta"
        return "dense"

    @property
    def may_share_gpu(self) -> bool:
        """True if the part's only actor leaves enough of a GPU for the actor of another room."""
        return True

    @property
    def gpu_share(self) -> float:
        """The share, 0 to 1, of a GPU's memory that an engine takes, on each GPU that it uses; 0 in a part without an
        engine."""
        return 0.0

    @property
    def least_gpu_share(self) -> float:
        """The smallest `gpu_share` with which the part's actors can start; 0 if there is no such limit."""
        return 0.0

    @property
    def size_text(self) -> str:
        """The keys of the configuration, with their values, that decide how many GPUs the part needs."""
        return ""

    @property
    def needs(self) -> list[Need] | None:
        """The memory that each actor needs, in the order of `actors`; None if the sizes of the model are unknown."""
        return [Need({}) for _ in self.actors]

    def decided(self) -> dict[str, object]:
        """Returns the values that the configuration leaves open and the machines decide: {name of a section: the
        section with these values filled in}, and {name of a key: its value} for keys outside of sections."""
        return {}

    @property
    def warnings(self) -> list[str]:
        """Warnings about options with a price that is easily overlooked."""
        return []

    @abstractmethod
    def rows(self, device_text: str) -> list[tuple[str, str]]:
        """Returns the rows of the plan that this part prints, as (name of the row, text) pairs. `device_text`: a text
        about the devices and threads of each actor that holds a model, such as "one GPU each, 4 threads each"."""
