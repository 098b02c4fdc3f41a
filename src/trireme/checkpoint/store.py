"""The checkpoints of one run directory: drafts, completion, retention, lineages, and the way back to an earlier
checkpoint.

    HEAD                                       the current run, lineage and attempt
    checkpoints/step_000020/                   a current checkpoint
    checkpoints/step_000040.partial-2/         a draft that attempt 2 writes, or wrote when it died
    checkpoints/step_000020.removed/           a checkpoint that is being deleted
    checkpoints.jsonl                          one row per current checkpoint, also if retention deleted it
    branches/<lineage>/                        HEAD, checkpoints and rows that were superseded when <lineage> was left

A checkpoint is current as long as no return to an earlier step supersedes it. So the current checkpoints are a chain,
over one or several lineages.

A crash at any point loses nothing: each change is a rename or the replacement of a whole file, in an order that the
next opening can complete. Nothing depends on the clock.

On a file system with unreliable locks a driver may lose its lock without noticing. So each start takes a number that
only one driver can take, and writes it to HEAD; and a look at HEAD precedes each change (`check_owner`). If the other
driver starts between that look and the change, no harm is done either: the new driver's `checkout` removes the drafts
of other drivers, so their rename fails, and gives the files of rows a new inode, so rows that they still append are
lost.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from trireme.checkpoint.files import fsync_directory, make_directory, replace_file, storage_errors, write_bytes
from trireme.checkpoint.manifest import MANIFEST, CheckpointRef, Manifest, step_name, step_of
from trireme.checkpoint.rows import ROLLOUTS, ROW_FILES, StepRow, move_rows, read_rows, recorded_steps, write_rows
from trireme.core.errors import CheckpointInvalid, LockLost
from trireme.core.finite_json import to_json
from trireme.core.paths import path_in
from trireme.core.refusals import Refusal
from trireme.process.faults import fault_point

HEAD = "HEAD"
CHECKPOINTS = "checkpoints"
LOCK = "driver.lock"
"""File that the driver of a run holds locked; its text names the process."""
KEEP = "KEEP"
"""A file of this name in a checkpoint protects it from deletion: something else refers to the checkpoint."""


@dataclass(frozen=True)
class Head:
    """The contents of the file HEAD in a run directory: the current run, lineage and attempt, and the checkpoint that
    the lineage started from. (HEAD in object storage has more: see `trireme.checkpoint.stored_run`.)"""

    run_id: str  # 8 hex digits, the same in all attempts
    lineage: str  # 8 hex digits
    attempt: int  # counts every start, from 1
    base: CheckpointRef | None  # the checkpoint that the lineage started from; None: from the beginning

    @classmethod
    def new(cls, attempt: int = 1, base: CheckpointRef | None = None) -> Head:
        """Returns the HEAD of a new run, with a random run id and lineage."""
        return cls(secrets.token_hex(4), secrets.token_hex(4), attempt, base)

    @classmethod
    def read(cls, file: Path) -> Head | None:
        """Returns the HEAD in `file`; None if there is no such file. Raises CheckpointInvalid if it is damaged."""
        if not file.exists():
            return None
        try:
            return TypeAdapter(cls).validate_json(file.read_bytes())
        except ValueError as error:
            raise CheckpointInvalid(f"{file} is damaged ({type(error).__name__}: {error})") from None

    def write(self, file: Path) -> None:
        """Replaces the contents of `file` by this HEAD. Raises OSError."""
        replace_file(file, (to_json(asdict(self), indent=1) + "\n").encode())


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint with every byte checked."""

    path: Path
    manifest: Manifest
    notes: tuple[str, ...] = ()  # for people: how it was chosen


def _step(checkpoint: Path) -> int:
    step = step_of(checkpoint.name)
    assert step is not None
    return step


def _rename_away(directory: Path) -> Path:
    """Renames a directory that will be deleted, so that it is neither a checkpoint nor a draft. Returns its new
    path."""
    away = directory.with_name(f"{directory.name}.removed")
    if away.exists():
        shutil.rmtree(away)
    directory.rename(away)
    fsync_directory(directory.parent)
    return away


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints under the run directory `root`: makes, finds, deletes and sets aside checkpoints. A process that
    changes anything must hold the run's lock.

    `owner`: (run id, attempt) of the driver that makes changes. Once another driver has started, each change raises
    LockLost instead. If `owner` is None, this is not checked. `fence`: a function that is called before each change.
    It raises LockLost if a place outside this directory, such as HEAD in object storage, names another driver.
    """

    root: Path
    owner: tuple[str, int] | None = None
    fence: Callable[[], None] | None = field(default=None, compare=False)
    _read: dict[Path, Manifest] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Manifests of the checkpoints that this store has read whole and found unaltered."""

    @property
    def directory(self) -> Path:
        return self.root / CHECKPOINTS

    @property
    def rows(self) -> Path:
        """The file with a row per checkpoint: name, step, lineage, path (relative to the file's directory), identity of
        the weights."""
        return self.root / "checkpoints.jsonl"

    def checkpoint(self, step: int) -> Path:
        """Returns the path of the checkpoint of `step`, which need not exist."""
        return self.directory / step_name(step)

    def branch(self, lineage: str) -> Path:
        """Returns the directory for superseded files: when the run goes back to an earlier step, later checkpoints and
        rows move there. `lineage`: the lineage that the run then left. The directory need not exist."""
        return path_in(self.root / "branches", lineage)

    def head(self) -> Head | None:
        """Reads HEAD; None if the run never began. Raises CheckpointInvalid if it is damaged."""
        return Head.read(self.root / HEAD)

    def write_head(self, head: Head) -> None:
        """Replaces the file HEAD of the run directory. Raises OSError."""
        head.write(self.root / HEAD)

    def lineages(self) -> list[Head]:
        """Returns the last HEAD of each lineage that the run has left, then the current HEAD. A HEAD's `base` is the
        checkpoint that its lineage started from. Raises CheckpointInvalid if a HEAD is damaged."""
        earlier = [Head.read(file) for file in sorted(self.root.glob(f"branches/*/{HEAD}"))]
        return [head for head in (*earlier, self.head()) if head]

    def checkpoints(self) -> list[Path]:
        """Returns the directories of the run's current checkpoints, in order of step. Superseded checkpoints (in
        `branches/`) are not current. Verifies nothing."""
        return sorted((entry for entry in self._entries() if step_of(entry.name) is not None), key=_step)

    def partial(self) -> list[Path]:
        """Returns the directories of drafts, and of checkpoints and drafts whose deletion was interrupted."""
        return [e for e in self._entries() if ".partial-" in e.name or e.suffix == ".removed"]

    def _entries(self) -> list[Path]:
        if self.directory.is_dir():
            return sorted(e for e in self.directory.iterdir() if e.is_dir())
        return []

    def _whole(self) -> dict[Path, Manifest]:
        """Returns {checkpoint: its manifest} in order of step, for the checkpoints whose files all exist with the right
        sizes. Does not read the files."""
        whole = {}
        for checkpoint in self.checkpoints():
            with suppress(CheckpointInvalid):
                whole[checkpoint] = Manifest.verified(checkpoint, contents=False)
        return whole

    def newest(self) -> tuple[VerifiedCheckpoint | None, dict[Path, str]]:
        """Returns the newest checkpoint that verifies, contents included (None if none does), and {newer checkpoint:
        why it does not verify}."""
        passed_over: dict[Path, str] = {}
        for checkpoint in reversed(self.checkpoints()):
            try:
                manifest = self._read[checkpoint] = Manifest.verified(checkpoint)
                return VerifiedCheckpoint(checkpoint, manifest), passed_over
            except CheckpointInvalid as error:
                passed_over[checkpoint] = str(error)
        return None, passed_over

    def check_owner(self) -> None:
        """Calls `fence`, which may raise. Then raises LockLost if another driver, or a later attempt, has taken over
        the run directory, or if HEAD was removed."""
        if self.fence:
            self.fence()
        if self.owner is None or ((head := self.head()) and (head.run_id, head.attempt) == self.owner):
            return
        if head:
            newer = f"attempt {head.attempt} of run {head.run_id}"
        else:
            newer = f"a driver that removed {HEAD}"
        lock = self.root / LOCK
        if lock.exists():
            holder = lock.read_text().strip()
        else:
            holder = "not known"
        refusal = Refusal(
            f"{self.root}, which {newer} ({holder}) has taken over from attempt {self.owner[1]} of run {self.owner[0]}",
            f"one driver for a run directory; {LOCK} was deleted, or locks do not hold on its file system",
            "leave the run to the new driver: this one ends, and has published, deleted and written nothing since",
        )
        raise LockLost(str(refusal))

    def draft(self, step: int, attempt: int) -> Path:
        """Makes a new directory, in which `attempt` writes the checkpoint of `step`, and returns its path. Raises
        StorageFailed, LockLost."""
        self.check_owner()
        draft = self.directory / f"{step_name(step)}.partial-{attempt:d}"
        with storage_errors(draft):
            make_directory(self.directory)
            draft.mkdir()
        fault_point("commit.draft")
        return draft

    def publish(self, draft: Path, manifest: Manifest, contents: bool = False) -> Path:
        """Turns `draft`, which must hold all of `manifest.files`, into a checkpoint: writes the manifest and renames
        the directory. Returns the checkpoint's path.

        Raises StorageFailed, LockLost, and CheckpointInvalid if a file is missing or has the wrong size or (with
        `contents`) the wrong checksum.
        """
        write_bytes(draft, MANIFEST, manifest.to_json().encode())
        Manifest.verified(draft, contents)
        checkpoint = self.checkpoint(manifest.step)
        with storage_errors(checkpoint):
            fault_point("commit.manifest")
            for directory in (draft, *filter(Path.is_dir, draft.rglob("*"))):
                fsync_directory(directory)
            self.check_owner()
            fault_point("commit.checked")
            draft.rename(checkpoint)
            fsync_directory(self.directory)
            fault_point("commit.renamed")
        with suppress(OSError):  # no space: the next checkpoint, or the next checkout, adds the missing row
            self.record_checkpoints()
        return checkpoint

    def discard(self, draft: Path) -> None:
        """Deletes a draft if it still exists. Raises StorageFailed."""
        with storage_errors(draft):
            if draft.exists():
                shutil.rmtree(_rename_away(draft))

    def record_checkpoints(self) -> None:
        """Adds a row to checkpoints.jsonl for each checkpoint that has none. Raises OSError, and CheckpointInvalid for
        an unreadable manifest."""
        rows, torn = read_rows(self.rows)
        named = {row.values["name"] for row in rows}
        missing = [
            self._checkpoint_row(checkpoint) for checkpoint in self.checkpoints() if checkpoint.name not in named
        ]
        if missing or torn:
            write_rows(self.rows, [*rows, *missing])

    def _checkpoint_row(self, checkpoint: Path) -> StepRow:
        manifest = Manifest.read(checkpoint)
        values = {
            "name": checkpoint.name,
            "step": manifest.step,
            "lineage": manifest.lineage,
            "path": str(checkpoint.relative_to(self.root)),
            "identity": str(manifest.identity),
        }
        return StepRow((to_json(values) + "\n").encode(), values)

    def prune(self, keep_last: int, keep_every: int | None) -> list[str]:
        """Deletes checkpoints. Keeps the `keep_last` newest, checkpoints of a step divisible by `keep_every`,
        checkpoints with a file KEEP, and the newest that verifies. Neither counts nor deletes a checkpoint in which a
        file is missing or has the wrong size: `checkout` moves it.

        To find the newest that verifies, reads the contents of checkpoints, newest first, and stops at the first that
        verifies. Reads nothing if this object has already verified one of the `keep_last` newest. If no checkpoint
        verifies, deletes nothing. Returns the names of the deleted checkpoints. Raises StorageFailed, LockLost.
        """
        whole = self._whole()
        old = [checkpoint for checkpoint in list(whole)[:-keep_last] if not (checkpoint / KEEP).exists()]
        if keep_every:
            old = [checkpoint for checkpoint in old if _step(checkpoint) % keep_every]
        if old and not any(self._read.get(recent) == whole[recent] for recent in list(whole)[-keep_last:]):
            newest, _ = self.newest()
            old = [checkpoint for checkpoint in old if newest is not None and checkpoint != newest.path]
        for checkpoint in old:
            self.check_owner()
            with storage_errors(checkpoint):
                away = _rename_away(checkpoint)
                (away / MANIFEST).unlink()
                fault_point("commit.prune")
                shutil.rmtree(away)
        return [checkpoint.name for checkpoint in old]

    def checkout(self, step: int) -> list[str]:
        """Goes back to the checkpoint of `step`: afterwards no later checkpoint is current (see the module's
        docstring). Call it before this attempt opens its row files.

        Deletes drafts. Moves later checkpoints and damaged ones to `branches/<lineage>/`, the newest first. Then moves
        to the same directory the rows and recorded rollouts of the steps after the checkpoint (rows number steps from
        0, so the first row that moves has the number `step`), and the rows that checkpoints.jsonl has of the moved
        checkpoints and of deleted later ones. If anything was moved, HEAD starts a new lineage. HEAD is written last:
        if a call was interrupted, another call, for the same or another step, completes the move. Returns messages
        about what was moved.

        Raises LockLost as `check_owner` does, StorageFailed if a file cannot be written or moved, and CheckpointInvalid
        if HEAD is damaged or (where `owner` is None) missing, or if a manifest cannot be read.
        """
        self.check_owner()
        head = self.head()
        if not head:
            raise CheckpointInvalid(f"{self.root / HEAD} is missing")
        with storage_errors(self.root):
            for leftover in self.partial():
                with suppress(FileNotFoundError):  # its driver has just published it: it is parked below
                    shutil.rmtree(_rename_away(leftover))
            branch = self.branch(head.lineage)
            changes = self._park(step, branch)
            fault_point("checkout.parked")
            changes += self._cut_rows(step, branch)
            fault_point("checkout.rows")
            self.record_checkpoints()
            if branch.exists():
                head.write(branch / HEAD)
                checkpoint = self.checkpoint(step)
                if checkpoint.exists():
                    base = CheckpointRef(Manifest.read(checkpoint).lineage, step)
                else:
                    base = None
                self.check_owner()
                self.write_head(replace(head, lineage=secrets.token_hex(4), base=base))
        return changes

    def _park(self, step: int, branch: Path) -> list[str]:
        changes = []
        whole = self._whole()
        for checkpoint in reversed(self.checkpoints()):
            if _step(checkpoint) <= step and checkpoint in whole:
                continue
            parked = path_in(branch / CHECKPOINTS, checkpoint.name)
            make_directory(parked.parent)
            checkpoint.rename(parked)
            fsync_directory(parked.parent)
            fsync_directory(self.directory)
            changes.append(f"{checkpoint.name} is now {parked}")
        return changes

    def _cut_rows(self, step: int, branch: Path) -> list[str]:
        parked = {entry.name for entry in (branch / CHECKPOINTS).glob("*")}
        cuts = {
            name: move_rows(path_in(self.root, name), lambda row: row.step >= step, path_in(branch, name))
            for name in ROW_FILES
        }
        move_rows(
            self.rows, lambda row: row.step > step or row.values["name"] in parked, path_in(branch, self.rows.name)
        )
        for recorded, file in recorded_steps(self.root / ROLLOUTS).items():
            if recorded >= step:
                (branch / ROLLOUTS).mkdir(parents=True, exist_ok=True)
                file.rename(path_in(branch / ROLLOUTS, file.name))
        changes = [f"{moved} rows of {name} are now in {branch}" for name, (moved, _) in cuts.items() if moved]
        return changes + [f"{torn} torn lines of {name} were dropped" for name, (_, torn) in cuts.items() if torn]
