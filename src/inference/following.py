"""Follows published tensors into the parameters of vLLM's model, and sums the values of these parameters.

No table says which parameter a published tensor becomes a part of: it is *observed*. At an engine's first update
`CopyWatch` records each copy that vLLM's loaders make: the elements and name of the published tensor, and the
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

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImplBase

from inference.loaded import Elements, Following, HeldPart, LoadedSums
from trireme.transports.tensor_sums import TensorPart, merged, part_sums

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
PADDING = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}
"""Functions by which loaders fill elements that belong to no published value."""
COMPUTED = "loaders compute with it"
LAST_NAME = "\U0010ffff"
Layout = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Copy:
    """A copy that a loader makes from a part of a published tensor into a parameter."""

    part: HeldPart
    target: str
    """Name of the parameter or buffer."""
    source: Elements
    """The copied elements of the published tensor, in as many dimensions as `place`."""
    place: Elements
    """The elements of the parameter to which they are copied, in the same order."""


class CopyWatch(TorchDispatchMode):
    """Records copies from `published` tensors to a model's tensors, while it is entered as a context and not `idle`."""

    def __init__(self, published: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.idle = True
        self.copies: defaultdict[str, dict[Copy, int]] = defaultdict(dict)
        """{name of the parameter: {copy into it: the copy's number in order of all copies}}. A copy that loaders repeat
        counts once."""
        self.unfollowed: dict[str, str] = {}
        self._published = published
        self._addresses = sorted((tensor.data_ptr(), name) for name, tensor in published.items() if tensor.numel())
        self._model_tensors: Mapping[str, Tensor] = {}
        self._holders: dict[int, str] = {}  # by memory
        self._into: defaultdict[str, set[str]] = defaultdict(set)  # the published tensors that were copied there
        self._computed: dict[int, set[str]] = {}  # by memory: the published tensors that it was computed from

    def begin(self, model_tensors: Mapping[str, Tensor]) -> None:
        """Begins to record copies to `model_tensors`, {name: tensor}."""
        self._model_tensors, self._holders = (
            model_tensors,
            {_memory(tensor): name for name, tensor in model_tensors.items()},
        )
        self.idle = False

    def layouts(self) -> dict[str, Layout]:
        """Returns {name of a tensor that was copied to: its layout in memory}."""
        return {name: layout_of(self._model_tensors[name]) for name in self.copies}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (self.idle or func.is_view):
            if func is torch.ops.aten.copy_.default and _memory(args[0]) in self._holders:
                self._note(args[0], args[1])
            else:
                self._trace(func, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)], result)
        return result

    def _note(self, target: Tensor, source: Tensor) -> None:
        if _memory(source) == _memory(target):
            return  # vLLM copies a loaded layer to where its parameters always lie; some never lay elsewhere
        holder = self._holders[_memory(target)]
        name = self._name(source)
        if name is None:
            self.unfollowed.update(dict.fromkeys(self._origin(source), COMPUTED))
            return
        self._into[holder].add(name)
        published = self._published[name]
        unlike = _unlike(published, source, target)
        if unlike:
            self.unfollowed[name] = unlike
            return
        dims = list(zip(target.shape, source.stride(), target.stride(), strict=True))
        offset = (source.data_ptr() - published.data_ptr()) // published.element_size()
        start = int(target.storage_offset()) - int(self._model_tensors[holder].storage_offset())
        part = HeldPart(name, _slice(offset, merged((size, stride, stride) for size, stride, _ in dims), 1))
        rows = merged(dims)
        copy = Copy(part, holder, _slice(offset, rows, 1), _slice(start, rows, 2))
        if copy not in self.copies[holder]:
            self.copies[holder][copy] = sum(map(len, self.copies.values()))

    def _trace(self, func: Any, inputs: Sequence[Tensor], result: Any) -> None:
        """Notes that `func` computed the tensors in `result` from `inputs`. If `func` writes to a parameter, the
        published tensors from which `inputs` come cannot be followed; else they are remembered as the origin of
        `result`."""
        origin = {name for tensor in inputs for name in self._origin(tensor)}
        if func._schema.is_mutable and inputs and _memory(inputs[0]) in self._holders and func not in PADDING:
            self.unfollowed.update(dict.fromkeys(origin, COMPUTED))
        old = {_memory(tensor) for tensor in inputs}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (memory := _memory(tensor)) not in self._holders:
                if memory not in old:
                    self._computed.pop(memory, None)  # of a tensor that was freed
                if origin and self._name(tensor) is None:
                    self._computed.setdefault(memory, set()).update(origin)

    def _origin(self, tensor: Tensor) -> set[str]:
        """Returns the names of the published tensors from which the values in the memory of `tensor` were copied or
        computed."""
        name = self._name(tensor)
        if name is not None:
            return {name}
        holder = self._holders.get(_memory(tensor))
        if holder is not None:
            return self._into[holder]
        return self._computed.get(_memory(tensor), set())

    def _name(self, tensor: Tensor) -> str | None:
        """Returns the name of the published tensor that shares its memory with `tensor`; None if none does."""
        if tensor.is_meta or not (address := tensor.data_ptr()):
            return None
        at = bisect_right(self._addresses, (address, LAST_NAME)) - 1
        if at < 0:
            return None
        start, name = self._addresses[at]
        if address < start + self._published[name].nbytes:
            return name
        return None


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


def disordered(copies: Sequence[Copy]) -> list[str]:
    """Returns the names of numbered tensors (of layers, or of experts in one parameter) whose places in the model are
    not in the order of their numbers.

    Later updates follow the record of the first update. So if the loaders exchanged two tensors then, these would stay
    exchanged.
    """
    kinds: defaultdict[tuple[str, str], list[tuple[list[int], list[int], str]]] = defaultdict(list)
    for copy in copies:
        (name, numbers), (holder, places) = _numbers(copy.part.name), _numbers(copy.target)
        kinds[name, holder].append((numbers, [*places, copy.place.offset], copy.part.name))
    names: dict[str, None] = {}
    for kind in kinds.values():
        if len({tuple(numbers) for numbers, _, _ in kind}) == len(kind):  # each has one place
            for (_, place, first), (_, later, second) in pairwise(sorted(kind)):
                if place >= later:
                    names |= {first: None, second: None}
    return list(names)


def layout_of(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride()


def widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Returns True if `wide` can hold all values of `narrow`, so that casting there and back changes nothing."""
    return torch.promote_types(narrow, wide) == wide


def _unlike(published: Tensor, source: Tensor, target: Tensor) -> str | None:
    """Returns why values copied to `target` from `source`, a view of `published`, cannot be found again in `target`: a
    cast or a repetition. Returns None if they can be found."""
    if source.dtype != published.dtype or not widens(source.dtype, target.dtype):
        return f"{_short(published)} as {_short(source)} held in {_short(target)}"
    if source.shape != target.shape or 0 in source.stride():
        return "loaders repeat it"
    return None


def _slice(offset: int, dims: Sequence[tuple[int, int, int]], which: int) -> Elements:
    outermost_first = dims[::-1]
    return Elements(offset, tuple(dim[0] for dim in outermost_first), tuple(dim[which] for dim in outermost_first))


def _numbers(name: str) -> tuple[str, list[int]]:
    """Splits a dotted name: returns the name with "*" for each number, and the numbers."""
    parts = name.split(".")
    return ".".join("*" if part.isdigit() else part for part in parts), [int(part) for part in parts if part.isdigit()]


def _memory(tensor: Tensor) -> int:
    """Returns a number that identifies the memory of `tensor`: the same for all its views, on the device "meta" too."""
    return tensor.untyped_storage()._cdata


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
