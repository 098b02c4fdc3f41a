"""Takes the checkpoints of an attempt. Training continues while a checkpoint is written; one at a time is in flight.

    with Checkpoints(...) as checkpoints:        the end of the block takes the last checkpoint, also after a signal
        checkpoints.at_boundary(version)     between two steps: makes a draft, for which all rooms take snapshots
        checkpoints.seal()                   the step's row is written: completes the draft in the background, prunes
        checkpoints.leave_boundary()         the trainer is about to change its weights

If a part fails, the draft is removed, the checkpoint counts as missed, and an incident is recorded. On a full disk old
checkpoints are deleted except the newest that verifies, only one checkpoint is kept from then on, and the next boundary
is saved.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from trireme.checkpoint.files import FileRecord, storage_errors
from trireme.checkpoint.manifest import CheckpointRef, Manifest
from trireme.checkpoint.rows import ROW_FILES
from trireme.config import CommonConfig
from trireme.config.installed import package_versions
from trireme.core.errors import DiskFull, LimitReached, RoomFailed, StorageFailed, TriremeError, WeightsRefused
from trireme.core.finite_json import to_json
from trireme.core.paths import path_in
from trireme.core.types import WeightIdentity
from trireme.core.weights import PublishedWeights
from trireme.process import trace
from trireme.process.faults import fault_point
from trireme.process.signals import Stopped, StoppedWithoutCheckpoint
from trireme.run.rooms import PendingFiles, StatefulRoom, Trainer
from trireme.run.rundir import RunDir

log = logging.getLogger(__name__)
END_S = 30.0
"""Seconds for which a run that failed waits for a checkpoint that is being written, because all its parts may be on the
disk already."""


class FarParts(Protocol):
    """The parts of checkpoints on nodes that cannot see the run directory."""

    def gather(self, draft: Path, manifest: Manifest) -> None:
        """Copies files of the checkpoint `manifest` from other nodes to `draft`, the checkpoint's directory in the run
        directory. Raises StorageFailed, RoomFailed."""

    def discard(self, draft: Path) -> None:
        """Deletes the parts of `draft` on the nodes that wrote them. Raises RoomFailed."""


@dataclass(frozen=True)
class CheckpointDraft:
    """A checkpoint that is being written: its directory, its parts, and the published weights from which the part
    `inference` is written."""

    version: int
    path: Path
    identities: tuple[WeightIdentity, ...]
    parts: Mapping[str, PendingFiles]
    weights: PublishedWeights
    """The weights of `version`; the draft holds them so that they exist as long as they are read."""


class Checkpoints:
    """Makes the checkpoints of one attempt. `fixed`: the values that a resume must find unchanged. `decided`:
    {configuration key: the value that this run uses}, for keys that can be auto. `other_rooms`: {name: room} for each
    room, other than the trainer, that saves a part of each checkpoint; the part has this name. `note` records an
    incident. `far` collects the parts from nodes that cannot see the run directory; None if all nodes see it."""

    def __init__(
        self,
        config: CommonConfig,
        run: RunDir,
        fixed: Mapping[str, object],
        decided: Mapping[str, object],
        trainer: Trainer,
        other_rooms: Mapping[str, StatefulRoom],
        note: Callable[[str], None],
        far: FarParts | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self._fixed = fixed
        self._decided = decided
        self._note = note
        self._far = far
        self._trainer = trainer
        self._other_rooms = other_rooms
        manifest = run.start.manifest
        self._parent = CheckpointRef(manifest.lineage, manifest.step) if manifest else None  # the newest checkpoint
        if manifest:
            self._identities = list(manifest.identities)
        else:
            self._identities = []
        self._boundary: tuple[int, PublishedWeights | None] | None = None
        self._draft: CheckpointDraft | None = None  # until the row of its step is written
        self._sealing: Future[None] | None = None
        self._missed = 0
        self._is_last = False
        self._keep_last = config.checkpoint.keep_last
        self._has_room = False  # True: made since a checkpoint was missed

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """If the block ended without an error, training has reached its end: completes the last checkpoint. If the
        block ended with Stopped or LimitReached between two steps, takes a last checkpoint. In both cases, if the disk
        is full, deletes old checkpoints and tries again. Raises StorageFailed if there are no old checkpoints to
        delete, or if storage fails for another reason. Also raises RoomFailed and LockLost.

        If the block ended with another error, or with StoppedWithoutCheckpoint, takes no checkpoint. If a checkpoint is
        being written, waits for it up to END_S seconds.
        """
        may_save = isinstance(error, Stopped | LimitReached) and not isinstance(error, StoppedWithoutCheckpoint)
        try:
            if error is None or may_save:
                self._is_last = error is None
                self._settle()
                self._is_last = True
                while (may_save or self._missed) and self._is_unsaved:
                    self._save()
                    self.seal()
                    self._settle()
        finally:
            if self._sealing:
                with suppress(TriremeError, TimeoutError):
                    self._sealing.result(END_S)

    @property
    def _is_unsaved(self) -> bool:
        """True if the run is between two steps, and the current version of the weights has no checkpoint yet."""
        return self._boundary is not None and (self._parent is None or self._boundary[0] != self._parent.step)

    def at_boundary(self, version: int, weights: PublishedWeights | None = None) -> None:
        """Begins a checkpoint if one is due. Call it between two steps, when the trainer has the weights of `version`:
        at the start of the run, and after each step. If a checkpoint begins and `weights` is None, makes the trainer
        publish its weights.

        Raises StorageFailed after too many missed checkpoints, and LockLost. Raises WeightsRefused if a resumed trainer
        publishes weights that differ from those in its checkpoint.
        """
        manifest = self._run.start.manifest
        if weights and manifest and version == manifest.step:
            _check_loaded(weights.identity, manifest)
        self._boundary = (version, weights)
        if weights:
            self._remember(weights.identity)
        if self._sealing and self._sealing.done():
            self._settle()
        every = self._config.checkpoint.every
        is_due = version == self._config.max_steps or (every > 0 and version % every == 0)
        if (is_due or self._has_room) and version > self._run.start.step:
            self._save()

    def leave_boundary(self) -> None:
        """Call it when the trainer is about to change its weights. After that, no checkpoint can begin until
        `at_boundary` is called again."""
        self._boundary = None

    def seal(self) -> None:
        """Turns the draft into a checkpoint, in a background thread. Does nothing if there is no draft. Without
        `checkpoint.async_save`, waits until the checkpoint is complete. Call it when the rows of metrics of all
        finished steps are written."""
        draft = self._draft
        self._draft = None
        if draft is None:
            return
        self._sealing = _in_background(lambda: self._publish(draft), name=f"checkpoint of step {draft.version}")
        if not self._config.checkpoint.async_save:
            self._settle()

    def _remember(self, identity: WeightIdentity) -> None:
        oldest = identity.version - self._config.max_steps_off_policy
        self._identities = [i for i in self._identities if i.version >= oldest] + [identity]

    def _save(self) -> None:
        """Makes a draft, and takes snapshots of all rooms for it. Returns when training may continue. Without
        `checkpoint.async_save` this is when all files are written."""
        assert self._boundary
        version, weights = self._boundary
        self._settle()
        if weights is None:
            weights = self._trainer.publish_weights(version)
            self._remember(weights.identity)
        try:
            path = self._run.store.draft(version, self._run.start.attempt)
        except StorageFailed as error:
            self._miss(error)
            return
        self._has_room = False
        parts = {
            **{name: other.save_state(path_in(path, name)) for name, other in self._other_rooms.items()},
            "trainer": self._trainer.save_state(path / "trainer"),
            "inference": self._trainer.save_weights(path / "inference", weights),
        }
        self._draft = CheckpointDraft(version, path, tuple(self._identities), parts, weights)
        if not self._config.checkpoint.async_save:
            for part in parts.values():
                with suppress(StorageFailed):  # raised again, and counted, when it is sealed
                    part.wait(self._config.timeouts.checkpoint_s)

    def _publish(self, draft: CheckpointDraft) -> None:
        """Waits for all parts of `draft`, makes it a checkpoint, and prunes old checkpoints. If storage fails, deletes
        the draft and raises StorageFailed."""
        store = self._run.store
        limit_s = self._config.timeouts.checkpoint_s
        try:
            with trace.span("commit", "commits", version=draft.version):
                fault_point("commit.parts")
                files: list[FileRecord] = []
                for room, part in draft.parts.items():
                    files += part.wait(limit_s)
                    fault_point(f"commit.{room}")
                for rows in map(
                    self._run.root.joinpath, ROW_FILES
                ):  # on the disk before the checkpoint that covers them
                    with storage_errors(rows), rows.open("rb") as file:
                        os.fsync(file.fileno())
                store.check_owner()  # HEAD, which names the lineage, is this attempt's
                manifest = self._manifest(draft, files)
                if self._far:
                    self._far.gather(draft.path, manifest)
                    fault_point("commit.gathered")
                store.publish(draft.path, manifest)
        except StorageFailed:
            self._discard(draft)
            raise
        self._parent = CheckpointRef(manifest.lineage, manifest.step)
        try:
            store.prune(self._keep_last, self._config.checkpoint.keep_every)
        except StorageFailed as error:  # the checkpoint is there
            self._note(f"old checkpoints stay: {error}")

    def _discard(self, draft: CheckpointDraft) -> None:
        """Deletes a draft, here and on other nodes, once all parts have stopped writing."""
        for part in draft.parts.values():
            with suppress(TriremeError):
                part.wait(self._config.timeouts.checkpoint_s)
        if self._far:
            with suppress(TriremeError):
                self._far.discard(draft.path)
        self._run.store.discard(draft.path)

    def _manifest(self, draft: CheckpointDraft, files: list[FileRecord]) -> Manifest:
        resolved = self._config.model_dump(mode="json", exclude={"clean", "resume"})  # these concern only one start
        return Manifest(
            step=draft.version,
            lineage=self._run.head.lineage,
            parent=self._parent,
            attempt=self._run.start.attempt,
            identities=draft.identities,
            shards=self._config.trainer.mesh.processes,
            replicas=self._config.num_replicas,
            fixed=self._fixed,
            decided=self._decided,
            config_hash=hashlib.blake2b(to_json(resolved, sort_keys=True).encode(), digest_size=8).hexdigest(),
            packages=package_versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            files=tuple(files),
        )

    def _settle(self) -> None:
        """Waits for the checkpoint that is being written, if there is one. If its storage failed, counts it as missed.
        Raises RoomFailed if it takes too long, and StorageFailed or LockLost as `_miss` does."""
        sealing = self._sealing
        self._sealing = None
        if sealing is None:
            return
        limit = self._config.timeouts.checkpoint_s
        try:
            sealing.result(limit + END_S)  # a room that is late is named by its own wait, which ends before
            self._missed = 0
        except TimeoutError:
            raise RoomFailed(
                f"waited {limit:g} s (timeouts.checkpoint_s) for a checkpoint in {self._run.root}"
            ) from None
        except StorageFailed as error:
            self._miss(error)

    def _miss(self, error: StorageFailed) -> None:
        """Counts a missed checkpoint and records an incident. If the disk is full, deletes old checkpoints. If no
        checkpoint was deleted, raises `error` in two cases: more than `checkpoint.max_missed` checkpoints were missed
        in a row, or this was the last checkpoint of the run. Raises LockLost."""
        self.check_owner()  # what another driver's start took away is no failure of the storage
        self._missed += 1
        if isinstance(error, DiskFull):
            deleted = self._prune_for_room()
        else:
            deleted = []
        if deleted:
            pruned = f"; deleted {', '.join(deleted)}, and from now on only the newest checkpoint is kept"
        else:
            pruned = ""
        limit = self._config.checkpoint.max_missed
        self._note(
            f"checkpoint missed ({self._missed} in a row; up to checkpoint.max_missed = {limit} may be): "
            f"{error}{pruned}"
        )
        if not deleted and (self._is_last or self._missed > limit):
            raise error

    def _prune_for_room(self) -> list[str]:
        """Frees disk space by deleting old checkpoints. Keeps the newest checkpoint that verifies, checkpoints kept by
        `checkpoint.keep_every`, and checkpoints with a file KEEP. Returns the deleted names. If any were deleted, the
        run acts from then on as if `checkpoint.keep_last` were 1."""
        try:
            deleted = self._run.store.prune(1, self._config.checkpoint.keep_every)
        except StorageFailed as error:
            self._note(f"old checkpoints stay: {error}")
            return []
        if deleted:
            self._keep_last = 1
            self._has_room = True
        return deleted

    def check_owner(self) -> None:
        """Raises LockLost if another driver has taken over the run directory."""
        self._run.store.check_owner()

    def make_room(self) -> None:
        """Frees space for a row of metrics: waits for the checkpoint that is being written in the background, and
        deletes old checkpoints. If there are no old checkpoints to delete, deletes the draft that waits for `seal`, if
        there is one; the draft then counts as a missed checkpoint. Raises StorageFailed after too many missed
        checkpoints. Also raises RoomFailed and LockLost."""
        self._settle()
        if not self._prune_for_room() and self._draft:
            draft = self._draft
            self._draft = None
            self._discard(draft)
            self._miss(StorageFailed("its space was needed for the rows of its step"))


def _check_loaded(published: WeightIdentity, checkpoint: Manifest) -> None:
    """Raises WeightsRefused if a resumed trainer published other weights than the checkpoint's."""
    expected = checkpoint.identity.digest
    if published.digest != expected:
        raise WeightsRefused(
            f"the trainer loaded step {checkpoint.step} and published weights with digest {published.digest}; "
            f"the checkpoint has weights with digest {expected}"
        )


def _in_background(work: Callable[[], None], name: str) -> Future[None]:
    """Runs `work` in a daemon thread called `name`. Returns a future that is done when `work` ends, and has its error.
    Unlike a thread of an executor, a daemon thread that hangs does not keep the process from ending."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
