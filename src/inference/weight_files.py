"""How one version of the weights gets from a replica's actor into its engine process on the same machine.

The actor receives the buckets, copies them into anonymous files in memory and hands over their paths. So the engine
process needs neither Ray nor a name in /dev/shm, and no file is left behind when either dies. The copy is made while
the engine still samples: it costs memory for the moment, not a longer pause.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trireme.core.weights import WeightsManifest


@dataclass(frozen=True)
class WeightFiles:
    """One version as its engine process gets it."""

    manifest: WeightsManifest
    paths: tuple[str, ...]
    """Files with the buckets' bytes."""

    def open(self) -> list[npt.NDArray[np.uint8]]:
        """Maps the buckets: pages are shared with the file until written to, and writes stay private."""
        return [np.memmap(path, dtype=np.uint8, mode="c") for path in self.paths]


@contextmanager
def in_memory_files(buckets: Sequence[npt.NDArray[np.uint8]]) -> Iterator[tuple[str, ...]]:
    """Yields paths of nameless files with the bytes of `buckets`, for other processes of this user."""
    with ExitStack() as stack:
        files = [stack.enter_context(os.fdopen(os.memfd_create("weights"), "wb")) for _ in buckets]
        for file, bucket in zip(files, buckets, strict=True):
            file.write(bucket.data)
            file.flush()
        yield tuple(f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in files)
