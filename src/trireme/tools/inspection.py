"""Inspects a run directory: its checkpoints with their contents and checksums, and which lineage continued which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table

from trireme.checkpoint.manifest import CheckpointRef, Manifest, step_of
from trireme.checkpoint.store import CheckpointStore, Head
from trireme.core.errors import EXIT_OK, CheckpointInvalid
from trireme.run.rundir import CONFIG, resume_command
from trireme.supervision.roster import Incident
from trireme.supervision.status import INCIDENTS, Status, read_incidents

MOST_INCIDENTS = 10
"""The most incidents that are shown to a person; JSON has all."""


@dataclass(frozen=True, kw_only=True)
class InspectedCheckpoint:
    """A checkpoint of a run, and whether it verifies. Fields that come from its manifest are None if the manifest is
    unreadable."""

    path: str  # relative to the run
    step: int
    branch: str | None  # the lineage that left it behind, in branches/; None on HEAD's
    verifies: bool
    reason: str | None  # why it does not
    lineage: str | None = None
    attempt: int | None = None
    shards: int | None = None
    replicas: int | None = None
    created: str | None = None
    parent: CheckpointRef | None = None
    identity: str | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Inspection:
    """The contents of a run directory, as `trireme inspect --json` prints them."""

    run: str
    quick: bool  # the contents of files were not read: a resume may still refuse a checkpoint that verifies
    head: Head | None
    lineages: Sequence[Head]  # the current one last; empty when a HEAD cannot be read
    damage: str | None  # why it cannot be read
    commits: Sequence[InspectedCheckpoint]  # of each branch in order of step, the current branch last
    leftovers: Sequence[str]  # paths in checkpoints/ that are no checkpoints; the next resume deletes them
    attempts: Sequence[int]
    newest: int | None  # the step that a resume takes
    incidents: Sequence[Incident]  # oldest first
    finished: int | None  # the step at which the newest command ended, if it reached its last one
    resume: str | None  # the command that continues from the newest checkpoint, or starts again where there is none


def inspect(root: Path, on_checkpoint: Callable[[Path], None], quick: bool) -> Inspection:
    """Reads the run directory `root`. Verifies every byte of its checkpoints, or with `quick` only the sizes of their
    files. Calls `on_checkpoint` with the path of each checkpoint, relative to `root`, before reading it."""
    store = CheckpointStore(root)
    branches = [CheckpointStore(path.parent) for path in sorted(root.glob("branches/*/checkpoints"))]
    commits = []
    for place in (*branches, store):
        for path in place.checkpoints():
            on_checkpoint(path.relative_to(root))
            checkpoint = _checkpoint(root, path, None if place is store else place.root.name, quick)
            if path.exists():  # the run may just have deleted it
                commits.append(checkpoint)
    lineages: list[Head] = []
    damage = None
    try:
        lineages += {head.lineage: head for head in store.lineages()}.values()  # one being left may be there twice
    except CheckpointInvalid as error:
        damage = str(error)
    status = Status.read(root)
    if status and status.ended and status.ended.exit_code == EXIT_OK:
        finished = status.step
    else:
        finished = None
    attempts = [path.name.removeprefix("attempt_") for path in root.glob("logs/attempt_*")]
    return Inspection(
        run=str(root),
        quick=quick,
        head=lineages[-1] if lineages else None,
        lineages=lineages,
        damage=damage,
        commits=commits,
        leftovers=[str(path.relative_to(root)) for path in store.partial()],
        attempts=sorted(int(attempt) for attempt in attempts if attempt.isdecimal()),
        newest=max(
            (checkpoint.step for checkpoint in commits if checkpoint.branch is None and checkpoint.verifies),
            default=None,
        ),
        incidents=read_incidents(root),
        finished=finished,
        resume=resume_command(root, longer=2 * finished if finished else None) if (root / CONFIG).exists() else None,
    )


def _checkpoint(root: Path, path: Path, branch: str | None, quick: bool) -> InspectedCheckpoint:
    step = step_of(path.name)
    assert step is not None
    manifest = None
    reason = None
    try:
        manifest = Manifest.verified(path, contents=not quick)
    except (CheckpointInvalid, FileNotFoundError) as error:
        reason = str(error)
        with suppress(CheckpointInvalid):
            manifest = Manifest.read(path)
    about: dict[str, Any] = {}
    if manifest:
        about = {name: getattr(manifest, name) for name in ("lineage", "attempt", "shards", "replicas", "created")}
        about |= {"parent": manifest.parent, "identity": str(manifest.identity), "bytes": manifest.size}
    place = str(path.relative_to(root))
    return InspectedCheckpoint(path=place, step=step, branch=branch, verifies=reason is None, reason=reason, **about)


def render(report: Inspection) -> Iterator[RenderableType]:
    """Yields the parts of the report for a terminal, in order."""
    yield f"run {report.run}"
    if report.damage:
        yield f"damaged: {report.damage}"
    head = report.head
    if head:
        logs = ", ".join(f"attempt_{attempt}" for attempt in report.attempts) or "none"
        yield f"HEAD: run id {head.run_id}, lineage {head.lineage}, attempt {head.attempt}; logs: {logs}"
        yield from (_lineage_line(lineage, report.lineages) for lineage in report.lineages)
    for branch in dict.fromkeys(checkpoint.branch for checkpoint in report.commits):
        yield _table(branch, [checkpoint for checkpoint in report.commits if checkpoint.branch == branch], report.quick)
    if not report.commits:
        yield "no checkpoints"
    for checkpoint in report.commits:
        if checkpoint.reason:
            yield f"{checkpoint.path} does not verify: {checkpoint.reason}"
    for leftover in report.leftovers:
        yield f"{leftover} is no checkpoint: it is being written or deleted, or the next resume deletes it"
    incidents = report.incidents
    if incidents:
        if len(incidents) > 1:
            heading = f"{len(incidents)} incidents"
        else:
            heading = "1 incident"
        yield f"{heading}, all in {INCIDENTS}" + (":" if len(incidents) <= MOST_INCIDENTS else "; the newest:")
    for incident in incidents[-MOST_INCIDENTS:]:  # oldest first
        when = datetime.fromtimestamp(incident.at, UTC)
        place = f"attempt {incident.attempt}, step {incident.step}"
        yield f"  {when:%Y-%m-%d %H:%M:%S} UTC, {place}: {incident.part}: {incident.what}"
    if report.resume:
        if report.newest is None:
            start = "the beginning: there is no checkpoint that verifies"
        else:
            start = f"step {report.newest}"
        if report.finished is None:
            action = f"continue from {start}"
        else:
            action = f"finished at step {report.finished}; for longer"
        yield f"\n{action}\n  {report.resume}"


def _lineage_line(head: Head, lineages: Sequence[Head]) -> str:
    """Returns a line on the lineage of `head`: its name, whether it is the current lineage, and the lineage and step
    from which it continued."""
    if head == lineages[-1]:
        state = "current"
    else:
        state = f"left in attempt {head.attempt}, see branches/{head.lineage}"
    if head.base is None:
        return f"lineage {head.lineage} from the beginning ({state})"
    is_here = head.base.lineage in {lineage.lineage for lineage in lineages}
    origin = f"of lineage {head.base.lineage}" + ("" if is_here else ", which is not in this run")
    return f"lineage {head.lineage} from step {head.base.step} {origin} ({state})"


def _table(branch: str | None, commits: list[InspectedCheckpoint], quick: bool) -> Table:
    if branch is None:
        title = "checkpoints"
    else:
        title = f"superseded checkpoints, in branches/{branch}"
    table = Table(title=title, title_justify="left")
    for column in ("step", "lineage", "attempt", "written", "size", "sizes fit" if quick else "verifies"):
        table.add_column(column, no_wrap=True)
    for checkpoint in commits:
        about = ["?"] * 4
        if checkpoint.lineage and checkpoint.created and checkpoint.bytes is not None:
            written = age(checkpoint.created, datetime.now(UTC))
            about = [checkpoint.lineage, str(checkpoint.attempt), written, decimal(checkpoint.bytes)]
        table.add_row(str(checkpoint.step), *about, "yes" if checkpoint.verifies else "NO")
    return table


def age(created: str, now: datetime) -> str:
    """Returns the time from `created` (ISO 8601) to `now` as text; `created` itself if it is in the future.

    >>> age("2026-01-01T10:00:00+00:00", datetime(2026, 1, 1, 12, 30, tzinfo=UTC))
    '2 h ago'
    """
    past = now - datetime.fromisoformat(created)
    if past < timedelta(0):
        return created  # the clock was set back
    for unit, length in (("d", timedelta(days=1)), ("h", timedelta(hours=1)), ("min", timedelta(minutes=1))):
        if past >= length:
            return f"{past // length} {unit} ago"
    return f"{past.seconds} s ago"
