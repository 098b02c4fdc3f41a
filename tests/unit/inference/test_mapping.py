"""Finding the file behind an array: what another process maps there has the same bytes."""

import mmap
import os
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest

from inference.mapping import make_own, populate, regions_of

PAGE = 4096


@pytest.fixture
def file():
    descriptor = os.memfd_create("store")
    os.ftruncate(descriptor, 4 * PAGE)
    yield descriptor
    os.close(descriptor)


def mapped(file: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(file, nbytes, offset=offset), dtype=np.uint8)


def test_another_process_maps_the_same_bytes_and_writes_to_its_own(file: int) -> None:
    whole = mapped(file, PAGE, 2 * PAGE)
    whole[:] = np.random.default_rng(0).integers(0, 256, 2 * PAGE)
    buckets = [whole[100:5000], whole[:0], whole[7000:7001]]
    regions = regions_of(buckets, [os.getpid()])
    assert (regions[0].offset, regions[0].nbytes) == (PAGE + 100, 4900)
    for bucket, region in zip(buckets, regions, strict=True):
        code = f"import numpy as np; from inference.mapping import Region; print({region!r}.map().tolist())"
        output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        assert output == f"{bucket.tolist()}\n"
    regions[0].map()[:] = 9
    assert (whole != 9).any()


def test_memory_of_the_heap_and_files_that_nobody_holds_have_no_place(file: int) -> None:
    whole = mapped(file, 0, PAGE)
    assert regions_of([whole, np.zeros(100, dtype=np.uint8)], [os.getpid()]) is None
    assert regions_of([whole], []) is None
    assert regions_of([whole], [2**22 + 1]) is None, "a process that does not exist"
    private = np.frombuffer(mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    assert regions_of([private], [os.getpid()]) is None


def test_pages_made_own_no_longer_follow_the_file(file: int) -> None:
    whole = mapped(file, 0, 4 * PAGE)
    regions = regions_of([whole], [os.getpid()])
    follows, private = regions[0].map(), regions[0].map()
    populate([follows, private, follows[:0]])
    make_own(private.base)
    whole[::100] = 3
    assert (follows.sum(), private.sum()) == (whole.sum(), 0)
