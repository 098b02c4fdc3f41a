"""The policy in the trainer: a Hugging Face causal language model, sharded by FSDP2 layer by layer.

Master weights are float32 (`trainer.master_dtype`). With another inference dtype FSDP casts parameters when it gathers
a layer, so the trainer computes with the same values that replicas get. Gradients are reduced in float32
(`trainer.reduce_dtype`), and *summed* over ranks, because losses are raw sums over tokens. With copies of the model
(`trainer.mesh`) parameters are spread over one dimension of the mesh, and gradients summed over both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trainer.attention import PACKED, choose_kernel, has_kernel
from trainer.batching import MicroBatch
from trainer.host_activations import HostActivations
from trainer.logprobs import add_token_logprobs, why_unfused
from trainer.lora import add_adapters, start_values
from trainer.mesh import Mesh
from trainer.shard_sums import ShardSums
from trireme.config import CommonConfig
from trireme.config.model_facts import ModelFacts
from trireme.config.trainer import LoraConfig
from trireme.core.base_digest import stored_dtypes, stored_shapes
from trireme.core.class_tensors import Differences, differences, refuse_kinds, saved_tensors
from trireme.core.errors import BadInput
from trireme.plan.memory import shard_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Sharding:
    """Decides how the models of a run are held and computed, and loads them sharded.

    `dtype`: the dtype in which the model computes and is published; with `model.dtype` auto, bfloat16 on GPUs and
    float32 on CPUs. `memory`: the decisions that depend on free memory. Memory that a replica takes on this rank's GPU
    (the part `replica_share` of the GPU) does not count as free. `whole`: the whole model stays gathered over each
    batch; it is `memory.whole`, unless a resumed run has decided otherwise. `packed`: rows are packed; with
    `trainer.packing` auto, only if there is a kernel for packed rows. `shares`: common prefixes are computed once.
    `packed` and `shares` become False if `trainer.proof` shows that a model cannot be computed like this. `kernel`: the
    name of the kernel for packed rows and why newer ones cannot be used; "" if there is none. `head`: whether
    kernels turn logits into log-probabilities and, if they do not, why; "" on CPUs. `compiles`: layers are compiled,
    unless a trial shows that they cannot be compiled (`trainer.compiled`).
    """

    def __init__(self, config: CommonConfig, facts: ModelFacts, mesh: Mesh, replica_share: float) -> None:
        options = config.trainer
        on_gpus = mesh.device.type == "cuda"
        dtype = config.model.dtype
        self.dtype = DTYPES[("bfloat16" if on_gpus else "float32") if dtype == "auto" else dtype]
        self._head_dtype = DTYPES.get(config.model.head_dtype, self.dtype)  # "model" is none of them
        self._mesh = mesh
        self._master = DTYPES[options.master_dtype]
        self.compiles = options.compiles(on_gpus=on_gpus)
        self._reduce = DTYPES[options.reduce_dtype] if mesh.dp_size > 1 else torch.float32
        self._obstacle = "there is too little memory for"  # to keeping the whole model over each batch
        if options.reshard_after_forward is True:
            self._obstacle = "trainer.reshard_after_forward forbids"
        elif options.reduce_dtype != "float32":
            self._obstacle = "trainer.reduce_dtype forbids"
        auto = options.packing == "auto" and has_kernel(mesh.device, self.dtype)
        self.packed = auto or options.packing == "packed"
        self.shares = options.shares_prefixes != "off"
        self.kernel = ""  # of packed attention, where there is one
        if (self.packed or self.shares) and has_kernel(mesh.device, self.dtype):
            self.kernel = choose_kernel(mesh.device, self.dtype, facts.num_heads, facts.num_kv_heads, facts.head_dim)
        self.head = ""
        self._fused = False
        if on_gpus:
            reason = why_unfused(mesh.device, self.dtype, self._head_dtype, facts.vocab_size)
            self._fused = not reason
            self.head = f"logits are computed without kernels: {reason}" if reason else "logits are computed by kernels"
        mesh.leave_room(replica_share)
        self.memory = shard_memory(config, facts, on_gpus=on_gpus, room=mesh.smallest_room(config, replica_share))
        self.whole = self.memory.whole  # layers stay gathered between micro-batches (`accumulating`)
        self._offload = CPUOffloadPolicy(pin_memory=on_gpus) if options.offload == "cpu" else OffloadPolicy()

    def keep_whole(self, requested: bool) -> str:
        """Decides after a resume whether the whole model stays gathered over each batch. It does if it stayed gathered
        before the resume (`requested`) and memory and configuration still allow it. If they no longer allow it and
        there are several ranks, the last bits of gradients change, and this method returns a message for the log. In
        all other cases returns ""."""
        self.whole = requested and self.memory.whole
        if requested == self.whole or self._mesh.size == 1:
            return ""
        return (
            f"the run has kept the whole model over each batch, which {self._obstacle} now: gradients are added in "
            "another order, which changes their last bits"
        )

    def shard_model(self, name: str, weights: str, lora: LoraConfig | None = None, seed: int = 0) -> PreTrainedModel:
        """Returns the model `name`, sharded over all ranks, with the values of `weights` (a directory or a name on the
        hub). With `lora` the model is frozen and has adapters, initialised from `seed`. Collective.

        Only the first rank reads the weights. On all ranks the model starts without memory. Then each layer in turn is
        allocated whole on the device, filled from the first rank, and sharded, so no device holds more than one whole
        layer (the root, with embeddings and head, counts as one).
        """
        source = load_source(weights) if self._mesh.is_first else None
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa:
            attention = "sdpa"
        else:
            attention = "eager"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=self._master, attn_implementation=attention, trust_remote_code=False
            )
        model.eval()  # no dropout: p must be the distribution that was sampled from
        if lora:
            add_adapters(model, lora, self.dtype, self._master)
        if source is None:
            tensors = {}
        else:
            tensors = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        if lora and tensors:
            tensors = start_values(model, tensors, seed)
        names = {module: prefix for prefix, module in model.named_modules()}
        count = model.config.get_text_config().num_hidden_layers
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
        if not lists:
            raise BadInput(f"{name} has no list of {count} decoder layers: this architecture cannot be sharded")
        if any(uses > 1 for uses in Counter(id(p) for layer in lists[0] for p in layer.parameters()).values()):
            raise BadInput(f"{name} has decoder layers that share parameters: this architecture cannot be sharded")
        for unit in [*lists[0], model]:
            self._fill(unit, names[unit], tensors)
            self._shard(unit)
        host = HostActivations(self._mesh.device, self.memory.host_layers)
        for number, layer in enumerate(lists[0]):  # FSDP's hooks, which gather the layer's parameters, stay outside
            if self.compiles:
                layer.forward = torch.compile(layer.forward, dynamic=True)
            if self.memory.kept_tokens is not None:
                if self.memory.movable_layers:
                    spare = partial(host.run, layer, number)
                else:
                    spare = partial(checkpoint, use_reentrant=False)
                layer.forward = partial(self.spare_if_large, layer.forward, spare, self.memory.kept_tokens)
        if source is not None:
            model.generation_config = source.generation_config
        model._weight_conversions = self._mesh.broadcast_object(source and source._weight_conversions)
        return add_token_logprobs(model, self._head_dtype, fused=self._fused)

    def _fill(self, unit: nn.Module, prefix: str, tensors: dict[str, Tensor]) -> None:
        """Allocates the tensors of `unit` on the device and fills them with the first rank's values. `tensors`: the
        values by name on the first rank, empty elsewhere; `prefix`: the name of `unit` in the model. Collective."""
        modules = list(_own_modules(unit))
        for module in modules:
            module.to_empty(device=self._mesh.device, recurse=False)
        if isinstance(unit, PreTrainedModel):
            unit.tie_weights()  # to_empty has given tied parameters separate memory
        unit_tensors = {id(t) for m in modules for t in [*m.parameters(recurse=False), *m.buffers(recurse=False)]}
        for name, tensor in [*unit.named_parameters(prefix), *unit.named_buffers(prefix)]:
            if id(tensor) in unit_tensors:
                if tensors:  # cast where it is needed, after the stored bytes have travelled there
                    tensor.data.copy_(tensors[name].to(self._mesh.device))
                self._mesh.broadcast(tensor.data)

    def _shard(self, unit: nn.Module) -> None:
        dtype = None if self.dtype == self._master else self.dtype
        # The root's inputs are not cast: they are token ids, and temperatures, which must stay exact.
        policy = MixedPrecisionPolicy(dtype, self._reduce, cast_forward_inputs=not isinstance(unit, PreTrainedModel))
        mesh = self._mesh.fsdp
        offload = self._offload
        sharded = fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=True)
        if self._mesh.dp_size > 1:  # alone there is nothing to average, and a division by 1 would be a copy
            # Sum, do not average. Without the second line the factor 1 becomes a reduction that gloo does not have.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def lay_out(self, models: Sequence[PreTrainedModel], *, packed: bool, shares: bool) -> None:
        """Sets the layout of micro-batches for all `models`. `packed`: sequences are packed into one row; else they are
        padded rows. `shares`: prefixes are shared."""
        self.packed = packed
        self.shares = shares
        for model in models:
            if packed:
                model.set_attn_implementation(PACKED)

    @contextmanager
    def layout_of(self, model: PreTrainedModel, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Context manager: within its `with` block, `model` has the attention that `micro_batches` need. This is PACKED
        if the micro-batches share prefixes, else the attention that the model has already. Put all forward and backward
        passes of a batch into the block. Either all micro-batches share prefixes or none does."""
        before = model.config._attn_implementation
        switches = before != PACKED and any(micro.shared for micro in micro_batches)
        if switches:
            model.set_attn_implementation(PACKED)
        try:
            yield
        finally:
            if switches:
                model.set_attn_implementation(before)

    @staticmethod
    def spare_if_large(
        forward: Callable[..., Any],
        spare: Callable[..., Any],
        kept_tokens: int,
        hidden: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Runs a layer's `forward` on `hidden` [B, L, H]. If B L exceeds `kept_tokens`, `spare` runs it, in a way that
        holds less device memory until the backward pass."""
        if hidden.shape[:-1].numel() <= kept_tokens:
            return forward(hidden, *args, **kwargs)
        return spare(forward, hidden, *args, **kwargs)

    @property
    def weights_stay(self) -> bool:
        """True if memory allows that the weights of all units are gathered at the same time (`ShardMemory`)."""
        return self.whole or self.memory.weights_stay

    @contextmanager
    def accumulating(self, model: PreTrainedModel) -> Iterator[Callable[[bool], None]]:
        """Context manager: accumulates the gradients of all micro-batches of a batch. Put their forward and backward
        passes into its `with` block. Yields a function; call it before each pass, with True before the last pass and
        False before all others.

        Where memory allows (`ShardMemory`) the weights stay gathered from pass to pass. Elsewhere only the root and the
        last layer stay gathered from a forward pass to its backward pass, which begins with them. If `self.whole` is
        true, each rank also keeps the gradients of all parameters, and they are summed over ranks in the last pass
        alone. At the end of the `with` block nothing is left gathered, also after an error.
        """
        units = fsdp_units(model)
        root = units[0]
        frees = not self.weights_stay

        def next_pass(last: bool) -> None:
            root.set_requires_gradient_sync(last or not self.whole)
            root.set_reshard_after_backward(last or frees)

        root.set_reshard_after_forward(frees)
        for unit in (root, units[-1]):
            unit.set_reshard_after_forward(False, recurse=False)
        with freed_after(model):
            try:
                yield next_pass
            finally:
                next_pass(True)
                root.set_reshard_after_forward(True)


def load_source(name: str) -> PreTrainedModel:
    """Loads a model into host memory, with the weights of its files. `name` is a local directory or a name on the hub.

    If all weights are stored in bfloat16, or all in float16, they keep this dtype. They then stay in the mapped files
    until they are copied, so their bytes are read and cast once. Otherwise the weights are float32. They are float32
    too if the model computes a buffer in the dtype of its weights, because 16 bits would round the buffer's values.

    Raises BadInput unless the tensors that the model would publish have the names and shapes of the tensors in its
    files.
    """
    source, report = _open(name, _stored_dtype(name))
    buffers = (b for module in source.modules() for b in module.buffers(recurse=False) if b.is_floating_point())
    if any(buffer.dtype != torch.float32 for buffer in buffers):
        source, report = _open(name, torch.float32)
    stored = stored_shapes(name)
    if stored is None:
        differing = Differences([], [])
    else:
        differing = differences(source, stored)
    problems = {
        "lacks": {*report["missing_keys"], *differing.lacking},
        "has in addition": report["unexpected_keys"],
        "has in another shape": {*(key[0] for key in report["mismatched_keys"]), *differing.reshaped},
    }
    advice = "save it again with save_pretrained of the installed transformers, or train another model"
    refuse_kinds(f"model.name = {name}", source, problems, advice)
    return source


def _open(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Opens a model in host memory. Returns the model, and transformers' report on missing, unexpected and mismatched
    tensors."""
    source, report = AutoModelForCausalLM.from_pretrained(
        name,
        config=AutoConfig.from_pretrained(name, trust_remote_code=False),
        dtype=dtype,
        attn_implementation="eager",  # never runs; else, and without `config`, its JSON could name code to fetch
        trust_remote_code=False,
        output_loading_info=True,
    )
    return source, report


def _stored_dtype(name: str) -> torch.dtype:
    """Returns the dtype of the floating-point tensors in the model's files if all are bfloat16 or all float16; else
    float32."""
    stored = {dtype for dtype in stored_dtypes(name) if dtype.startswith(("F", "BF"))}
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(stored.pop() if len(stored) == 1 else "", torch.float32)


def _own_modules(unit: nn.Module) -> Iterator[nn.Module]:
    """Yields `unit` and its descendants, except modules that are already sharded as units of their own."""
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)


def fsdp_units(model: PreTrainedModel) -> list[Any]:
    """Returns the root and then the decoder layers: the modules that `fully_shard` made FSDPModules."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@torch.no_grad()
def gathered_units(model: PreTrainedModel, *, stay: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
    """Gathers one FSDP unit after the other, first the root, then each decoder layer. Yields the names and whole
    tensors of the unit, on every rank's device.

    Parameters are in the inference dtype; persistent buffers keep the dtype in which the model's class saves them.
    Names and shapes match a Hugging Face checkpoint, where each expert has separate tensors. A unit's tensors may be
    used until the next unit is requested. With `stay` they may be used longer, and the units stay gathered: a forward
    pass need not gather them again, and `freed_after` frees them. Tied tensors come once, under the embedding's name.
    Collective.
    """
    for unit, tensors_of in _units(model):
        if isinstance(unit, FSDPModule):
            unit.unshard()
        tensors = {name: tensor.detach() for name, tensor in tensors_of().items()}
        yield list(revert_weight_conversion(model, tensors).items())
        if isinstance(unit, FSDPModule) and not stay:
            unit.reshard()


@contextmanager
def freed_after(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: frees all gathered weights of `model` at the end of its `with` block, also after an error."""
    try:
        yield
    finally:
        for unit in fsdp_units(model):
            unit.reshard()


def published_units(model: PreTrainedModel, dtype: torch.dtype) -> list[list[tuple[str, Tensor]]]:
    """Returns the names, shapes and dtypes that `gathered_units` will yield, unit by unit, as tensors without memory
    (device "meta"). `dtype`: the dtype in which the model publishes."""

    def empty(tensor: Tensor) -> Tensor:
        casts = isinstance(tensor, DTensor) and tensor.is_floating_point()
        return torch.empty(tensor.shape, dtype=dtype if casts else tensor.dtype, device="meta")

    tensors = ({name: empty(tensor) for name, tensor in tensors_of().items()} for _, tensors_of in _units(model))
    return [list(revert_weight_conversion(model, unit).items()) for unit in tensors]


def shard_sums(model: PreTrainedModel, dtype: torch.dtype, *, is_first: bool) -> ShardSums:
    """Returns the `ShardSums` of the tensors that `gathered_units` yields: it computes this rank's share of their
    checksums for the digest. `dtype`: the dtype in which the model publishes; `is_first`: as in `ShardSums`."""
    units = (tensors_of() for _, tensors_of in _units(model))
    return ShardSums(units, partial(revert_weight_conversion, model), dtype, is_first=is_first)


def _units(model: PreTrainedModel) -> Iterator[tuple[nn.Module, Callable[[], dict[str, Tensor]]]]:
    """Yields the FSDP units of `model`, the root and then the decoder layers, each with a function. The function
    returns {name in the model: tensor} for the saved tensors of this unit alone. If the unit is gathered when the
    function is called, the tensors are whole; else they are sharded."""
    root, *layers = fsdp_units(model) or [model]
    inside = {id(tensor) for layer in layers for tensor in saved_tensors(layer).values()}
    names = {module: prefix and f"{prefix}." for prefix, module in model.named_modules()}

    def tensors(unit: nn.Module) -> dict[str, Tensor]:
        unit_tensors = {names[unit] + name: tensor for name, tensor in saved_tensors(unit).items()}
        if unit is root:
            return {name: t for name, t in unit_tensors.items() if id(t) not in inside}
        return unit_tensors

    for unit in (root, *layers):
        yield unit, partial(tensors, unit)
