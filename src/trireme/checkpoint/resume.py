"""Which commit a run goes on from, whether it may, and how another run's commit becomes the start of a new one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.checkpoint.files import make_directory
from trireme.checkpoint.manifest import Manifest, step_of, verify
from trireme.checkpoint.rows import ROW_FILES, read_rows, write_rows
from trireme.checkpoint.store import CheckpointStore
from trireme.config.refusals import Refusal
from trireme.config.resume_compat import REFERENCE_WEIGHTS
from trireme.core.errors import CheckpointInvalid

ABSENT = "(absent)"


@dataclass(frozen=True)
class Chosen:
    """A commit whose every byte was checked. `notes`: what a person should know about the choice."""

    commit: Path
    manifest: Manifest
    notes: tuple[str, ...] = ()


def choose(store: CheckpointStore, step: int | None) -> Chosen | None:
    """The commit of `step`, or the newest that verifies (None, -1); None where there is no commit at all.

    Raises BadInput for a step that is not there or does not verify, and when no commit verifies.
    """
    if step is not None and step >= 0:
        return _of_step(store, step)
    found = store.newest()
    if found.commit is not None and found.manifest is not None:
        return Chosen(found.commit, found.manifest, tuple(str(each) for each in found.passed_over))
    if not found.passed_over:
        return None
    raise Refusal(
        f"the run in {store.root}, none of whose commits verifies: "
        + "; ".join(f"{each.commit.name}: {each.reason}" for each in found.passed_over),
        "a commit that is whole",
        "restore one from a backup, or start a new run under another --run.name",
    ).error()


def _of_step(store: CheckpointStore, step: int) -> Chosen:
    commit = store.commit(step)
    steps = ", ".join(str(step_of(each.name)) for each in store.commits()) or "none"
    if not commit.exists():
        raise Refusal(
            f"--resume.step {step}, of which {store.checkpoints} holds no commit",
            f"a step that was committed and not superseded; there are: {steps}",
            "choose one of these, or the newest with --resume alone",
        ).error()
    try:
        return Chosen(commit, verify(commit))
    except CheckpointInvalid as error:
        raise Refusal(
            f"--resume.step {step}, whose commit {commit} does not verify: {error}",
            f"a commit that is whole; there are: {steps}",
            "choose another step, or the newest that verifies with --resume alone",
        ).error() from None


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted name."""
    leaves = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value
        leaves.update(_leaves(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value})
    return leaves


def differences(committed: Mapping[str, Any], now: Mapping[str, Any], then: str = "in the commit") -> list[str]:
    """What differs between two nested dicts of JSON values, a line each; `then` says where the first is from."""
    before, after = _leaves(committed), _leaves(json.loads(json.dumps(now)))
    return [
        f"{name}: {json.dumps(before[name]) if name in before else ABSENT} {then}, "
        f"{json.dumps(after[name]) if name in after else ABSENT} now"
        for name in dict.fromkeys([*before, *after])
        if before.get(name, ABSENT) != after.get(name, ABSENT)
    ]


def check_fixed(chosen: Chosen, fixed: Mapping[str, Any], force: bool) -> tuple[str, ...]:
    """Raises BadInput when what may not change between commit and resume did; with `force` it is what is returned."""
    committed = chosen.manifest.fixed
    notes: tuple[str, ...] = ()
    before, now = committed.get("loss", {}), fixed.get("loss", {})
    if REFERENCE_WEIGHTS in now and REFERENCE_WEIGHTS not in before and "trainer.kl.coef" in before:
        notes = (f"{chosen.commit} does not say which weights its KL reference had: taken for those of now",)
        committed = {**committed, "loss": {**before, REFERENCE_WEIGHTS: now[REFERENCE_WEIGHTS]}}
    changed = differences(committed, fixed)
    if changed and not force:
        raise Refusal(
            f"to go on from {chosen.commit} with other values of what a run is made of:\n    " + "\n    ".join(changed),
            "the same model, tokenizer, loss and data order as in the commit",
            "give the values of the commit, start a new run, or go on all the same with --resume.force",
        ).error()
    return (*notes, *(f"changed, and forced: {line}" for line in changed))


def fork(source: Chosen, store: CheckpointStore, attempt: int) -> tuple[Chosen, str]:
    """Makes a commit of another run the first one in `store`, with the rows that led to it; returns it, and a note.

    Files are hard links where the file system can, else copies; all are verified before they become a commit. The
    source stays as it is. Done again after a crash it finishes. Raises OSError, StorageFailed, CheckpointInvalid.
    """
    for leftover in store.partial():
        shutil.rmtree(leftover)
    step = source.manifest.step
    _copy_rows(source.commit.parents[1], store.root, step)
    commit, how = store.commit(step), "the same as"
    if not commit.exists():
        draft = store.draft(step, attempt)
        linked = [_link_or_copy(source.commit / record.path, draft / record.path) for record in source.manifest.files]
        store.publish(draft, source.manifest, contents=True)
        how = "made of hard links to" if all(linked) else "a copy of"
    return Chosen(commit, verify(commit)), f"{commit} is {how} {source.commit}"


def _copy_rows(source: Path, target: Path, step: int) -> None:
    """The rows of steps before `step`: what led to the commit."""
    for name in ROW_FILES:
        rows, _ = read_rows(source / name)
        write_rows(target / name, [row for row in rows if row.step < step])


def _link_or_copy(source: Path, target: Path) -> bool:
    """Whether `target` could be made a hard link; else it is a copy, forced onto the disk."""
    make_directory(target.parent)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
        with target.open("rb") as copy:
            os.fsync(copy.fileno())
        return False
    return True
