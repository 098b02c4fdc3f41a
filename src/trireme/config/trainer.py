"""The section `trainer`: shards, optimiser, loss, KL penalty, LoRA."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt

from trireme.config.section import NAMES_CODE, NonNegativeFloat, NonNegativeInt, Section, Share
from trireme.core.normalization import LossNormalization

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
UNEMBED = ("lm_head",)
LINEAR = (*ATTENTION, *MLP, *UNEMBED)
"""Names of the linear layers of a decoder that can have a LoRA adapter."""


SharePrefixes = Literal["auto", "on", "off"]
"""Values of `trainer.share_prefixes`."""
Checkpointing = bool | Literal["auto", "offload"]
"""Values of `trainer.checkpointing`."""


class OptimConfig(Section):
    beta1: Share = 0.9
    """AdamW: decay of the running mean of gradients."""
    beta2: Share = 0.95
    """AdamW: decay of the running mean of squared gradients."""
    eps: PositiveFloat = 1e-12
    """AdamW: added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW: decoupled weight decay."""


class ReferenceConfig(Section):
    base_model: str | None = None
    """The reference: a Hugging Face model, a local directory or a name on the hub."""
    load_checkpoint_path: str | None = None
    """Take its weights from here instead: a Hugging Face directory, or a checkpoint of a run, which is then kept for
    good."""
    update_every: NonNegativeInt = 0
    """Steps after which the reference becomes the current policy; 0 = never."""


class KlConfig(Section):
    coef: NonNegativeFloat = 0.0
    """Penalty, in the advantages, for moving away from the reference; 0 = none."""
    discount: Share = 0.0
    """A token also answers for the penalties that follow it, discounted by this; 0 = only for its own."""
    reference: ReferenceConfig = ReferenceConfig()
    alarm: PositiveFloat = 0.01
    """Warn, once per stretch, when kl_sample_train_v2 between sampler and trainer exceeds this."""
    stop: PositiveFloat | None = None
    """Stop the run, after a checkpoint, when it exceeds this; none = never."""


class LoraConfig(Section):
    rank: PositiveInt | None = None
    """Train adapters of this rank on frozen weights: 1, 8, 16, 32, 64, 128, 256, 320 or 512, the ranks of vLLM; none =
    train all weights."""
    alpha: PositiveFloat = 32.0
    """The output of an adapter is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is dropped while gradients are computed, and only then."""
    targets: list[str] = Field([])
    """Names of the linear layers with an adapter (`q_proj`, ...); empty = as the next three say."""
    train_attn: bool = True
    """Adapters for q_proj, k_proj, v_proj, o_proj."""
    train_mlp: bool = True
    """Adapters for gate_proj, up_proj, down_proj."""
    train_unembed: bool = False
    """An adapter for lm_head; not for models with tied embeddings."""
    seed: int | None = None
    """Seed of the adapters' first values; none = the run's seed."""

    @property
    def on(self) -> bool:
        """True if adapters are trained instead of all weights."""
        return self.rank is not None

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Names of the linear layers that get an adapter, in the order of `LINEAR`.

        >>> LoraConfig(rank=8, train_mlp=False).target_modules
        ('q_proj', 'k_proj', 'v_proj', 'o_proj')
        """
        parts = ((self.train_attn, ATTENTION), (self.train_mlp, MLP), (self.train_unembed, UNEMBED))
        targets = self.targets or [name for on, names in parts if on for name in names]
        return tuple(
            sorted(set(targets), key=lambda name: (LINEAR.index(name) if name in LINEAR else len(LINEAR), name))
        )


class MeshSizes(NamedTuple):
    """Sizes of the trainer's device mesh by dimension, outermost first. All processes compute different
    datums. (A dimension of processes that share datums would have to come last.)"""

    replicate: int
    """Copies of the model (HSDP)."""
    shard: int
    """Processes over which FSDP2 spreads each copy."""

    @property
    def processes(self) -> int:
        """Number of processes of the trainer."""
        return math.prod(self)

    @property
    def data_parallel(self) -> int:
        """Number of processes that compute different datums."""
        return self.replicate * self.shard

    @property
    def parts(self) -> int:
        """Number of processes over which one copy of the model and of its optimiser state is spread."""
        return self.shard


class CommonTrainer(Section):
    """The keys of `trainer` that every kind of training has."""

    shards: PositiveInt = 1
    """Number of FSDP2 shards, one process each (one GPU each where there are GPUs)."""
    replicate: PositiveInt = 1
    """Copies of the model, each spread over `shards` processes (HSDP); there are shards x replicate of them in all."""
    gpus_per_node: PositiveInt | None = None
    """This many processes, rank after rank, are always on one node; none = Ray packs all actors on as few nodes as
    it can."""
    loss_normalization: LossNormalization | None = None
    """How tokens weigh. token_mean: all tokens equally; sequence_mean_token_mean: as in GRPO and GSPO, all sequences
    equally; sequence_mean_token_sum_norm: as in Dr. GRPO, by sequences times their longest length;
    sequence_mean_token_sum (once sequence_mean): by sequences; sum: not divided. none = the loss's published form:
    token_mean, and for gspo sequence_mean_token_mean."""
    learning_rate: PositiveFloat | Literal["auto"] = "auto"
    """Peak learning rate; auto = by hidden size, for Qwen and Llama models."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 at max_steps."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient's norm is clipped to this."""
    optim: OptimConfig = OptimConfig()
    lora: LoraConfig = LoraConfig()
    max_refused_steps: PositiveInt = 3
    """Stop, after a checkpoint, when in this many steps in a row the gradient of at least one update was not finite."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens (with padding) that a shard computes at the same time; only a single longer sequence exceeds it. Bounds
    memory only."""
    packing: Literal["auto", "rows", "packed"] = "auto"
    """How a micro-batch is laid out: as rows of about equal length, padded; or packed, one sequence after the other,
    and none sees another. auto = packed on GPUs in 16 bits, else rows."""
    share_prefixes: SharePrefixes = "auto"
    """Compute tokens with which several sequences begin only once. auto = for each minibatch in which that saves 5 % of
    the counted work, where the model shows at the start that it can; on = for each minibatch that shares anything, and
    a model that cannot is refused. With `lora.dropout` sequences are computed whole."""
    checkpointing: Checkpointing = "auto"
    """Keep only the input of each decoder layer, and compute the layer again in the backward pass; auto = for
    micro-batches with activations that exceed the memory left by the state on the shards. offload = for these
    micro-batches copy the activations of as many layers as necessary to host memory, and back for the backward pass;
    auto never does that, because no GPU has measured it."""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Free the weights of a layer that were gathered from all shards after each pass, and gather them again for the
    next one (ZeRO-3). false = gather them once for all micro-batches of a batch (ZeRO-2). auto = false where they fit
    into memory."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which several shards sum the gradients of a layer. bfloat16 halves what they send; then gradients are
    summed after each micro-batch, because sums over micro-batches are float32."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile each decoder layer: faster steps, after half a minute of compiling at the start. auto = on GPUs
    without `lora.dropout`, where a trial shows that layers compile as one graph and compute the same."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: weights, gradients and AdamW's state of a GPU's shard live in host memory."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the trained weights, their gradients and AdamW's moments. bfloat16 halves their memory, and loses
    every update below 1/256 of a weight."""

    def compiles(self, *, on_gpus: bool) -> bool:
        """Returns True if layers should be compiled; they are then compiled only if a trial shows that they can be."""
        return self.compile is True or (self.compile == "auto" and on_gpus and not self.lora.dropout)

    @property
    def shares_prefixes(self) -> SharePrefixes:
        """The value of `share_prefixes`; "off" if adapters train with dropout, because dropout draws a new mask for
        each sequence."""
        if self.lora.dropout:
            return "off"
        return self.share_prefixes

    @property
    def mesh(self) -> MeshSizes:
        return MeshSizes(self.replicate, self.shards)


class TrainerConfig(CommonTrainer):
    loss_fn: str | None = Field(None, json_schema_extra=NAMES_CODE)
    """`importance_sampling`, `ppo` (GRPO, with the advantages of groups), `cispo`, `dro`, `gspo`, or a loss of your
    own as `package.module:function`; none = `importance_sampling` if max_steps_off_policy is 0, else
    `ppo`."""
    loss_fn_config: dict[str, float] = Field({})
    """Parameters of the loss: `clip_low_threshold` and `clip_high_threshold` (ppo 0.8 and 1.2, cispo 0 and 4, gspo
    0.9997 and 1.0004), `beta` (dro, required), `max_ratio` (off), `mask_ratio_low` and `mask_ratio_high` (off)."""
    kl: KlConfig = KlConfig()
    num_substeps: PositiveInt = 1
    """Optimiser updates per step; groups are split evenly over them."""
    num_minibatches: PositiveInt | Literal["auto"] = "auto"
    """Parts of a substep that are trained on as soon as their groups have finished (streaming). auto = whenever the
    trainer is free, all groups that have finished by then: at least an eighth of the substep, and at least 16
    rollouts for each shard. In deterministic mode auto = 1."""
