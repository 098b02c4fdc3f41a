"""What a shard of the trainer needs in memory, and whether it computes layers twice to need less.

Estimates by the model's sizes, for plans. What a layer keeps of a token was counted, in float32 and bfloat16, on models
of the Qwen3, Qwen3-MoE and Llama kinds (`tests/unit/test_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trireme.config.model_facts import ModelFacts
from trireme.config.schema import CommonTrainer

GIB = 2**30
SHARD_BASE_GIB = 0.5
"""Measured resident memory of a shard without weights."""
LOGITS_GIB = 0.2
"""What a shard holds of logits at once (`trainer.logprobs`)."""
KEPT_ON_CPU, KEPT_ON_GPU = 4 * GIB, 24 * GIB
"""`checkpointing = "auto"` keeps activations up to this."""
WHOLE_ON_CPU, WHOLE_ON_GPU = 1 * GIB, 4 * GIB
"""Up to this a model stays whole over the micro-batches of a batch."""


@dataclass(frozen=True)
class ShardMemory:
    """Bytes, but for the `tokens` of a full micro-batch. `state`: a shard's part of what lives from step to step.
    `gathered`: weights and gradients that are whole at the same time. `activations`: what a full micro-batch leaves
    from forward to backward; `again`: layers are computed twice for it. `offloaded`: the state is in host memory,
    while models compute on GPUs."""

    tokens: int
    state: int
    gathered: int
    activations: int
    again: bool
    offloaded: bool

    @classmethod
    def of(
        cls,
        options: CommonTrainer,
        facts: ModelFacts,
        tokens: int,
        state_bytes: int,
        dtype_bytes: int,
        *,
        on_gpus: bool,
    ) -> ShardMemory:
        """`tokens` of a full micro-batch; `state_bytes` of the whole model; `dtype_bytes` of a number in the dtype that
        computes."""
        kept = kept_tokens(options.checkpointing, facts, dtype_bytes, on_gpus=on_gpus)
        again = kept is not None and tokens > kept
        return cls(
            tokens=tokens,
            state=state_bytes // options.shards,
            gathered=gathered_bytes(facts, dtype_bytes, on_gpus=on_gpus),
            activations=activation_bytes(facts, tokens, dtype_bytes, again),
            again=again,
            offloaded=on_gpus and options.offload == "cpu",
        )

    @property
    def total(self) -> int:
        """Where the models compute."""
        base = int((SHARD_BASE_GIB + LOGITS_GIB) * GIB)
        return base + (0 if self.offloaded else self.state) + self.gathered + self.activations


def layer_activations(facts: ModelFacts) -> int:
    """Numbers that a decoder layer keeps of each token for its backward pass: what goes in and out of both norms and of
    every product; queries, keys and values with their norms; what the gate and its function gave. With experts also
    what each of them got and gave."""
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    experts = 3 * facts.num_chosen * facts.hidden_size
    return 8 * facts.hidden_size + 6 * queries + 5 * keys + 4 * facts.mlp_size + experts


def activation_bytes(facts: ModelFacts, tokens: int, dtype_bytes: int, again: bool) -> int:
    """What is kept of `tokens` from forward to backward, all layers; with `again` the input of each, and all of one."""
    layer = layer_activations(facts)
    kept = facts.num_layers * facts.hidden_size + layer if again else facts.num_layers * layer
    return tokens * kept * dtype_bytes


def whole_bytes(facts: ModelFacts, dtype_bytes: int) -> int:
    """All weights in the dtype that computes, and their gradients, summed up in float32."""
    return facts.num_parameters * (dtype_bytes + 4)


def stays_whole(facts: ModelFacts, dtype_bytes: int, *, on_gpus: bool) -> bool:
    """Whether every shard keeps the whole model while it computes the micro-batches of a batch. Then it is gathered
    once for all, and gradients are summed over shards once; else both for every micro-batch and layer."""
    return whole_bytes(facts, dtype_bytes) <= (WHOLE_ON_GPU if on_gpus else WHOLE_ON_CPU)


def gathered_bytes(facts: ModelFacts, dtype_bytes: int, *, on_gpus: bool) -> int:
    """The whole model where it stays whole; else embeddings and head, which are gathered throughout a pass, and two
    layers, each with its gradient."""
    if stays_whole(facts, dtype_bytes, on_gpus=on_gpus):
        return whole_bytes(facts, dtype_bytes)
    layer = (facts.num_parameters - facts.embedding_parameters) // facts.num_layers
    return 2 * dtype_bytes * (facts.embedding_parameters + 2 * layer)


def kept_tokens(option: bool | Literal["auto"], facts: ModelFacts, dtype_bytes: int, *, on_gpus: bool) -> int | None:
    """By `trainer.checkpointing`: of more tokens at once than this, layers are computed again in the backward pass;
    none = never."""
    if option == "auto":
        return (KEPT_ON_GPU if on_gpus else KEPT_ON_CPU) // activation_bytes(facts, 1, dtype_bytes, False)
    return 0 if option else None
