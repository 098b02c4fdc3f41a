"""Computes this rank's share of the sums (`trireme.core.digest.Sums`) of each published tensor. The digest of a version
is made of these sums, so it needs no gather.

Nearly every published tensor is a part of one parameter (`trireme.core.slices`). Any other tensor has to be gathered
before it can be summed.

Each rank sums its rows of the parts, cast piece by piece to the dtype in which they are published. If several ranks
hold copies of a shard, the first of them sums it; the first rank sums tensors that are not sharded. The sums of all
ranks add up to the sums of the whole tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from trireme.core.digest import Sums, warm_up
from trireme.core.slices import Convert, Slice, find_slices
from trireme.core.weights import gathered_text
from trireme.process import trace
from trireme.transports.tensor_sums import TensorPart, equal_parts, part_sums, rectangle, tensor_sums, to_sums


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
