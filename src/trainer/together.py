"""Several adapters in one pass of the base: each row, or packed sequence, with the matrices of its own adapter.

    y_t = W x_t + (alpha / rank) B A x_t       with A and B of the adapter of the datum that token t belongs to

The datums of an adapter follow each other in a micro-batch. So in each LoRA layer the tokens of all adapters go through
W at once, and those of each through its own A and B, which have its own rank. This is exact. No operation of the base
adds up over tokens of different sequences, and its weights have no gradient. The gradient of A and B is a sum over the
adapter's own tokens, and the tokens of others are not multiplied by 0 but are not there at all. So a value that is not
finite stays with its own adapter. What differs from a pass alone is rounding: kernels may add up in another order for
another shape.

For this the matrices of all adapters of a pass are whole on each rank beside the model, whose own LoRA parameters are
not used, with their gradients, which are summed over ranks once and then given to the adapters.

That a model computes so is shown by trying it before the first such pass (`prove_together`). A layer that reorders
tokens, a head that does not call its adapter, or attention that multiplies what it masks by 0 are found by that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from trainer.adapters import Adapters
from trainer.batch_checks import nonfinite_datums
from trainer.batching import MicroBatch, ShardOutput, collect
from trainer.lora import ADAPTER, adapter_mode
from trainer.losses import LossFn, Metrics, backward, monitors, resolve_loss
from trainer.merging import AdapterShare, in_order, places_of
from trainer.mesh import Mesh
from trainer.model import fsdp_units
from trainer.passes import Passes
from trainer.proof import LENGTHS, rounding
from trireme.config import CommonConfig
from trireme.core.batch import BatchPart, TokenBatch
from trireme.core.errors import BadInput
from trireme.run.metrics import reduce_metrics

PROBED = 0.1
"""Size of what a tried adapter adds to the output of a layer, for inputs of size 1."""
GRADIENT_OFF = 8
"""Roundings of the dtype that computes by which gradients may differ, in their norm."""


@dataclass(frozen=True)
class Matrices:
    """A and B of one adapter in one layer, of its own rank. Their gradients are added up where `.grad` is."""

    A: Tensor  # [rank, inputs]
    B: Tensor  # [outputs, rank]
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """Returns what the adapter adds to the layer's output for `x` [T, inputs]: [T, outputs]."""
        A, B = self.A.to(x.dtype), self.B.to(x.dtype)  # as FSDP casts what it gathers
        return nn.functional.linear(nn.functional.linear(x, A), B) * self.scale


class WholeAdapters:
    """Some adapters, whole on this rank, and their gradients. Inside `in_place_of` the LoRA layers of the model compute
    with them."""

    def __init__(self, parameters: Sequence[tuple[str, DTensor]], count: int, device: torch.device) -> None:
        """`parameters`: those of the model's own adapter, by name; `count`: how many adapters there are. All are 0."""
        self._parameters = parameters
        total, dtype = sum(parameter.numel() for _, parameter in parameters), parameters[0][1].dtype
        self.values = torch.zeros(count, total, dtype=dtype, device=device)
        self.gradients = torch.zeros(count, total, dtype=dtype, device=device)
        self._layers: list[dict[str, Matrices]] = [{} for _ in range(count)]
        self._present: list[tuple[int, int]] = []
        self.called: set[str] = set()
        """Names of the layers that have computed."""

    def tensors(self, table: Tensor, number: int) -> Iterator[tuple[str, DTensor, Tensor]]:
        """Yields name and parameter of the model, and adapter `number`'s tensor in `values` or `gradients`, in which
        what is of the same rank lies together."""
        place = 0
        for name, parameter in self._parameters:
            tensor = table[number, place : place + parameter.numel()]
            rows, columns = parameter.shape
            yield name, parameter, tensor.view(rows, columns) if ".lora_A." in name else tensor.view(columns, rows).T
            place += parameter.numel()

    def open(self, number: int, rank: int, scale: float, targets: Sequence[str] | None = None) -> None:
        """Has adapter `number` compute with the first `rank` rows of its A; `targets` names its layers, None: all."""
        values, gradients = (self.tensors(table, number) for table in (self.values, self.gradients))
        opened: dict[str, dict[str, Tensor]] = {}
        for (name, _, value), (_, _, gradient) in zip(values, gradients, strict=True):
            layer, _, which = name.partition(".lora_")
            if targets is not None and layer.rpartition(".")[2] not in targets:
                continue
            own = slice(None, rank) if which[0] == "A" else (slice(None), slice(None, rank))
            matrix = value[own].detach().requires_grad_()
            matrix.grad = gradient[own]
            opened.setdefault(layer, {})[which[0]] = matrix
        self._layers[number] = {layer: Matrices(**matrices, scale=scale) for layer, matrices in opened.items()}

    def load(self, adapters: Adapters, names: Sequence[str], mesh: Mesh) -> None:
        """Takes the values of these adapters from all ranks. Collective."""
        for number, name in enumerate(names):
            for (_, parameter, whole), own in zip(
                self.tensors(self.values, number), adapters.values_of(name), strict=True
            ):
                whole[own_rows(parameter)] = own.to(whole.device)
        mesh.join_shards(self.values)
        for number, name in enumerate(names):
            adapter = adapters.adapter_of(name)
            spec, scale = adapter.spec, adapter.alpha / adapter.rank
            self.open(number, spec.rank if spec else adapter.rank, scale, spec.targets if spec else None)

    def give_gradients(self, adapters: Adapters, names: Sequence[str], mesh: Mesh) -> None:
        """Adds up the gradients of all ranks, and gives them to the adapters. Collective."""
        mesh.sum_over_ranks(self.gradients)
        for number, name in enumerate(names):
            whole = self.tensors(self.gradients, number)
            adapters.add_gradients(name, [gradient[own_rows(parameter)] for _, parameter, gradient in whole])

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Has the LoRA layers of `model` compute with these adapters inside the block."""
        layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        with ExitStack() as stack:
            for name, layer in layers.items():
                setattr(layer, "forward", partial(self._forward, name, layer))  # noqa: B010  # of nn.Module's
                stack.callback(layer.__dict__.pop, "forward")
            yield

    def compute(self, present: Sequence[tuple[int, int]]) -> None:
        """Says of the next micro-batch, until its backward pass has ended, which adapters have its tokens: their
        numbers, and how many tokens, one after the other."""
        self._present = list(present)

    def _forward(self, name: str, layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.called.add(name)
        output: Tensor = layer.base_layer(x, *args, **kwargs)
        rows = layer.lora_dropout[ADAPTER](x).reshape(-1, x.shape[-1])
        sizes = [size for _, size in self._present]
        if len(rows) != sum(sizes):
            raise BadInput(f"{name} gets {len(rows)} tokens; expected the {sum(sizes)} of the micro-batch, in order")
        added = []
        for (number, _), own in zip(self._present, rows.split(sizes), strict=True):
            matrices = self._layers[number].get(name)
            added.append(matrices(own) if matrices else own.new_zeros(len(own), output.shape[-1]))
        return output + torch.cat(added).view_as(output)


def own_rows(parameter: DTensor) -> slice:
    """Returns which rows of a parameter this rank has: FSDP gives each rank as many, and the last ones fewer."""
    spread = [dim for dim, placement in enumerate(parameter.placements) if placement == Shard(0)]
    if not spread:
        return slice(None)
    (dim,) = spread
    each = -(-parameter.shape[0] // parameter.device_mesh.size(dim))
    first = each * parameter.device_mesh.get_local_rank(dim)
    return slice(min(first, parameter.shape[0]), min(first + each, parameter.shape[0]))


class Together:
    """Passes of several adapters on one rank. All ranks make the same calls in the same order."""

    def __init__(self, model: PreTrainedModel, adapters: Adapters, passes: Passes, mesh: Mesh) -> None:
        self._model, self._adapters, self._passes, self._mesh = model, adapters, passes, mesh
        self._parameters = [(name, cast(DTensor, p)) for name, p in adapters.parameters.items()]

    def run(
        self, part: BatchPart, micro_batches: Sequence[MicroBatch], shares: Sequence[AdapterShare]
    ) -> list[ShardOutput]:
        """Computes what the shares ask for, and adds their gradients to those of their adapters. Returns the outputs of
        each, with its own numbers of datums. Collective. Raises BadInput for an adapter that is not there."""
        names = [share.adapter for share in shares]
        for name in names:
            self._adapters.adapter_of(name)
        whole = WholeAdapters(self._parameters, len(names), self._passes.device)
        whole.load(self._adapters, names, self._mesh)
        trains = any(share.loss_fn for share in shares)
        works = [_Work(share) for share in shares]
        passing = self._passes.sharding.accumulating(self._model)
        grad, mode = torch.set_grad_enabled(trains), adapter_mode(self._model, dropout=trains)
        with grad, mode, whole.in_place_of(self._model), passing as next_pass:
            for count, micro in enumerate(map(in_order, micro_batches), start=1):
                next_pass(count == len(micro_batches))
                places, rows, p = self._compute(part, micro, shares, whole)
                gradient = torch.zeros_like(p)
                for number, place in places:
                    own = {name: column[place] for name, column in rows.items()}
                    gradient[place] = works[number].note(micro, place, p[place].detach(), own)
                if trains:
                    p.backward(gradient)
        if trains:
            whole.give_gradients(self._adapters, names, self._mesh)
        return [work.output(part) for work in works]

    def _compute(
        self, part: BatchPart, micro: MicroBatch, shares: Sequence[AdapterShare], whole: WholeAdapters
    ) -> tuple[list[tuple[int, slice]], dict[str, Tensor], Tensor]:
        """Returns where the shares are in a micro-batch, its rows, and their log-probabilities."""
        places, rows = list(places_of(micro, shares)), self._passes.rows(part, micro)
        packed, longest = self._passes.sharding.packed, rows["tokens"].shape[1]
        tokens = np.asarray([part.lengths[d] if packed else longest for d in micro.datums])
        whole.compute([(number, int(tokens[place].sum())) for number, place in places])
        return places, rows, self._passes.logprobs(self._model, part, micro, rows)

    def why_in_turn(self, config: CommonConfig, dtype: torch.dtype) -> str:
        """Tries two adapters in one pass, whose values are random, against each alone. Returns "" if they agree, and if
        one that is not finite does not touch the other; else why adapters cannot share a pass. `dtype`: that which
        computes. Collective; changes nothing."""
        if config.deterministic:
            return "in deterministic mode no result depends on who else asks at the time"
        if config.trainer.compile:
            return "trainer.compile has compiled the layers with one adapter"
        try:
            return self._tried(dtype)
        except Exception as error:  # each architecture fails in its own way
            for unit in fsdp_units(self._model):
                unit.reshard()
            return f"two adapters in one pass cannot be computed ({type(error).__name__}: {error})"

    def _tried(self, dtype: torch.dtype) -> str:
        vocabulary = self._model.config.get_text_config().vocab_size
        batch = TokenBatch.join([_sample(number, length, vocabulary) for number, length in enumerate(LENGTHS)])
        part = BatchPart.of(replace(batch, sequences=np.arange(len(batch))))
        shares = [AdapterShare("", number, 1, ("target_tokens",), None, {}) for number in range(2)]
        whole = WholeAdapters(self._parameters, 2, self._passes.device)
        for number in range(2):
            self._fill(whole, number)

        def tried(*datums: int) -> tuple[dict[int, Tensor], Tensor]:
            """Returns the log-probabilities of these datums, and the gradients of both adapters."""
            whole.gradients.zero_()
            rows = self._backward(part, MicroBatch(datums), shares, whole)
            return rows, whole.gradients.clone()

        alone = [tried(number) for number in range(2)]
        if silent := {name.partition(".lora_")[0] for name, _ in self._parameters} - whole.called:
            return f"{min(silent)} is not called as a layer"
        both, values = tried(0, 1), whole.values.clone()
        largest = max(float(rows[number].abs().max()) for number, (rows, _) in enumerate(alone))
        allowed = rounding(dtype, largest, self._model.config.get_text_config().num_hidden_layers)

        def off(number: int, found: tuple[dict[int, Tensor], Tensor]) -> str:
            (rows, gradients), (own, wanted) = found, alone[number]
            if not (moved := float((rows[number] - own[number]).abs().max())) <= allowed:
                return f"log-probabilities move by {moved:.3g}"
            distance = float((gradients[number] - wanted[number]).norm() / wanted[number].norm())
            return (
                "" if distance <= max(1e-4, GRADIENT_OFF * torch.finfo(dtype).eps) else f"a gradient by {distance:.3g}"
            )

        for number in range(2):
            if wrong := off(number, both):
                return f"{wrong} when another adapter is in the pass"
            whole.values[1 - number].fill_(math.nan)
            if wrong := off(number, tried(0, 1)):
                return f"{wrong} when another adapter in the pass is not finite"
            whole.values.copy_(values)
            whole.values[number].zero_()
            if not off(number, tried(number)):
                return "an adapter changes nothing"
            whole.values.copy_(values)
        return ""

    @torch.no_grad()
    def _fill(self, whole: WholeAdapters, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for name, parameter, value in whole.tensors(whole.values, number):
            size = (1 if ".lora_A." in name else PROBED) / math.sqrt(parameter.shape[1])
            value.copy_(size * torch.randn(parameter.shape, generator=generator))
            rank = parameter.shape[0 if ".lora_A." in name else 1]
        whole.open(number, rank, 1.0)

    def _backward(
        self, part: BatchPart, micro: MicroBatch, shares: Sequence[AdapterShare], whole: WholeAdapters
    ) -> dict[int, Tensor]:
        """Returns the log-probabilities of each datum of a micro-batch, after a backward pass of their sum."""
        with whole.in_place_of(self._model), self._passes.sharding.accumulating(self._model) as next_pass:
            next_pass(True)
            _, _, p = self._compute(part, micro, shares, whole)
            lengths = [int(part.lengths[d]) for d in micro.datums]
            inside = torch.arange(p.shape[1])[None] < torch.tensor(lengths)[:, None]
            p.backward(inside.to(p.device, p.dtype))
        return {d: row[:length] for d, row, length in zip(micro.datums, p.detach(), lengths, strict=True)}


class _Work:
    """Collects what one share asks for, over the micro-batches of a rank."""

    def __init__(self, share: AdapterShare) -> None:
        """Raises BadInput for an unknown loss, or a wrong configuration."""
        self._share = share
        self._loss: tuple[LossFn, dict[str, float]] | None = None
        if share.loss_fn:
            self._loss = resolve_loss(share.loss_fn, share.loss_fn_config)
        self._logprobs: list[tuple[MicroBatch, Tensor]] = []
        self._metrics: list[Metrics] = []
        self._all_finite = True

    def note(self, micro: MicroBatch, place: slice, p: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """Takes the share's rows of a micro-batch, and returns the gradient of its loss by their log-probabilities."""
        own = replace(micro, datums=tuple(d - self._share.first for d in micro.datums[place]))
        self._logprobs.append((own, p))
        if self._loss is None:
            return torch.zeros_like(p)
        columns = {name: rows[name] for name in (*self._share.columns, "tokens")}
        leaf = p.clone().requires_grad_()
        loss, metrics, finite = backward(self._loss[0], leaf, columns, self._loss[1])
        self._all_finite = self._all_finite and finite
        if not micro.filler:
            watched: Metrics = monitors(p, columns) if "logprobs" in columns else {}
            self._metrics.append({"loss:sum": loss, **watched, **metrics})
        return torch.zeros_like(p) if leaf.grad is None else leaf.grad

    def output(self, part: BatchPart) -> ShardOutput:
        """Returns what this rank has computed of the share."""
        own = self._share.own(part)
        output = collect(own.lengths, self._logprobs, reduce_metrics(self._metrics))
        if self._all_finite or self._loss is None:
            return output
        return replace(output, suspects=nonfinite_datums(own, output, *self._loss))


def _sample(number: int, length: int, vocabulary: int) -> TokenBatch:
    """Returns a datum of tokens that do not repeat soon."""
    place = np.arange(length + 1)
    tokens = ((31 * place**2 + 17 * place + 3 + 7 * number) % vocabulary).astype(np.int32)
    columns = {"target_tokens": tokens[1:].astype(np.int64)}
    return TokenBatch(tokens[:-1], np.array([0, length]), columns, np.ones(1, np.float32))
