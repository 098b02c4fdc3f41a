"""Finds where arrays of Ray's object store lie in files, so that other processes of this node can map them without a
copy. Also has the memory into which weights arrive.

Ray keeps objects in files without a name, which the raylet holds open and every worker maps. An engine's process is no
part of Ray, but it runs for the same user, so it can open the raylet's files as /proc/<raylet>/fd/N.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

ON_DEVICE = "the engine's device"
MADV_POPULATE_READ = 22
"""From Linux's headers; the module `mmap` does not name it."""
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ...s ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+)")
"""Matches a line of /proc/self/maps of shared memory: begin, end, offset in the file, major and minor device, inode."""


@dataclass(frozen=True)
class Region:
    """The place of one bucket's bytes in a file that other processes of this user can map."""

    path: str
    """The file, which need not have a name: a path below /proc. ON_DEVICE: memory of the engine's own device."""
    offset: int
    """Where in the file the bytes begin."""
    nbytes: int
    """Number of bytes."""

    def map(self, *, shared: bool = False) -> npt.NDArray[np.uint8]:
        """Returns the bytes, mapped into this process: pages are shared with the file until written to, and writes stay
        private. `shared`: writes go to the file."""
        if not self.nbytes:
            return np.zeros(0, dtype=np.uint8)  # nothing cannot be mapped
        return np.memmap(self.path, np.uint8, "r+" if shared else "c", self.offset, (self.nbytes,))


@dataclass(frozen=True)
class _Mapping:
    """A part of a file that is mapped into this process's memory."""

    begin: int
    end: int
    offset: int
    file: tuple[int, int]
    """Device and inode."""


def paged(path: str, sizes: Sequence[int]) -> tuple[list[Region], int]:
    """Lays buckets out in one block of memory, which has the path `path`. Returns the region of each bucket, which
    begins at a page, and the bytes of the block, which are a number of whole pages. `sizes`: the bytes of each
    bucket."""
    *offsets, end = accumulate((-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes), initial=0)
    return [Region(path, offset, size) for offset, size in zip(offsets, sizes, strict=True)], end


COUNT_BYTES = 8


def with_table(sizes: Sequence[int]) -> list[int]:
    """Returns the sizes of buckets, in bytes, and behind them the size of a table that has an int64 for each bucket:
    the number of bytes that arrived for it (`arrived_regions`)."""
    return [*sizes, COUNT_BYTES * len(sizes)]


def arrived_regions(path: str, sizes: Sequence[int]) -> list[Region]:
    """Returns what arrived for each bucket in the file at `path`, in which the buckets and a table lie as `with_table`
    says: the whole bucket, or its changes, which have fewer bytes. `sizes`: the bytes of each bucket."""
    regions, _ = paged(path, with_table(sizes))
    counts = regions.pop().map().view(np.int64)
    return [Region(path, region.offset, int(count)) for region, count in zip(regions, counts, strict=True)]


class Landing:
    """Memory for received bytes, in a file without a name. Other processes can map it by its `path`, as long as this
    object lives. It stays mapped here, because a new mapping of the same pages costs a page fault for each page."""

    def __init__(self) -> None:
        file = os.memfd_create("weights")
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        self._file = file
        self.whole: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        """All bytes of the file."""
        weakref.finalize(self, os.close, file)

    def bytes_at(self, region: Region) -> npt.NDArray[np.uint8]:
        """Returns the bytes at `region`, without a copy."""
        return self.whole[region.offset : region.offset + region.nbytes]

    def regions(self, sizes: Sequence[int]) -> list[Region]:
        """Returns for each bucket a region of the file, which begins at a page and has the number of bytes in `sizes`.
        Resizes the file so that all regions fit."""
        regions, end = paged(self.path, sizes)
        if len(self.whole) != max(end, 1):
            os.ftruncate(self._file, max(end, 1))
            self.whole = np.memmap(self.path, np.uint8, "r+", shape=(max(end, 1),))
        return regions

    def copy(self, buckets: Sequence[npt.NDArray[np.uint8]]) -> list[Region]:
        """Copies `buckets` into the file and returns their regions. Call it in a thread: copying blocks."""
        regions = self.regions([len(bucket) for bucket in buckets])
        with open(self._file, "wb", closefd=False) as file:  # page faults of `whole` would take as long as the copy
            for region, bucket in zip(regions, buckets, strict=True):
                file.seek(region.offset)
                file.write(bucket.data)
        return regions


def regions_of(buckets: Sequence[npt.NDArray[np.uint8]], holders: Sequence[int]) -> list[Region] | None:
    """Returns the place of each contiguous bucket in a file that one of the processes `holders` (ids) has open. Returns
    None if a bucket is in no such file, but in ordinary memory. The bytes stay there as long as the arrays live."""
    mappings = _shared_mappings()
    within = [next((m for m in mappings if m.begin <= _address(bucket) < m.end), None) for bucket in buckets]
    files = {mapping.file for mapping in within if mapping}
    paths = dict(_open_files(holders, files))
    regions = []
    for bucket, mapping in zip(buckets, within, strict=True):
        if not bucket.nbytes:
            regions.append(Region(os.devnull, 0, 0))
        elif mapping is None or mapping.file not in paths:
            return None
        else:
            offset = mapping.offset + _address(bucket) - mapping.begin
            regions.append(Region(paths[mapping.file], offset, bucket.nbytes))
    return regions


def _address(bucket: npt.NDArray[np.uint8]) -> int:
    return int(bucket.__array_interface__["data"][0])


def _shared_mappings() -> list[_Mapping]:
    with open("/proc/self/maps") as lines:
        matches = [match.groups() for line in lines if (match := _MAPPING.match(line))]
    return [
        _Mapping(int(begin, 16), int(end, 16), int(offset, 16), (os.makedev(int(major, 16), int(minor, 16)), int(node)))
        for begin, end, offset, major, minor, node in matches
    ]


def _open_files(holders: Sequence[int], files: set[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], str]]:
    """Yields ((device, inode), path below /proc) for each of `files` that a process of `holders` has open and this
    process may open."""
    for holder in holders:
        try:
            descriptors = os.listdir(f"/proc/{holder}/fd")
        except OSError:  # it has ended, or is another user's
            continue
        for descriptor in descriptors:
            path = f"/proc/{holder}/fd/{descriptor}"
            try:
                status = os.stat(path)
                file = status.st_dev, status.st_ino
                if file in files:
                    os.close(os.open(path, os.O_RDONLY))
                    yield file, path
            except OSError:  # closed meanwhile, or not allowed
                continue


def populate(buckets: Iterable[object]) -> None:
    """Adds the pages of mapped buckets to this process's page table, so that loading the buckets, while the engine is
    paused, causes no page faults. Skips buckets that are no arrays. Call it in a thread. Linux before 5.14 ignores the
    request; loading is then only slower."""
    madvise = ctypes.CDLL(None).madvise  # unlike `mmap.madvise` it does not hold Python's lock
    for bucket in buckets:
        if not isinstance(bucket, np.ndarray):
            continue
        begin = bucket.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        length = bucket.ctypes.data + bucket.nbytes - begin
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_POPULATE_READ)


def mappings_of(buckets: Iterable[object]) -> list[weakref.ref[mmap.mmap]]:
    """Returns weak references to the memory mappings of the arrays in `buckets` that came from `Region.map`. If a
    reference is still alive after the buckets are dropped, something still uses its mapping."""
    owners: list[object] = [bucket.base for bucket in buckets if isinstance(bucket, np.ndarray)]
    return [weakref.ref(owner) for owner in owners if isinstance(owner, mmap.mmap)]


def make_own(mapped: mmap.mmap) -> None:
    """Copies each page of a private mapping into this process's own memory, so that later writes to the file do not
    change it."""
    np.frombuffer(mapped, dtype=np.uint8)[:: mmap.PAGESIZE] |= 0
