"""What a run directory holds: its commits, what is in them and whether it is whole, and how its lineages descend."""

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
"""That a person is shown."""


@dataclass(frozen=True)
class Part:
    """One room's part of a commit: number of `files`, their `bytes`, and what they `hold` beyond that, by name."""

    files: int
    bytes: int
    holds: Mapping[str, Any]


@dataclass(frozen=True)
class Commit:
    """`path` relative to the run. `branch`: the lineage under whose branch it is parked; None on HEAD's. `invalid`:
    why it does not verify, None if it does. `manifest` None: it cannot be read."""

    path: Path
    step: int
    branch: str | None
    invalid: str | None
    manifest: Manifest | None
    parts: Mapping[str, Part]


@dataclass(frozen=True)
class Leftover:
    """Something in checkpoints/ that is no commit; goes with the next resume."""

    path: Path
    bytes: int
    what: str


@dataclass(frozen=True)
class Report:
    """All of a run. `lineages`: the current one last; empty with `damage` when a HEAD cannot be read. `commits` of each
    branch in order of step, HEAD's branch last. `newest` is the step that a resume takes. `quick`: the contents of the
    files were not read, so that a commit which verifies may yet be refused by a resume. `incidents`: oldest first."""

    root: Path
    quick: bool
    lineages: tuple[Head, ...]
    damage: str | None
    commits: tuple[Commit, ...]
    leftovers: tuple[Leftover, ...]
    attempts: tuple[int, ...]
    newest: int | None
    incidents: tuple[Incident, ...]

    @property
    def head(self) -> Head | None:
        return self.lineages[-1] if self.lineages else None

    @property
    def resume(self) -> str | None:
        """The command that goes on from the newest commit, or starts again where there is none."""
        return resume_command(self.root) if (self.root / "config.json").exists() else None


# ---------------------------------------------------------------------------------------------------------- finding out


def inspect(root: Path, on_commit: Callable[[Path], None], quick: bool = False) -> Report:
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
            if path.exists():  # a run that is under way may have deleted it
                commits.append(commit)
    lineages, damage = _lineages(store)
    whole = [commit.step for commit in commits if commit.branch is None and commit.invalid is None]
    return Report(
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


def _commit(root: Path, path: Path, branch: str | None, quick: bool) -> Commit:
    step = step_of(path.name)
    assert step is not None
    try:
        manifest = Manifest.verified(path, contents=not quick)
        parts = _parts(path, manifest)
    except (CheckpointInvalid, FileNotFoundError) as error:
        return Commit(path.relative_to(root), step, branch, str(error), _readable_manifest(path), {})
    return Commit(path.relative_to(root), step, branch, None, manifest, parts)


def _readable_manifest(path: Path) -> Manifest | None:
    try:
        return Manifest.read(path)
    except CheckpointInvalid:
        return None


def _parts(path: Path, manifest: Manifest) -> dict[str, Part]:
    return {
        "trainer": _part(manifest, "trainer", shards=manifest.shards),
        **_part_of_data(path, manifest),
        "inference": _part(manifest, "inference", replicas=manifest.replicas, **_weights(path / "inference")),
    }


def _weights(path: Path) -> dict[str, Any]:
    """What replicas are given: the dtype of a whole model, the rank of adapters."""
    if (path / ADAPTER).exists():
        return {"adapter_rank": json.loads((path / ADAPTER).read_bytes())["r"]}
    return {"dtype": json.loads((path / "config.json").read_bytes())["dtype"]}


def _part_of_data(path: Path, manifest: Manifest) -> dict[str, Part]:
    """The orchestrator's of a run of `rl`; of `sft` the place in its data."""
    if (path / "data").exists():
        return {"data": _part(manifest, "data", **json.loads((path / "data" / "state.json").read_bytes()))}
    groups = json.loads((path / "orchestrator" / "state.json").read_bytes())["ledger"]["groups"]
    finished = sum(group["finished"] for group in groups)
    holds = {"groups_finished": finished, "groups_in_flight": len(groups) - finished}
    return {"orchestrator": _part(manifest, "orchestrator", **holds)}


def _part(manifest: Manifest, room: str, **holds: Any) -> Part:
    sizes = [record.size for record in manifest.files if record.path.startswith(f"{room}/")]
    return Part(len(sizes), sum(sizes), holds)


def _leftover(root: Path, path: Path) -> Leftover:
    attempt = _numbers([path], r".*\.partial-(\d+)")
    what = f"attempt {attempt[0]} is writing it, or ended while it did" if attempt else "its deletion has not ended"
    return Leftover(path.relative_to(root), sum(_sizes(path)), what)


def _sizes(directory: Path) -> Iterator[int]:
    """Bytes of each file below, of those that are still there when they are looked at."""
    for file in directory.rglob("*"):
        with suppress(FileNotFoundError):
            yield file.lstat().st_size if file.is_file() else 0


def _numbers(paths: Iterable[Path], pattern: str) -> list[int]:
    """The numbers in those names that `pattern` matches as a whole."""
    return [int(match[1]) for path in paths if (match := re.fullmatch(pattern, path.name))]


# ------------------------------------------------------------------------------------------------------------- showing


def to_json(report: Report) -> dict[str, Any]:
    """The report as JSON values."""
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


def _commit_to_json(commit: Commit) -> dict[str, Any]:
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


def render(report: Report) -> Iterator[RenderableType]:
    """What a person reads, part by part."""
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
        yield f"\ngo on from {start}\n  {report.resume}"


def _incidents(incidents: tuple[Incident, ...]) -> Iterator[str]:
    """The newest ones, oldest first; nothing where there are none."""
    if incidents:
        known = f"{len(incidents)} incidents" if len(incidents) > 1 else "1 incident"
        yield f"{known}, all in {INCIDENTS}" + (":" if len(incidents) <= MOST_INCIDENTS else "; the newest:")
    for incident in incidents[-MOST_INCIDENTS:]:
        when = datetime.fromtimestamp(incident.at, UTC)
        place = f"attempt {incident.attempt}, step {incident.step}"
        yield f"  {when:%Y-%m-%d %H:%M:%S} UTC, {place}: {incident.part}: {incident.what}"


def _lineage_tree(lineages: tuple[Head, ...]) -> Tree:
    """Which lineage descends from which, and from which step of it."""
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


def _table(branch: str | None, commits: list[Commit], quick: bool) -> Table:
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


def _holds(commit: Commit) -> str:
    """A line for each room; nothing of a commit that does not verify."""
    lines = []
    for room, part in commit.parts.items():
        counts = [f"{name.replace('_', ' ')} {value}" for name, value in part.holds.items()]
        lines.append(", ".join([f"{room} {decimal(part.bytes)}", *counts]))
    return "\n".join(lines)


def age(created: str, now: datetime) -> str:
    """How long ago the time `created` (ISO 8601) was, by the clock of this machine.

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
