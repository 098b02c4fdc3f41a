"""Files of a checkpoint: hashed as they are written, on the disk when the record is returned, errors that help."""

import errno
import fcntl
import mmap
import os
import time
from pathlib import Path
from threading import Barrier, Event, Lock
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import xxhash
from checkpoint_support import Crash, crashes

from trireme.checkpoint import files
from trireme.checkpoint.files import (
    BLOCK_BYTES,
    BLOCKS,
    HUGE_PAGE,
    FileRecord,
    HashingWriter,
    checksum_of,
    replace_file,
    storage_errors,
    write_bytes,
)
from trireme.core.errors import EXIT_FAILED, StorageFailed

pytestmark = pytest.mark.usefixtures("instant_disk")


def failing(number: int) -> Mock:
    """Returns a function that raises this error of the system."""
    return Mock(side_effect=OSError(number, os.strerror(number)))


@pytest.mark.parametrize("size", [0, BLOCK_BYTES + 12345])
def test_the_checksum_of_an_empty_file_and_of_many_reads(tmp_path: Path, size: int) -> None:
    contents = np.random.default_rng(0).bytes(size)
    record = write_bytes(tmp_path / "trainer", "deep/a.bin", contents[:100], contents[100:])
    assert (record.path, record.size) == ("trainer/deep/a.bin", size)
    assert checksum_of(tmp_path / record.path) == record.checksum == xxhash.xxh3_128_hexdigest(contents)


def test_an_array_of_two_dimensions_counts_in_bytes(tmp_path: Path) -> None:
    with HashingWriter(tmp_path / "f") as writer:
        assert writer.write(np.zeros((2, 3), dtype=np.float32).data) == 24
        assert writer.tell() == 24


def test_a_short_write_of_the_system_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, real = HashingWriter(tmp_path / "f"), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, chunk, at: real(file, chunk[:2], at))
    writer.write(b"abcde")
    writer.close()
    assert (tmp_path / "f").read_bytes() == b"abcde"


class Watched:
    """Stands in for `os.pwrite`, and notes of each write how many bytes it had, and whether it went past the page
    cache.

    `refused_from`: the number of the first write that is refused if it does, as some file systems do.
    """

    def __init__(self, refused_from: int | None = None) -> None:
        self.writes: list[tuple[int, bool]] = []
        self.refused_from = refused_from
        self.plain = os.pwrite
        self.lock = Lock()

    def __call__(self, file: int, chunk: Any, at: int) -> int:
        with self.lock:  # threads write at the same time, and the number of a write decides
            direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
            if direct and self.refused_from is not None and len(self.writes) >= self.refused_from:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self.writes.append((len(chunk), direct))
        return self.plain(file, chunk, at)


def memory_flags(address: int) -> list[str]:
    """Returns what the kernel was told about the mapping that contains `address` (`VmFlags` of proc_pid_smaps(5))."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            within = start <= address < end
        elif within and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:x}")


class TestDirect:
    """Which blocks pass by the page cache; what is in the file does not depend on it."""

    CONTENTS = np.random.default_rng(1).bytes(3 * BLOCK_BYTES + 1000)

    def write(self, file: Path, monkeypatch: pytest.MonkeyPatch, **options: int) -> list[tuple[int, bool]]:
        with HashingWriter(file) as writer:
            watched = Watched(**options)
            monkeypatch.setattr(os, "pwrite", watched)
            for start, end in ((0, 7), (7, 2 * BLOCK_BYTES - 1), (2 * BLOCK_BYTES - 1, len(self.CONTENTS))):
                writer.write(self.CONTENTS[start:end])
        assert file.read_bytes() == self.CONTENTS
        assert writer.record("f") == FileRecord("f", len(self.CONTENTS), xxhash.xxh3_128_hexdigest(self.CONTENTS))
        return watched.writes

    def test_full_blocks_do_and_the_rest_does_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the file system can: some tmpfs cannot, and there none do."""
        direct = True
        try:
            os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
        except OSError:
            direct = False
        writes = self.write(tmp_path / "f", monkeypatch)
        assert writes == [(BLOCK_BYTES, direct)] * 3 + [(1000, False)]

    def test_a_block_is_one_piece_of_memory(self, tmp_path: Path) -> None:
        """A huge page is requested; the system decides whether there is one."""
        with HashingWriter(tmp_path / "f") as writer:
            address = writer._blocks[0].ctypes.data
            assert "hg" in memory_flags(address)
            assert address % HUGE_PAGE == 0
            writer.write(self.CONTENTS)
        assert (tmp_path / "f").read_bytes() == self.CONTENTS

    def test_a_kernel_without_huge_pages(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Memory(mmap.mmap):
            madvise = failing(errno.EINVAL)

        monkeypatch.setattr(mmap, "mmap", Memory)
        assert write_bytes(tmp_path / "d", "f", self.CONTENTS).size == len(self.CONTENTS)
        assert (tmp_path / "d" / "f").read_bytes() == self.CONTENTS

    def test_none_where_it_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real, refused = fcntl.fcntl, []

        def refuse(file: int, command: int, argument: int = 0) -> int:
            if command == fcntl.F_SETFL and argument & os.O_DIRECT:
                refused.append(file)
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(file, command, argument)

        monkeypatch.setattr(fcntl, "fcntl", refuse)
        assert self.write(tmp_path / "f", monkeypatch) == [(BLOCK_BYTES, False)] * 3 + [(1000, False)]
        assert len(refused) == 1, "asked once, not for every block"

    @pytest.mark.parametrize("number", [0, 1])
    def test_none_once_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        writes = self.write(tmp_path / "f", monkeypatch, refused_from=number)
        assert [size for size, _ in writes] == [BLOCK_BYTES] * 3 + [1000]
        assert not any(direct for _, direct in writes[number:])

    def test_a_write_between_a_refusal_and_its_answer_is_repeated(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain, on, second, refused = os.pwrite, Event(), Event(), []

        def set_direct(file: int, direct: bool) -> bool:
            if direct:
                on.set()
            elif on.is_set():
                assert second.wait(10), "no other block was written in the meantime"
                on.clear()
            return True

        def write(file: int, chunk: Any, at: int) -> int:
            if not on.is_set():
                return plain(file, chunk, at)
            refused.append(at)
            if len(refused) == 2:
                second.set()
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(os, "pwrite", write)
        monkeypatch.setattr(files, "_set_direct", set_direct)
        with HashingWriter(tmp_path / "f") as writer:
            writer.write(self.CONTENTS)
        assert (tmp_path / "f").read_bytes() == self.CONTENTS

    def test_blocks_are_written_while_the_next_fill(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each waits until as many as there are blocks are being written, and they end in another order."""
        together, plain = Barrier(BLOCKS), os.pwrite
        contents = np.random.default_rng(2).bytes(3 * BLOCKS * BLOCK_BYTES + 7)

        def write(file: int, chunk: Any, at: int) -> int:
            if len(chunk) == BLOCK_BYTES:
                time.sleep(0.01 * (BLOCKS - together.wait(10)))
            return plain(file, chunk, at)

        monkeypatch.setattr(os, "pwrite", write)
        with HashingWriter(tmp_path / "f") as writer:
            writer.write(contents)
        assert (tmp_path / "f").read_bytes() == contents
        assert writer.record("f") == FileRecord("f", len(contents), xxhash.xxh3_128_hexdigest(contents))

    def test_other_refusals_are_errors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also EINVAL, when it has another cause."""
        monkeypatch.setattr(os, "pwrite", failing(errno.EINVAL))
        with pytest.raises(OSError, match="Invalid argument"), HashingWriter(tmp_path / "f") as writer:
            writer.write(bytes(BLOCK_BYTES))


def test_closed_means_on_the_disk_unless_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[int] = []
    monkeypatch.setattr(os, "fsync", forced.append)
    with HashingWriter(tmp_path / "f") as writer:
        number = writer.fileno()
        assert forced == []
    writer.close()
    assert forced == [number]
    with pytest.raises(Crash), HashingWriter(tmp_path / "g") as writer:
        raise Crash
    assert forced == [number]
    assert writer._file.closed


class TestErrors:
    def test_no_space(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The system's error is simulated; the end-to-end tests fill a real file system."""
        monkeypatch.setattr(HashingWriter, "write", failing(errno.ENOSPC))
        with pytest.raises(StorageFailed) as failed:
            write_bytes(tmp_path / "trainer", "a.bin", b"x")
        assert failed.value.exit_code == EXIT_FAILED
        for part in (str(tmp_path / "trainer" / "a.bin"), "No space left on device", "MiB free", "make room"):
            assert part in str(failed.value)

    def test_no_space_in_the_middle_of_what_torch_saves(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch.save hides the first error behind one of its own, that the file is not as long as it should be."""
        import torch

        plain = os.pwrite

        def nearly(file: int, chunk: Any, at: int) -> int:
            if at + len(chunk) > BLOCK_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return plain(file, chunk, at)

        def save(file: Path) -> None:
            with storage_errors(file), HashingWriter(file) as writer:
                torch.save(torch.zeros(2 * BLOCKS * BLOCK_BYTES // 4), writer)

        monkeypatch.setattr(os, "pwrite", nearly)
        with pytest.raises(StorageFailed, match="No space left on device"):
            save(tmp_path / "weights")

    @pytest.mark.parametrize(
        ("call", "number", "reason"),
        [("fsync", errno.EDQUOT, "quota exceeded"), ("mkdir", errno.EROFS, "Read-only file system")],
    )
    def test_other_calls(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, reason: str
    ) -> None:
        monkeypatch.setattr(os, call, failing(number))
        with pytest.raises(StorageFailed, match=reason):
            write_bytes(tmp_path / "trainer", "a.bin", b"x")


def test_replacing_a_file_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "HEAD"
    change = 1
    replace_file(file, b"old contents")
    with file.open("rb", buffering=0) as reader:
        while crashes(change, lambda: replace_file(file, b"the new contents")):
            assert file.read_bytes() in (b"old contents", b"the new contents")
            change += 1
        assert reader.read() == b"old contents", "a reader keeps the old one"
    assert change > 3
    assert file.read_bytes() == b"the new contents"
    assert os.listdir(tmp_path) == ["HEAD"]
