"""The sums of what this rank holds of each published tensor: a version gets its digest without a gather.

A published tensor is mostly a part of one parameter: the parameter itself under another name, one of stacked experts,
one of fused matrices. Which part of which is found by behaviour: transformers' conversions run on tensors without
memory, in which a copy is a view of what it copies. A result that still lies in a parameter's storage is the part that
its offset and strides say. Anything else (put together of several, permuted for rotary embeddings, rounded) has to be
gathered before it can be summed.

Each rank sums its rows of the parts, cast piece by piece to the dtype in which they are published. Copies of a shard
are summed once, and tensors that are not sharded by the first rank. The sums of all ranks add up to the whole's.
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
from trireme.process import trace
from trireme.transports.tensor_sums import rectangle, sums_of_equals, tensor_sums, to_sums

Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
"""Gives the published tensors, by name, of a model's tensors."""
_ALIAS = torch.ops.aten.alias.default
_COPY = torch.ops.aten.clone.default
_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
NAMED = 3
"""Names that `ShardSums.text` gives as examples."""


@dataclass(frozen=True)
class Slice:
    """A published tensor that is a part of `source`: its element [j_0, j_1, ...] is element
    `offset + sum of j_d strides[d]` of the whole `source`, counted in C order."""

    source: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def row(self) -> int:
        """Elements of a row of the source."""
        return prod(self.source.shape[1:])

    @property
    def steps(self) -> list[int]:
        """The dimensions that go from row to row of the source; the others stay within a row."""
        return [d for d, stride in enumerate(self.strides) if self.shape[d] > 1 and stride >= self.row]

    @property
    def is_rectangle_of_rows(self) -> bool:
        """True if some rows of the source are a rectangle of this."""
        steps = self.steps
        inner = sum((self.shape[d] - 1) * self.strides[d] for d in range(len(self.shape)) if d not in steps)
        whole_rows = all(self.strides[d] % self.row == 0 for d in steps)
        return len(steps) <= 1 and whole_rows and self.offset % self.row + inner < self.row

    def of_whole(self, whole: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Returns this of the source, which is `whole`, as a view, and where it starts in this tensor."""
        view = whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.offset)
        return view, (0,) * len(self.shape)

    def of_rows(self, local: Tensor, begin: int, end: int) -> tuple[Tensor, tuple[int, ...]]:
        """Returns what lies in the rows `begin : end` of the source, which are `local`, as a view, and where it starts
        in this tensor."""
        assert len(local) == end - begin, f"rows {begin} to {end} of a tensor are {len(local)} here"
        shape, start, row = list(self.shape), [0] * len(self.shape), self.row
        first, within = divmod(self.offset, row)
        if steps := self.steps:
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
    """Where what a rank holds of a published tensor is: in the whole, and in memory. Parts of one tensor at equal
    places are summed together."""

    whole: tuple[int, ...]
    """Shape of the published tensor."""
    start: tuple[int, ...]
    """Where in it the part begins."""
    shape: tuple[int, ...]
    """Shape of the part."""
    strides: tuple[int, ...]
    """Its strides in memory."""


class _CopiesAsViews(TorchDispatchMode):
    """Lets the copies that are made inside the block be views of what they copy."""

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
            self.changed |= {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@torch.no_grad()
def find_slices(tensors: Mapping[str, Tensor], convert: Convert) -> dict[str, Slice | None]:
    """Returns, by name, which part of which of `tensors` each published tensor is; None for one that has to be
    gathered. `tensors` may be sharded; nothing of them is read."""
    empty = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    sources = {_storage(tensor): tensors[name] for name, tensor in empty.items()}
    with _CopiesAsViews() as copies:
        published = convert(dict(empty))
    return {
        name: None if _storage(tensor) in copies.changed else _slice(tensor, sources.get(_storage(tensor)))
        for name, tensor in published.items()
    }


def _slice(published: Tensor, source: Tensor | None) -> Slice | None:
    """Returns what is `published` of the `source` with the same storage, if each shard has a rectangle of it."""
    if source is None or published.dtype != source.dtype or published.is_conj() or published.is_neg():
        return None
    part = Slice(source, tuple(published.shape), published.stride(), int(published.storage_offset()))
    if not isinstance(source, DTensor) or source.numel() == 0:
        return part
    spread = [placement for placement in source.placements if placement != Replicate()]
    return part if spread == [Shard(0)] and part.is_rectangle_of_rows else None


class ShardSums:
    """The sums of a model's published tensors, as far as this rank holds them.

    `units` are the model's tensors by name, those together that `convert` needs together. What is sharded is published
    in `dtype`, if it has a floating point, and buffers as they are. `is_first`: this rank sums what is not sharded.
    """

    def __init__(
        self, units: Iterable[Mapping[str, Tensor]], convert: Convert, dtype: torch.dtype, *, is_first: bool
    ) -> None:
        self._slices = {name: part for unit in units for name, part in find_slices(unit, convert).items()}
        self._rows = {name: row for row, name in enumerate(self._slices)}
        self._by_source = _sharing_sources(self._slices)
        self._dtype, self._is_first = dtype, is_first
        self.gathered = [name for name, part in self._slices.items() if part is None]
        """Names of the tensors that are summed after the gather."""
        if any(part is not None and part.source.device.type == "cpu" for part in self._slices.values()):
            warm_up()

    @property
    def text(self) -> str:
        """Says which tensors are summed after the gather; "" if none are."""
        if not self.gathered:
            return ""
        named = ", ".join([*self.gathered[:NAMED], *(["..."] if len(self.gathered) > NAMED else [])])
        return f"digests of {len(self.gathered)} of {len(self._slices)} tensors are taken after the gather: {named}"

    @torch.no_grad()
    def of_shard(self, device: torch.device) -> Tensor:
        """Returns this rank's share of the sums, int64 [tensors, 2] on `device`: zeros where it holds nothing."""
        table = torch.zeros(len(self._slices), 2, dtype=torch.int64, device=device)
        with trace.span("sums"):
            for parts in self._by_source:
                source = parts[0][1].source
                dtype = self._dtype if isinstance(source, DTensor) and source.is_floating_point() else None
                for place, held in self._held(parts).items():
                    sums = sums_of_equals([view for _, view in held], *rectangle(place.whole, place.start), dtype)
                    table[[row for row, _ in held]] += sums.to(device)
        return table

    def _held(self, parts: Sequence[tuple[int, Slice]]) -> dict[PartPlace, list[tuple[int, Tensor]]]:
        """Returns what this rank holds of parts of one tensor, and is to sum: their rows in the table, and views, by
        their place in the whole."""
        source = parts[0][1].source.detach()
        if isinstance(source, DTensor):
            begin, end, counts = _rows_here(source)
            local = source.to_local().contiguous()
            taken = partial(Slice.of_rows, local=local, begin=begin, end=end)
        else:
            counts, taken = self._is_first, partial(Slice.of_whole, whole=source.contiguous())
        found: defaultdict[PartPlace, list[tuple[int, Tensor]]] = defaultdict(list)
        for row, part in parts if counts else []:
            view, start = taken(part)
            if view.numel():
                found[PartPlace(part.shape, start, tuple(view.shape), view.stride())].append((row, view))
        return found

    @torch.no_grad()
    def watching(
        self, units: Iterable[Sequence[tuple[str, Tensor]]], owned: Collection[str], table: Tensor
    ) -> Iterator[Sequence[tuple[str, Tensor]]]:
        """Yields the gathered units, and adds to `table` the sums of those `owned` tensors that need the gather."""
        wanted = set(self.gathered) & set(owned)
        for unit in units:
            for name, tensor in unit:
                if name in wanted:
                    table[self._rows[name]] += tensor_sums(tensor).to(table.device)
            yield unit

    def by_name(self, table: Tensor) -> dict[str, Sums]:
        """Returns the sums by the tensors' names. `table`: the ranks' tables, added up."""
        return dict(zip(self._slices, to_sums(table), strict=True))


def _sharing_sources(slices: Mapping[str, Slice | None]) -> list[list[tuple[int, Slice]]]:
    """Returns the parts of each tensor that has some, with their rows in the table."""
    found: defaultdict[int, list[tuple[int, Slice]]] = defaultdict(list)
    for row, part in enumerate(slices.values()):
        if part is not None and part.source.numel():
            found[id(part.source)].append((row, part))
    return list(found.values())


def _rows_here(source: DTensor) -> tuple[int, int, bool]:
    """Returns which rows of the whole tensor this rank holds, from the first to the one after the last, and if it sums
    them: of several copies, the first does."""
    coordinates = source.device_mesh.get_coordinate()
    assert coordinates is not None, "this rank is in the mesh"
    begin, end, counts = 0, source.shape[0], True
    for d, (placement, at) in enumerate(zip(source.placements, coordinates, strict=True)):
        if placement == Replicate():
            counts = counts and at == 0
        else:
            rows = -(-source.shape[0] // source.device_mesh.size(d))
            begin, end = (min(edge * rows, source.shape[0]) for edge in (at, at + 1))
    return begin, end, counts
