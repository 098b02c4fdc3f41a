"""Files of a checkpoint: hashed as they are written, on the disk when the record is returned, errors that help."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from checkpoint_support import Crash, crash_at, crashes

from trireme.checkpoint.files import (
    READ_BYTES,
    FileRecord,
    HashingWriter,
    checksum_of,
    replace_file,
    storage_errors,
    write_bytes,
)
from trireme.errors import EXIT_FAILED, StorageFailed

pytestmark = pytest.mark.usefixtures("instant_disk")


def test_a_record_says_what_was_written(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.int64)
    record = write_bytes(tmp_path / "step" / "trainer", "a.bin", b"abc", array.data, b"")
    contents = b"abc" + array.tobytes()
    assert (tmp_path / "step" / "trainer" / "a.bin").read_bytes() == contents
    assert record == FileRecord("trainer/a.bin", 51, xxhash.xxh3_128_hexdigest(contents))


def test_an_empty_file(tmp_path: Path) -> None:
    assert write_bytes(tmp_path / "d", "e").size == 0
    assert checksum_of(tmp_path / "d" / "e") == xxhash.xxh3_128_hexdigest(b"")


def test_a_subdirectory_is_part_of_the_name(tmp_path: Path) -> None:
    assert write_bytes(tmp_path / "trainer", "deep/a.bin", b"x").path == "trainer/deep/a.bin"


def test_the_checksum_of_a_file_of_many_reads(tmp_path: Path) -> None:
    contents = np.random.default_rng(0).bytes(READ_BYTES + 12345)
    record = write_bytes(tmp_path / "d", "large", contents[:100], contents[100:])
    assert checksum_of(tmp_path / "d" / "large") == record.checksum == xxhash.xxh3_128_hexdigest(contents)


def test_an_array_of_two_dimensions_counts_in_bytes(tmp_path: Path) -> None:
    with HashingWriter(tmp_path / "f") as writer:
        assert writer.write(np.zeros((2, 3), dtype=np.float32).data) == 24
        assert writer.tell() == 24


def test_a_short_write_of_the_system_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = HashingWriter(tmp_path / "f")
    real = writer._file

    class Hesitant:
        closed = False
        fileno = staticmethod(real.fileno)
        close = staticmethod(real.close)

        def write(self, chunk: memoryview) -> int:
            return real.write(chunk[:2])

    monkeypatch.setattr(writer, "_file", Hesitant())
    writer.write(b"abcde")
    writer.close()
    assert (tmp_path / "f").read_bytes() == b"abcde"


def test_closed_means_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[int] = []
    monkeypatch.setattr(os, "fsync", forced.append)
    with HashingWriter(tmp_path / "f") as writer:
        number = writer.fileno()
        assert forced == []
    writer.close()
    assert forced == [number]


def test_what_fails_is_not_forced_onto_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[int] = []
    monkeypatch.setattr(os, "fsync", forced.append)
    with pytest.raises(Crash), HashingWriter(tmp_path / "f") as writer:
        raise Crash
    assert forced == []
    assert writer._file.closed


class TestErrors:
    def test_no_space(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """By the error that the system gives; the end-to-end tests fill a real file system."""

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(HashingWriter, "write", full)
        with pytest.raises(StorageFailed) as failed:
            write_bytes(tmp_path / "trainer", "a.bin", b"x")
        assert failed.value.exit_code == EXIT_FAILED
        for part in (str(tmp_path / "trainer" / "a.bin"), "No space left on device", "MiB free", "make room"):
            assert part in str(failed.value)

    def test_no_space_in_the_middle_of_what_torch_saves(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch.save hides the first error behind one of its own, that the file is not as long as it should be."""
        import torch

        class Nearly(io.FileIO):
            def write(self, chunk: memoryview) -> int:  # type: ignore[override]
                if self.tell() + len(chunk) > 1000:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return super().write(chunk)

        def save(file: Path) -> None:
            with storage_errors(file), HashingWriter(file) as writer:
                monkeypatch.setattr(writer, "_file", Nearly(file, "wb"))
                torch.save(torch.zeros(1000), writer)

        with pytest.raises(StorageFailed, match="No space left on device"):
            save(tmp_path / "weights")

    def test_no_space_when_forced_onto_the_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(_: int) -> None:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StorageFailed, match="quota exceeded"):
            write_bytes(tmp_path, "a.bin", b"x")

    def test_a_directory_that_cannot_be_written(self, tmp_path: Path) -> None:
        """A file in its place: tests may run as root, whom permissions do not stop."""
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageFailed, match=r"a\.bin"):
            write_bytes(tmp_path / "file" / "trainer", "a.bin", b"x")

    def test_read_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(os, "mkdir", refuse)
        with pytest.raises(StorageFailed, match="Read-only file system"):
            write_bytes(tmp_path / "trainer", "a.bin", b"x")

    def test_other_errors_pass(self, tmp_path: Path) -> None:
        with pytest.raises(KeyError), storage_errors(tmp_path):
            raise KeyError("x")


def test_replacing_a_file_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "HEAD"
    change = 1
    replace_file(file, b"old contents")
    while crashes(change, lambda: replace_file(file, b"the new contents")):
        assert file.read_bytes() in (b"old contents", b"the new contents")
        change += 1
    assert change > 3
    assert file.read_bytes() == b"the new contents"


def test_a_reader_of_a_replaced_file_keeps_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "HEAD"
    replace_file(file, b"old contents")
    with file.open("rb", buffering=0) as reader:
        replace_file(file, b"new")
        assert reader.read() == b"old contents"
    assert os.listdir(tmp_path) == ["HEAD"]


def test_the_crashes_of_these_tests_do_happen(tmp_path: Path) -> None:
    with pytest.raises(Crash), crash_at(1):
        write_bytes(tmp_path, "f", b"abcdef")
    assert (tmp_path / "f").read_bytes() == b"abc"
