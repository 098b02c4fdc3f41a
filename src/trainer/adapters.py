"""Several LoRA adapters on one base; one of them at a time is in the model.

The model has one set of LoRA layers, with the rank and the layers of `trainer.lora`. It holds the values, the AdamW
state and the accumulated gradients of the adapter in use; the other adapters wait in host memory. Everything that works
with the model's parameters (FSDP, saves, publishing) works with the adapter in use and knows no others. A switch moves
bytes: an adapter that trains in turn with others computes what it computes alone, bit for bit, unless it has dropout,
because all adapters share its random numbers.

An adapter with a smaller rank r, or with fewer layers, is padded with zeros: the rows of A beyond r and the columns of
B beyond r are 0. The padding is exact and stays so. The gradient of a padded row of A is computed from padded columns
of B, which are 0, and the other way round; AdamW's update of a value 0 with moments 0 is 0, with weight decay too, if
its eps is above 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.lora import ADAPTER, read_adapter
from trainer.mesh import Mesh
from trainer.snapshot import MOMENTS
from trainer.state import Checkpointer
from trireme.config import CommonConfig
from trireme.config.trainer import LoraConfig
from trireme.core.base_digest import base_digest
from trireme.core.errors import BadInput
from trireme.core.weights import Adapter, AdapterSpec

FIRST = ""
"""The name of the adapter with which the model begins, as `trainer.lora` describes it."""


@dataclass
class WaitingAdapter:
    """An adapter that is not in the model: this rank's part of its values, AdamW state and gradients, in host
    memory."""

    adapter: Adapter
    state: list[Tensor]
    """For each parameter its values, AdamW's moments and AdamW's count of steps, in the order of `Adapters._live`."""
    gradients: list[Tensor | None]
    """For each parameter the accumulated gradient; None before the first pass."""


class Adapters:
    """Keeps this rank's part of each LoRA adapter, and swaps one adapter at a time into the model. All ranks must make
    the same calls in the same order. No call communicates."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.AdamW,
        checkpointer: Checkpointer,
        lora: LoraConfig,
        first: Adapter,
    ) -> None:
        """`parameters`: the model's trained parameters by name; `optimizer` has AdamW's state for them. `first`: the
        adapter that the parameters hold now."""
        self._model = model
        self._parameters = dict(parameters)
        self._optimizer = optimizer
        self._checkpointer = checkpointer
        self._lora = lora
        self._waiting: dict[str, WaitingAdapter] = {}
        self.name = FIRST
        self.adapter = first
        """The adapter in use."""

    def add(self, name: str, spec: AdapterSpec, start: Path | None = None) -> None:
        """Adds the adapter `name`, which waits in host memory until `use`. Without `start` its matrix B is zero, so it
        changes nothing at first. With `start`, a directory in peft's form, its values are read from there. Raises
        BadInput if `name` is taken, if `spec` does not fit the model's LoRA layers, or if `start` does not fit
        `spec`."""
        if name == self.name or name in self._waiting:
            raise BadInput(f"an adapter {name!r} is there already: give another name, or drop it first")
        rank = self.adapter.rank
        targets = self._lora.target_modules
        if not 1 <= spec.rank <= rank:
            raise BadInput(
                f"an adapter of rank {spec.rank}; expected 1 to {rank}: start with a larger trainer.lora.rank"
            )
        other = sorted(set(spec.targets) - set(targets)) or ([] if spec.targets else ["no layers"])
        if other:
            raise BadInput(f"an adapter for {', '.join(other)}; expected some of {', '.join(targets)} (trainer.lora)")
        alpha = spec.alpha / spec.rank * rank
        values = [self._of_rank(parameter, whole) for parameter, whole in self._start_values(spec, start)]
        state = [
            tensor
            for value in values
            for tensor in (value, *(torch.zeros_like(value) for _ in MOMENTS), torch.zeros(()))
        ]
        self._waiting[name] = WaitingAdapter(Adapter(self.adapter.base, rank, alpha, spec), state, [None] * len(values))

    @torch.no_grad()
    def use(self, name: str) -> None:
        """Puts the adapter `name` into the model, and moves the adapter that was in use to host memory, unchanged. Does
        nothing if `name` is in use. Raises BadInput for an unknown name."""
        if name == self.name:
            return
        entering = self._waiting.pop(name, None)
        if entering is None:
            raise BadInput(
                f"there is no adapter {name!r}; expected one of {', '.join(map(repr, (self.name, *self._waiting)))}"
            )
        self._checkpointer.keep()
        for live, waiting in zip(self._live(), entering.state, strict=True):
            before = live.to("cpu", copy=True)
            live.copy_(waiting)
            waiting.copy_(before)  # its memory becomes that of the one that leaves
        gradients = [None if p.grad is None else cast(DTensor, p.grad).to_local().cpu() for p in self._all]
        for parameter, gradient in zip(self._all, entering.gradients, strict=True):
            if gradient is None:
                parameter.grad = None
            else:
                parameter.grad = torch.empty_like(parameter)
            if gradient is not None:
                cast(DTensor, parameter.grad).to_local().copy_(gradient)
        self._waiting[self.name] = WaitingAdapter(self.adapter, entering.state, gradients)
        self.name = name
        self.adapter = entering.adapter
        for layer in self._model.modules():
            if isinstance(layer, LoraLayer):
                layer.scaling[ADAPTER] = self.adapter.alpha / self.adapter.rank

    def drop(self, name: str) -> None:
        """Forgets the adapter `name`. If it is in use, the model first switches back to its initial adapter, which is
        named `FIRST`. Raises BadInput for an unknown name, and for the initial adapter, which cannot be dropped."""
        if name == FIRST:
            raise BadInput("the first adapter cannot be dropped; expected the name of one that was added")
        if name == self.name:
            self.use(FIRST)
        if self._waiting.pop(name, None) is None:
            added = [repr(other) for other in (self.name, *self._waiting) if other != FIRST]
            if added:
                expected = f"expected one of {', '.join(added)}"
            else:
                expected = "none has been added to the first one, which cannot be dropped"
            raise BadInput(f"there is no adapter {name!r} to drop; {expected}")

    @property
    def _all(self) -> list[nn.Parameter]:
        return list(self._parameters.values())

    def _live(self) -> Iterator[Tensor]:
        """Yields the live tensors (not copies) of one parameter after the other: this rank's part of the parameter and
        of its AdamW moments, and its AdamW count of steps."""
        for parameter in self._all:
            state = self._optimizer.state[parameter]
            for tensor in (parameter, *(state[moment] for moment in MOMENTS)):
                yield cast(DTensor, tensor.detach()).to_local()
            yield state["step"]

    def _start_values(self, spec: AdapterSpec, start: Path | None) -> Iterator[tuple[DTensor, Tensor]]:
        """Yields (parameter, initial values) for each parameter; the values are an unsharded tensor of the parameter's
        shape. Together these tensors form an adapter of rank `spec.rank` on the layers `spec.targets`, padded with
        zeros. With `start`, the adapter is read from this directory. Without it, A is random and B is zero."""
        generator = torch.Generator().manual_seed(spec.seed)
        wholes = dict[str, Tensor]()
        local = dict[str, Tensor]()  # the parts of these that are the adapter's
        for name, parameter in self._parameters.items():
            layer, _, which = name.partition(".lora_")
            whole = wholes[name] = torch.zeros(parameter.shape, dtype=parameter.dtype)
            if layer.rpartition(".")[2] in spec.targets:
                local[name] = whole[: spec.rank] if which.startswith("A") else whole[:, : spec.rank]
        shapes = {name: tuple(part.shape) for name, part in local.items()}
        if start:
            saved = read_adapter(start, spec, self.adapter.base, shapes)
        else:
            saved = None
        for name, part in local.items():
            if saved is not None:
                part.copy_(saved[name])
            elif ".lora_A." in name:
                first = torch.empty(part.shape)
                part.copy_(nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=generator))
        for name, parameter in self._parameters.items():
            yield cast(DTensor, parameter), wholes[name]

    @staticmethod
    def _of_rank(parameter: DTensor, whole: Tensor) -> Tensor:
        """Shards the tensor `whole` like `parameter`, and returns a copy of this rank's part in host memory."""
        sharded = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        return sharded.to_local().to("cpu", copy=True)


class AdapterVerbs:
    """Gives a shard the verbs that add, use and drop LoRA adapters. Each raises BadInput if the whole model is
    trained."""

    _adapters: Adapters | None = None
    """None: the whole model is trained."""

    @property
    def _adapter(self) -> Adapter | None:
        """The adapter in use; None if the whole model is trained."""
        if self._adapters:
            return self._adapters.adapter
        return None

    def add_adapter(self, name: str, spec: AdapterSpec, start: Path | None = None) -> None:
        """Adds the adapter `name`, which waits until `use_adapter`. Without `start` it changes nothing at first. With
        `start`, a directory in peft's form, its values are read from there. Raises BadInput if this model cannot have
        the adapter, or if `name` is taken."""
        self._several().add(name, spec, start)

    def use_adapter(self, name: str) -> None:
        """Makes all other verbs work with the adapter `name`, in the state in which it was left. The model's initial
        adapter is named `FIRST`. Raises BadInput for an unknown name."""
        self._several().use(name)

    def drop_adapter(self, name: str) -> None:
        """Forgets the adapter `name`. If it is in use, the model first switches back to its initial adapter, which is
        named `FIRST`. Raises BadInput for an unknown name, and for the initial adapter, which cannot be dropped."""
        self._several().drop(name)

    def _several(self) -> Adapters:
        if self._adapters is None:
            raise BadInput("this run trains the whole model and has no adapters: set trainer.lora.rank")
        return self._adapters


def first_adapter(config: CommonConfig, mesh: Mesh) -> Adapter | None:
    """Returns the description of the adapter with which the model begins: rank, alpha and the digest of the base
    weights, the same on all ranks. Returns None if the whole model is trained. Collective."""
    lora = config.trainer.lora
    if lora.rank is None:
        return None
    digest = mesh.broadcast_object(base_digest(config.model.name) if mesh.is_first else "")
    return Adapter(digest, lora.rank, lora.alpha)
