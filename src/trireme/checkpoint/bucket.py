"""Object storage below a URL such as s3://bucket/prefix: puts, reads, lists and deletes objects. An object is put
whole; `swap` puts it only if a condition holds.

The store itself has to refuse a put if its condition does not hold (If-None-Match and If-Match of S3; Google's and
Azure's stores have the same). `try_conditions` tries that before a run relies on it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import BinaryIO

from trireme.checkpoint.files import FileRecord, HashingWriter, fsync_directory, make_directory, storage_errors
from trireme.core.errors import StorageFailed
from trireme.core.extras import require
from trireme.core.paths import path_in
from trireme.core.refusals import Refusal
from trireme.process.faults import fault_point

PIECE_BYTES = 8 << 20
"""Size of the pieces in which an object travels."""
WINDOW = 4
"""Number of pieces of a fetched object that are on the way at the same time."""
REQUEST_S = 60.0
"""Time limit of one request, which moves at most PIECE_BYTES."""
RETRIES = 3
RETRY_S = 60.0
"""Seconds after the first try of a request during which the request is sent again if it fails."""
PIECE_S = 2 * (REQUEST_S + RETRY_S)
"""Time limit for a piece, with its retries."""
DELETED_AT_ONCE = 1000
CONDITIONS = (
    "object storage that refuses a put whose condition does not hold (If-None-Match, If-Match), as Amazon's S3 does: "
    "without this two drivers of one run would not notice each other"
)


SILENT = re.compile(r"HTTP error|status code: (429|50[0234])")
"""Matches the messages of the package obstore which say that the store was not reached, or was too busy to answer."""


class StoreSilent(StorageFailed):
    """Raised when the store could not be reached or was too busy. The same request may succeed later."""


class PutRefused(Exception):
    """Raised when the condition of a conditional put does not hold: the store has another object than the caller
    expects. Nothing has changed."""


class Bucket:
    """Reads, puts and deletes the objects below a URL. Each method raises StorageFailed if the store cannot be reached
    (StoreSilent) or refuses the request."""

    def __init__(self, url: str) -> None:
        """Opens the store at `url`; sends no request. Raises BadInput if the package obstore is missing or does not
        accept the URL."""
        require("obstore", extra="s3", what_for=f"run.output_dir = {url}")
        from obstore.store import from_url

        self.url = url
        try:
            self._store = from_url(
                url,
                client_options={"timeout": timedelta(seconds=REQUEST_S), "allow_http": True},  # as the endpoint says
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)},
            )
        except Exception as error:  # the package has an error of its own for each kind of store
            raise Refusal(
                f"run.output_dir = {url}: {_first_line(error)}",
                "a directory, or a URL such as s3://bucket/prefix",
                "correct --run.output-dir; keys, region and endpoint are taken from the environment (AWS_...)",
            ) from None

    @contextmanager
    def _storage_errors(self, key: str) -> Iterator[None]:
        """Context manager: turns an error in its `with` block into StorageFailed, and the error of a put whose
        condition does not hold into PutRefused. The messages name the object `key`."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            yield
        except (AlreadyExistsError, PreconditionError) as error:
            raise PutRefused(f"{self.url}/{key}") from error
        except StorageFailed:
            raise
        except Exception as error:  # one class for each kind of failure, without a common base
            failed = StoreSilent if SILENT.search(_first_line(error)) else StorageFailed
            raise failed(f"{self.url}/{key}: {_first_line(error)}") from error

    def read(self, key: str) -> tuple[bytes, str] | None:
        """Returns the contents of the object `key` and its tag; None if there is no such object."""
        import obstore

        with self._storage_errors(key):
            try:
                result = obstore.get(self._store, key)
                return bytes(result.bytes()), str(result.meta["e_tag"])
            except FileNotFoundError:
                return None

    def tag(self, key: str) -> str | None:
        """Returns the tag of the object `key`, which changes with its contents; None if there is no such object."""
        import obstore

        with self._storage_errors(key):
            try:
                return str(obstore.head(self._store, key)["e_tag"])
            except FileNotFoundError:
                return None

    def put(self, key: str, contents: bytes | BinaryIO) -> None:
        """Puts the object `key`, whole or not at all, and replaces an existing one. `contents`: bytes, or an open file,
        which is uploaded in parts of PIECE_BYTES."""
        import obstore

        with self._storage_errors(key):
            obstore.put(self._store, key, contents, chunk_size=PIECE_BYTES)

    def swap(self, key: str, contents: bytes, tag: str | None) -> str:
        """Replaces the object `key` if its tag is still `tag`. If `tag` is None, creates the object. Returns the new
        tag. Raises PutRefused if the object has another tag, or if `tag` is None and the object exists."""
        import obstore

        with self._storage_errors(key):
            put = obstore.put(
                self._store, key, contents, mode="create" if tag is None else {"e_tag": tag}, use_multipart=False
            )
        return str(put["e_tag"])

    def fetch(self, key: str, directory: Path, record: FileRecord) -> None:
        """Downloads the object `key` to the file `record.path` below `directory`, and verifies the file's size and
        checksum. Raises StorageFailed if the download fails or if the size or checksum differs from `record`; a partial
        or wrong file may then remain. Raises CheckpointInvalid if the path leads out of `directory`."""
        import obstore

        file = path_in(directory, record.path)
        with self._storage_errors(key):
            size = int(obstore.head(self._store, key)["size"])
        if size != record.size:
            raise StorageFailed(f"{self.url}/{key} has {size} bytes, it was written with {record.size}")
        with storage_errors(file):
            make_directory(file.parent)
            with HashingWriter(file) as writer, ThreadPoolExecutor(WINDOW) as pool:
                for start in range(0, size, WINDOW * PIECE_BYTES):
                    offsets = range(start, min(start + WINDOW * PIECE_BYTES, size), PIECE_BYTES)
                    for contents in pool.map(partial(self._piece, key, size), offsets, timeout=PIECE_S):
                        fault_point("bucket.write")
                        writer.write(contents)
            fsync_directory(file.parent)
        written = writer.record(record.path)
        if written != record:
            raise StorageFailed(
                f"{self.url}/{key} arrived with checksum {written.checksum}, but was written with {record.checksum}: "
                f"it was altered in the store, or on the way. Try again; if it again arrives with {written.checksum}, "
                "the object in the store is damaged: resume from an earlier step (--resume.step)"
            )

    def _piece(self, key: str, size: int, offset: int) -> memoryview:
        """Returns the bytes from `offset` on, at most PIECE_BYTES, of the object `key`, which has `size` bytes."""
        import obstore

        with self._storage_errors(key):
            return memoryview(obstore.get_range(self._store, key, start=offset, end=min(offset + PIECE_BYTES, size)))

    def keys(self, prefix: str) -> list[str]:
        """Returns the keys of all objects below `prefix`. Only whole path components match: `a/b` matches `a/b/c`, not
        `a/bc`."""
        import obstore

        with self._storage_errors(prefix):
            return [str(entry["path"]) for page in obstore.list(self._store, prefix) for entry in page]

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes the objects `keys`; ignores missing ones."""
        import obstore

        rest = list(keys)
        while rest:
            now = rest[:DELETED_AT_ONCE]
            rest = rest[DELETED_AT_ONCE:]
            with self._storage_errors(now[0]), suppress(FileNotFoundError):
                obstore.delete(self._store, now)

    def try_conditions(self) -> None:
        """Checks that the store refuses a put whose condition is false. Uses a trial object, and deletes it afterwards.
        Raises BadInput if the store accepts such a put or cannot be written at all; StoreSilent if it still gives no
        answer after retries."""
        key = f"trial-{secrets.token_hex(8)}"
        try:
            first = self.swap(key, b"first", None)
            self._expect_refusal(key, None, "If-None-Match: *")
            self.swap(key, b"second", first)
            self._expect_refusal(key, first, f"If-Match: {first}")
            self.delete([key])
        except StoreSilent as error:
            raise StoreSilent(
                f"the store of run.output_dir = {self.url} does not answer: {error}. Nothing has been started or "
                "changed: start the same command again when the store answers. If it has never answered here, correct "
                "AWS_ENDPOINT_URL, AWS_REGION or the proxy in the environment"
            ) from error
        except (StorageFailed, PutRefused) as error:
            raise Refusal(
                f"run.output_dir = {self.url}, which did not take a conditional put: {error}",
                CONDITIONS,
                "correct the URL, or keys, region and endpoint in the environment (AWS_...); or take a directory",
            ) from None

    def _expect_refusal(self, key: str, tag: str | None, condition: str) -> None:
        try:
            self.swap(key, b"refuse this", tag)
        except PutRefused:
            return
        with suppress(StorageFailed):
            self.delete([key])
        raise Refusal(
            f"run.output_dir = {self.url}, a store that accepted a write with `{condition}` although this condition "
            "was false",
            CONDITIONS,
            "take another store, or a newer version of it, or a directory as --run.output-dir",
        )


def _first_line(error: Exception) -> str:
    """Returns an error's message in one line of at most 500 characters, without the debug output of obstore."""
    return str(error).split("\n\nDebug source")[0].strip().replace("\n", " ")[:500]
