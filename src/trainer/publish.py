"""Publishing: one version's weights, gathered layer by layer, packed into byte buckets on the host of rank 0.

A bucket is filled in a buffer that is used again and again; `put` copies it away and returns a reference. Tensors that
a replica fuses (q, k and v; gate and up) always share a bucket, so that no receiver sees a part of one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trireme.core.weights import Canary, TensorEntry, hash_bytes

Put = Callable[[npt.NDArray[np.uint8]], Any]
"""Copies a bucket to where replicas can get it, and returns a reference; the array is reused afterwards."""

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 64
CANARY_TOKENS = 8
"""Enough for attention to look back and for every weight but the embeddings' rows to count; little beside the prefill
of the requests in flight, with which replicas compute them."""

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
    """The fixed sequence, int32, over the vocabulary, shorter than `max_seq_len` (a replica samples one more)."""
    position = np.arange(max(2, min(CANARY_TOKENS, max_seq_len - 1)), dtype=np.int64)
    return ((31 * position**2 + 17 * position + 3) % vocab_size).astype(np.int32)


def canary_tolerance(dtype: torch.dtype, largest_logit: float, num_layers: int) -> float:
    """By how much the logprobs of two right implementations may differ: 1e-4, or in low precision
    4 u * largest_logit * sqrt(num_layers), with u the unit roundoff (2^-8 in bfloat16).

    Rounding errors of the layers add up like independent ones and move logits in proportion. Between bfloat16 and
    float32, for random Qwen3 models of 2 to 28 layers, the largest difference was 0.8 to 1.4 times
    u * largest_logit * sqrt(num_layers); a single layer's missing MLP moved the logprobs by 5 to 90 times as much.
    """
    return max(1e-4, 2 * torch.finfo(dtype).eps * largest_logit * math.sqrt(num_layers))


@torch.no_grad()
def compute_canary(model: PreTrainedModel, max_seq_len: int, device: torch.device) -> Canary:
    """The canary under the weights that the model computes with, which are those that it publishes. Collective."""
    config = model.config.get_text_config()
    tokens = canary_tokens(config.vocab_size, max_seq_len)
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
    tolerance = canary_tolerance(logits.dtype, float(logits.abs().max()), config.num_hidden_layers)
    return Canary(tokens, logprobs.cpu().numpy(), tolerance)
