"""When commits are taken, and that training goes on while they are written. One is in flight at a time.

the step is released       at_boundary   draft; snapshots of the trainer and of the others (of `rl` the orchestrator, of
                                         `sft` the place in its data); the published weights
the step's row is written  seal          in the background: all parts waited for, manifest, rename, prune
something failed                         the draft is removed, the commit counts as missed
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from trireme.checkpoint.files import FileRecord, storage_errors
from trireme.checkpoint.manifest import CommitRef, Manifest
from trireme.config import CommonConfig
from trireme.core.errors import RoomFailed, StorageFailed, TriremeError, WeightsRefused
from trireme.core.types import WeightIdentity
from trireme.core.weights import PublishedWeights
from trireme.plan.base import package_versions
from trireme.process import trace
from trireme.process.faults import fault_point
from trireme.run.rundir import RunDir

END_S = 30.0
"""How long a run that failed waits for a commit in flight, whose parts may all be there."""


class Part(Protocol):
    """One room's files, on their way to the disk."""

    def wait(self, timeout_s: float) -> list[FileRecord]:
        """The records of all of them. Raises StorageFailed, RoomFailed."""
        ...


class Saving(Protocol):
    """A room as commits see it: its state is that of the call, which returns when training may go on."""

    def save_state(self, path: Path) -> Part: ...


class SavingTrainer(Saving, Protocol):
    def save_weights(self, path: Path, published: PublishedWeights) -> Part: ...


@dataclass(frozen=True)
class UnderWay:
    """A commit: what it will be called, and the rooms' parts. Holds `weights` as long as they are read."""

    version: int
    draft: Path
    identities: tuple[WeightIdentity, ...]
    parts: Mapping[str, Part]
    weights: PublishedWeights


class Commits:
    """Takes the commits of one attempt. `fixed` is what a resume must find unchanged; `others` are the rooms beside
    the trainer, by the name of their part; `say` prints a line."""

    def __init__(
        self,
        config: CommonConfig,
        run: RunDir,
        fixed: Mapping[str, Any],
        trainer: SavingTrainer,
        others: Mapping[str, Saving],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._run, self._fixed, self._say = config, run, fixed, say
        self._trainer, self._others = trainer, others
        manifest = run.start.manifest
        self._parent = CommitRef(manifest.lineage, manifest.step) if manifest else None
        self._identities = list(manifest.identities) if manifest else []
        self._newest = manifest.step if manifest else None
        self._boundary: PublishedWeights | None = None
        self._unsealed: UnderWay | None = None
        self._sealing: Future[None] | None = None
        self._missed = 0

    def __enter__(self) -> Commits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """A run that fails while a commit is in flight still gets it, if its parts are there or come."""
        if self._sealing:
            with suppress(TriremeError, TimeoutError):
                self._sealing.result(END_S)

    def begin(self, weights: PublishedWeights) -> None:
        """The start version is published. Raises WeightsRefused when a resumed trainer does not hold what was saved."""
        manifest = self._run.start.manifest
        if manifest and weights.identity.digest != manifest.identities[-1].digest:
            raise WeightsRefused(
                f"the trainer loaded step {manifest.step} and published weights with digest {weights.identity.digest}; "
                f"the commit was made of {manifest.identities[-1].digest}"
            )
        self.arrive(weights)

    def at_boundary(self, weights: PublishedWeights) -> None:
        """The step that made `weights` is released: begins a commit if one is due. Raises StorageFailed after too many
        missed ones."""
        self.arrive(weights)
        if self._sealing and self._sealing.done():
            self._settle()
        if self.due(weights.identity.version):
            self._save(weights)

    def due(self, version: int) -> bool:
        """Whether the boundary of `version` is to be committed."""
        every = self._config.checkpoint.every
        return version == self._config.max_steps or (every > 0 and version % every == 0)

    def arrive(self, weights: PublishedWeights) -> None:
        """The run is at the boundary of `weights`: if it ends here, that is what is committed."""
        self._boundary = weights
        oldest = weights.identity.version - self._config.max_steps_off_policy
        self._identities = [i for i in self._identities if i.version >= oldest] + [weights.identity]

    def leave_boundary(self) -> None:
        """The trainer is about to change: until the next boundary there is nothing to commit."""
        self._boundary = None

    def seal(self) -> None:
        """The rows up to this boundary are written: what was begun here may become a commit, in the background if it
        may."""
        saving, self._unsealed = self._unsealed, None
        if saving is None:
            return
        self._sealing = _in_background(lambda: self._finish(saving), name=f"commit of step {saving.version}")
        if not self._config.checkpoint.async_save:
            self._settle()

    def take(self) -> int | None:
        """Commits the boundary that the run is at, and waits; the step of the newest commit, if there is one.

        For a run that ends early. In the middle of a step nothing can be committed: the newest commit stands.
        """
        if self._sealing:
            self._settle()
        if self._boundary and self._boundary.identity.version != self._newest:
            self._save(self._boundary)
            self.seal()
        self.finish()
        return self._newest

    def finish(self) -> None:
        """Waits for the commit in flight. Raises StorageFailed if it failed, however many may be missed."""
        if self._sealing:
            self._settle(may_miss=0)

    def _save(self, weights: PublishedWeights) -> None:
        """Takes the snapshots. Returns when training may go on."""
        if self._sealing:
            self._settle()
        version = weights.identity.version
        try:
            draft = self._run.store.draft(version, self._run.start.attempt)
        except StorageFailed as error:
            self._miss(error, self._config.checkpoint.max_missed)
            return
        parts = {
            **{name: room.save_state(draft / name) for name, room in self._others.items()},
            "trainer": self._trainer.save_state(draft / "trainer"),
            "inference": self._trainer.save_weights(draft / "inference", weights),
        }
        self._unsealed = UnderWay(version, draft, tuple(self._identities), parts, weights)
        if not self._config.checkpoint.async_save:
            for part in parts.values():
                with suppress(StorageFailed):  # raised again, and counted, when it is sealed
                    part.wait(self._config.timeouts.checkpoint_s)

    def _finish(self, saving: UnderWay) -> None:
        """Waits for all parts, and makes them a commit."""
        store, options = self._run.store, self._config.checkpoint
        try:
            with trace.span("commit", "commits", version=saving.version):
                files = self._collect(saving)
                self._force_rows()
                store.publish(saving.draft, self._manifest(saving, files))
        except StorageFailed:
            self._abandon(saving)
            raise
        self._parent, self._newest = CommitRef(self._run.lineage, saving.version), saving.version
        store.prune(options.keep_last, options.keep_every)

    def _collect(self, saving: UnderWay) -> list[FileRecord]:
        fault_point("commit.parts")
        files: list[FileRecord] = []
        for room, part in saving.parts.items():
            files += part.wait(self._config.timeouts.checkpoint_s)
            fault_point(f"commit.{room}")
        return files

    def _force_rows(self) -> None:
        """The rows that the commit covers are on the disk before it is."""
        for rows in self._run.row_files:
            with storage_errors(rows), rows.open("rb") as file:
                os.fsync(file.fileno())

    def _abandon(self, saving: UnderWay) -> None:
        """Gives the space back, once nobody writes there any more."""
        for part in saving.parts.values():
            with suppress(TriremeError):
                part.wait(self._config.timeouts.checkpoint_s)
        self._run.store.discard(saving.draft)

    def _manifest(self, saving: UnderWay, files: list[FileRecord]) -> Manifest:
        return Manifest(
            step=saving.version,
            lineage=self._run.lineage,
            parent=self._parent,
            attempt=self._run.start.attempt,
            identities=saving.identities,
            shards=self._config.trainer.processes,
            replicas=self._config.num_replicas,
            fixed=self._fixed,
            config_hash=config_hash(self._config),
            packages=package_versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            files=tuple(files),
        )

    def _settle(self, may_miss: int | None = None) -> None:
        """Waits for the commit in flight."""
        assert self._sealing is not None
        sealing, self._sealing = self._sealing, None
        limit = self._config.timeouts.checkpoint_s
        try:
            sealing.result(limit + END_S)  # a room that is late is named by its own wait, which ends before
            self._missed = 0
        except TimeoutError:
            raise RoomFailed(f"waited {limit:g} s (timeouts.checkpoint_s) for a commit in {self._run.root}") from None
        except StorageFailed as error:
            self._miss(error, self._config.checkpoint.max_missed if may_miss is None else may_miss)

    def _miss(self, error: StorageFailed, may_miss: int) -> None:
        self._missed += 1
        if self._missed > may_miss:
            raise error
        self._say(f"commit missed ({self._missed} of at most {may_miss} in a row): {error}")


def config_hash(config: CommonConfig) -> str:
    """Short hash of the resolved configuration, without what only concerns one start."""
    text = json.dumps(config.model_dump(mode="json", exclude={"clean", "resume"}), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _in_background(work: Callable[[], None], name: str) -> Future[None]:
    """Runs `work` in a daemon thread: one that hangs must not keep the process from ending, as an executor's would."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
