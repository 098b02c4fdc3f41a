"""Chooses the commit that a run resumes from, checks that the configuration fits it, and forks another run's commit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trireme.checkpoint.files import make_directory
from trireme.checkpoint.manifest import Manifest, step_of
from trireme.checkpoint.rows import ROW_FILES, read_rows, write_rows
from trireme.checkpoint.store import CheckpointStore, VerifiedCommit
from trireme.core.errors import CheckpointInvalid
from trireme.core.finite_json import to_json
from trireme.core.paths import path_in
from trireme.core.refusals import Refusal

ABSENT = "(absent)"


def choose(
    store: CheckpointStore, step: int | None, flag: str = "--resume.step", newest: str = "--resume alone"
) -> VerifiedCommit | None:
    """Returns the commit of `step`. With step None or -1, returns the newest commit that verifies, with notes on newer
    ones that do not, or None if the store has no commit. `flag` and `newest` are the options that errors name: for a
    step, and for the newest commit.

    Raises BadInput if the commit of `step` is missing or does not verify, or if no commit verifies.
    """
    if step is not None and step >= 0:
        return _of_step(store, step, flag, newest)
    verified, passed_over = store.newest()
    if verified:
        return replace(
            verified, notes=tuple(f"passed over {commit}: {reason}" for commit, reason in passed_over.items())
        )
    if not passed_over:
        return None
    raise Refusal(
        f"the run in {store.root}, none of whose commits verifies: "
        + "; ".join(f"{commit.name}: {reason}" for commit, reason in passed_over.items()),
        "a commit that is whole",
        "restore one from a backup, or start a new run under another --run.name",
    ).error()


def _of_step(store: CheckpointStore, step: int, flag: str, newest: str) -> VerifiedCommit:
    commit = store.commit(step)
    steps = ", ".join(str(step_of(entry.name)) for entry in store.commits()) or "none"
    try:
        return VerifiedCommit(commit, Manifest.verified(commit))
    except CheckpointInvalid as error:
        wrong = f"whose commit {commit} does not verify: {error}"
    if not commit.exists():
        wrong = f"of which {store.checkpoints} holds no commit"
    raise Refusal(
        f"{flag} {step}, {wrong}",
        f"the step of a commit that is whole and not superseded; there are: {steps}",
        f"choose one of these, or the newest that verifies with {newest}",
    ).error()


def choose_existing(store: CheckpointStore, step: int | None, flag: str, newest: str) -> VerifiedCommit:
    """Returns the commit that `choose` returns for the same arguments. Raises BadInput also if there is no commit."""
    chosen = choose(store, step, flag, newest)
    if chosen:
        return chosen
    raise Refusal(
        f"the run {store.root}, which holds no commit",
        "the directory of a run with a commit in its checkpoints/",
        "let the run reach its first commit, or give another directory; `trireme inspect` lists what a run holds",
    ).error()


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested values to {dotted name: value}."""
    leaves = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value
        leaves.update(_leaves(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value})
    return leaves


def differences(committed: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a line for each value that differs between two nested dicts of JSON values: its dotted name, its value in
    `committed` and its value in `now`."""
    before = _leaves(committed)
    after = _leaves(json.loads(to_json(now)))
    return [
        f"{name}: {to_json(before[name]) if name in before else ABSENT} in the commit, "
        f"{to_json(after[name]) if name in after else ABSENT} now"
        for name in dict.fromkeys([*before, *after])
        if before.get(name, ABSENT) != after.get(name, ABSENT)
    ]


def check_fixed(chosen: VerifiedCommit, fixed: Mapping[str, object], force: bool) -> tuple[str, ...]:
    """Raises BadInput if a value in `fixed` differs from the commit's, unless `force`. Returns one note for people on
    each changed value, which only `force` allows."""
    changed = differences(chosen.manifest.fixed, fixed)
    if changed and not force:
        raise Refusal(
            f"to resume from {chosen.path} with other values of what a run is made of:\n    " + "\n    ".join(changed),
            "the same model, tokenizer, loss and data order as in the commit",
            "give the values of the commit, start a new run, or resume in spite of this with --resume.force",
        ).error()
    return tuple(f"changed, and forced: {line}" for line in changed)


def fork(source: VerifiedCommit, store: CheckpointStore, attempt: int) -> tuple[VerifiedCommit, str]:
    """Makes the commit `source` of another run the first commit in `store`, and copies the rows of the steps that led
    to it. `attempt` names the draft. Returns the new commit, and a note for people.

    Files are hard links where the file system can, else copies; all are verified before they become a commit. The
    source is unchanged. Another call completes an interrupted one. Raises OSError, StorageFailed, CheckpointInvalid.
    """
    for leftover in store.partial():
        shutil.rmtree(leftover)
    step = source.manifest.step
    for name in ROW_FILES:  # of the steps that led to the commit
        rows, _ = read_rows(path_in(source.path.parents[1], name))
        write_rows(path_in(store.root, name), [row for row in rows if row.step < step])
    commit = store.commit(step)
    how = "the same as"
    if not commit.exists():
        draft = store.draft(step, attempt)
        linked = [
            _link_or_copy(path_in(source.path, record.path), path_in(draft, record.path))
            for record in source.manifest.files
        ]
        store.publish(draft, source.manifest, contents=True)
        if all(linked):
            how = "made of hard links to"
        else:
            how = "a copy of"
    return VerifiedCommit(commit, Manifest.verified(commit)), f"{commit} is {how} {source.path}"


def _link_or_copy(source: Path, target: Path) -> bool:
    """Makes `target` a hard link to `source` and returns True. If there can be no link, or `source` belongs to another
    user, makes a copy, forces it onto the disk and returns False. Raises OSError."""
    make_directory(target.parent)
    try:
        if source.stat().st_uid != os.geteuid():
            raise PermissionError(f"{source} belongs to another user, who can change it")
        os.link(source, target)
    except OSError:  # also another file system, or one without hard links
        shutil.copyfile(source, target)
        with target.open("rb") as copy:
            os.fsync(copy.fileno())
        return False
    return True
