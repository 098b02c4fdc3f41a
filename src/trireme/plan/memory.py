"""Estimates what a shard of the trainer needs in memory, and whether it computes layers twice to need less.

What a layer keeps of a token was counted, in float32 and bfloat16, on models of the Qwen3, Qwen3-MoE and Llama kinds
(`tests/unit/plan/test_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trireme.config.model_facts import ModelFacts
from trireme.config.trainer import CommonTrainer

GIB = 2**30
SHARD_BASE_GIB = 0.5
"""Measured resident memory of a shard without weights."""
LOGITS_GIB = 0.2
"""Logits that a shard holds at the same time (`trainer.logprobs`)."""
KEPT_ON_CPU, KEPT_ON_GPU = 4 * GIB, 24 * GIB
"""`checkpointing = "auto"` keeps activations up to this size."""
WHOLE_ON_CPU, WHOLE_ON_GPU = 1 * GIB, 4 * GIB
"""A model up to this size stays whole over the micro-batches of a batch."""


@dataclass(frozen=True)
class ShardMemory:
    """The memory of one shard, in bytes except for `tokens`."""

    tokens: int
    """Tokens of a full micro-batch."""
    state: int
    """The shard's part of weights, gradients and moments."""
    gathered: int
    """Weights and gradients that are whole at the same time."""
    activations: int
    """Values that a full micro-batch keeps from the forward to the backward pass."""
    again: bool
    """True: layers are computed again in the backward pass of a full micro-batch."""
    offloaded: bool
    """True: the state is in host memory, and models compute on GPUs."""

    @property
    def total(self) -> int:
        """Bytes on the device that computes."""
        base = int((SHARD_BASE_GIB + LOGITS_GIB) * GIB)
        return base + (0 if self.offloaded else self.state) + self.gathered + self.activations


@dataclass(frozen=True)
class ModelMemory:
    """Sizes of a model that is trained, as one shard holds them while it computes."""

    facts: ModelFacts
    """Sizes of the model."""
    dtype_bytes: int
    """Bytes of a number in the dtype that computes."""
    on_gpus: bool
    """True: models compute on GPUs."""

    def shard(self, options: CommonTrainer, tokens: int, state_bytes: int) -> ShardMemory:
        """Returns the memory of a shard, for `tokens` in a full micro-batch and `state_bytes` of the whole model."""
        kept = self.kept_tokens(options.checkpointing)
        again = kept is not None and tokens > kept
        offloaded = self.on_gpus and options.offload == "cpu"
        state, activations = state_bytes // options.shards, self.activations(tokens, again)
        return ShardMemory(tokens, state, self.gathered, activations, again, offloaded)

    @property
    def layer_values(self) -> int:
        """Numbers that a decoder layer keeps of each token for its backward pass: inputs and outputs of both norms and
        of every product; queries, keys and values with their norms; the gate and its function. With experts also the
        input and output of each chosen one."""
        facts = self.facts
        queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
        experts = 3 * facts.num_chosen * facts.hidden_size
        return 8 * facts.hidden_size + 6 * queries + 5 * keys + 4 * facts.mlp_size + experts

    def activations(self, tokens: int, again: bool) -> int:
        """Bytes that all layers keep of `tokens` until the backward pass; with `again` the input of each layer, and
        everything of one."""
        layers = self.facts.num_layers
        values = layers * self.facts.hidden_size + self.layer_values if again else layers * self.layer_values
        return tokens * values * self.dtype_bytes

    @property
    def whole(self) -> int:
        """Bytes of all weights in the dtype that computes, and of their gradients, which are summed in float32."""
        return self.facts.num_parameters * (self.dtype_bytes + 4)

    @property
    def stays_whole(self) -> bool:
        """True: every shard keeps the whole model over the micro-batches of a batch, so that weights are gathered and
        gradients are summed over shards once per batch. False: once per micro-batch and layer."""
        return self.whole <= (WHOLE_ON_GPU if self.on_gpus else WHOLE_ON_CPU)

    @property
    def gathered(self) -> int:
        """Bytes of the whole model where it stays whole; else of embeddings and head, which are gathered during a whole
        pass, and of two layers, each with its gradient."""
        if self.stays_whole:
            return self.whole
        layer = (self.facts.num_parameters - self.facts.embedding_parameters) // self.facts.num_layers
        return 2 * self.dtype_bytes * (self.facts.embedding_parameters + 2 * layer)

    def kept_tokens(self, option: bool | Literal["auto"]) -> int | None:
        """Returns the most tokens of a micro-batch whose layers are not computed again in the backward pass, by
        `trainer.checkpointing`; None: they never are."""
        if option == "auto":
            return (KEPT_ON_GPU if self.on_gpus else KEPT_ON_CPU) // self.activations(1, False)
        return 0 if option else None
