"""Publishing: one version's weights, gathered layer by layer, packed into byte buckets on the host of rank 0.

A bucket is filled in a buffer that is used again and again; `put` copies it away and returns a reference. Tensors that a
replica fuses (q, k and v; gate and up) always share a bucket, so that no receiver sees a part of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.model import token_logprobs
from trireme.weights import Canary, TensorEntry, hash_bytes

Put = Callable[[npt.NDArray[np.uint8]], Any]
"""Copies a bucket to where replicas can get it, and returns a reference; the array is reused afterwards."""

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 64
CANARY_TOKENS = 24
CANARY_TOLERANCE_FP32 = 1e-4

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_FUSED = re.compile(r"\b(?:[qkv]|gate|up)_proj\b")


def fused_group(name: str) -> str:
    """What a tensor must stay together with: the same string for q, k and v of a layer, and for its gate and up.

    >>> fused_group("layers.0.mlp.gate_proj.weight"), fused_group("layers.0.self_attn.k_proj.bias")
    ('layers.0.mlp.', 'layers.0.self_attn.')
    """
    fused = _FUSED.search(name)
    return name[: fused.start()] if fused else name


def _groups(unit: Iterable[tuple[str, Tensor]]) -> list[list[tuple[str, Tensor]]]:
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in unit:
        groups.setdefault(fused_group(name), []).append((name, tensor))
    return list(groups.values())


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Packer:
    """Packs units of named tensors into buckets of about `bucket_bytes` (a larger group has a larger one to itself)."""

    def __init__(self, put: Put, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._put = put
        self._bucket_bytes = bucket_bytes
        self._buffer = np.zeros(0, dtype=np.uint8)

    def pack(self, units: Iterable[Sequence[tuple[str, Tensor]]]) -> tuple[tuple[TensorEntry, ...], tuple[Any, ...]]:
        """All entries, and the references of the buckets. Takes each unit once, in turn."""
        entries: list[TensorEntry] = []
        references: list[Any] = []
        used = 0
        for group in (group for unit in units for group in _groups(unit)):
            size = sum(_padded(tensor.nbytes) for _, tensor in group)
            if used and used + size > self._bucket_bytes:
                references.append(self._put(self._buffer[:used]))
                used = 0
            self._reserve(used, size)
            for name, tensor in group:
                entries.append(self._copy(name, tensor, len(references), used))
                used += _padded(tensor.nbytes)
        references.append(self._put(self._buffer[:used]))
        return tuple(entries), tuple(references)

    def _reserve(self, used: int, size: int) -> None:
        """Room for `size` more bytes, what is there kept."""
        if used + size > len(self._buffer):
            larger = np.zeros(max(used + size, min(2 * len(self._buffer), self._bucket_bytes)), dtype=np.uint8)
            larger[:used] = self._buffer[:used]
            self._buffer = larger

    def _copy(self, name: str, tensor: Tensor, bucket: int, offset: int) -> TensorEntry:
        place = self._buffer[offset : offset + tensor.nbytes]
        torch.from_numpy(place).view(tensor.dtype).view(tensor.shape).copy_(tensor)
        shape = tuple(tensor.shape)
        return TensorEntry(name, _DTYPES[tensor.dtype], shape, bucket, offset, tensor.nbytes, hash_bytes(place))


def canary_tokens(vocab_size: int, max_seq_len: int) -> npt.NDArray[np.int32]:
    """The fixed sequence, int32: spread over the vocabulary, shorter than `max_seq_len` (a replica samples one more)."""
    position = np.arange(max(2, min(CANARY_TOKENS, max_seq_len - 1)), dtype=np.int64)
    return ((31 * position**2 + 17 * position + 3) % vocab_size).astype(np.int32)


def canary_tolerance(dtype: torch.dtype) -> float:
    """TBD"""
    return CANARY_TOLERANCE_FP32 if dtype == torch.float32 else 0.25


@torch.no_grad()
def compute_canary(model: PreTrainedModel, tokens: npt.NDArray[np.int32], device: torch.device, tolerance: float) -> Canary:
    """The canary under the weights that the model computes with, which are those that it publishes. Collective."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None].to(device)
    logprobs = token_logprobs(model, ids[:, :-1], ids[:, 1:], torch.ones(1, device=device))
    return Canary(tokens, logprobs[0].cpu().numpy(), tolerance)
