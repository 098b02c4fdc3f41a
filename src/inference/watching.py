"""Records the copies that vLLM's loaders make: elements of published tensors to elements of parameters."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inference.loaded import Elements, HeldPart
from trireme.transports.tensor_sums import merged

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
