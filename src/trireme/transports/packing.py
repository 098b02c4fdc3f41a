"""Named tensors laid out in flat byte buckets in host memory, and found there again.

Tensors that a replica fuses (q, k and v; gate and up) always share a bucket, so that no receiver sees a part of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trireme.core.weights import TensorEntry, hash_bytes

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 64
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
"""By their names in safetensors. Parameters have the first three; buffers can have any."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FUSED = re.compile(r"\b(?:[qkv]|gate|up)_proj\b")


def fused_group(name: str) -> str:
    """Returns the same string for tensors that must stay together: q, k and v of a layer, its gate and up.

    >>> fused_group("layers.0.mlp.gate_proj.weight"), fused_group("layers.0.self_attn.k_proj.bias")
    ('layers.0.mlp.', 'layers.0.self_attn.')
    """
    fused = _FUSED.search(name)
    return name[: fused.start()] if fused else name


def tensor_of(entry: TensorEntry, buckets: Sequence[npt.NDArray[np.uint8]]) -> Tensor:
    """Returns the tensor that `entry` describes, as a view of its bucket."""
    flat = torch.from_numpy(buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes])
    return flat.view(DTYPES[entry.dtype]).view(entry.shape)


class Packer:
    """A `trireme.core.transport.Sender`: rank 0 packs, the others take part in gathering each unit and keep nothing.

    A bucket has about `bucket_bytes`; a larger group of tensors has a larger one to itself. Buckets are filled in one
    buffer: `put` copies each to where receivers can get it and returns a reference. The source is the tuple of these.
    """

    def __init__(
        self, put: Callable[[npt.NDArray[np.uint8]], Any], rank: int = 0, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._put, self._rank, self._bucket_bytes = put, rank, bucket_bytes
        self._buffer = np.zeros(bucket_bytes, dtype=np.uint8)

    def send(self, units: Iterable[Sequence[tuple[str, Tensor]]]) -> tuple[tuple[TensorEntry, ...], Any]:
        entries: list[TensorEntry] = []
        references: list[Any] = []
        used = 0
        for unit in units:
            if self._rank != 0:
                continue
            groups: dict[str, list[tuple[str, Tensor]]] = {}
            for name, tensor in unit:
                groups.setdefault(fused_group(name), []).append((name, tensor))
            for group in groups.values():
                size = sum(_padded(tensor.nbytes) for _, tensor in group)
                if used and used + size > self._bucket_bytes:
                    references.append(self._put(self._buffer[:used]))
                    used = 0
                if size > len(self._buffer):
                    self._buffer = np.zeros(size, dtype=np.uint8)
                for name, tensor in group:
                    entries.append(self._copy(name, tensor, len(references), used))
                    used += _padded(tensor.nbytes)
        if self._rank != 0:
            return (), None
        references.append(self._put(self._buffer[:used]))
        return tuple(entries), tuple(references)

    def _copy(self, name: str, tensor: Tensor, bucket: int, offset: int) -> TensorEntry:
        place = self._buffer[offset : offset + tensor.nbytes]
        torch.from_numpy(place).view(tensor.dtype).view(tensor.shape).copy_(tensor)
        shape = tuple(tensor.shape)
        return TensorEntry(name, _NAMES[tensor.dtype], shape, bucket, offset, tensor.nbytes, hash_bytes(place))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
