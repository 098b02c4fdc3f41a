"""Inspects a run directory: its commits, what they hold, if they verify, and how its lineages descend."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.tree import Tree

from trireme.checkpoint.manifest import Manifest, step_of
from trireme.checkpoint.store import CheckpointStore, Head
from trireme.core.errors import CheckpointInvalid
from trireme.run.rundir import resume_command
from trireme.supervision.roster import Incident
from trireme.supervision.status import INCIDENTS, read_incidents
from trireme.tools.merge import ADAPTER

MOST_INCIDENTS = 10
"""Shown to a person; JSON has all."""


@dataclass(frozen=True)
class CommitPart:
    """One room's part of a commit."""

    files: int
    bytes: int
    holds: Mapping[str, Any]  # what a person may want to know of it, by name


@dataclass(frozen=True)
class InspectedCommit:
    """A commit of a run."""

    path: Path  # relative to the run
    step: int
    branch: str | None  # the lineage that left it behind, in branches/; None on HEAD's
    invalid: str | None  # why it does not verify; None if it does
    manifest: Manifest | None  # None: it cannot be read
    parts: Mapping[str, CommitPart]  # by room


@dataclass(frozen=True)
class Leftover:
    """Something in checkpoints/ that is not a commit. The next resume deletes it."""

    path: Path  # relative to the run
    bytes: int
    what: str


@dataclass(frozen=True)
class Inspection:
    """The contents of a run directory."""

    root: Path
    quick: bool  # the contents of files were not read: a resume may still refuse a commit that verifies
    lineages: tuple[Head, ...]  # the current one last; empty when a HEAD cannot be read
    damage: str | None  # why it cannot be read
    commits: tuple[InspectedCommit, ...]  # of each branch in order of step, HEAD's branch last
    leftovers: tuple[Leftover, ...]
    attempts: tuple[int, ...]
    newest: int | None  # the step that a resume takes
    incidents: tuple[Incident, ...]  # oldest first

    @property
    def head(self) -> Head | None:
        return self.lineages[-1] if self.lineages else None

    @property
    def resume(self) -> str | None:
        """Returns the command that continues from the newest commit, or starts again where there is none."""
        return resume_command(self.root) if (self.root / "config.json").exists() else None


def inspect(root: Path, on_commit: Callable[[Path], None], quick: bool = False) -> Inspection:
    """Reads the run directory `root`, every byte of its commits included unless `quick`; `on_commit` is told which is
    next."""
    store = CheckpointStore(root)
    branches = sorted(root.glob("branches/*/checkpoints"))
    places = [*(CheckpointStore(branch.parent) for branch in branches), store]
    commits = []
    for place in places:
        for path in place.commits():
            on_commit(path.relative_to(root))
            commit = _commit(root, path, None if place is store else place.root.name, quick)
            if path.exists():  # the run may just have deleted it
                commits.append(commit)
    lineages, damage = _lineages(store)
    whole = [commit.step for commit in commits if commit.branch is None and commit.invalid is None]
    return Inspection(
        root=root,
        quick=quick,
        lineages=lineages,
        damage=damage,
        commits=tuple(commits),
        leftovers=tuple(_leftover(root, path) for path in store.partial()),
        attempts=tuple(sorted(_numbers(root.glob("logs/attempt_*"), r"attempt_(\d+)"))),
        newest=max(whole, default=None),
        incidents=tuple(read_incidents(root)),
    )


def _lineages(store: CheckpointStore) -> tuple[tuple[Head, ...], str | None]:
    try:
        heads = store.lineages()
    except CheckpointInvalid as error:
        return (), str(error)
    return tuple({head.lineage: head for head in heads}.values()), None  # one being left may be there twice


def _commit(root: Path, path: Path, branch: str | None, quick: bool) -> InspectedCommit:
    step = step_of(path.name)
    assert step is not None
    try:
        manifest = Manifest.verified(path, contents=not quick)
        parts = _parts(path, manifest)
    except (CheckpointInvalid, FileNotFoundError) as error:
        return InspectedCommit(path.relative_to(root), step, branch, str(error), _readable_manifest(path), {})
    return InspectedCommit(path.relative_to(root), step, branch, None, manifest, parts)


def _readable_manifest(path: Path) -> Manifest | None:
    try:
        return Manifest.read(path)
    except CheckpointInvalid:
        return None


def _parts(path: Path, manifest: Manifest) -> dict[str, CommitPart]:
    return {
        "trainer": _part(manifest, "trainer", shards=manifest.shards),
        **_part_of_data(path, manifest),
        "inference": _part(manifest, "inference", replicas=manifest.replicas, **_weights(path / "inference")),
    }


def _weights(path: Path) -> dict[str, Any]:
    """Returns what replicas load: the dtype of a whole model, the rank of adapters."""
    if (path / ADAPTER).exists():
        return {"adapter_rank": json.loads((path / ADAPTER).read_bytes())["r"]}
    return {"dtype": json.loads((path / "config.json").read_bytes())["dtype"]}


def _part_of_data(path: Path, manifest: Manifest) -> dict[str, CommitPart]:
    """Returns the orchestrator's part of a run of `rl`, or the place in the data of `sft`."""
    if (path / "data").exists():
        return {"data": _part(manifest, "data", **json.loads((path / "data" / "state.json").read_bytes()))}
    groups = json.loads((path / "orchestrator" / "state.json").read_bytes())["ledger"]["groups"]
    finished = sum(group["finished"] for group in groups)
    holds = {"groups_finished": finished, "groups_in_flight": len(groups) - finished}
    return {"orchestrator": _part(manifest, "orchestrator", **holds)}


def _part(manifest: Manifest, room: str, **holds: Any) -> CommitPart:
    sizes = [record.size for record in manifest.files if record.path.startswith(f"{room}/")]
    return CommitPart(len(sizes), sum(sizes), holds)


def _leftover(root: Path, path: Path) -> Leftover:
    attempt = _numbers([path], r".*\.partial-(\d+)")
    what = f"attempt {attempt[0]} is writing it, or ended while it did" if attempt else "its deletion has not ended"
    return Leftover(path.relative_to(root), sum(_sizes(path)), what)


def _sizes(directory: Path) -> Iterator[int]:
    """Yields the bytes of each file below; skips files that disappear."""
    for file in directory.rglob("*"):
        with suppress(FileNotFoundError):
            yield file.lstat().st_size if file.is_file() else 0


def _numbers(paths: Iterable[Path], pattern: str) -> list[int]:
    """Returns the numbers in those names that `pattern` matches as a whole."""
    return [int(match[1]) for path in paths if (match := re.fullmatch(pattern, path.name))]


def to_json(report: Inspection) -> dict[str, Any]:
    """Returns the inspection as JSON values."""
    return {
        "run": str(report.root),
        "quick": report.quick,
        "head": asdict(report.head) if report.head else None,
        "lineages": [asdict(head) for head in report.lineages],
        "damage": report.damage,
        "commits": [_commit_to_json(commit) for commit in report.commits],
        "leftovers": [asdict(leftover) | {"path": str(leftover.path)} for leftover in report.leftovers],
        "attempts": list(report.attempts),
        "newest": report.newest,
        "incidents": [asdict(incident) for incident in report.incidents],
        "resume": report.resume,
    }


def _commit_to_json(commit: InspectedCommit) -> dict[str, Any]:
    manifest = commit.manifest
    shown = ("lineage", "attempt", "shards", "replicas", "created")
    return {
        "path": str(commit.path),
        "step": commit.step,
        "branch": commit.branch,
        "verifies": commit.invalid is None,
        "reason": commit.invalid,
        **{name: getattr(manifest, name, None) for name in shown},
        "parent": asdict(manifest.parent) if manifest and manifest.parent else None,
        "identity": str(manifest.identity) if manifest else None,
        "bytes": manifest.size if manifest else None,
        "parts": {room: asdict(part) for room, part in commit.parts.items()},
    }


def render(report: Inspection) -> Iterator[RenderableType]:
    """Yields what a person reads, part by part."""
    head = report.head
    yield f"run {report.root}"
    if report.damage:
        yield f"damaged: {report.damage}"
    if head:
        logs = ", ".join(f"attempt_{attempt}" for attempt in report.attempts) or "none"
        yield f"HEAD: run id {head.run_id}, lineage {head.lineage}, attempt {head.attempt}; logs: {logs}"
        yield _lineage_tree(report.lineages)
    for branch in dict.fromkeys(commit.branch for commit in report.commits):
        yield _table(branch, [commit for commit in report.commits if commit.branch == branch], report.quick)
    if not report.commits:
        yield "no commits"
    for commit in report.commits:
        if commit.invalid:
            yield f"{commit.path} does not verify: {commit.invalid}"
    for leftover in report.leftovers:
        yield f"{leftover.path} is no commit ({decimal(leftover.bytes)}): {leftover.what}"
    yield from _incidents(report.incidents)
    if report.resume:
        start = "the beginning: there is no commit that verifies" if report.newest is None else f"step {report.newest}"
        yield f"\ncontinue from {start}\n  {report.resume}"


def _incidents(incidents: tuple[Incident, ...]) -> Iterator[str]:
    """Yields the newest incidents, oldest first."""
    if incidents:
        known = f"{len(incidents)} incidents" if len(incidents) > 1 else "1 incident"
        yield f"{known}, all in {INCIDENTS}" + (":" if len(incidents) <= MOST_INCIDENTS else "; the newest:")
    for incident in incidents[-MOST_INCIDENTS:]:
        when = datetime.fromtimestamp(incident.at, UTC)
        place = f"attempt {incident.attempt}, step {incident.step}"
        yield f"  {when:%Y-%m-%d %H:%M:%S} UTC, {place}: {incident.part}: {incident.what}"


def _lineage_tree(lineages: tuple[Head, ...]) -> Tree:
    """Draws which lineage descends from which, and from which step of it."""
    known = {head.lineage for head in lineages}
    tree = Tree("lineages")

    def grow(below: Tree, parent: str | None) -> None:
        for head in lineages:
            base = head.base.lineage if head.base else None
            if (base if base in known else None) == parent:
                grow(below.add(_lineage_label(head, known, current=head == lineages[-1])), head.lineage)

    grow(tree, None)
    return tree


def _lineage_label(head: Head, known: set[str], current: bool) -> str:
    state = "current" if current else f"left in attempt {head.attempt}, see branches/{head.lineage}"
    if head.base is None:
        return f"{head.lineage} from the beginning ({state})"
    origin = "" if head.base.lineage in known else f" of lineage {head.base.lineage}, which is not in this run"
    return f"{head.lineage} from step {head.base.step}{origin} ({state})"


def _table(branch: str | None, commits: list[InspectedCommit], quick: bool) -> Table:
    title = "commits" if branch is None else f"superseded commits, in branches/{branch}"
    table = Table(title=title, title_justify="left", show_lines=True)
    for column in ("step", "lineage", "attempt", "written", "size", "sizes fit" if quick else "verifies"):
        table.add_column(column, no_wrap=True)
    table.add_column("holds")
    for commit in commits:
        manifest = commit.manifest
        about = ["?"] * 4
        if manifest:
            written = age(manifest.created, datetime.now(UTC))
            about = [manifest.lineage, str(manifest.attempt), written, decimal(manifest.size)]
        table.add_row(str(commit.step), *about, "NO" if commit.invalid else "yes", _holds(commit))
    return table


def _holds(commit: InspectedCommit) -> str:
    """Returns a line for each room; none for a commit that does not verify."""
    lines = []
    for room, part in commit.parts.items():
        counts = [f"{name.replace('_', ' ')} {value}" for name, value in part.holds.items()]
        lines.append(", ".join([f"{room} {decimal(part.bytes)}", *counts]))
    return "\n".join(lines)


def age(created: str, now: datetime) -> str:
    """Returns how long ago the time `created` (ISO 8601) was, by the clock of this machine.

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
