"""Follows published tensors into the parameters of vLLM's model, and sums the values of these parameters.

No table says which parameter a published tensor becomes a part of: it is *observed*. At an engine's first update
`inference.watching` records each copy that vLLM's loaders make: the elements and name of the published tensor, and the
elements and name of the parameter. Later updates use this record.

vLLM loads layer by layer (`vllm.model_executor.model_loader.reload`): its parameters have no memory at first, and the
loaders copy into them only to count how much of a layer has come. These copies are the recorded ones. When a layer is
complete the loaders fill new memory, the layer may *pack* its weights for its kernels, and the result is copied to the
permanent memory of the layer's parameters.

A parameter is summed at the last moment when it is still plain. *At the end of the update*, where packing does not
change it: all parameters on CUDA, except the experts of some kernels; norms, embeddings, biases and output matrices on
CPUs. *Right before packing*, where packing changes it: linear layers and stacked experts on CPUs, which keep no plain
copy. The first update shows which of both applies.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImplBase

from inference.loaded import Elements, Following, LoadedSums
from inference.watching import Copy, CopyWatch, Layout, disordered, layout_of, widens
from trireme.transports.tensor_sums import TensorPart, part_sums

PACK = "process_weights_after_loading"
PLAIN = {
    method.process_weights_after_loading
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
}
"""The functions that vLLM's methods without quantisation call after a load. On CUDA they do nothing, or pack experts in
place."""
AHEAD = 4
"""Most parameters, not yet packed, that wait to be summed while vLLM loads more: they take memory."""
WITHIN = "within the reload"
AFTER = "after the reload"


def own_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Returns {name: tensor} of the layer's own parameters and buffers, without its submodules."""
    return dict(chain(layer.named_parameters(recurse=False), layer.named_buffers(recurse=False)))


class TensorFollower:
    """Finds where the values of published tensors lie in the parameters of one model. At each update, computes
    checksums (sums) of the values there, which prove that the engine has loaded the published values. Each rank of an
    engine has one follower. `tensors_of(layer)` returns {name: tensor} of the layer's tensors that may receive
    published values."""

    def __init__(self, model: nn.Module, tensors_of: Callable[[nn.Module], Mapping[str, Tensor]] = own_tensors) -> None:
        self._model = model
        self._tensors_of = tensors_of
        self._prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self._table: list[tuple[str, torch.dtype, torch.Size, float | None]] | None = None
        self._watch: CopyWatch | None = None  # while what the loaders do is not yet known
        self._copies: Mapping[str, dict[Copy, int]] = {}  # by parameter, with their numbers
        self._layouts: dict[str, Layout] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._factors: Mapping[str, float] = {}
        self._packed: dict[str, str] = {}  # parameters that are packed, and when
        self._in_place: set[str] = set()  # those that are packed in the memory where they lie
        self._copied: frozenset[str] = frozenset()  # published tensors that are copied in place
        self._sums: dict[int, Tensor] = {}  # by the number of the copy, on the device
        self._threads = ThreadPoolExecutor(max(1, torch.get_num_threads()), "sums")
        self._pending: deque[Future[dict[int, Tensor]]] = deque()

    @contextmanager
    def following(
        self,
        tensors: Mapping[str, Tensor],
        *,
        traced: bool,
        factors: Mapping[str, float] = MappingProxyType({}),
        copied: frozenset[str] = frozenset(),
    ) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Context manager: observes how vLLM's loaders load `tensors` within its `with` block; the method `loaded` then
        sums the loaded values. Yields an iterator of (name, tensor) for the loaders; start to iterate only after vLLM
        has prepared its parameters. The tensors must live until `loaded` is called.

        `traced`: True if this follower recorded at an earlier update where the loaders copy the tensors, and the
        replica accepted the record (`LoadedProof.traced`). If `traced` is False, or if the tensors' names, order,
        shapes, dtypes or factors differ from the recorded ones, the follower makes a new record in this block.
        `factors`: {tensor: the factor by which it was multiplied since it was published}; its sums are exact only if
        the factor is a power of two. `copied`: the tensors that `copy` has loaded; the loaders do not get them.
        """
        table = _table_of(tensors, factors)
        self._sums.clear()
        self._factors = factors
        with ExitStack() as stack:
            if not traced or table != self._table:
                self._watch = stack.enter_context(CopyWatch(tensors))
                self._table = table
                self._copies = self._watch.copies
                self._packed = {}
                self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
            for module in self._model.modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, QuantizeMethodBase) and PACK not in vars(method):
                    # Of the object alone: the class has its own again when it is deleted.
                    setattr(method, PACK, partial(self.pack, WITHIN, method.process_weights_after_loading))
                    stack.callback(delattr, method, PACK)
            yield self._published({name: tensor for name, tensor in tensors.items() if name not in copied})
            if self._watch:
                self._watch.idle = True

    def copied(self, tensors: Mapping[str, Tensor], *, traced: bool) -> frozenset[str]:
        """Returns the names of the published `tensors` that `copy` can load with the same result as vLLM's loaders; the
        loaders have to load the others. Returns no names if the parameters' layout in memory has changed since the
        first update, or if nothing is recorded for tensors of these shapes. `traced`: as for `following`."""
        model_tensors = self._model_tensors()
        lies = all(
            name in model_tensors and layout_of(model_tensors[name]) == layout for name, layout in self._layouts.items()
        )
        if traced and lies and _table_of(tensors, {}) == self._table:
            return self._copied
        return frozenset()

    def copy(self, groups: Iterable[Mapping[str, Tensor]]) -> None:
        """Copies published tensors, which `copied` has named, into the parameters. Each of `groups` is {name: tensor};
        the memory of a group may be used again once the next group is taken. Call `loaded` afterwards. If loaders have
        to load other tensors, call `following` before `loaded`."""
        self._sums.clear()
        self._factors = MappingProxyType({})
        model_tensors = self._model_tensors()
        by_name: defaultdict[str, list[Copy]] = defaultdict(list)
        for copies in self._copies.values():
            for copy in copies:
                by_name[copy.part.name].append(copy)
        for group in groups:
            chosen = [(copy, tensor) for name, tensor in group.items() for copy in by_name[name]]
            targets = [_elements(model_tensors[copy.target].data, copy.place) for copy, _ in chosen]
            if targets:  # else this rank holds nothing of the group
                torch._foreach_copy_(targets, [_elements(tensor, copy.source) for copy, tensor in chosen])

    def _published(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if self._watch:
            self._watch.begin(self._model_tensors())
        yield from tensors.items()

    def pack(self, when: str, pack: Callable[[nn.Module], None], layer: nn.Module) -> None:
        """Calls the function `pack` with `layer`. The function may rearrange the layer's parameters for its kernels;
        the parameters that it changes are summed before the call. `when`: WITHIN if vLLM calls this method during its
        reload of the weights, AFTER if the method is called after the reload."""
        if self._watch is None:
            for name, tensor in self._tensors_of_layer(layer).items():
                if self._packed.get(name) == when:
                    self._begin(name, tensor)
                    if name in self._in_place:
                        self._await(0)
            pack(layer)
            return
        self._layouts = self._watch.layouts()
        with _disable_current_modes():  # the watch would see each operation of the sums, and slow it down
            self._pack_watched(when, pack, layer)

    def _pack_watched(self, when: str, pack: Callable[[nn.Module], None], layer: nn.Module) -> None:
        """Does the work of the method `pack` at an update that records the copies. It is not yet known then which
        parameters the function `pack` changes. To find out, sums the layer's parameters before and after this function
        is called."""
        before = {name: tensor for name, tensor in self._tensors_of_layer(layer).items() if name not in self._packed}
        memory = {name: tensor.data_ptr() for name, tensor in before.items()}
        plain = {name: self._sum(name, tensor) for name, tensor in before.items()}
        pack(layer)
        after = self._tensors_of_layer(layer)
        for name, sums in plain.items():
            if sums and not (name in after and _equal(sums, self._sum(name, after[name]))):
                self._packed[name] = when
                self._sums |= sums
                if name in after and after[name].data_ptr() == memory[name]:
                    self._in_place.add(name)

    def loaded(self, unfollowed: Mapping[str, str] = MappingProxyType({})) -> LoadedSums:
        """Sums the parameters that packing does not change, now that they are loaded. Returns the sums of these and of
        the packed parameters. Call it once after `following` or `copy`. `unfollowed`: {tensor that was loaded in
        another way: reason}."""
        watch = self._watch
        self._watch = None
        if watch:
            self._layouts = watch.layouts()
        model_tensors = self._model_tensors()
        plain = {name: model_tensors[name] for name in self._copies.keys() - self._packed.keys()}
        on_devices: dict[int, TensorPart] = {}
        for name, tensor in plain.items():
            if tensor.device.type == "cpu":
                self._begin(name, tensor)
            else:  # a kernel sums them all in a few launches
                on_devices |= self._parts(name, tensor)
        self._sums |= _sums_by_number(on_devices)
        self._await(0)
        copies = sorted(
            chain(*(copies_of.items() for copies_of in self._copies.values())), key=lambda copies_of: copies_of[1]
        )
        device = next((copies_of.device for copies_of in self._sums.values()), None)
        nothing = torch.zeros(2, dtype=torch.int64, device=device)
        # What does not lie any more as it did has no sums, so it is refused. One answer comes from the device.
        sums = torch.stack([nothing, *(self._sums.get(number, nothing) for _, number in copies)])[1:].cpu()
        following = None
        if watch:
            parts = tuple(copy.part for copy, _ in copies)
            packed = sum(len(self._copies[name]) for name in self._packed)
            lost = {**watch.unfollowed, **unfollowed}
            self._copied = frozenset() if lost else self._only_copied([copy for copy, _ in copies])
            following = Following(parts, packed, lost, disordered([copy for copy, _ in copies]))
        return LoadedSums(sums.numpy().view(np.uint64), following)

    def _only_copied(self, copies: Sequence[Copy]) -> frozenset[str]:
        """Returns the names of the published tensors that later updates may copy in place, without vLLM's loaders.
        Returns no names unless the platform is CUDA. vLLM loads a layer whole or not at all. So if one tensor of a
        layer needs the loaders, all tensors of this layer need them, and so does every other layer that has a part of
        one of these tensors. `copies`: the copies that the loaders made at the first update."""
        if not current_platform.is_cuda():
            return frozenset()
        layers = {self._prefixes[layer] for layer in self._prefixes if computes(layer)}
        layers |= {_layer_of(name) for name in self._packed}
        before: set[str] = set()
        loaded: set[str] = set()
        while layers != before:
            before = layers
            loaded = {copy.part.name for copy in copies if _layer_of(copy.target) in layers}
            layers = layers | {_layer_of(copy.target) for copy in copies if copy.part.name in loaded}
        return frozenset(self._dtypes.keys() - loaded)

    def _begin(self, name: str, tensor: Tensor) -> None:
        """Begins to sum the published values that lie in the parameter `name`. If the parameter is in CPU memory, a
        thread sums them while the load continues."""
        if tensor.device.type == "cpu":
            self._pending.append(self._threads.submit(self._sum, name, tensor.data))
            self._await(AHEAD)
        else:
            self._sums |= self._sum(name, tensor)

    def _await(self, limit: int) -> None:
        while len(self._pending) > limit:
            self._sums |= self._pending.popleft().result()

    def _sum(self, name: str, tensor: Tensor) -> dict[int, Tensor]:
        """Returns {number of a recorded copy operation: checksum of the copied values, int64 [2]} for all operations
        that copy published values into the parameter `name`. Returns {} if the parameter's layout in memory has
        changed."""
        return _sums_by_number(self._parts(name, tensor))

    def _parts(self, name: str, tensor: Tensor) -> dict[int, TensorPart]:
        """Returns {number of a recorded copy operation: the part of the parameter to sum} for all operations that copy
        published values into the parameter `name`. Returns {} if the parameter's layout in memory has changed."""
        if name not in self._copies or self._layouts[name] != layout_of(tensor):
            return {}
        parts = {}
        for copy, number in self._copies[name].items():
            dtype = self._dtypes[copy.part.name]
            place = copy.place
            if widens(dtype, tensor.dtype):
                view = _elements(tensor.data, place)
                factor = self._factors.get(copy.part.name)
                if factor is not None:
                    view = view / factor
                parts[number] = TensorPart(view, copy.source.offset, copy.source.stride, dtype)
        return parts

    def _model_tensors(self) -> dict[str, Tensor]:
        """Returns {name in the model: tensor} of the tensors to follow in all layers."""
        return {name: tensor for layer in self._prefixes for name, tensor in self._tensors_of_layer(layer).items()}

    def _tensors_of_layer(self, layer: nn.Module) -> dict[str, Tensor]:
        return {self._prefixes[layer] + name: tensor for name, tensor in self._tensors_of(layer).items()}


def computes(layer: nn.Module) -> bool:
    """Returns True if vLLM, after a load, may compute further values from the layer's own weights. On CUDA, linear
    layers, embeddings and experts that are not quantised have no such values: they only hold their weights, packed or
    not."""
    method = getattr(layer, "quant_method", None)
    return isinstance(method, QuantizeMethodBase) and type(method).process_weights_after_loading not in PLAIN


def derives(model: nn.Module) -> bool:
    """Returns True if an attention layer of `model` computes further values at the end of a load, from its own loaded
    weights or another layer's. Attention with latent keys (MLA) does so."""
    for module in model.modules():
        if isinstance(module, Attention):
            attends = type(module)
            attention = type(module.impl)
            after = attends.process_weights_after_loading, attention.process_weights_after_loading
            if after != (Attention.process_weights_after_loading, AttentionImplBase.process_weights_after_loading):
                return True
        elif is_deferred_attention_layer(module):
            return True
    return False


def _layer_of(tensor: str) -> str:
    """Returns the prefix of the layer that has the parameter or buffer `tensor`."""
    return tensor[: tensor.rfind(".") + 1]


def _table_of(
    tensors: Mapping[str, Tensor], factors: Mapping[str, float]
) -> list[tuple[str, torch.dtype, torch.Size, float | None]]:
    return [(name, tensor.dtype, tensor.shape, factors.get(name)) for name, tensor in tensors.items()]


def _elements(tensor: Tensor, elements: Elements) -> Tensor:
    """Returns a view of the given elements of `tensor`; their offset counts from its first element."""
    return tensor.as_strided(elements.shape, elements.stride, tensor.storage_offset() + elements.offset)


def _sums_by_number(parts: Mapping[int, TensorPart]) -> dict[int, Tensor]:
    """Returns {number of a recorded copy operation: checksum of its part, two sums as int64 [2]}. `parts`: {number of a
    recorded copy operation: the part of a parameter to which it copied values}. All parts must be on one device."""
    if not parts:
        return {}
    return dict(zip(parts, part_sums(list(parts.values())), strict=True))


def _equal(sums: Mapping[int, Tensor], expected: Mapping[int, Tensor]) -> bool:
    return sums.keys() == expected.keys() and all(
        torch.equal(value, expected[number]) for number, value in sums.items()
    )
