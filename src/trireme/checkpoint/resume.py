"""Chooses the checkpoint that a run resumes from, checks that the configuration fits it, and forks another run's
checkpoint."""

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
from trireme.checkpoint.store import CheckpointStore, VerifiedCheckpoint
from trireme.core.errors import CheckpointInvalid
from trireme.core.finite_json import to_json
from trireme.core.paths import path_in
from trireme.core.refusals import Refusal

ABSENT = "(absent)"


def choose(
    store: CheckpointStore, step: int | None, flag: str = "--resume.step", newest: str = "--resume alone"
) -> VerifiedCheckpoint | None:
    """Returns the checkpoint of `step`. If `step` is None or -1, returns the newest checkpoint that verifies, with
    a note on each newer checkpoint that does not; returns None if the store has no checkpoint. Errors name two options:
    `flag`, which selects a step, and `newest`, which selects the newest checkpoint.

    Raises BadInput if the checkpoint of `step` is missing or does not verify, or if the store has checkpoints and none
    of them verifies.
    """
    if step is not None and step >= 0:
        return _of_step(store, step, flag, newest)
    verified, passed_over = store.newest()
    if verified:
        return replace(
            verified, notes=tuple(f"passed over {checkpoint}: {reason}" for checkpoint, reason in passed_over.items())
        )
    if not passed_over:
        return None
    raise Refusal(
        f"the run in {store.root}, none of whose checkpoints verifies: "
        + "; ".join(f"{checkpoint.name}: {reason}" for checkpoint, reason in passed_over.items()),
        "a checkpoint that is whole",
        "restore one from a backup, or start a new run under another --run.name",
    )


def _of_step(store: CheckpointStore, step: int, flag: str, newest: str) -> VerifiedCheckpoint:
    checkpoint = store.checkpoint(step)
    steps = ", ".join(str(step_of(entry.name)) for entry in store.checkpoints())
    try:
        return VerifiedCheckpoint(checkpoint, Manifest.verified(checkpoint))
    except CheckpointInvalid as error:
        wrong = f"whose checkpoint {checkpoint} does not verify: {error}"
    if not checkpoint.exists():
        wrong = f"of which {store.directory} holds no checkpoint"
    if steps:
        do = f"choose one of these, or use {newest} to take the newest undamaged checkpoint"
    else:
        do = "choose a run with a checkpoint"
    raise Refusal(
        f"{flag} {step}, {wrong}",
        f"the step of an undamaged checkpoint in the run's checkpoints/; there are: {steps or 'none'}",
        do,
    )


def choose_existing(store: CheckpointStore, step: int | None, flag: str, newest: str) -> VerifiedCheckpoint:
    """Returns the checkpoint that `choose` returns for the same arguments. Raises BadInput also if there is no
    checkpoint."""
    chosen = choose(store, step, flag, newest)
    if chosen:
        return chosen
    raise Refusal(
        f"the run {store.root}, which holds no checkpoint",
        "the directory of a run with a checkpoint in its checkpoints/",
        "let the run reach its first checkpoint, or give another directory; `trireme inspect` lists what a run holds",
    )


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested values to {dotted name: value}."""
    flat = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value
        flat.update(leaves(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value})
    return flat


def differences(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Returns a line for each value that differs between two nested dicts of JSON values: its dotted name, its value in
    `saved` and its value in `now`."""
    before = leaves(saved)
    after = leaves(json.loads(to_json(now)))
    return [
        f"{name}: {to_json(before[name]) if name in before else ABSENT} in the checkpoint, "
        f"{to_json(after[name]) if name in after else ABSENT} now"
        for name in dict.fromkeys([*before, *after])
        if before.get(name, ABSENT) != after.get(name, ABSENT)
    ]


def check_fixed(chosen: VerifiedCheckpoint, fixed: Mapping[str, object], force: bool) -> tuple[str, ...]:
    """Compares `fixed`, the values that a resume may not change (model, tokenizer, loss, order of the data), with the
    same values in the checkpoint. If any differ, raises BadInput; with `force`, instead returns a note for each."""
    changed = differences(chosen.manifest.fixed, fixed)
    if changed and not force:
        raise Refusal(
            f"a resume from {chosen.path} with settings that differ from the checkpoint's:\n    "
            + "\n    ".join(changed),
            "the same model, tokenizer, loss and data order as in the checkpoint",
            "give the values of the checkpoint, start a new run, or resume with --resume.force",
        )
    return tuple(f"changed, and forced: {line}" for line in changed)


def fork(source: VerifiedCheckpoint, store: CheckpointStore, attempt: int) -> tuple[VerifiedCheckpoint, str]:
    """Copies `source`, a checkpoint of another run, into `store`, as the first checkpoint there. Also copies the rows
    of the steps before the checkpoint from that run's metrics.jsonl and trained.jsonl. `attempt` names the draft.
    Returns the new checkpoint, and a note about the copy.

    Files are hard links where possible, else copies; all are verified before they become a checkpoint. The source is
    unchanged. If a call was interrupted, another call completes it. Raises OSError, StorageFailed, CheckpointInvalid.
    """
    for leftover in store.partial():
        shutil.rmtree(leftover)
    step = source.manifest.step
    for name in ROW_FILES:  # of the steps that led to the checkpoint
        rows, _ = read_rows(path_in(source.path.parents[1], name))
        write_rows(path_in(store.root, name), [row for row in rows if row.step < step])
    checkpoint = store.checkpoint(step)
    how = "the same as"
    if not checkpoint.exists():
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
    return VerifiedCheckpoint(checkpoint, Manifest.verified(checkpoint)), f"{checkpoint} is {how} {source.path}"


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
