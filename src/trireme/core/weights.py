"""Published weights: what travels from the trainer to the replicas, and how its delivery is proved.

The trainer packs the tensors of one version, in the inference dtype and under their (unfused) Hugging Face names, into
a few flat byte buckets. Each tensor has its own hash; the digest of the version is a hash over the sorted table of
names, dtypes, shapes and hashes. A receiver recomputes the hashes from the received bytes. That proves delivery; the
canary, the log-probabilities of a fixed token sequence, proves that the received weights are *used*. A prefill computes
these, and answers come from decode steps: a replica also samples tokens after the sequence, and compares what decode
steps say of them with what a prefill says.

With LoRA only the adapter's tensors travel. The digest then also covers the base, by its own digest, and the adapter's
rank and alpha: without these the tensors mean nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trireme.core.digest import SCHEME, WORD_BYTES, Sums, sums_of
from trireme.core.errors import WeightsRefused
from trireme.core.types import WeightIdentity

if TYPE_CHECKING:
    from trireme.core.transport import Session

ALIGNMENT = 64
"""Each tensor in a bucket begins at a multiple of this many bytes."""
PIECE_BYTES = 2**24
"""The most bytes of a tensor that one thread sums at a time: about a tenth of an embedding, and still a millisecond's
work."""
NAMED = 3
"""The most names that `gathered_text` gives as examples."""


class TensorPlace(NamedTuple):
    """The place of a tensor in the buckets of a version: number of the bucket, offset and size in bytes."""

    bucket: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor, which is bytes `offset : offset + nbytes` of a bucket."""

    name: str
    dtype: str
    """Named as in safetensors ("F32")."""
    shape: tuple[int, ...]
    bucket: int
    """Number of the bucket."""
    offset: int
    nbytes: int
    hash: str
    """The hash of the tensor's bytes: the sums of `trireme.core.digest`, as 32 hex digits."""

    @property
    def place(self) -> TensorPlace:
        return TensorPlace(self.bucket, self.offset, self.nbytes)


@dataclass(frozen=True)
class Layout:
    """Says where each tensor that a run publishes lies in the buckets: the same for every version."""

    entries: tuple[TensorEntry, ...]
    """One entry for each tensor, in the order in which tensors are gathered and lie in the buckets. Hashes are
    empty."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each bucket."""
        sizes = [0] * (self.entries[-1].bucket + 1 if self.entries else 1)
        for entry in self.entries:
            sizes[entry.bucket] = max(sizes[entry.bucket], padded(entry.offset + entry.nbytes))
        return tuple(sizes)

    def share(self, rank: int, size: int) -> set[str]:
        """Returns the names of the tensors that trainer rank `rank`, one of `size` ranks, stores for receivers: the
        tensors in its share of the buckets. Bucket b belongs to rank b mod `size`."""
        return {entry.name for entry in self.entries if entry.bucket % size == rank}

    def with_hashes(self, hashes: Mapping[str, str]) -> tuple[TensorEntry, ...]:
        """Returns the entries for one version, with its hashes. `hashes`: {name of a tensor: its hash in this
        version}."""
        return tuple(replace(entry, hash=hashes[entry.name]) for entry in self.entries)


def padded(nbytes: int) -> int:
    """Returns the number of bytes that a tensor of `nbytes` takes in a bucket, where tensors begin at multiples of
    ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def gathered_text(names: Sequence[str]) -> str:
    """Returns a message that counts the published tensors `names`, and names the first few. These tensors have to be
    gathered before their digests can be computed (`trireme.core.slices`). Returns "" if `names` is empty.

    >>> gathered_text(["a", "b", "c", "d"])
    'summed after the gather: 4 of the published tensors (a, b, c, ...)'
    """
    if not names:
        return ""
    named = ", ".join([*names[:NAMED], *(["..."] if len(names) > NAMED else [])])
    return f"summed after the gather: {len(names)} of the published tensors ({named})"


@dataclass(frozen=True)
class AdapterSpec:
    """The settings of one LoRA adapter in a run that can train several adapters on the same base model."""

    rank: int
    """The rank of the adapter, at most `trainer.lora.rank`."""
    alpha: float
    """The output of the adapter is scaled by alpha / rank."""
    targets: tuple[str, ...]
    """Names of the linear layers that it adapts, among the layers of `trainer.lora`."""
    seed: int
    """The seed of the adapter's initial values."""


@dataclass(frozen=True)
class Adapter:
    """Describes a published LoRA adapter: its tensors A and B add the matrix B A, times alpha / rank, to a layer's
    weight."""

    base: str
    """The digest of the weights that the adapter was trained on (`trireme.core.base_digest.base_digest`)."""
    rank: int
    alpha: float
    spec: AdapterSpec | None = None
    """The rank, alpha, layers and seed of this adapter, in a run that can train several adapters on the same base
    model. There, `rank` above is the rank of all published tensors; zeros fill the rows and columns beyond the
    adapter's rank, and the tensors of layers that it does not adapt. None: the run trains a single adapter, and none of
    its tensors are padded."""

    def __str__(self) -> str:
        return f"adapter of rank {self.rank} and alpha {self.alpha:g} on base {self.base}"


def weights_digest(entries: Sequence[TensorEntry], adapter: Adapter | None = None) -> str:
    """Returns the digest of a version (32 hex digits): it covers names, dtypes, shapes and hashes
    (`trireme.core.digest`) of the tensors, and `adapter`. It does not depend on the order of `entries` or on the places
    of tensors in buckets."""
    return table_digest(entries, SCHEME, *([str(adapter)] if adapter else []))


def table_digest(entries: Sequence[TensorEntry], *head: str) -> str:
    """Returns the digest (32 hex digits) of the lines `head`, and of the names, dtypes, shapes and hashes of `entries`,
    sorted by name."""
    table = hashlib.blake2b(digest_size=16)
    for line in head:
        table.update(f"{line}\n".encode())
    for entry in sorted(entries, key=lambda e: e.name):
        table.update(f"{entry.name}\0{entry.dtype}\0{entry.shape}\0{entry.hash}\n".encode())
    return table.hexdigest()


@dataclass(frozen=True)
class Drift:
    """The difference between the replica's and the trainer's log-probabilities of the canary, in nats."""

    mean: float
    """Mean over the tokens of the absolute difference."""
    largest: float
    """Largest absolute difference."""

    @classmethod
    def worst(cls, drifts: Iterable[Drift]) -> Drift:
        """Returns a Drift with the greatest `mean` and the greatest `largest` among `drifts`; the two may come from
        different entries. `drifts` must have at least one entry."""
        measured = list(drifts)
        return cls(max(drift.mean for drift in measured), max(drift.largest for drift in measured))


EXACT = Drift(1e-4, 1e-4)
"""The largest drift that a replica may have with a model in float32."""
ROUNDED = Drift(0.2, 3.0)
"""The largest drift that a replica may have with a model in 16 bits at the first update of a run. The mean tells faults
(0.7 and more in the random models of two layers that were tried) from rounding (up to 0.09); single tokens moved by up
to 1.55, because rounding may change their experts (docs/internals/benchmarks.md)."""
LEAST = Drift(0.05, ROUNDED.largest)
GROWTH = 5.0
"""At later updates the drift of a model in 16 bits may be GROWTH times the drift at the first update, and LEAST in any
case. Where rounding changes experts, the drift of a right model grows in training: in a model of two layers it went
from 0.012 to 0.087 in 82 updates. So the mean may also be GROWTH times the largest mean so far, up to ROUNDED. (The
first update of a resumed run is bounded by ROUNDED.)"""


DECODED = 4
"""The number of tokens that a replica samples in decode steps after the canary. One more token, between the canary and
these tokens, is sampled in the canary's prefill."""
AFTER_CANARY = DECODED + 2
"""The number of tokens for which the sequence must have space after the canary: the DECODED + 1 sampled tokens, and one
token that a prefill of all these samples."""
SHORTEST_CANARY = 2
"""The fewest tokens of a canary: one with a log-probability, and the token before it."""


@dataclass(frozen=True)
class Canary:
    """A fixed sequence with the trainer's log-probabilities under the published weights."""

    tokens: npt.NDArray[np.int32]
    """int32 [T]"""
    logprobs: npt.NDArray[np.float32]
    """float32 [T - 1], of tokens[1:] given the tokens before each."""
    bound: Drift
    """The largest drift that a replica may have: EXACT, ROUNDED, or a bound that follows from the drifts of earlier
    updates (`PublishedWeights.bounded_by`)."""


@dataclass(frozen=True)
class WeightsManifest:
    """Describes one published version, without its bytes."""

    identity: WeightIdentity
    entries: tuple[TensorEntry, ...]
    canary: Canary
    adapter: Adapter | None = None
    """The adapter, if the tensors are a LoRA adapter's, with peft's names; None: the tensors are the whole model."""
    base: WeightIdentity | None = None
    """The version before this one, to which changes apply if changes travel (`trireme.transports.delta`); None: no
    earlier version is known."""


@dataclass(frozen=True)
class PublishedWeights:
    """One version of the weights, which replicas can receive."""

    manifest: WeightsManifest
    source: Any
    """The object from which a receiver gets the bytes. Only the transport that made it reads it
    (`trireme.core.transport`)."""
    session: Session | None = None
    """The replicas to which the version was sent; None if it was sent to none."""

    @property
    def identity(self) -> WeightIdentity:
        return self.manifest.identity

    def bounded_by(self, first: Drift, largest: Drift) -> PublishedWeights:
        """Returns the same weights with another bound for the canary's drift. The bound is computed from `first`, the
        drift at the first update, and `largest`, the largest drift so far. If the bound is EXACT, it does not
        change."""
        canary = self.manifest.canary
        if canary.bound == EXACT:
            return self
        mean = max(GROWTH * first.mean, min(GROWTH * largest.mean, ROUNDED.mean), LEAST.mean)
        canary = replace(canary, bound=Drift(mean, max(GROWTH * first.largest, LEAST.largest)))
        return replace(self, manifest=replace(self.manifest, canary=canary))

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.manifest.entries)


@dataclass(frozen=True)
class UpdateReport:
    """A replica's report after an update: the replica now samples from `identity`. Times are in seconds."""

    replica: int
    identity: WeightIdentity
    drift: Drift
    """The drift of the canary in this replica."""
    reprefill_tokens: int
    """The number of tokens in flight for which KV is computed again."""
    seconds: float
    """Duration of the whole update."""
    wait_s: float = 0.0
    """The part of `seconds` in which the replica waited for the engine's step in progress."""
    pause_s: float = 0.0
    """The part of `seconds` in which the engine stood still."""
    node: str = ""
    """Ray's id of the replica's node."""
    received: int = 0
    """The number of bytes that arrived, as changes or as whole buckets."""
    refused: bool = False
    """True if the replica received the whole version because the changes did not lead to the published bytes."""


def check_received(
    manifest: WeightsManifest,
    buckets: Sequence[npt.NDArray[np.uint8]],
    known_sums: Mapping[TensorPlace, str] = MappingProxyType({}),
    threads: int = 1,
) -> None:
    """Raises WeightsRefused unless the bytes in `buckets` are the published bytes, according to the hashes and the
    digest in `manifest`. `known_sums`: {place: hash} of tensors whose hashes are known already; their bytes are not
    read again. `threads`: the number of threads that compute hashes at the same time."""
    version = manifest.identity.version
    digest = manifest.identity.digest
    if weights_digest(manifest.entries, manifest.adapter) != digest:
        raise WeightsRefused(
            f"the table of tensors of version {version} does not have the digest {digest} with which it was published: "
            "it was corrupted on the way"
        )
    unread = [entry for entry in manifest.entries if entry.place not in known_sums]
    pieces = [(entry, at) for entry in unread for at in range(0, max(entry.nbytes, 1), PIECE_BYTES)]
    sums = {entry.place: Sums() for entry in unread}
    with ThreadPoolExecutor(threads, "sums") as pool:  # the kernel does not hold Python's lock
        for (entry, _), piece_sums in zip(pieces, pool.map(partial(_piece_sums, buckets), pieces), strict=True):
            sums[entry.place] += piece_sums
    for entry in manifest.entries:
        received = known_sums.get(entry.place) or str(sums[entry.place])
        if received != entry.hash:
            raise WeightsRefused(
                f"tensor {entry.name} of version {version} arrived with hash {received}, "
                f"published as {entry.hash}: it was corrupted on the way"
            )


def _piece_sums(buckets: Sequence[npt.NDArray[np.uint8]], piece: tuple[TensorEntry, int]) -> Sums:
    """Returns the sums of one piece of a tensor; a piece has at most PIECE_BYTES bytes. `piece`: (the tensor's entry,
    the byte within the tensor at which the piece begins)."""
    entry, at = piece
    begin = entry.offset + at
    end = entry.offset + min(at + PIECE_BYTES, entry.nbytes)
    return sums_of(buckets[entry.bucket][begin:end], at // WORD_BYTES)


def check_canary(manifest: WeightsManifest, logprobs: npt.NDArray[np.float32]) -> Drift:
    """Returns the drift of a replica. `logprobs`: the replica's log-probabilities of the canary's tokens, float32 [T -
    1]. Raises WeightsRefused if the drift is beyond the canary's bound or NaN."""
    canary, bound = manifest.canary, manifest.canary.bound
    difference = np.abs(logprobs - canary.logprobs)
    drift = Drift(float(difference.mean()), float(difference.max()))
    if not (drift.mean <= bound.mean and drift.largest <= bound.largest):
        raise WeightsRefused(
            f"canary of version {manifest.identity.version}: the replica's logprobs differ from the trainer's by "
            f"{drift.mean:.3g} on average and {drift.largest:.3g} at most, expected no more than {bound.mean:.3g} and "
            f"{bound.largest:.3g}: the weights it uses are not those that were published"
            + ("" if bound == EXACT else ", or it rounds far more than usual (try model.dtype = float32)")
        )
    return drift


def check_decoding(
    manifest: WeightsManifest, decoded: npt.NDArray[np.float32], prefilled: npt.NDArray[np.float32]
) -> None:
    """Checks that the decode steps of a replica agree with its prefills. After the canary the replica samples DECODED
    tokens, and computes the log-probability of each twice: `decoded` in decode steps, `prefilled` in a prefill of the
    same tokens, both float32 [DECODED]. Raises WeightsRefused if the two differ by more than the canary's bound, or are
    NaN. The bound for the mean difference is applied to the median here: in a mixture-of-experts model, rounding can
    route a token to other experts, and with few tokens, one such token would move the mean."""
    bound = manifest.canary.bound
    difference = np.abs(decoded - prefilled)
    middle = float(np.median(difference))
    largest = float(difference.max())
    if not (middle <= bound.mean and largest <= bound.largest):
        raise WeightsRefused(
            f"canary of version {manifest.identity.version}: logprobs of {len(decoded)} tokens in decode steps differ "
            f"from those of the same tokens in a prefill by {middle:.3g} in the median and {largest:.3g} at most, "
            f"expected no more than {bound.mean:.3g} and {bound.largest:.3g}: decode steps of the replica do not use "
            "the weights that its prefills use"
        )
