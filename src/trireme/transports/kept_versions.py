"""The published versions that a trainer rank keeps in host memory, for receivers that come later."""

from __future__ import annotations

import sys
import threading
from collections import Counter

import numpy as np
import numpy.typing as npt

from trireme.core.errors import WeightsGone

Bucket = npt.NDArray[np.uint8]
UNREAD = 2
"""References to an array in one list, or to the memory of one array, without a reader: the list's or the array's, and
the counting call's. A reader of the array or a part of it holds another: Ray as it passes a bucket on, PyTorch as it
sends."""


class KeptVersions:
    """Keeps a rank's share of the last two versions, and of older versions that are leased. Its methods are
    thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[int, dict[int, Bucket]] = {}  # in the order in which they were published
        self._leases: Counter[int] = Counter()
        self._spare: list[Bucket] = []  # of the versions that the newest one displaced

    def memory(self, nbytes: int) -> Bucket:
        """Returns memory of `nbytes` bytes for a bucket of the version that was begun: a bucket of a dropped version,
        if one has this size and no reader, else new memory. New memory costs more than writing to it, because the
        system provides it page by page."""
        with self._lock:
            for number in range(len(self._spare)):
                counts = [sys.getrefcount(self._spare[number]), sys.getrefcount(self._spare[number].base)]
                if self._spare[number].nbytes == nbytes and counts == [UNREAD, UNREAD]:
                    return self._spare.pop(number)
        return np.zeros(nbytes, dtype=np.uint8)

    def begin(self, version: int, *, reuse: bool = False) -> None:
        """Begins `version`, and drops all earlier versions but the last one and the leased ones. `reuse`: `memory` may
        give out the dropped buckets again; this needs that all kept buckets came from `memory`."""
        with self._lock:
            self._versions.pop(version, None)
            dropped = self._drop(keep=1)
            self._spare = dropped if reuse else []
            self._versions[version] = {}

    def keep(self, version: int, number: int, bucket: Bucket) -> None:
        with self._lock:
            self._versions[version][number] = bucket

    def bucket(self, version: int, number: int) -> Bucket:
        """Returns a bucket of this rank's share. Raises WeightsGone."""
        with self._lock:
            if version in self._versions:
                return self._versions[version][number]
            versions = ", ".join(map(str, self._versions)) or "none"
            raise WeightsGone(
                f"the bytes of version {version} are gone from the trainer's memory, which has those of {versions}: "
                "take the newest version"
            )

    def lease(self, version: int) -> None:
        """Keeps `version` until `release` has been called as often as `lease`. Raises WeightsGone if the version is not
        kept any more."""
        with self._lock:
            if version not in self._versions:
                raise WeightsGone(f"version {version} is gone from the trainer's memory, so nothing can save it")
            self._leases[version] += 1

    def release(self, version: int) -> None:
        with self._lock:
            self._leases[version] -= 1
            self._drop(keep=2)

    def _drop(self, keep: int) -> list[Bucket]:
        """Drops all versions that are not leased, except the last `keep`. Returns the buckets of the dropped
        versions."""
        dropped: list[Bucket] = []
        for version in list(self._versions)[:-keep]:
            if self._leases[version] <= 0:
                dropped += self._versions.pop(version).values()
                del self._leases[version]
        return dropped
