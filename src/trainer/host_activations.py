"""Keeps activations of layers in host memory from the forward pass to the backward pass.

While a layer computes its output, each tensor that it saves for its backward pass is copied to host memory. So device
memory holds the saved tensors of two layers at a time: in the forward pass, of the layer that computes and of the layer
before it, whose copies may not have ended; in the backward pass, of the layer that computes and of the layer that
computes next, whose tensors are copied back meanwhile.

Copies are queued on a stream of their own. This stream and the stream that computes wait for each other, and the host
waits for neither. On CPUs the same code runs with PyTorch's streams for CPUs, which do nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from trainer.transfers import queue_to_host
from trireme.plan.memory import LAYERS_ON_DEVICE

SMALLEST_BYTES = 4096
"""Smaller tensors stay on the device."""
Memory = tuple[int, int]
"""Identifies memory that tensors are views of, and its version: in-place operations change the version."""


class HostActivations:
    """Runs the layers of a model. `host_layers`: returns for a number of tokens how many layers, counted from the
    first, copy their saved tensors to host memory."""

    def __init__(self, device: torch.device, host_layers: Callable[[int], int]) -> None:
        self.device = device
        self._host_layers = host_layers
        self._streams = torch.get_device_module(device)
        self._copies = self._streams.Stream()
        self._recent: deque[SavedTensors] = deque()  # of the layers whose tensors have not yet left the device

    def run(
        self, layer: nn.Module, number: int, forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs the function `forward` of the layer with this number on `hidden` [B, L, H]. Weights of `layer` and the
        tensors among the other arguments, which layers share, are not copied."""
        if number == 0:
            self._recent.clear()
        if len(self._recent) == LAYERS_ON_DEVICE:
            self._recent.popleft().leave_device()
        before = self._recent[-1] if self._recent else None
        leaves = tree_leaves((args, kwargs))
        tensors = [*layer.parameters(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        saved = SavedTensors(self, before, {_storage(tensor) for tensor in tensors})
        self._recent.append(saved)
        moves = number < self._host_layers(hidden.shape[:-1].numel())
        with saved_tensors_hooks(saved.pack if moves else _stay, saved.unpack):
            return forward(hidden, *args, **kwargs)

    @contextmanager
    def copying(self, saved: SavedTensors) -> Iterator[None]:
        """Context manager: copies of `saved` within its `with` block are queued behind all earlier work and copies."""
        self._copies.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._copies):
            yield
            saved.copied = self._copies.record_event()

    def forget_recent(self) -> None:
        """Lets tensors that are on the device at the end of the forward pass stay there."""
        self._recent.clear()

    def wait_for(self, saved: SavedTensors) -> None:
        """Lets the work that is queued from now on wait for the copies of `saved`."""
        if saved.copied is not None:
            self._streams.current_stream().wait_event(saved.copied)


class SavedTensors:
    """The tensors that one layer saves in one forward pass. Autograd holds this object, and so its copies, until the
    layer's backward pass has ended. `before`: those of the layer before, whose backward pass comes next. `shared`:
    memory that is not copied."""

    def __init__(self, owner: HostActivations, before: SavedTensors | None, shared: set[int]) -> None:
        self.copied: Any = None  # the event after the last copy of these tensors
        self._owner = owner
        self._before = before
        self._shared = shared
        self._on_host: dict[Memory, Tensor] = {}
        self._on_device: dict[Memory, Tensor] = {}
        self._in_backward = False

    def pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        """Queues a copy of the memory of `tensor` to the host, unless another view of this memory was copied before.
        Returns a function that returns `tensor` in the backward pass; or `tensor` itself if it is not copied."""
        storage = tensor.untyped_storage()
        memory = _storage(tensor), tensor._version
        if (
            memory[0] in self._shared
            or storage.nbytes() < SMALLEST_BYTES
            or tensor.device.type != self._owner.device.type
        ):
            return tensor
        if memory not in self._on_host:
            whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            self._on_device[memory] = whole
            with self._owner.copying(self):
                self._on_host[memory] = queue_to_host(whole)
        view = tensor.shape, tensor.stride(), tensor.storage_offset()
        return partial(self._view, memory, tensor.dtype, *view)

    def unpack(self, packed: Tensor | Callable[[], Tensor]) -> Tensor:
        """Returns a saved tensor on the device. The first call begins the layer's backward pass, and queues the copies
        to the device for the layer before."""
        if not self._in_backward:
            self._in_backward = True
            self._owner.forget_recent()
            self.return_to_device()
            self._owner.wait_for(self)
            if self._before:
                self._before.return_to_device()
                self._before = None
        return packed if isinstance(packed, Tensor) else packed()

    def leave_device(self) -> None:
        """Frees the device's memory behind the copies to the host."""
        self._owner.wait_for(self)
        self._on_device.clear()

    def return_to_device(self) -> None:
        """Queues copies to the device of the tensors that have left it."""
        absent = self._on_host.keys() - self._on_device.keys()
        if not absent:
            return
        # Made on the stream that computes, so its later work may reuse this memory as soon as it is freed.
        self._on_device |= {m: torch.empty_like(self._on_host[m], device=self._owner.device) for m in absent}
        with self._owner.copying(self):
            for memory in absent:
                self._on_device[memory].copy_(self._on_host[memory], non_blocking=True)

    def _view(self, memory: Memory, dtype: torch.dtype, *place: Any) -> Tensor:
        return self._on_device[memory].view(dtype).as_strided(*place)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _stay(tensor: Tensor) -> Tensor:
    return tensor
