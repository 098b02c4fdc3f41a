"""The commits of one run directory: drafts, publication, retention, lineages, and the way back to an earlier commit.

    HEAD                                       run, lineage and attempt that are under way
    checkpoints/step_000020/                   a commit of HEAD's branch
    checkpoints/step_000040.partial-2/         one that attempt 2 is writing, or was when it died
    checkpoints/step_000020.removed/           one that is being deleted
    checkpoints.jsonl                          one row per commit of HEAD's branch, also of those that retention deleted
    branches/<lineage>/                        what was superseded when <lineage> was left: its HEAD, checkpoints, rows

A crash at any point loses nothing: every change is a rename or the replacement of a whole file, in an order in which
the next opening can finish what was begun. Nothing depends on the clock.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trireme.checkpoint.files import fsync_directory, make_directory, replace_file, storage_errors, write_bytes
from trireme.checkpoint.manifest import MANIFEST, CommitRef, Manifest, read_manifest, step_name, step_of, verify
from trireme.checkpoint.rows import ROW_FILES, StepRow, cut, read_rows, write_rows
from trireme.core.errors import CheckpointInvalid
from trireme.process.faults import fault_point
from trireme.run.rollout_records import ROLLOUTS, recorded_steps

HEAD = "HEAD"
KEEP = "KEEP"
"""A file of this name in a commit marks that something else refers to it: it is never deleted."""


@dataclass(frozen=True)
class Head:
    """What is under way: `run_id` (8 hex, for good), `lineage` (8 hex), `attempt` (counts every start from 1), `base`
    (the commit that the lineage started from; None: from the beginning)."""

    run_id: str
    lineage: str
    attempt: int
    base: CommitRef | None

    @classmethod
    def new(cls, attempt: int = 1, base: CommitRef | None = None) -> Head:
        """Of a new run."""
        return cls(secrets.token_hex(4), secrets.token_hex(4), attempt, base)


@dataclass(frozen=True)
class PassedOver:
    """A commit that does not verify, and why."""

    commit: Path
    reason: str

    def __str__(self) -> str:
        return f"passed over {self.commit}: {self.reason}"


@dataclass(frozen=True)
class Found:
    """A commit that verifies (None: there is none), and newer ones that do not."""

    commit: Path | None
    manifest: Manifest | None
    passed_over: tuple[PassedOver, ...]


def _step(commit: Path) -> int:
    step = step_of(commit.name)
    assert step is not None
    return step


def _invalid(commit: Path, *, contents: bool) -> str | None:
    """Why `commit` does not verify; None when it does."""
    try:
        verify(commit, contents)
    except CheckpointInvalid as error:
        return str(error)
    return None


def _read_head(file: Path) -> Head | None:
    if not file.exists():
        return None
    try:
        values = json.loads(file.read_bytes())
        return Head(**{**values, "base": CommitRef(**values["base"]) if values["base"] else None})
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointInvalid(f"{file} is damaged ({type(error).__name__}: {error})") from None


def _write_head(file: Path, head: Head) -> None:
    replace_file(file, (json.dumps(asdict(head), indent=1) + "\n").encode())


def _fsync_tree(directory: Path) -> None:
    for path, _, _ in os.walk(directory):
        fsync_directory(Path(path))


def _rename_away(directory: Path) -> Path:
    """Gives what will be deleted a name that is neither a commit's nor a draft's; returns it."""
    away = directory.with_name(f"{directory.name}.removed")
    if away.exists():
        shutil.rmtree(away)
    directory.rename(away)
    fsync_directory(directory.parent)
    return away


@dataclass(frozen=True)
class CheckpointStore:
    """The commits under the run directory `root`. Whoever changes anything holds the run's lock."""

    root: Path

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def rows(self) -> Path:
        """One row per commit: name, step, lineage, path (relative to the directory of this file), identity."""
        return self.root / "checkpoints.jsonl"

    def commit(self, step: int) -> Path:
        """Where the commit of `step` lies, if there is one."""
        return self.checkpoints / step_name(step)

    def branch(self, lineage: str) -> Path:
        """Where what was superseded when `lineage` was left lies, if anything was."""
        return self.root / "branches" / lineage

    def head(self) -> Head | None:
        """None: the run never began. Raises CheckpointInvalid for a damaged one."""
        return _read_head(self.root / HEAD)

    def write_head(self, head: Head) -> None:
        """Raises OSError."""
        _write_head(self.root / HEAD, head)

    def lineages(self) -> list[Head]:
        """The current lineage, and before it those that were left, each as it was last: `base` says from where it
        descends. Raises CheckpointInvalid for a damaged one."""
        left = [_read_head(file) for file in sorted(self.root.glob(f"branches/*/{HEAD}"))]
        return [head for head in (*left, self.head()) if head]

    def commits(self) -> list[Path]:
        """The commits of HEAD's branch in order of step, whether or not they verify."""
        return sorted((entry for entry in self._entries() if step_of(entry.name) is not None), key=_step)

    def partial(self) -> list[Path]:
        """Drafts, and what was left of deleted commits and drafts."""
        return [e for e in self._entries() if ".partial-" in e.name or e.suffix == ".removed"]

    def _entries(self) -> list[Path]:
        return sorted(e for e in self.checkpoints.iterdir() if e.is_dir()) if self.checkpoints.is_dir() else []

    def newest(self) -> Found:
        """The newest commit that verifies, contents included, and those passed over on the way to it."""
        passed_over: list[PassedOver] = []
        for commit in reversed(self.commits()):
            try:
                return Found(commit, verify(commit), tuple(passed_over))
            except CheckpointInvalid as error:
                passed_over.append(PassedOver(commit, str(error)))
        return Found(None, None, tuple(passed_over))

    def draft(self, step: int, attempt: int) -> Path:
        """A new directory in which the commit of `step` is written. Raises StorageFailed."""
        draft = self.checkpoints / f"{step_name(step)}.partial-{attempt}"
        with storage_errors(draft):
            make_directory(self.checkpoints)
            draft.mkdir()
        fault_point("commit.draft")
        return draft

    def publish(self, draft: Path, manifest: Manifest, contents: bool = False) -> Path:
        """Makes the draft, to which all of `manifest.files` were written, a commit; returns where it lies.

        Raises StorageFailed; CheckpointInvalid when a file is not there, not with its size, or (if `contents` are to be
        read) not with its checksum.
        """
        write_bytes(draft, MANIFEST, manifest.to_json().encode())
        verify(draft, contents)
        fault_point("commit.manifest")
        commit = self.commit(manifest.step)
        with storage_errors(commit):
            _fsync_tree(draft)
            draft.rename(commit)
            fsync_directory(self.checkpoints)
            fault_point("commit.renamed")
            self.record_commits()
        return commit

    def discard(self, draft: Path) -> None:
        """Deletes a draft that will not be published, if it is still there. Raises StorageFailed."""
        with storage_errors(draft):
            if draft.exists():
                shutil.rmtree(_rename_away(draft))

    def record_commits(self) -> None:
        """Adds the commits that have no row yet to `rows`. Raises OSError, and CheckpointInvalid for an unreadable
        manifest."""
        rows, torn = read_rows(self.rows)
        named = {row.values["name"] for row in rows}
        missing = [self._commit_row(commit) for commit in self.commits() if commit.name not in named]
        if missing or torn:
            write_rows(self.rows, [*rows, *missing])

    def _commit_row(self, commit: Path) -> StepRow:
        manifest = read_manifest(commit)
        values = {
            "name": commit.name,
            "step": manifest.step,
            "lineage": manifest.lineage,
            "path": str(commit.relative_to(self.root)),
            "identity": str(manifest.identity),
        }
        return StepRow((json.dumps(values) + "\n").encode(), values)

    def prune(self, keep_last: int, keep_every: int | None) -> list[str]:
        """Deletes commits that are neither among the `keep_last` newest, nor of a step divisible by `keep_every`, nor
        marked by a file `KEEP`, nor the newest that verifies (contents included: it is read before anything goes).
        Damaged commits do not count and are left to `checkout`. Returns the names of the deleted. Raises StorageFailed.
        """
        whole = [commit for commit in self.commits() if _invalid(commit, contents=False) is None]
        old = [commit for commit in whole[:-keep_last] if not self._kept(commit, keep_every)]
        newest = self.newest().commit if old else None
        doomed = [commit for commit in old if newest is not None and commit != newest]
        for commit in doomed:
            with storage_errors(commit):
                away = _rename_away(commit)
                (away / MANIFEST).unlink()
                fault_point("commit.prune")
                shutil.rmtree(away)
        return [commit.name for commit in doomed]

    def _kept(self, commit: Path, keep_every: int | None) -> bool:
        return (keep_every is not None and _step(commit) % keep_every == 0) or (commit / KEEP).exists()

    def checkout(self, step: int) -> list[str]:
        """Makes `step` the end of HEAD's branch; to be called before any row of this attempt is written, or its file
        opened.

        Drafts are deleted. Later commits, and damaged ones, are parked under `branches/<lineage>/`, the newest first;
        then rows of step >= `step` (of checkpoints.jsonl: of what was parked) move there. When anything is there, HEAD
        starts a new lineage, last of all: until then another call goes on where this one was interrupted, with this
        or another step. Returns what was done, for people. Raises StorageFailed, CheckpointInvalid without a HEAD.
        """
        head = self.head()
        if head is None:
            raise CheckpointInvalid(f"{self.root / HEAD} is missing")
        with storage_errors(self.root):
            for leftover in self.partial():
                shutil.rmtree(leftover)
            branch = self.branch(head.lineage)
            done = self._park(step, branch)
            fault_point("checkout.parked")
            done += self._cut_rows(step, branch)
            fault_point("checkout.rows")
            self.record_commits()
            if branch.exists():
                _write_head(branch / HEAD, head)
                self.write_head(replace(head, lineage=secrets.token_hex(4), base=self._base(step)))
        return done

    def _base(self, step: int) -> CommitRef | None:
        commit = self.commit(step)
        return CommitRef(read_manifest(commit).lineage, step) if commit.exists() else None

    def _park(self, step: int, branch: Path) -> list[str]:
        done = []
        for commit in reversed(self.commits()):
            if _step(commit) <= step and _invalid(commit, contents=False) is None:
                continue
            parked = branch / self.checkpoints.name / commit.name
            make_directory(parked.parent)
            commit.rename(parked)
            fsync_directory(parked.parent)
            fsync_directory(self.checkpoints)
            done.append(f"{commit.name} is now {parked}")
        return done

    def _cut_rows(self, step: int, branch: Path) -> list[str]:
        parked = {entry.name for entry in branch.glob(f"{self.checkpoints.name}/*")}
        cuts = {name: cut(self.root / name, lambda row: row.step >= step, branch / name) for name in ROW_FILES}
        cut(self.rows, lambda row: row.step > step or row.values["name"] in parked, branch / self.rows.name)
        self._move_records(step, branch)
        done = [f"{c.moved} rows of {name} are now in {branch / name}" for name, c in cuts.items() if c.moved]
        return done + [f"{c.torn} torn lines of {name} were dropped" for name, c in cuts.items() if c.torn]

    def _move_records(self, step: int, branch: Path) -> None:
        """Records of rollouts of step >= `step` move to the branch, each at once."""
        for recorded, file in recorded_steps(self.root / ROLLOUTS).items():
            if recorded >= step:
                (branch / ROLLOUTS).mkdir(parents=True, exist_ok=True)
                file.rename(branch / ROLLOUTS / file.name)
