"""Estimates what a shard of the trainer needs in memory, and whether it computes layers twice to need less.

The formulas are compared with what the trainer's own code holds, counted on tensors without memory, for models of the
Qwen3, Qwen3-MoE and Llama kinds (`scripts/memory.py` of the repository, `tests/unit/plan/test_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from trireme.config.model_facts import ModelFacts
from trireme.config.run import DTYPE_BYTES
from trireme.config.schema import CommonConfig
from trireme.config.trainer import Checkpointing, CommonTrainer, LoraConfig

GIB = 2**30
SHARD_BASE_GIB = 0.6
"""Measured memory of a shard without weights, after its first step. The 0.5 GiB of libraries' code in it are shared by
two shards on a machine, so half of them counts for each shard."""
LOGIT_BYTES = 12
"""Bytes that the backward pass holds for each logit of a chunk, in float32: the logits of this chunk and of the chunk
before, and the gradient of the logits."""
CPU_LOGITS = 2**24
MOST_LOGITS = 2**30
"""The number of logits of a chunk: CPU_LOGITS on a CPU, where larger chunks are no faster; up to MOST_LOGITS on a GPU
that has enough memory beyond the plan. (2^24 logits are 110 tokens of a vocabulary of 152,000: too few rows for a
GPU.)"""
LARGEST_KEPT = 32 * 2**20
KEPT_BYTES = 64 * 2**20
KEPT_OF_LAYERS = 17
KEPT_OF_LARGE = 192 * 2**20
"""Bytes of freed tensors that glibc does not give back on a host, a fit to measurements of models up to 70 million
parameters (docs/internals/memory.md). glibc gives back tensors of more than LARGEST_KEPT bytes. If a layer has at most
LARGEST_KEPT bytes, glibc keeps KEPT_BYTES, and KEPT_OF_LAYERS bytes for each parameter of the layers; if it has more,
KEPT_OF_LARGE bytes."""
FLAT_TOKENS = 8
"""A plan assumes that all datums of a micro-batch together have at most FLAT_TOKENS tokens for each distinct token: a
shared prefix is distinct once, but is in each datum that begins with it. Columns are counted as if they had a row for
each datum (with a user's own loss they have it). Keys of a layer are gathered for the tokens of all datums at once (64
answers to 30,000 tokens have 2 million)."""
LAYERS_ON_DEVICE = 2
"""Layers whose activations are in device memory at least, where those of the others are in host memory: one that
computes and one whose activations are copied (`trainer.host_activations`)."""
PINNED_ROUNDING = 4 / 3
"""Page-locked host memory over the tensors in it, on average: PyTorch takes powers of two."""
PLACE_BYTES = 96
"""Bytes for each token, counted in all datums (see FLAT_TOKENS): columns, log-probabilities and their gradient, and
what losses and monitors compute with them (counted in `tests/unit/trainer/test_shard_prefixes.py`)."""
GPU_ALLOWANCES = {"CUDA context": GIB // 2, "NCCL": GIB, "workspaces": GIB // 2}
"""{purpose: bytes} that a shard takes of its GPU in addition to tensors. These are allowances: nothing was measured on
a GPU."""
GPU_SHARE = 0.85
HOST_SHARE = 0.5
"""The shares that a shard plans to fill: GPU_SHARE of a GPU's free memory, HOST_SHARE of a process's part of a host's
memory. The rest covers errors of the estimate and losses of allocators, and on a host also copies of checkpoints, the
replicas' caches and the system."""


def gpu_room(free_bytes: int, memory_bytes: int, replica_share: float = 0.0) -> int:
    """Returns the bytes that a shard may fill on a GPU of `memory_bytes`. `free_bytes`: free at the moment;
    `replica_share`: the part of the GPU, 0 to 1, that a replica takes."""
    remaining = min(free_bytes, int(memory_bytes * (1 - replica_share)))
    return int(GPU_SHARE * max(0, remaining - sum(GPU_ALLOWANCES.values())))


def gpu_limit(memory_bytes: int, replica_share: float) -> float:
    """Returns the part of a GPU of `memory_bytes`, 0 to 1, up to which PyTorch may hold memory in a shard beside a
    replica that takes the part `replica_share`. What a shard takes in addition to tensors is left out."""
    return max(0.0, 1 - replica_share - sum(GPU_ALLOWANCES.values()) / memory_bytes)


def host_room(memory_bytes: int, config: CommonConfig) -> int:
    """Returns the bytes that a shard on CPUs may fill on a host of `memory_bytes`. They follow from the size of the
    machine, not from its free memory at the moment, so that each attempt of a run decides alike."""
    return int(HOST_SHARE * memory_bytes) // (config.trainer.mesh.processes + config.num_replicas)


def chunk_logits(free_bytes: int | None) -> int:
    """Returns how many logits a shard computes at the same time. On a GPU this is the largest power of two that needs
    at most half of its `free_bytes`, but at least CPU_LOGITS and at most MOST_LOGITS. `free_bytes` None: CPU_LOGITS,
    the number for a CPU."""
    if free_bytes is None:
        return CPU_LOGITS
    fit = max(1, free_bytes // (2 * LOGIT_BYTES))
    return max(CPU_LOGITS, min(MOST_LOGITS, 2 ** (fit.bit_length() - 1)))


def host_layers(movable_layers: int, kept_tokens: int | None, tokens: int) -> int:
    """Returns `ShardMemory.host_layers`."""
    kept = movable_layers * (kept_tokens or 0) // tokens
    return max(0, movable_layers - max(LAYERS_ON_DEVICE, kept))


@dataclass(frozen=True)
class ShardMemory:
    """The planned memory of a shard, in bytes except for counts of tokens, and the choices that follow from it."""

    tokens: int
    """Tokens of a full micro-batch."""
    state: int
    """The shard's part of weights, gradients and moments."""
    gathered: int
    """Bytes of weights, gradients and buffers of collectives that a shard holds whole (gathered from all shards) at the
    same time."""
    activations: int
    """Bytes of the values that a full micro-batch keeps from the forward to the backward pass."""
    logits: int
    """Planned bytes for a chunk of logits on a CPU. On a GPU larger chunks take up to half of the remaining free
    memory, at most MOST_LOGITS * LOGIT_BYTES = 12 GiB (`trainer.logprobs`)."""
    freed: int
    """Bytes of freed tensors that the allocator does not give back; 0 on GPUs, where they are in the part of the memory
    that is not planned for."""
    flat: int
    """Bytes that a micro-batch with shared prefixes takes for the tokens of all its datums (a prefix counts for each
    datum): columns, and keys and values of one layer, with their gradients."""
    kept_tokens: int | None
    """The most tokens of a micro-batch whose activations all stay on the device. The layers of a larger micro-batch are
    computed again in the backward pass, or the activations of its first layers go to host memory. None: the activations
    of all micro-batches stay. The number changes no bit of the results."""
    again: bool
    """True: layers are computed again in the backward pass of a full micro-batch."""
    movable_layers: int
    """The number of layers if the activations of layers may go to host memory, else 0."""
    whole: bool
    """True: every shard keeps the whole model over the micro-batches of a batch, so that weights are gathered and
    gradients are summed over shards once per batch. False: once per micro-batch and layer. With several shards and
    micro-batches the choice decides the order in which gradients are added, and so their last bits. Always False if
    gradients are summed in bfloat16, in which sums over micro-batches would be too coarse."""
    weights_stay: bool
    """True: every shard keeps all weights over the micro-batches of a batch, so that they are gathered once per batch
    (ZeRO-2; with `whole` also their gradients). False: weights are gathered layer by layer in each pass (ZeRO-3). The
    choice changes no bit of the results."""
    offloaded: bool
    """True: the state is in host memory, and models compute on GPUs."""

    def host_layers(self, tokens: int) -> int:
        """Returns how many layers, counted from the first, have their activations in host memory in a micro-batch of
        `tokens` tokens. As many of the last layers, whose backward pass comes first, keep theirs as have room."""
        return host_layers(self.movable_layers, self.kept_tokens, tokens)

    @property
    def host_activations(self) -> int:
        """Bytes of a full micro-batch's activations in host memory."""
        moved = self.host_layers(self.tokens)
        if not moved:
            return 0
        return int(PINNED_ROUNDING * moved * self.activations / (self.movable_layers - moved))

    @property
    def total(self) -> int:
        """Bytes that the shard takes on the device that computes."""
        return self.base + (0 if self.offloaded else self.state) + self.gathered + self.activations

    @property
    def base(self) -> int:
        """Bytes that a shard takes in addition to its state and the memory of a pass: its process, a chunk of logits,
        values for the tokens of all datums, and freed tensors that the allocator keeps."""
        return int(SHARD_BASE_GIB * GIB) + self.logits + self.flat + self.freed

    @property
    def text(self) -> str:
        """Returns a text about the choices that depend on memory: which layers are computed twice, and how often
        weights are gathered."""
        layers = "layers are kept until the backward pass"
        if self.again:
            layers = f"layers are computed twice in micro-batches of more than {self.kept_tokens:,} tokens"
        number = self.host_layers(self.tokens)
        if number:
            layers = f"activations of {number} of {self.movable_layers} layers go to host memory in full micro-batches"
        weights = "once a batch" if self.whole else "layer by layer"
        if self.weights_stay and not self.whole:
            weights = "once a batch, their gradients summed layer by layer"
        return f"{layers}, weights are gathered {weights}"


@dataclass(frozen=True)
class ModelMemory:
    """Computes the memory that one shard needs to train a model, from the model's sizes."""

    facts: ModelFacts
    """Sizes of the model."""
    dtype_bytes: int
    """Size, in bytes, of one number in the dtype in which models compute."""
    on_gpus: bool
    """True: models compute on GPUs."""

    def shard(self, options: CommonTrainer, tokens: int, state_bytes: int, room: int) -> ShardMemory:
        """Returns the memory of a shard that may fill `room` bytes. `tokens`: the tokens of a full micro-batch;
        `state_bytes`: weights, gradients and moments of the whole model, over all shards.

        After the state, memory is used for activations first, because computing layers twice costs more than gathering
        weights again. If enough memory is left, all weights and gradients stay gathered. If it is enough only for the
        weights, all weights stay gathered.
        """
        offloaded = self.on_gpus and options.offload == "cpu"
        state = state_bytes // options.mesh.parts
        logits = self.logits(tokens)
        freed = self.freed
        flat = self.flat(tokens) if options.shares_prefixes != "off" else 0
        free = room - int(SHARD_BASE_GIB * GIB) - logits - freed - flat - (0 if offloaded else state)
        by_layer = self.gathered(options.lora, whole=False)
        kept_tokens = self.kept_tokens(options.checkpointing, free - by_layer)
        movable = self.facts.num_layers if options.checkpointing == "offload" else 0
        again = kept_tokens is not None and tokens > kept_tokens and not movable
        activations = self.activations(tokens, again, host_layers(movable, kept_tokens, tokens))
        option = options.reshard_after_forward
        remaining = free - activations
        may_stay = option is not True and (options.reduce_dtype == "float32" or options.mesh.processes == 1)
        whole = may_stay and self.stays_whole(remaining, options.lora)
        staying = by_layer + self.dtype_bytes * (self.facts.num_layers - 2) * self._layer
        stay = whole or (staying <= remaining if option == "auto" else not option)
        if whole:
            gathered = self.gathered(options.lora, whole=True)
        elif stay:
            gathered = staying
        else:
            gathered = by_layer
        gathered = max(gathered, self.gathered_alone(options.lora) - activations)
        return ShardMemory(
            tokens,
            state,
            gathered,
            activations,
            logits,
            freed,
            flat,
            kept_tokens,
            again,
            movable,
            whole,
            stay,
            offloaded,
        )

    def logits(self, tokens: int) -> int:
        """Returns the bytes of one chunk of logits on a CPU, for a micro-batch of `tokens`."""
        return LOGIT_BYTES * min(CPU_LOGITS, tokens * self.facts.vocab_size)

    def flat(self, tokens: int) -> int:
        """Returns an upper bound of the bytes that a micro-batch takes for the tokens of all its datums
        (`ShardMemory.flat`). These tokens include a shared prefix once for each datum. `tokens`, the number of the
        micro-batch's distinct tokens, includes it only once.

        A CPU needs fewer bytes than the bound, because it gathers keys for one group of datums at a time. Within a
        group, all datums have the same number of tokens, and shared prefixes of the same length. On a GPU the bound is
        higher if query heads share key heads: FlashAttention 2 first makes gradients of keys and values for each query
        head, and then adds them up for each key head.
        """
        facts = self.facts
        heads = 4 * facts.num_kv_heads
        if self.on_gpus and facts.num_heads != facts.num_kv_heads:
            heads += 2 * facts.num_heads
        keys = heads * facts.head_dim * self.dtype_bytes
        return FLAT_TOKENS * tokens * (keys + PLACE_BYTES)

    @property
    def freed(self) -> int:
        """Bytes of freed tensors that the host's allocator does not give back; 0 on GPUs."""
        if self.on_gpus:
            return 0
        large = self.dtype_bytes * self._layer > LARGEST_KEPT
        if large:
            return KEPT_OF_LARGE
        return KEPT_BYTES + KEPT_OF_LAYERS * self._layer * self.facts.num_layers

    @property
    def layer_bytes(self) -> int:
        """Bytes that a decoder layer keeps for its backward pass, for each token: outputs of both norms and of every
        matrix product; queries, keys and values with their norms; the gate before and after its activation function.
        Norms keep their input in float32. With experts, the input and output of each chosen expert are added."""
        facts = self.facts
        queries = facts.num_heads * facts.head_dim
        keys = facts.num_kv_heads * facts.head_dim
        experts = 3 * facts.num_chosen * facts.hidden_size
        values = 4 * facts.hidden_size + 4 * queries + 3 * keys + 4 * facts.mlp_size + experts
        return values * self.dtype_bytes + (2 * facts.hidden_size + queries + keys) * 4

    def activations(self, tokens: int, again: bool, on_host: int = 0) -> int:
        """Returns the bytes that all layers but `on_host` keep on the device for `tokens` tokens until the backward
        pass. `again`: True if layers are computed twice. Then each layer keeps only its input, and all values are kept
        for one layer at a time."""
        layers = self.facts.num_layers - on_host
        inputs = self.facts.hidden_size * self.dtype_bytes
        return tokens * (layers * inputs + self.layer_bytes if again else layers * self.layer_bytes)

    def stays_whole(self, free: int, lora: LoraConfig) -> bool:
        """Returns True if all weights and all gradients, gathered on each shard, fit into `free` bytes."""
        return self.gathered(lora, whole=True) <= free

    def gathered(self, lora: LoraConfig, *, whole: bool) -> int:
        """Returns the most bytes of gathered (whole) weights, gradients and buffers of collectives that a shard holds
        together with the activations. Numbers are in the dtype in which models compute, unless float32 is named.

        If `whole`, these bytes hold all weights, all gradients in float32 (counted as 0 under LoRA), and the output
        matrix's gradient. Otherwise they hold the embeddings and the output matrix, which stay gathered during a pass,
        and in addition the larger of two peaks. At the first peak the output matrix's gradient, which was summed in
        float32, is cast: the shard holds this gradient in both dtypes, and a layer's weights. At the second peak a
        layer's gradient is summed over shards: the shard holds the output matrix's gradient, the weights of this layer
        and the next, the layer's gradient, and a float32 buffer for the sum (counted as 0 under LoRA). The output
        matrix's gradient is 0 bytes if LoRA leaves the matrix frozen.
        """
        dtype = self.dtype_bytes
        layer = self._layer
        head = self._head(lora)
        reduced = 0 if lora.on else 4
        if whole:
            return self.facts.num_parameters * (dtype + reduced) + dtype * head
        of_head = dtype * layer + (4 + dtype) * head
        of_layer = dtype * head + (3 * dtype + reduced) * layer
        return dtype * self.facts.embedding_parameters + max(of_head, of_layer)

    def gathered_alone(self, lora: LoraConfig) -> int:
        """Returns the most bytes of gathered weights and buffers while no activations are held: the larger of two
        peaks. At the first, the shard holds embeddings, output matrix and first layer twice: in the buffer in which
        they were gathered, and as copies. At the second, it holds embeddings and output matrix, their gradients, and
        the float32 buffer to which the gradients are copied."""
        dtype = self.dtype_bytes
        root = self.facts.embedding_parameters
        return max(2 * dtype * (root + self._layer), 0 if lora.on else (2 * dtype + 4) * root)

    @property
    def _layer(self) -> int:
        """Number of parameters of one layer."""
        return (self.facts.num_parameters - self.facts.embedding_parameters) // self.facts.num_layers

    def _head(self, lora: LoraConfig) -> int:
        """Returns how many parameters of the output matrix have a gradient: all, or 0 if LoRA leaves it frozen."""
        if lora.on and "lm_head" not in lora.target_modules:
            return 0
        return self.facts.vocab_size * self.facts.hidden_size

    def kept_tokens(self, option: Checkpointing, free: int) -> int | None:
        """Returns the most tokens that a micro-batch may have without activation checkpointing. `option` is
        `trainer.checkpointing`; with auto and offload, the activations of these tokens fit into `free` bytes. Returns
        None if no micro-batch uses checkpointing."""
        if isinstance(option, bool):
            return 0 if option else None
        return max(0, free) // self.activations(1, False)


def shard_memory(config: CommonConfig, facts: ModelFacts, *, on_gpus: bool, room: int) -> ShardMemory:
    """Returns the memory of a shard that may fill `room` bytes (from `gpu_room` or `host_room`). The plan calls this
    with the free memory that nodes report, the shards with the free memory that they see themselves."""
    dtype_bytes = config.model.dtype_bytes(on_gpus=on_gpus)
    state = bytes_per_trained(config) * facts.trained_parameters(config.trainer.lora)
    state += bytes_per_parameter(config, dtype_bytes) * facts.num_parameters
    tokens = config.trainer.micro_batch_tokens
    return ModelMemory(facts, dtype_bytes, on_gpus).shard(config.trainer, tokens, state, room)


def bytes_per_trained(config: CommonConfig) -> int:
    """Returns the bytes of state for each trained parameter: the weight, its gradient and two Adam moments."""
    return 4 * DTYPE_BYTES[config.trainer.master_dtype]


def bytes_per_parameter(config: CommonConfig, dtype_bytes: int) -> int:
    """Returns the bytes of state for each parameter of the whole model, in addition to `bytes_per_trained`. Under LoRA,
    the frozen weight takes `dtype_bytes`, the size of a number in the dtype in which models compute. If the KL
    reference is a second model, its weight takes the size of a number in `trainer.master_dtype`. Without LoRA and
    without such a reference, returns 0."""
    base = dtype_bytes if config.trainer.lora.on else 0
    return base + (DTYPE_BYTES[config.trainer.master_dtype] if config.loads_reference else 0)
