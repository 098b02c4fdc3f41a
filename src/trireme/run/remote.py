"""Starts a run that is kept in object storage: downloads the run to this machine, and takes over its HEAD there."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import xxhash

from trireme.checkpoint.bucket import Bucket, PutRefused
from trireme.checkpoint.files import (
    HashingWriter,
    fsync_directory,
    make_directory,
    replace_file,
    storage_errors,
    write_bytes,
)
from trireme.checkpoint.manifest import MANIFEST, Manifest
from trireme.checkpoint.store import HEAD, KEEP, LOCK, CheckpointStore
from trireme.checkpoint.stored_run import StoredCheckpoint, StoredRun, part_key
from trireme.config import CommonConfig
from trireme.core.errors import CheckpointInvalid, StorageFailed
from trireme.core.finite_json import to_json
from trireme.core.paths import path_in
from trireme.core.refusals import Refusal
from trireme.run.mirror import Mirror
from trireme.run.rundir import BEFORE_MARKS, RunDir, locked, named_root

RECORD = "STORE"
"""The name of a file in the run directory of a run that is kept in object storage. It lists tokens of HEADs in the
store: the run directory has everything that these HEADs name."""
ARRIVING = ".arriving"
"""The suffix of the name of a run directory while it is being downloaded."""


class RemoteRun:
    """A run in object storage, as its HEAD said when this command started."""

    def __init__(self, url: str, config: CommonConfig, say: Callable[[str], None]) -> None:
        """Checks that the store at `url` can hold a run. If the configuration names the run, reads its HEAD, and
        downloads the run if a resume needs it. `say` prints notes. Raises BadInput if the store or the run cannot be
        used. Also raises StorageFailed and CheckpointInvalid."""
        self._url = url
        self._config = config
        self._say = say
        Bucket(url).try_conditions()
        self._bucket: Bucket | None = None
        self._in_store: StoredRun | None = None
        self._tag: str | None = None
        root = named_root(config)
        if root:
            self._look(root.name)
            self._prepare(root)

    def _look(self, name: str) -> Bucket:
        """Reads HEAD of the run `name` from the store, if there is such a run. Returns the bucket of the run. Raises
        CheckpointInvalid if HEAD is damaged."""
        self._bucket = bucket = Bucket(f"{self._url}/{name}")
        head_object = bucket.read(HEAD)
        if head_object:
            try:
                self._in_store = StoredRun.from_json(head_object[0])
                self._tag = head_object[1]
            except CheckpointInvalid as error:
                raise CheckpointInvalid(f"{bucket.url}: {error}") from None
        return bucket

    def _prepare(self, root: Path) -> None:
        """Makes the run directory `root` ready for the start. If the run in the store is to be resumed and the
        directory is out of date, moves the directory aside and downloads the run. Raises BadInput if a new run has a
        name that the store already has, unless --clean is given."""
        resume = self._config.resume
        stored = self._in_store
        if stored is None:
            return
        if not resume.requested or (resume.dir is not None and resume.latest != "auto"):
            if not self._config.clean:
                newest = max(stored.of_branch(), default=0)
                raise Refusal(
                    f"the run {self._url}/{root.name}, which already exists (newest checkpoint: step {newest})",
                    "a new run, or --resume",
                    "choose another --run.name, continue that run with --resume, or delete its files with --clean",
                )
            return
        only_there = (
            resume.step in stored.of_branch() and not CheckpointStore(root).checkpoint(resume.step or 0).exists()
        )
        if _is_up_to_date(root, stored) and not only_there:
            return
        arriving = root.with_name(root.name + ARRIVING)
        with storage_errors(root):
            moved = _set_aside(root, stored.driver)
            if moved:
                if only_there:
                    state = "lacks the checkpoint to resume from"
                else:
                    state = "is older"
                self._say(f"{root} {state}, or is another run than {self._url}/{root.name}: it is now {moved}")
            make_directory(arriving)
            with locked(arriving):  # another start on this machine may bring it too
                notes = self._bring(root, arriving, stored)
        for note in notes:
            self._say(note)

    def _bring(self, root: Path, arriving: Path, stored: StoredRun) -> list[str]:
        """Downloads the run, with the one checkpoint to resume from, to the directory `arriving`, and renames it to
        `root`. Returns notes for people. Raises BadInput, StorageFailed, CheckpointInvalid."""
        bucket = self._bucket
        assert bucket
        for entry in arriving.iterdir():  # of a start that was killed
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != LOCK:
                entry.unlink()
        for path, parts in stored.files.items():
            file = path_in(arriving, path)
            make_directory(file.parent)
            with HashingWriter(file) as writer:
                for number, part in enumerate(parts):
                    contents = bucket.read(part_key(path, number, part))
                    if not contents or xxhash.xxh3_128_hexdigest(contents[0]) != part.checksum:
                        raise StorageFailed(
                            f"{bucket.url}/{part_key(path, number, part)} is {'altered' if contents else 'missing'}; "
                            "a driver of this run that is still alive may have put a new HEAD meanwhile: try again"
                        )
                    writer.write(contents[0])
        checkpoint, notes = self._bring_checkpoint(arriving, stored)
        if checkpoint is None and notes:
            raise Refusal(
                f"the run {bucket.url}, none of whose checkpoints verifies: {'; '.join(notes)}",
                "a checkpoint that is whole",
                "restore one from a backup, or start a new run under another --run.name",
            )
        stored.head.write(arriving / HEAD)
        _record(arriving, stored.token)
        arriving.rename(root)
        fsync_directory(root.parent)
        return [
            *notes,
            f"{root} was brought from {bucket.url}, with {checkpoint or 'no checkpoint: there is none yet'}",
        ]

    def _bring_checkpoint(self, root: Path, stored: StoredRun) -> tuple[str | None, list[str]]:
        """Downloads one checkpoint to `root`. If a step is requested, this is the checkpoint of that step; if not, it
        is the newest checkpoint that verifies. Returns the checkpoint's name (None if no checkpoint was downloaded),
        and a note for each checkpoint that could not be used. Raises BadInput if the store lacks the requested
        step."""
        steps = stored.of_branch()
        requested = self._config.resume.step
        notes: list[str] = []
        if requested is not None and requested >= 0:
            if requested not in steps:
                if steps:
                    do = "choose one of these, or use --resume alone to take the newest"
                else:
                    do = "use --resume alone, which begins at step 0, or choose a run with a checkpoint"
                raise Refusal(
                    f"--resume.step {requested}, for which {self._url}/{root.name.removesuffix(ARRIVING)} holds "
                    "no checkpoint",
                    "the step of a checkpoint in the run's checkpoints/; there are: "
                    f"{', '.join(map(str, steps)) or 'none'}",
                    do,
                )
            steps = {requested: steps[requested]}
        for path in reversed(steps.values()):
            place = path_in(root, path)
            try:
                self._bring_files(place, stored.commits[path])
                return place.name, notes
            except (StorageFailed, CheckpointInvalid) as error:
                notes.append(f"passed over {path} in the store: {error}")
                shutil.rmtree(place, ignore_errors=True)
        return None, notes

    def _bring_files(self, checkpoint: Path, stored: StoredCheckpoint) -> None:
        bucket = self._bucket
        assert bucket
        text = bucket.read(f"{stored.key}/{MANIFEST}")
        if text is None or xxhash.xxh3_128_hexdigest(text[0]) != stored.manifest:
            raise CheckpointInvalid(f"{stored.key}/{MANIFEST} is {'altered' if text else 'missing'}")
        manifest = Manifest.from_json(text[0].decode())
        for record in manifest.files:
            bucket.fetch(f"{stored.key}/{record.path}", checkpoint, record)
        if stored.kept:
            (checkpoint / KEEP).touch()
        write_bytes(checkpoint, MANIFEST, text[0])

    def claim(self, run: RunDir, note: Callable[[str], None]) -> Mirror:
        """Takes over HEAD in the store for `run`. Returns the mirror that uploads `run`; the caller has to start the
        mirror. `note` records incidents of the mirror. Raises BadInput if another driver took over HEAD first. Also
        raises StorageFailed."""
        bucket = self._bucket or self._look(run.root.name)
        if self._in_store and self._in_store.head.run_id == run.start.run_id:
            before = self._in_store
        else:
            before = None
        mine = StoredRun(
            driver=self._in_store.driver + 1 if self._in_store else 1,
            token=secrets.token_hex(8),
            holder=f"pid {os.getpid()} on {os.uname().nodename}",
            head=run.head,
            commits=before.commits if before else {},
            files=before.files if before else {},
        )
        with storage_errors(run.root):
            _record(run.root, mine.token, *([before.token] if before else []))
        try:
            tag = bucket.swap(HEAD, mine.to_json(), self._tag)
        except PutRefused:
            tag = _own_tag(bucket, mine)
        self._say(f"the run is kept in {bucket.url}, and any machine can resume it from there")
        options = self._config.checkpoint
        limit_s = self._config.timeouts.checkpoint_s
        return Mirror(bucket, run.root, mine, tag, options, limit_s, note)

    @contextmanager
    def mirrored(self, run: RunDir, note: Callable[[str], None]) -> Iterator[RunDir]:
        """A context manager. Takes over HEAD in the store for `run`. Uploads `run` while the `with` block runs, and
        once more at the end of the block. Yields a copy of `run` that knows its mirror. Before each change, the `store`
        of this copy calls `Mirror.check`, and raises its errors: LockLost, for example, if another driver has taken
        over HEAD.

        `note` records incidents. Raises BadInput if another driver took over HEAD first, and StorageFailed if the last
        upload is not done in time. Also raises LockLost.
        """
        mirror = self.claim(run, note)
        limit_s = self._config.timeouts.checkpoint_s
        mirror.start()
        try:
            yield replace(run, mirror=mirror)
        except BaseException as error:
            try:
                mirror.close(min(self._config.checkpoint.grace_s, limit_s))
            except StorageFailed as late:
                error.add_note(str(late))
            raise
        mirror.close(limit_s)


def _own_tag(bucket: Bucket, mine: StoredRun) -> str:
    """Finds out if this driver put `mine` as HEAD although the store refused the put. (A put may succeed although its
    answer is lost; the store then refuses the same put when it is sent again.) Returns the tag of HEAD if HEAD is
    `mine`. Otherwise raises BadInput, because another driver has put HEAD. Also raises StorageFailed."""
    head_object = bucket.read(HEAD)
    if head_object and head_object[0] == mine.to_json():
        return head_object[1]
    raise Refusal(
        f"the run {bucket.url}, which another driver has taken over since this driver began",
        "one driver for a run",
        "stop the other driver or wait until it ends, then start this one again",
    ) from None


def _record(root: Path, *tokens: str) -> None:
    replace_file(root / RECORD, to_json(tokens).encode())


def _is_up_to_date(root: Path, stored: StoredRun) -> bool:
    """Returns True if the directory `root` has everything that `stored` names. This is so if the driver that put
    `stored` worked in `root`, or if the run was downloaded to `root` when its HEAD was `stored`."""
    if not (root / RECORD).exists() or not (root / HEAD).exists():
        return False
    head = CheckpointStore(root).head()
    tokens: list[str] = json.loads((root / RECORD).read_bytes())
    return head is not None and head.run_id == stored.head.run_id and stored.token in tokens


def _set_aside(root: Path, driver: int) -> Path | None:
    """Renames the directory `root` to <name>.before-<driver>-<random>, and returns the new path. Returns None if there
    is no such directory. Deletes the directory and returns None if it holds no run. Raises BadInput if a running driver
    uses the directory. Also raises OSError."""
    if not root.exists():
        return None
    if {entry.name for entry in root.iterdir()} <= set(BEFORE_MARKS):
        shutil.rmtree(root)
        return None
    with locked(root):
        moved = root.with_name(f"{root.name}.before-{driver}-{secrets.token_hex(2)}")
        root.rename(moved)
        fsync_directory(root.parent)
    return moved
