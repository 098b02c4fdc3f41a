"""Named tensors laid out in flat byte buckets in host memory, and found there again.

Tensors that a replica fuses (q, k and v; gate and up) always share a bucket, so that no receiver sees a part of one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Generic, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trireme.core.errors import TriremeError
from trireme.core.transport import Session, Stored, join_parts
from trireme.core.weights import Layout, TensorEntry, padded
from trireme.transports.tensor_sums import tensor_sums, to_sums

BUCKET_BYTES = 64 * 2**20
BUFFERS = 2
"""Buckets that a rank packs or passes on at the same time."""
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""PyTorch's dtypes by their names in safetensors. Parameters have one of the first three; buffers can have any."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FUSED = re.compile(r"\b(?:[qkv]|gate|up)_proj\b")

Bucket: TypeAlias = npt.NDArray[np.uint8]
Buffer = TypeVar("Buffer", Bucket, Tensor, Bucket | Tensor)
"""The memory in which a bucket is packed: host memory, or bytes on a GPU."""
Units = Iterable[Sequence[tuple[str, Tensor]]]
"""Named tensors, unit by unit, in the order in which they are gathered."""


def fused_group(name: str) -> str:
    """Returns a key for the tensor `name`. Tensors that must share a bucket have equal keys: q, k and v of a layer;
    gate and up of a layer.

    >>> fused_group("layers.0.mlp.gate_proj.weight"), fused_group("layers.0.self_attn.k_proj.bias")
    ('layers.0.mlp.', 'layers.0.self_attn.')
    """
    fused = _FUSED.search(name)
    if fused:
        return name[: fused.start()]
    return name


def lay_out(units: Units, bucket_bytes: int = BUCKET_BYTES) -> Layout:
    """Assigns tensors to places in buckets; the tensors may be on the device "meta". A bucket has at most
    `bucket_bytes` bytes, except that a larger group of fused tensors gets a bucket of its own."""
    entries: list[TensorEntry] = []
    bucket = used = 0
    for unit in units:
        groups: defaultdict[str, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, tensor in unit:
            groups[fused_group(name)].append((name, tensor))
        for group in groups.values():
            size = sum(padded(tensor.nbytes) for _, tensor in group)
            if used and used + size > bucket_bytes:
                bucket += 1
                used = 0
            for name, tensor in group:
                dtype = _NAMES[tensor.dtype]
                shape = tuple(tensor.shape)
                entries.append(TensorEntry(name, dtype, shape, bucket, used, tensor.nbytes, ""))
                used += padded(tensor.nbytes)
    return Layout(tuple(entries))


def tensor_of(entry: TensorEntry, buckets: Mapping[int, Bucket | Tensor] | Sequence[Bucket | Tensor]) -> Tensor:
    """Returns the tensor that `entry` describes, as a view of its bucket. `buckets`: the buckets, indexed by their
    number."""
    if not entry.nbytes:  # which cannot be viewed as another dtype
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    part = buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]
    if isinstance(part, Tensor):
        flat = part
    else:
        flat = torch.from_numpy(part)
    return flat.view(DTYPES[entry.dtype]).view(entry.shape)


def fill(
    layout: Layout,
    units: Units,
    selected: Collection[int],
    buffer: Callable[[int], Buffer],
    on_full: Callable[[int, Buffer], None],
) -> None:
    """Copies tensors from `units` into memory. Copies only tensors of the buckets with a number in `selected`.
    `buffer(number)` returns an array for a bucket, at least as large as the bucket. When a bucket is full, calls
    `on_full` with its number and memory. The calls are in ascending order of the numbers, because receivers expect
    buckets in this order. Takes every unit, even if none of its tensors is in a selected bucket, because gathering a
    unit is a collective operation of all trainer ranks. Raises TriremeError if the tensors do not match the layout."""
    places = {entry.name: entry for entry in layout.entries}
    missing = defaultdict[int, int](int)
    for bucket in (entry.bucket for entry in layout.entries):
        missing[bucket] += 1
    filling: dict[int, Buffer] = {}
    order = {entry.name: number for number, entry in enumerate(layout.entries)}
    for unit in units:
        # The layout has fused tensors together, a unit need not: the bucket after theirs could be full first.
        for name, tensor in sorted(unit, key=lambda named: order.get(named[0], -1)):
            entry = places.pop(name, None)
            if entry is None or (entry.shape, DTYPES[entry.dtype]) != (tuple(tensor.shape), tensor.dtype):
                raise TriremeError(
                    f"tensor {name}, {tensor.dtype} {tuple(tensor.shape)}, is not in the layout: {entry}"
                )
            if entry.bucket not in selected:
                continue
            if entry.bucket not in filling:
                filling[entry.bucket] = buffer(entry.bucket)[: layout.sizes[entry.bucket]]
            tensor_of(entry, filling).copy_(tensor)
            end = entry.offset + entry.nbytes
            if padded(end) > end:  # the memory had other buckets, and zeros never change
                filling[entry.bucket][end : padded(end)] = 0
            missing[entry.bucket] -= 1
            if not missing[entry.bucket]:
                on_full(entry.bucket, filling.pop(entry.bucket))
    if places:
        raise TriremeError(f"{len(places)} tensors of the layout were not gathered, {next(iter(places))} among them")


def host_memory(nbytes: int, *, pinned: bool) -> Bucket:
    """Returns host memory of `nbytes` bytes for a bucket. `pinned`: page-locked, which makes copies from a GPU several
    times as fast."""
    if not pinned:
        return np.zeros(nbytes, dtype=np.uint8)
    memory: Bucket = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


class Packer(Generic[Stored]):
    """A `trireme.core.transport.Sender` that stores buckets where receivers fetch them; each rank packs its share of
    the buckets. `put(number, bucket)` stores a copy of a bucket and returns a reference to the copy; it runs in a
    thread. `send` returns the rank's part, {number of a bucket: its reference}."""

    endpoint = None

    def __init__(self, put: Callable[[int, Bucket], Stored], rank: int = 0, size: int = 1) -> None:
        self._put = put
        self._rank = rank
        self._size = size
        self._buffers = [np.zeros(0, dtype=np.uint8)] * BUFFERS

    def send(self, version: int, layout: Layout, units: Units, session: Session | None) -> dict[int, Stored]:
        share = range(self._rank, len(layout.sizes), self._size)
        largest = max((layout.sizes[bucket] for bucket in share), default=0)
        free = SimpleQueue[Bucket]()
        putting = dict[int, Future[Stored]]()
        for memory in self._buffers:
            free.put(memory)
        from_gpu = False

        def observed() -> Iterator[Sequence[tuple[str, Tensor]]]:
            nonlocal from_gpu
            for unit in units:
                from_gpu = any(tensor.is_cuda for _, tensor in unit)
                yield unit

        def buffer(bucket: int) -> Bucket:
            memory = free.get()  # waits for the thread, if it has both
            if len(memory) >= layout.sizes[bucket]:
                return memory
            return host_memory(largest, pinned=from_gpu)

        def put(number: int, full: Bucket) -> Stored:
            try:
                return self._put(number, full)
            finally:
                free.put(cast(Bucket, full.base))

        with ThreadPoolExecutor(1, "put") as thread:
            fill(
                layout,
                observed(),
                share,
                buffer,
                lambda bucket, full: putting.update({bucket: thread.submit(put, bucket, full)}),
            )
        part = {bucket: reference.result() for bucket, reference in putting.items()}
        self._buffers = [free.get() for _ in self._buffers]
        return part


def pack(
    units: Units, put: Callable[[Bucket], Stored], bucket_bytes: int = BUCKET_BYTES
) -> tuple[tuple[TensorEntry, ...], tuple[Stored, ...]]:
    """Packs tensors that are all in this process into buckets, and calls `put` with each bucket. Returns the tensors'
    entries, with hashes, and the references that `put` returned."""
    tensors = [list(unit) for unit in units]
    layout = lay_out(tensors, bucket_bytes)
    references = join_parts([Packer(lambda _, full: put(full)).send(0, layout, tensors, None)])
    return layout.with_hashes({name: hash_tensor(t) for unit in tensors for name, t in unit}), references


def hash_tensor(tensor: Tensor) -> str:
    """Returns the hash of a tensor's bytes, with which `trireme.core.weights.check_received` compares the received
    tensor."""
    return str(*to_sums(tensor_sums(tensor)[None]))
