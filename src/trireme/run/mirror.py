"""Keeps a run in object storage while it trains: `run.output_dir = "s3://bucket/prefix"` (`checkpoint.stored_run`).

The run works in its directory on this machine as every run does. A thread uploads each new checkpoint to the store, its
manifest last, then the new parts of the other files, then HEAD, which names all of that, and which the store accepts
only from the driver that put it last. A driver with a refused HEAD has been superseded: its next check of its right to
write raises LockLost. A failed upload is an incident, and is tried again; after more than `checkpoint.max_missed`
checkpoints in a row the run stops.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from trireme.checkpoint.bucket import Bucket, PutRefused
from trireme.checkpoint.manifest import MANIFEST, Manifest
from trireme.checkpoint.rows import METRICS, ROLLOUTS, TRAINED
from trireme.checkpoint.store import HEAD, KEEP, CheckpointStore, Head
from trireme.checkpoint.stored_run import (
    PART_BYTES,
    FilePart,
    StoredCheckpoint,
    StoredRun,
    checkpoint_key,
    elsewhere,
    part_key,
    part_of,
    writer_of,
)
from trireme.config.run import CheckpointConfig
from trireme.config.trust import RECORD
from trireme.core.errors import CheckpointInvalid, LockLost, StorageFailed
from trireme.core.paths import path_in
from trireme.core.refusals import Refusal
from trireme.process import trace
from trireme.process.faults import fault_point

FILES = (RECORD, "code.diff", METRICS, TRAINED, "checkpoints.jsonl")
TREES = (ROLLOUTS, "logs", "trace", "tensorboard", "wandb")
LOOK_S = 1.0
"""Seconds between looks for a new checkpoint."""
EVERY_S = 60.0
"""Seconds between two uploads while there is no new checkpoint. Each upload brings new metrics and logs, and
finds out if HEAD in the store is still this driver's."""
RETRY_S = 30.0
"""Seconds until a failed upload is tried again."""


@dataclass(frozen=True)
class Shape:
    """The state of a run directory that changes only when an attempt starts: HEAD (run, lineage and attempt), and the
    list of checkpoints in `branches/`. `Mirror.bring` compares it before and after an upload, to find out if an attempt
    began meanwhile."""

    head: Head
    parked: frozenset[str]
    """The paths of the checkpoints in `branches/`, which a resume from an earlier step has put aside."""


class Mirror:
    """Uploads the files of the run directory `root` to `bucket`, in a thread. Before that, this driver must have put
    HEAD in the store. `stored`: the contents of this HEAD. `tag`: the tag that the store gave it, which changes with
    HEAD's contents.

    `limit_s`: seconds within which an upload of all new files must be done. `note` records an incident.
    """

    def __init__(
        self,
        bucket: Bucket,
        root: Path,
        stored: StoredRun,
        tag: str,
        options: CheckpointConfig,
        limit_s: float,
        note: Callable[[str], None],
    ) -> None:
        self.bucket = bucket
        self._root = root
        self._options = options
        self._limit_s = limit_s
        self._note = note
        self._stored = stored
        self._tag = tag
        self._observed: set[str] = set()  # checkpoints that the directory held at some time, by path
        self._looked_at: set[str] = set()  # checkpoints that the directory held at the last success, by name
        self._stats: dict[str, tuple[int, int, int]] = {}  # of the files whose parts `_stored` has
        self._swept = 0  # the attempt that last deleted what was left in the store
        self._waiting: set[str] = set()  # new checkpoints since the last success
        self._failed: Exception | None = None
        self._lost: BaseException | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="store", daemon=True)

    def start(self) -> None:
        """Starts the thread that watches the run directory and uploads new checkpoints and files."""
        self._thread.start()

    def check(self) -> None:
        """Raises LockLost if another driver has taken over HEAD in the store. Raises StorageFailed if uploads fail and
        more than `checkpoint.max_missed` checkpoints wait for their upload. Raises any other error that ended the
        thread."""
        if self._lost:
            raise self._lost
        if self._failed and len(self._waiting) > self._options.max_missed:
            raise StorageFailed(self._failure_text(self._failed))

    def draft_key(self, manifest: Manifest) -> str:
        """Returns the key that the checkpoint with this `manifest`, which may still be a draft, will have in the
        store."""
        return checkpoint_key(self._stored.driver, manifest)

    def await_key(self, checkpoint: Path, limit_s: float) -> str:
        """Waits until the store has `checkpoint`, a checkpoint of the run directory. Returns its key in the store.
        Raises LockLost, and StorageFailed after `limit_s` seconds."""
        checksum = xxhash.xxh3_128_hexdigest((checkpoint / MANIFEST).read_bytes())
        deadline = time.monotonic() + limit_s
        while True:
            stored = self._stored.commits.get(str(checkpoint.relative_to(self._root)))
            if stored and stored.manifest == checksum:
                return stored.key
            self.check()
            if time.monotonic() > deadline:
                reason = f": {self._failed}" if self._failed else ""
                raise StorageFailed(f"waited {limit_s:g} s until {self.bucket.url} has {checkpoint.name}{reason}")
            time.sleep(LOOK_S)

    def close(self, limit_s: float) -> None:
        """Makes the thread upload everything new for the last time, and then end. Waits for the thread up to `limit_s`
        seconds. Raises LockLost, and StorageFailed if the upload failed or is not done by then."""
        self._ending.set()
        self._thread.join(limit_s)
        if self._lost:
            raise self._lost
        if self._thread.is_alive() or self._failed:
            late = StorageFailed(f"waited {limit_s:g} s for {self.bucket.url}")
            raise StorageFailed(self._failure_text(self._failed or late)) from self._failed

    def _failure_text(self, error: Exception) -> str:
        return (
            f"{self.bucket.url} lacks what is new in {self._root}, {len(self._waiting)} checkpoints among it "
            f"(checkpoint.max_missed = {self._options.max_missed}): {error}"
        )

    def _follow(self) -> None:
        """The function of the thread. Stores an error that ends the thread; `check` and `close` raise it."""
        try:
            self._bring_what_comes()
        except BaseException as error:  # that of the package's compiled code is no Exception
            self._lost = error

    def _bring_what_comes(self) -> None:
        """Uploads all new files until `close` is called: at once when there is a new checkpoint, else every EVERY_S
        seconds. After a failed upload, tries again after RETRY_S seconds. Uploads once more at the end."""
        full_at = time.monotonic()
        retry_at = 0.0
        while not self._lost and not self._ending.wait(LOOK_S):
            self._waiting |= self._new_checkpoints()
            now = time.monotonic()
            if now >= retry_at and (self._waiting or now >= full_at):
                self._try()
                full_at = time.monotonic() + EVERY_S
                if self._failed:
                    retry_at = time.monotonic() + RETRY_S
                else:
                    retry_at = 0.0
        if not self._lost:
            self._waiting |= self._new_checkpoints()
            self._try()

    def _new_checkpoints(self) -> set[str]:
        """Returns the names of the checkpoints that the run directory did not have at the last successful upload."""
        return {checkpoint.name for checkpoint in CheckpointStore(self._root).checkpoints()} - self._looked_at

    def _try(self) -> None:
        names = {checkpoint.name for checkpoint in CheckpointStore(self._root).checkpoints()}
        try:
            while not self.bring():
                pass
        except (StorageFailed, CheckpointInvalid, OSError) as error:
            if not self._failed:
                self._note(f"{self._failure_text(error)}; tried again every {RETRY_S:g} s")
            self._failed = error
        except Exception as error:  # LockLost, or an error of this program, which ends the run
            self._lost = error
        else:
            if self._failed:
                self._note(f"{self.bucket.url} has everything again")
            self._failed = None
            self._looked_at = names
            self._waiting.clear()

    def bring(self) -> bool:
        """Uploads everything that is new, puts HEAD, and deletes objects that HEAD no longer names. Returns False,
        without putting HEAD, if an attempt began meanwhile: then call it again. Raises LockLost, StorageFailed,
        OSError."""
        deadline = time.monotonic() + self._limit_s
        shape = self._shape()
        driver = self._stored.driver
        if shape is None:
            return True  # the directory was emptied for a start that has not come to an end
        commits = self._bring_checkpoints(deadline)
        self._observed |= commits.keys()
        fault_point("store.commits")
        stats: dict[str, tuple[int, int, int]] = {}
        files = {}
        for path in sorted(_files(self._root)):
            with suppress(FileNotFoundError):  # moved to a branch just now
                files[path] = self._bring_file(path, driver, deadline, stats)
        if self._shape() != shape:
            return False
        # What is newer in the store than all that arrived stays: those here may have been deleted on their way.
        newest = max(replace(self._stored, commits=commits).of_branch(), default=-1)
        newer = {path for step, path in self._stored.of_branch().items() if step > newest}
        deleted = self._observed - commits.keys() - newer
        remaining = replace(
            self._stored,
            commits={path: checkpoint for path, checkpoint in self._stored.commits.items() if path not in deleted},
        )
        keep_last = self._options.keep_last
        keep_every = self._options.keep_every
        commits |= elsewhere(remaining, shape.head, commits, keep_last, keep_every)
        new = replace(self._stored, head=shape.head, commits=commits, files=files)
        if new == self._stored:
            if self.bucket.tag(HEAD) != self._tag:
                self._settle()
        else:
            self._put_head(replace(new, written=self._stored.written + 1))
        self._stats = stats
        if self._swept != shape.head.attempt:
            self._sweep(shape.head.attempt)
        return True

    def _shape(self) -> Shape | None:
        head = CheckpointStore(self._root).head()
        parked = frozenset(str(path.relative_to(self._root)) for path in _parked(self._root))
        if head:
            return Shape(head, parked)
        return None

    def _bring_checkpoints(self, deadline: float) -> dict[str, StoredCheckpoint]:
        """Uploads the checkpoints of the run directory that the store lacks, the newest first, and the checkpoints in
        `branches/` last. Returns {path: checkpoint} for all checkpoints that are complete in the store. Raises
        StorageFailed after `deadline` (monotonic)."""
        by_checksum = {checkpoint.manifest: checkpoint for checkpoint in self._stored.commits.values()}
        brought = {}
        for checkpoint in [*reversed(CheckpointStore(self._root).checkpoints()), *_parked(self._root)]:
            try:
                text = (checkpoint / MANIFEST).read_bytes()
                checksum = xxhash.xxh3_128_hexdigest(text)
                stored = by_checksum.get(checksum) or self._bring_checkpoint(checkpoint, text, checksum, deadline)
            except (CheckpointInvalid, FileNotFoundError):
                continue  # damaged, or deleted just now
            path = str(checkpoint.relative_to(self._root))
            brought[path] = replace(stored, kept=(checkpoint / KEEP).exists())
        return brought

    def _bring_checkpoint(self, checkpoint: Path, text: bytes, checksum: str, deadline: float) -> StoredCheckpoint:
        manifest = Manifest.verified(checkpoint, contents=False)
        key = checkpoint_key(self._stored.driver, manifest)
        present = self.bucket.keys(key)  # after a failure, or as the parts of other nodes (`trireme.checkpoint.parts`)
        paths = {f"{key}/{record.path}": record.path for record in manifest.files}
        remaining = {file_key: path for file_key, path in paths.items() if file_key not in present}
        with ExitStack() as ending, trace.span("upload", "store", version=manifest.step, bytes=manifest.size):
            # Opened first: the checkpoint may be deleted here before all of it has arrived.
            files = {
                file_key: ending.enter_context(path_in(checkpoint, path).open("rb"))
                for file_key, path in remaining.items()
            }
            for file_key, file in files.items():
                self._in_time(deadline, file_key)
                self.bucket.put(file_key, file)
                fault_point("store.file")
            self.bucket.put(f"{key}/{MANIFEST}", text)
            fault_point("store.manifest")
        return StoredCheckpoint(key, checksum)

    def _bring_file(
        self, path: str, driver: int, deadline: float, stats: dict[str, tuple[int, int, int]]
    ) -> tuple[FilePart, ...]:
        """Uploads the new parts of the file `path`. `driver`: the number of this driver, for the keys of the new parts.
        Returns all parts of the file, and adds its inode, size and time of change to `stats`. Raises StorageFailed
        after `deadline` (monotonic)."""
        file = self._root / path
        stored_parts = self._stored.files.get(path, ())
        stat = file.stat()
        stats[path] = now = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if self._stats.get(path) == now and path in self._stored.files:
            return stored_parts
        parts: list[FilePart] = []
        with file.open("rb") as stream:
            while block := stream.read(PART_BYTES):
                number = len(parts)
                part = part_of(block, driver, stored_parts[number] if number < len(stored_parts) else None)
                if number >= len(stored_parts) or part is not stored_parts[number]:
                    self._in_time(deadline, path)
                    self.bucket.put(part_key(path, number, part), block)
                    fault_point("store.part")
                parts.append(part)
        return tuple(parts)

    def _in_time(self, deadline: float, label: str) -> None:
        if time.monotonic() > deadline:
            raise StorageFailed(
                f"{label} and the files after it were not uploaded to the store within {self._limit_s:g} s "
                "(timeouts.checkpoint_s)"
            )

    def _put_head(self, new: StoredRun) -> None:
        """Puts `new` as HEAD on the condition that HEAD is still this driver's, then deletes the objects that only the
        old HEAD named. Raises LockLost if another driver has put HEAD, or if HEAD is missing. Also raises
        StorageFailed."""
        old = self._stored
        try:
            self._tag = self.bucket.swap(HEAD, new.to_json(), self._tag)
        except PutRefused:
            if self._settle() != new:
                raise StorageFailed(f"{self.bucket.url}: an earlier HEAD of this driver arrived late") from None
        self._stored = new
        fault_point("store.head")
        self.bucket.delete(sorted(old.parts() - new.parts()))
        for key in sorted(old.checkpoint_keys() - new.checkpoint_keys()):
            self.bucket.delete(self.bucket.keys(key))

    def _settle(self) -> StoredRun:
        """Reads HEAD in the store again, because a put may succeed although its answer is lost. If this driver put
        HEAD, returns HEAD. Raises LockLost if another driver put HEAD, or if HEAD is missing."""
        head_object = self.bucket.read(HEAD)
        if head_object:
            stored = StoredRun.from_json(head_object[0])
        else:
            stored = None
        if stored and head_object and stored.token == self._stored.token:
            self._stored = stored
            self._tag = head_object[1]
            return stored
        if stored:
            by = f"{stored.holder}, attempt {stored.head.attempt} of run {stored.head.run_id}"
        else:
            by = "no driver"
        refusal = Refusal(
            f"{self.bucket.url}, whose HEAD was put by {by}, after driver {self._stored.driver} "
            f"({self._stored.holder})",
            "one driver for a run: the store takes HEAD only from the one that put it last",
            "leave the run to the new driver: this one ends, and nothing that the new one names was changed by it",
        )
        raise LockLost(str(refusal))

    def _sweep(self, attempt: int) -> None:
        """Deletes objects of earlier drivers, and of attempts before `attempt`, that HEAD does not name. An earlier
        driver may still be alive and put more; those objects are deleted when the next attempt begins."""
        stored = self._stored
        swept: list[str] = []
        parts = stored.parts()
        commits = stored.checkpoint_keys()
        for key in [*self.bucket.keys("commits"), *self.bucket.keys("rows")]:
            writer = writer_of(key)
            is_named = key in parts or "/".join(key.split("/")[:3]) in commits
            if writer is not None and writer < (stored.driver, attempt) and not is_named:
                swept.append(key)
        self.bucket.delete(swept)
        self._swept = attempt


def _parked(root: Path) -> list[Path]:
    """Returns the directories of the checkpoints in `branches/`, which a resume from an earlier step has put aside."""
    return sorted(root.glob("branches/*/checkpoints/step_*"))


def _files(root: Path) -> Iterator[str]:
    """Yields the paths, relative to `root`, of all files to upload that belong to no checkpoint, such as metrics,
    rollouts, logs, traces and the files of trackers. Includes these files of the run's branches, and the branches' HEAD
    files. Leaves out symbolic links in the directories of TREES."""
    for top in (root, *root.glob("branches/*")):
        for name in (*FILES, *((HEAD,) if top != root else ())):
            if (top / name).is_file():
                yield str((top / name).relative_to(root))
        for tree in TREES:
            for directory, _, names in os.walk(top / tree):
                for name in names:
                    file = Path(directory, name)
                    if file.is_file() and not file.is_symlink() and file.suffix != ".new":
                        yield str(file.relative_to(root))
