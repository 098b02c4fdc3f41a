"""Files of a model arrive whole or not at all, once for each node."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from trireme.core.errors import DiskFull, RoomFailed, StorageFailed
from trireme.core.model_files import ModelFiles
from trireme.process import model_cache
from trireme.process.model_cache import ARRIVING, Contents, ModelCache, ModelPiece, checksum, cut

LIMIT_S = 60.0
FILES = {"config.json": b"{}", "empty.txt": b"", "model.safetensors": bytes(range(256)) * 10}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "PIECE_BYTES", 100)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    for name, contents in FILES.items():
        (directory / name).write_bytes(contents)
    return directory


class Wire:
    """Reads pieces of `source` as another node does, and counts them."""

    def __init__(self, source: Path, altered: Iterable[int] = ()) -> None:
        self.source, self.altered = source, set(altered)
        self.read: Counter[ModelPiece] = Counter()

    def __call__(self, piece: ModelPiece) -> tuple[Contents, str]:
        self.read[piece] += 1
        contents = np.fromfile(self.source / piece.file, np.uint8, piece.size, offset=piece.offset)
        said = checksum(contents)
        if piece.size and piece.offset in self.altered:
            contents[0] ^= 1
        return contents, said

    @property
    def bytes(self) -> int:
        return sum(piece.size * times for piece, times in self.read.items())


def bring(cache: ModelCache, source: Path, wire: Wire, limit_s: float = LIMIT_S) -> Path:
    return cache.bring("m", ModelFiles.of(source), wire, time.monotonic() + limit_s)


def left(cache: ModelCache) -> list[str]:
    return sorted(path.name for path in cache.root.iterdir() if not path.name.endswith(".lock"))


def test_all_files_arrive_once(tmp_path: Path, source: Path) -> None:
    cache, wire, files = ModelCache(tmp_path / "cache", "n"), Wire(source), ModelFiles.of(source)
    place = bring(cache, source, wire)
    assert {file.name: file.read_bytes() for file in place.iterdir()} == FILES
    assert wire.bytes == files.total_bytes == sum(map(len, FILES.values()))
    assert set(wire.read) == set(cut("m", files))
    assert set(wire.read.values()) == {1}
    assert bring(cache, source, wire) == place == cache.find(files)
    assert wire.bytes == files.total_bytes, "the second process finds them"
    assert left(cache) == [files.digest]


def test_of_processes_that_start_together_one_reads(tmp_path: Path, source: Path) -> None:
    cache, wire = ModelCache(tmp_path / "cache", "n"), Wire(source)
    places: list[Path] = []
    threads = [threading.Thread(target=lambda: places.append(bring(cache, source, wire))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(places) == 4
    assert set(wire.read.values()) == {1}


def test_altered_bytes_are_refused_and_leave_nothing(tmp_path: Path, source: Path) -> None:
    cache = ModelCache(tmp_path / "cache", "10.0.0.2")
    with pytest.raises(StorageFailed, match=r"node 10\.0\.0\.2 cannot get the files of m: the 100 bytes at 300 of mod"):
        bring(cache, source, Wire(source, altered=[300]))
    assert left(cache) == []
    bring(cache, source, Wire(source))


def test_what_an_earlier_process_left_is_written_anew(tmp_path: Path, source: Path) -> None:
    """One that was killed while files arrived, and a file that was altered since."""
    cache, files = ModelCache(tmp_path / "cache", "n"), ModelFiles.of(source)
    for name in (f"{files.digest}{ARRIVING}", files.digest):
        (cache.root / name).mkdir(parents=True)
        (cache.root / name / "model.safetensors").write_bytes(b"half")
    assert cache.find(files) is None
    place = bring(cache, source, Wire(source))
    assert (place / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert left(cache) == [files.digest]


def test_a_small_disk_is_said_before_anything_travels(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    wire = Wire(source)
    with pytest.raises(DiskFull, match=r"node n .*they have 2,562 bytes, and 1,000 are free in "):
        bring(ModelCache(tmp_path / "cache", "n"), source, wire)
    assert not wire.read


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, source: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StorageFailed, match=r"node n cannot get .*cache\); make room there"):
        bring(ModelCache(tmp_path / "cache", "n"), source, Wire(source))


def test_a_slow_wire_ends_at_the_deadline(tmp_path: Path, source: Path) -> None:
    cache = ModelCache(tmp_path / "cache", "n")
    with pytest.raises(RoomFailed, match=r"node n .*of 2,562 bytes came in time \(timeouts\.start_s\)"):
        bring(cache, source, Wire(source), limit_s=0.0)
    assert left(cache) == []


def test_a_process_that_waits_names_the_one_that_fetches(tmp_path: Path, source: Path) -> None:
    cache, files = ModelCache(tmp_path / "cache", "n"), ModelFiles.of(source)
    cache.root.mkdir()
    with (cache.root / f"{files.digest}.lock").open("w") as lock:
        lock.write(str(os.getpid()))
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RoomFailed, match=rf"node n: process {os.getpid()} there did not finish fetching"):
            bring(cache, source, Wire(source), limit_s=0.3)
    bring(cache, source, Wire(source))


def test_names_that_lead_out_of_the_directory_are_refused(tmp_path: Path, source: Path) -> None:
    files = ModelFiles({"../config.json": 2}, {"../config.json": "1"})
    with pytest.raises(StorageFailed, match="no names of files"):
        ModelCache(tmp_path / "cache", "n").bring("m", files, Wire(source), time.monotonic() + LIMIT_S)
    assert not (tmp_path / "cache" / "config.json").exists()
