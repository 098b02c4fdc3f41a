"""The published versions that a trainer rank keeps in host memory, for receivers that come later."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import numpy.typing as npt

from trireme.core.errors import WeightsGone

Bucket = npt.NDArray[np.uint8]


class KeptVersions:
    """Keeps a rank's share of the buckets of the last two versions, and of older versions that are leased. Its methods
    are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[int, dict[int, Bucket]] = {}  # in the order in which they were published
        self._leases: Counter[int] = Counter()

    def begin(self, version: int) -> None:
        """Begins `version`. Keeps the previous version and all leased versions, and drops the others."""
        with self._lock:
            self._versions.pop(version, None)
            self._drop(keep=1)
            self._versions[version] = {}

    def keep(self, version: int, number: int, bucket: Bucket) -> None:
        with self._lock:
            self._versions[version][number] = bucket

    def bucket(self, version: int, number: int) -> Bucket:
        """Returns a bucket of this rank's share. Raises WeightsGone if the version is not kept any more."""
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

    def _drop(self, keep: int) -> None:
        """Drops all versions that are not leased, except the last `keep` versions."""
        for version in list(self._versions)[:-keep]:
            if self._leases[version] <= 0:
                del self._versions[version], self._leases[version]
