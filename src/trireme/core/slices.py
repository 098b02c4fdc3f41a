"""Finds out which part of a model's tensor each published tensor is. Such a part can be summed without a gather.

A published tensor is mostly a part of one parameter: the parameter itself under another name, one of stacked experts,
one of fused matrices. To find the part, transformers' conversions run on tensors without memory, in which a copy is a
view of its source. If a result still lies in a parameter's storage, its offset and strides give the part. Anything else
(put together of several, permuted for rotary embeddings, rounded) has to be gathered before it can be summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
"""A function that takes a model's tensors by name. Returns the published tensors by name, which it makes of them."""
_ALIAS = torch.ops.aten.alias.default
_COPY = torch.ops.aten.clone.default
_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


@dataclass(frozen=True)
class Slice:
    """A published tensor that is a part of the tensor `source`. Element [j_0, j_1, ...] of the published tensor is
    element `offset + sum over d of j_d * strides[d]` of the whole `source`, counted in C order."""

    source: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def row(self) -> int:
        """Number of elements in a row of the source (a row: one index of its first dimension)."""
        return prod(self.source.shape[1:])

    @property
    def steps(self) -> list[int]:
        """The dimensions of the published tensor whose stride is at least one row of the source. Along such a
        dimension, the next element always lies in another row. Dimensions of size 1 are left out."""
        return [d for d, stride in enumerate(self.strides) if self.shape[d] > 1 and stride >= self.row]

    @property
    def is_rectangle_of_rows(self) -> bool:
        """True if every range of rows of the source holds a rectangular block of the published tensor."""
        steps = self.steps
        inner = sum((self.shape[d] - 1) * self.strides[d] for d in range(len(self.shape)) if d not in steps)
        whole_rows = all(self.strides[d] % self.row == 0 for d in steps)
        return len(steps) <= 1 and whole_rows and self.offset % self.row + inner < self.row

    def of_whole(self, whole: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Returns (view, begin), in the form of `of_rows`. `view`: the published tensor as a view of `whole`. `begin`:
        a 0 for each dimension, because the view begins at the first element of the published tensor. `whole`: the
        source with all its values."""
        view = whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.offset)
        return view, (0,) * len(self.shape)

    def of_rows(self, local: Tensor, begin: int, end: int) -> tuple[Tensor, tuple[int, ...]]:
        """Returns (a view of `local`, the indices at which the view begins in the published tensor). The view is the
        part of the published tensor that lies in `local`; it has no elements if there is no such part. `local`: the
        rows `begin : end` of the source."""
        assert len(local) == end - begin, f"rows {begin} to {end} of a tensor are {len(local)} here"
        shape, start, row = list(self.shape), [0] * len(self.shape), self.row
        first, within = divmod(self.offset, row)
        steps = self.steps
        if steps:
            (d,) = steps
            pace = self.strides[d] // row
            start[d], stop = (min(max(0, -(-(edge - first) // pace)), self.shape[d]) for edge in (begin, end))
            shape[d] = stop - start[d]
            first += start[d] * pace
        elif not begin <= first < end:  # all of it is in a row of another rank
            return local.new_empty(0), tuple(start)
        place = local.storage_offset() + (first - begin) * row + within
        return local.as_strided(shape, self.strides, place if prod(shape) else 0), tuple(start)


class _CopiesAsViews(TorchDispatchMode):
    """A dispatch mode with which `find_slices` traces published tensors to their sources. Within its `with` block, a
    copy of a tensor becomes a view of that tensor, so both have the same storage. The mode also records which storages
    are written to: a tensor in such a storage is not a plain part of its source."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: set[int] = set()  # the storages that something was written to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _COPY:
            return _ALIAS(args[0])
        if func in _RESHAPES and not args[0].is_contiguous():
            try:
                return func(*args, **kwargs)
            except RuntimeError:  # only a real copy can have this form
                return func(torch.empty_like(args[0], memory_format=torch.contiguous_format), *args[1:], **kwargs)
        if func._schema.is_mutable:
            self.changed |= {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@torch.no_grad()
def find_slices(tensors: Mapping[str, Tensor], convert: Convert) -> dict[str, Slice | None]:
    """Returns {name of a published tensor: its Slice}. The Slice says which tensor in `tensors` contains the published
    tensor, and where. The value is None if the published tensor has to be gathered. `tensors`: the model's tensors by
    name; they may be sharded, and their values are not read. `convert` makes the published tensors from the model's
    tensors."""
    empty = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    sources = {_storage(tensor): tensors[name] for name, tensor in empty.items()}
    with _CopiesAsViews() as copies:
        published = convert(dict(empty))
    return {
        name: None if _storage(tensor) in copies.changed else _slice(tensor, sources.get(_storage(tensor)))
        for name, tensor in published.items()
    }


def _slice(published: Tensor, source: Tensor | None) -> Slice | None:
    """Returns the slice of `source` that makes up `published`; both share one storage. Returns None if there is no
    source, if the two differ in dtype, or if some shard of the source could hold a part of `published` that is not
    rectangular."""
    if source is None or published.dtype != source.dtype or published.is_conj() or published.is_neg():
        return None
    part = Slice(source, tuple(published.shape), published.stride(), int(published.storage_offset()))
    if not isinstance(source, DTensor) or source.numel() == 0:
        return part
    spread = [placement for placement in source.placements if placement != Replicate()]
    if spread == [Shard(0)] and part.is_rectangle_of_rows:
        return part
    return None
