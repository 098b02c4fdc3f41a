"""Computes this rank's share of the sums (`trireme.core.digest.Sums`) of each published tensor. The digest of a version
is made of these sums, so it needs no gather.

Nearly every published tensor is a part of one parameter: the parameter itself under another name, one of stacked
experts, one of fused matrices. To find the part (`find_slices`), transformers' conversions run on tensors without
memory, in which a copy is a view of its source. If a result still lies in a parameter's storage, its offset and strides
give the part. Anything else (put together of several, permuted for rotary embeddings, rounded) has to be gathered
before it can be summed.

Each rank sums its rows of the parts, cast piece by piece to the dtype in which they are published. If several ranks
hold copies of a shard, the first of them sums it; the first rank sums tensors that are not sharded. The sums of all
ranks add up to the sums of the whole tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trireme.core.digest import Sums, warm_up
from trireme.core.weights import gathered_text
from trireme.process import trace
from trireme.transports.tensor_sums import TensorPart, equal_parts, part_sums, rectangle, tensor_sums, to_sums

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


class PartPlace(NamedTuple):
    """Says where a rank's piece of a published tensor lies in the whole tensor, and how the piece lies in memory. One
    parameter can contain several published tensors (experts, for example). If their pieces have equal PartPlaces and
    are evenly spaced in memory, the pieces are summed together, as one TensorPart."""

    whole: tuple[int, ...]
    """Shape of the published tensor."""
    start: tuple[int, ...]
    """Index of the piece's first element in the published tensor."""
    shape: tuple[int, ...]
    """Shape of the piece."""
    strides: tuple[int, ...]
    """Strides of the piece in memory, in elements."""


class ShardSums:
    """Computes the checksums of a model's published tensors over the parts that this rank holds.

    `units`: groups of the model's tensors, {name: tensor}; `convert` turns each group into published tensors. Sharded
    floating-point tensors are published in `dtype`, other tensors in the dtype that they have. `is_first`: this rank
    sums the tensors that are not sharded.
    """

    def __init__(
        self, units: Iterable[Mapping[str, Tensor]], convert: Convert, dtype: torch.dtype, *, is_first: bool
    ) -> None:
        self._slices = {name: part for unit in units for name, part in find_slices(unit, convert).items()}
        self._rows = {name: row for row, name in enumerate(self._slices)}
        self._by_source = _sharing_sources(self._slices)
        self._dtype = dtype
        self._is_first = is_first
        self.gathered = [name for name, part in self._slices.items() if part is None]
        """Names of the tensors that are summed after the gather."""
        if any(part is not None and part.source.device.type == "cpu" for part in self._slices.values()):
            warm_up()

    @property
    def text(self) -> str:
        """A line that names the tensors that are summed after the gather; "" if there are none."""
        return gathered_text(self.gathered)

    @torch.no_grad()
    def of_shard(self, device: torch.device) -> Tensor:
        """Returns this rank's share of the sums, int64 [tensors, 2] on `device`, with a row for each published tensor.
        The row is 0 if this rank sums no part of the tensor, or if the tensor can be summed only after the gather."""
        table = torch.zeros(len(self._slices), 2, dtype=torch.int64, device=device)
        rows: defaultdict[torch.device, list[int]] = defaultdict(list)
        parts: defaultdict[torch.device, list[TensorPart]] = defaultdict(list)
        with trace.span("sums"):
            for slices in self._by_source:
                source = slices[0][1].source
                if isinstance(source, DTensor) and source.is_floating_point():
                    dtype = self._dtype
                else:
                    dtype = None
                for place, pieces in self._local_parts(slices).items():
                    views = [view for _, view in pieces]
                    parts[views[0].device] += equal_parts(views, *rectangle(place.whole, place.start), dtype)
                    rows[views[0].device] += [row for row, _ in pieces]
            for (
                part_device,
                device_parts,
            ) in parts.items():  # all at once, because a GPU sums many tensors in one launch
                table.index_add_(0, torch.tensor(rows[part_device], device=device), part_sums(device_parts).to(device))
        return table

    def _local_parts(self, parts: Sequence[tuple[int, Slice]]) -> dict[PartPlace, list[tuple[int, Tensor]]]:
        """Returns this rank's parts of the published tensors that come from one parameter, grouped by their place:
        {place: [(row in the table of sums, view of the part)]}. Returns {} if another rank sums these tensors. `parts`:
        for each of the tensors (row in the table of sums, slice of the parameter)."""
        source = parts[0][1].source.detach()
        if isinstance(source, DTensor):
            begin, end, counts = _rows_here(source)
            local = source.to_local().contiguous()
            taken = partial(Slice.of_rows, local=local, begin=begin, end=end)
        else:
            counts = self._is_first
            taken = partial(Slice.of_whole, whole=source.contiguous())
        by_place: defaultdict[PartPlace, list[tuple[int, Tensor]]] = defaultdict(list)
        for row, part in parts if counts else []:
            view, start = taken(part)
            if view.numel():
                by_place[PartPlace(part.shape, start, tuple(view.shape), view.stride())].append((row, view))
        return by_place

    @torch.no_grad()
    def watching(
        self, units: Iterable[Sequence[tuple[str, Tensor]]], owned: Collection[str], table: Tensor
    ) -> Iterator[Sequence[tuple[str, Tensor]]]:
        """Yields the gathered `units` unchanged. Adds to `table` (int64 [tensors, 2]) the sums of the tensors in
        `owned` that can only be summed after the gather."""
        watched = set(self.gathered) & set(owned)
        for unit in units:
            for name, tensor in unit:
                if name in watched:
                    table[self._rows[name]] += tensor_sums(tensor).to(table.device)
            yield unit

    def by_name(self, table: Tensor) -> dict[str, Sums]:
        """Returns {name of the tensor: its sums}. `table`: int64 [tensors, 2], added up over all ranks."""
        return dict(zip(self._slices, to_sums(table), strict=True))


def _sharing_sources(slices: Mapping[str, Slice | None]) -> list[list[tuple[int, Slice]]]:
    """Groups the slices by the parameter that they are parts of. Returns a list of (row in the table of sums, slice)
    for each parameter."""
    by_source: defaultdict[int, list[tuple[int, Slice]]] = defaultdict(list)
    for row, part in enumerate(slices.values()):
        if part is not None and part.source.numel():
            by_source[id(part.source)].append((row, part))
    return list(by_source.values())


def _rows_here(source: DTensor) -> tuple[int, int, bool]:
    """Returns (first row, end row, counts) for this rank's rows of the whole tensor `source`. `counts`: this rank sums
    these rows, because it is the first of the ranks that hold a copy of them."""
    coordinates = source.device_mesh.get_coordinate()
    assert coordinates is not None, "this rank is in the mesh"
    begin = 0
    end = source.shape[0]
    counts = True
    for d, (placement, at) in enumerate(zip(source.placements, coordinates, strict=True)):
        if placement == Replicate():
            counts = counts and at == 0
        else:
            rows = -(-source.shape[0] // source.device_mesh.size(d))
            begin, end = (min(edge * rows, source.shape[0]) for edge in (at, at + 1))
    return begin, end, counts


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
