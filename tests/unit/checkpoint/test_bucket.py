"""Objects of a store that enforces conditions, and what is said where it fails."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_support import Double, double

from trireme.checkpoint import bucket as bucket_module
from trireme.checkpoint.bucket import Bucket, PutRefused
from trireme.checkpoint.files import FileRecord, checksum_of
from trireme.core.errors import BadInput, CheckpointInvalid, DiskFull, StorageFailed

PIECE = 1000
pytestmark = pytest.mark.usefixtures("instant_disk")


@pytest.fixture(scope="module")
def server() -> Iterator[Double]:
    with double() as running:
        yield running


@pytest.fixture
def bucket(server: Double, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.ignores, server.refuses = (), lambda _request: False
    return Bucket(server.url)


def record_of(directory: Path, name: str) -> FileRecord:
    return FileRecord(name, (directory / name).stat().st_size, checksum_of(directory / name))


def test_a_put_on_a_condition(bucket: Bucket) -> None:
    first = bucket.swap("HEAD", b"1", None)
    with pytest.raises(PutRefused):
        bucket.swap("HEAD", b"2", None)
    second = bucket.swap("HEAD", b"2", first)
    with pytest.raises(PutRefused):
        bucket.swap("HEAD", b"3", first)
    assert bucket.read("HEAD") == (b"2", second)
    assert bucket.tag("HEAD") == second
    with pytest.raises(PutRefused):
        bucket.swap("missing", b"1", first)


def test_what_is_not_there(bucket: Bucket) -> None:
    assert bucket.read("nothing") is None
    assert bucket.tag("nothing") is None
    assert bucket.keys("nothing") == []
    bucket.delete(["nothing"])
    bucket.delete([])


def test_keys_below_a_part_of_a_path(bucket: Bucket) -> None:
    for key in ("a/b/1", "a/b/2", "a/bc/3"):
        bucket.put(key, b"x")
    assert sorted(bucket.keys("a/b")) == ["a/b/1", "a/b/2"]
    bucket.delete(bucket.keys("a"))
    assert bucket.keys("a") == []


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 3, 9 * PIECE])
def test_a_file_there_and_back(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").write_bytes(os.urandom(size))
    record = record_of(tmp_path / "here", "file")
    with (tmp_path / "here" / "file").open("rb") as file:
        (tmp_path / "here" / "file").rename(tmp_path / "here" / "renamed")  # as a checkpoint that is deleted meanwhile
        bucket.put("c/file", file)
    monkeypatch.setattr(bucket_module, "PIECE_BYTES", PIECE)
    bucket.fetch("c/file", tmp_path / "there", record)
    assert (tmp_path / "there" / "file").read_bytes() == (tmp_path / "here" / "renamed").read_bytes()


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"", "torn"),
        (b"abcde", "torn"),
        (b"abcdefgh", "torn"),
        (b"abcdef!", r"torn arrived with checksum \w+, but was written with \w+"),
        (None, "group/torn"),
    ],
)
def test_another_file_is_never_read(bucket: Bucket, tmp_path: Path, contents: bytes | None, reason: str) -> None:
    (tmp_path / "file").write_bytes(b"abcdefg")
    record = record_of(tmp_path, "file")
    bucket.delete(["torn"])
    if contents is not None:
        bucket.put("torn", contents)
    with pytest.raises(StorageFailed, match=reason):
        bucket.fetch("torn", tmp_path / "there", record)
    with pytest.raises(CheckpointInvalid, match="leads out of its directory"):
        bucket.fetch("torn", tmp_path / "there", FileRecord("../outside", 1, ""))


def test_a_full_disk_is_named(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"abcdefg")
    bucket.put("file", b"abcdefg")
    monkeypatch.setenv("TRIREME_FAULTS", "bucket.write@1=full")
    with pytest.raises(DiskFull, match="there/file"):
        bucket.fetch("file", tmp_path / "there", record_of(tmp_path, "file"))


def test_a_refusal_is_said_in_a_line(bucket: Bucket, server: Double) -> None:
    server.refuses = lambda _request: True
    with pytest.raises(StorageFailed) as failed:
        bucket.put("key", b"x")
    assert f"{server.url}/key" in str(failed.value)
    assert "403" in str(failed.value)
    assert "\n" not in str(failed.value)
    assert "Debug source" not in str(failed.value)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(BadInput, match="uv sync --extra s3") as refused:
        Bucket("s3://bucket/prefix")
    assert "run.output_dir = s3://bucket/prefix" in str(refused.value)
