"""Published weights: what travels from the trainer to the replicas, and how its delivery is proved.

The trainer packs the tensors of one version, in the inference dtype and under their (unfused) Hugging Face names, into
a few flat byte buckets. Each tensor has its own hash; the digest of the version is a hash over the sorted table of
names, dtypes, shapes and hashes. A receiver recomputes the hashes from the bytes that arrived. That proves delivery;
that what was delivered is *used* is proved by the canary: the log-probabilities of a fixed token sequence.

With LoRA only the adapter's tensors travel. The digest then covers what they are worth nothing without too: the base,
by its own digest, and the factor by which they count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from trireme.core.errors import WeightsRefused
from trireme.core.types import WeightIdentity


def hash_bytes(data: npt.NDArray[np.uint8]) -> str:
    """xxh3-128 of a contiguous byte array, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data.data)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: bytes `offset : offset + nbytes` of bucket number `bucket`; `dtype` as in safetensors ("F32")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int
    hash: str


@dataclass(frozen=True)
class Adapter:
    """What the tensors of a LoRA adapter belong to. `base`: digest of the weights that they were trained on
    (`trireme.core.base_digest.base_digest`). What they add to a layer is B A x alpha / rank."""

    base: str
    rank: int
    alpha: float

    def __str__(self) -> str:
        return f"adapter of rank {self.rank} and alpha {self.alpha:g} on base {self.base}"


def weights_digest(entries: Sequence[TensorEntry], adapter: Adapter | None = None) -> str:
    """Digest of a version (32 hex digits): independent of the order and the packing of the tensors."""
    table = hashlib.blake2b(digest_size=16)
    if adapter:
        table.update(f"{adapter}\n".encode())
    for entry in sorted(entries, key=lambda e: e.name):
        table.update(f"{entry.name}\0{entry.dtype}\0{entry.shape}\0{entry.hash}\n".encode())
    return table.hexdigest()


@dataclass(frozen=True)
class Canary:
    """A fixed sequence and what the trainer makes of it under the published weights.

    `tokens` int32 [T]; `logprobs` float32 [T - 1], of tokens[1:] given what precedes each; a replica must agree within
    `tolerance` (largest absolute difference).
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    tolerance: float


@dataclass(frozen=True)
class WeightsManifest:
    """What is published: one version, without its bytes."""

    identity: WeightIdentity
    entries: tuple[TensorEntry, ...]
    canary: Canary
    adapter: Adapter | None = None
    """The tensors are those of a LoRA adapter, under peft's names; None: they are the whole model."""


@dataclass(frozen=True)
class PublishedWeights:
    """One version, ready for replicas."""

    manifest: WeightsManifest
    source: Any
    """How a receiver gets the bytes; only the transport that made it reads it (`trireme.core.transport`)."""

    @property
    def identity(self) -> WeightIdentity:
        return self.manifest.identity

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.manifest.entries)


@dataclass(frozen=True)
class UpdateReport:
    """A replica's acknowledgement: it now samples from `identity`. Times in seconds: `seconds` of the whole update; of
    that `wait_s` for the step in progress, and `pause_s` from when the engine stood still until it went on."""

    replica: int
    identity: WeightIdentity
    canary_max_diff: float
    reprefill_tokens: int
    seconds: float
    wait_s: float = 0.0
    pause_s: float = 0.0


def check_received(manifest: WeightsManifest, buckets: Sequence[npt.NDArray[np.uint8]]) -> None:
    """Raises WeightsRefused unless the bytes in `buckets` are those that the manifest's identity names."""
    identity = manifest.identity
    if weights_digest(manifest.entries, manifest.adapter) != identity.digest:
        raise WeightsRefused(
            f"the table of tensors of version {identity.version} does not have digest {identity.digest}"
        )
    for entry in manifest.entries:
        received = hash_bytes(buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes])
        if received != entry.hash:
            raise WeightsRefused(
                f"tensor {entry.name} of version {identity.version} arrived with hash {received}, "
                f"published as {entry.hash}: it was corrupted on the way"
            )


def check_canary(manifest: WeightsManifest, logprobs: npt.NDArray[np.float32]) -> float:
    """Returns the largest absolute difference to the trainer's logprobs. Raises WeightsRefused when it is beyond the
    tolerance or NaN."""
    canary = manifest.canary
    diff = float(np.max(np.abs(logprobs - canary.logprobs)))
    if not diff <= canary.tolerance:
        raise WeightsRefused(
            f"canary of version {manifest.identity.version}: the replica's logprobs differ from the trainer's by "
            f"{diff:.3g}, more than {canary.tolerance:.3g}: the weights it uses are not those that were published"
        )
    return diff
