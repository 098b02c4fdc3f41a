"""Compares the tensors that the ranks of an engine loaded with the published tensors.

A rank names the parts of published tensors that it holds (`inference.following` finds them) and sums each of them. The
sums of the parts add up to the sum of the tensor, so together the ranks show that their parameters hold the published
values. All ranks hold the norms, and several hold the keys where there are fewer key heads than ranks: parts with
several holders must agree, and count once.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from trireme.core.digest import Sums
from trireme.core.errors import WeightsRefused
from trireme.core.weights import WeightsManifest

NAMED = 4
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Elements:
    """The place of some elements of a tensor: offset, shape and strides for `torch.as_strided`. Dimensions of size one
    are left out, and dimensions that are contiguous in memory are joined."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class HeldPart:
    """A part of a published tensor, or all of it, that a rank holds in its parameters."""

    name: str
    slice: Elements


@dataclass(frozen=True)
class Following:
    """The findings of one rank at its first update: which parts of published tensors its loaders copied into
    parameters."""

    parts: tuple[HeldPart, ...]
    """In the order of `LoadedSums.sums`. A part occurs several times if the rank holds copies of it."""
    packed: int
    """Number of parts that the engine packs for its kernels after they were summed."""
    unfollowed: dict[str, str]
    """{name of a tensor: why its values cannot be found in the parameters}."""
    disordered: list[str]
    """Names of tensors with numbers (layers, experts) that were loaded in another order than their numbers."""


@dataclass(frozen=True)
class LoadedSums:
    """The answer of a rank that has loaded a version: the sums of the parts that it holds."""

    sums: npt.NDArray[np.uint64]
    """uint64 [parts, 2]: the two sums (`trireme.core.digest.Sums`) of each part that the rank holds."""
    following: Following | None
    """The parts that the rows of `sums` belong to, if this update recorded them; None: the parts of the recorded
    update."""


class LoadedProof:
    """Compares the tensors that the ranks of an engine have loaded with the published tensors, at each update."""

    def __init__(self, replica_name: str) -> None:
        self._replica_name = replica_name
        self._engine_tensors: EngineTensors | None = None

    @property
    def traced(self) -> bool:
        """True once an update has recorded where the engine's loaders copy the published tensors, and `check` has
        accepted the record."""
        return self._engine_tensors is not None

    def check(self, manifest: WeightsManifest, answers_R: Sequence[bytes]) -> None:
        """Raises WeightsRefused unless the ranks hold the published values of `manifest`. `answers_R`: each rank's
        pickled `LoadedSums`."""
        ranks: list[LoadedSums] = [pickle.loads(answer) for answer in answers_R]
        followings = [rank.following for rank in ranks if rank.following]
        if followings:  # by all of them at the same update
            engine_tensors = EngineTensors(followings, manifest)
            engine_tensors.warn(self._replica_name)
            self._engine_tensors = engine_tensors
        assert self._engine_tensors is not None, "each engine finds it at its first update"
        self._engine_tensors.check(np.concatenate([rank.sums for rank in ranks]), manifest)


class EngineTensors:
    """Compares the checksums that the ranks of an engine report with the published checksums. Each rank reports a
    table with a row for each part of a published tensor that the rank holds. This class knows the tensor of each row.
    It reads the tables as one: first the rows of rank 0, then the rows of rank 1, and so on."""

    def __init__(self, followings_R: Sequence[Following], manifest: WeightsManifest) -> None:
        """`followings_R`: the record that each rank made at the first update. Raises WeightsRefused if a tensor of
        `manifest`, or a part of it, was loaded by no rank, or if numbered tensors (layers, experts) were loaded in
        another order than their numbers."""
        self._names = [entry.name for entry in manifest.entries]
        numbers = {name: number for number, name in enumerate(self._names)}
        sizes = {entry.name: prod(entry.shape) for entry in manifest.entries}
        rows = [(part, rank) for rank, following in enumerate(followings_R) for part in following.parts]
        first: dict[HeldPart, int] = {}
        for row, (part, _) in enumerate(rows):
            first.setdefault(part, row)
        loaded: Counter[str] = Counter()
        for part in first:
            loaded[part.name] += part.slice.size
        self._tensor = np.array([numbers[part.name] for part, _ in rows], np.int64)
        self._rank = np.array([rank for _, rank in rows], np.int64)
        self._first = np.array([first[part] for part, _ in rows], np.int64)  # the row of the same part
        self._unfollowed = {name: reason for following in followings_R for name, reason in following.unfollowed.items()}
        self._unfollowed |= {name: "parts overlap" for name, size in loaded.items() if size > sizes[name]}
        self._packed = sum(following.packed for following in followings_R)
        self._proved = np.array([name not in self._unfollowed for name in self._names], np.bool_)
        version = manifest.identity.version
        disordered = sorted({name for following in followings_R for name in following.disordered})
        if disordered:
            raise WeightsRefused(
                f"version {version}: the engine did not load these layers or experts in the order of their numbers: "
                f"{some(disordered)}"
            )
        missing = [name for name in self._names if name not in self._unfollowed and loaded[name] < sizes[name]]
        if missing:
            parts = [f"{name} ({loaded[name]} of {sizes[name]} values)" for name in missing]
            raise WeightsRefused(f"version {version}: the engine has loaded only a part, or nothing, of {some(parts)}")

    def warn(self, replica_name: str) -> None:
        """Logs a warning with the names of the tensors that cannot be summed in the parameters; only the canary proves
        that these tensors are used. Also logs how many parts vLLM packs after they were summed."""
        if self._unfollowed:
            log.warning(
                "%s: %d of %d published tensors cannot be followed into vLLM's parameters. Only the canary proves that "
                "they are used: %s",
                replica_name,
                len(self._unfollowed),
                len(self._names),
                patterns(self._unfollowed),
            )
        if self._packed:
            log.info(
                "%s: vLLM packs %d of %d parts of published tensors for its kernels after they are summed; the canary "
                "proves that it does that right",
                replica_name,
                self._packed,
                len(self._first),
            )

    def check(self, sums: npt.NDArray[np.uint64], manifest: WeightsManifest) -> None:
        """Raises WeightsRefused unless `sums`, uint64 [rows, 2] of all ranks, match the hashes in `manifest`."""
        hashes = [Sums.parse(entry.hash) for entry in manifest.entries]
        published = np.array([(sums.first, sums.second) for sums in hashes], np.uint64).reshape(-1, 2)
        total = np.zeros_like(published)
        once = self._first == np.arange(len(self._first))
        np.add.at(total, self._tensor[once], sums[once])
        wrong = (total != published).any(1)
        wrong[self._tensor[(sums != sums[self._first]).any(1)]] = True
        if not (wrong & self._proved).any():
            return
        differing = [
            f"{self._names[index]} (rank {self._blame(index, sums, published[index])})"
            for index in np.flatnonzero(wrong & self._proved)
        ]
        raise WeightsRefused(
            f"version {manifest.identity.version}: the engine has loaded values that differ from the published ones: "
            f"{some(differing)}"
        )

    def _blame(self, tensor: int, sums: npt.NDArray[np.uint64], published: npt.NDArray[np.uint64]) -> str:
        """Returns the numbers of the ranks that hold wrong values of tensor number `tensor`, as a text. If each part is
        on one rank only, the sums do not show which part is wrong, and all ranks with a part are returned. `published`:
        uint64 [2], the right sums of the tensor."""
        (mine,) = np.nonzero(self._tensor == tensor)
        ranks = np.unique(self._rank[mine])
        wrong = []
        for rank in ranks:
            of_rank = mine[self._rank[mine] == rank]
            rows = {self._first[row]: row for row in mine} | {self._first[row]: row for row in of_rank}
            copies = (sums[of_rank] != sums[[rows[self._first[row]] for row in of_rank]]).any()
            if copies or (sums[list(rows.values())].sum(0, dtype=np.uint64) != published).any():
                wrong.append(rank)
        return ", ".join(map(str, wrong or ranks))


def some(names: Sequence[str]) -> str:
    """Returns a text with the first NAMED of `names`, and how many more there are."""
    if len(names) > NAMED:
        rest = f" and {len(names) - NAMED} more"
    else:
        rest = ""
    return ", ".join(names[:NAMED]) + rest


def patterns(unfollowed: dict[str, str]) -> str:
    """Returns a text with names and reasons for {name: reason}, with one entry for names that differ only in their
    numbers.

    >>> patterns({"layers.0.gate.bias": "cast", "layers.1.gate.bias": "cast", "norm": "added to"})
    'layers.*.gate.bias (2: cast), norm (1: added to)'
    """
    numbers: defaultdict[tuple[str, str], int] = defaultdict(int)
    for name, reason in unfollowed.items():
        numbers[re.sub(r"(?<![^.])\d+(?![^.])", "*", name), reason] += 1
    return ", ".join(f"{name} ({count}: {reason})" for (name, reason), count in numbers.items())
