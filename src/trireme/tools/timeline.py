"""The traces of an attempt, read back: a bounded number of spans for a chart, or one file for Perfetto."""

from __future__ import annotations

import heapq
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.config.refusals import Refusal
from trireme.process.trace import ROOMS

NEWEST_STEPS = 50
"""Shown unless others are asked for: more cannot be told apart on a screen."""
MOST_SPANS = 12_000
MOST_ROWS = 48
MOST_PROCESSES = 40
MOST_POINTS = 1_000

KINDS = {
    "sampling": "sampling",
    "forward_backward": "training",
    "optim": "optimizer",
    "publish": "publishing",
    "update_replicas": "update",
    "wait": "waiting",
    "wait_for_batch": "waiting",
    "group": "groups",
    "evaluation": "evaluation",
    "commit": "commits",
    "checkpoint_stall": "commits",
    "begin_save": "commits",
    "finish_save": "commits",
    "save_weights": "commits",
}
"""Which colour a span has, by its name, else by its track; anything else is "other"."""
KINDS_OF_TRACKS = {"update": "update", "environment": "environment"}

NEVER = 1 << 62
SHORTEST_US = 10
"""Shorter spans are nowhere to be seen."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Window:
    """Microseconds since 1970."""

    start: int
    end: int

    def meets(self, start: int, end: int) -> bool:
        return start < self.end and self.start < end


@dataclass(frozen=True)
class Span:
    """Times in microseconds since 1970. `end` None: it was not over when the trace was read. `joined`: how many spans
    this one stands for."""

    name: str
    start: int
    end: int | None
    args: Mapping[str, Any]
    joined: int = 1


@dataclass
class Track:
    """A line of a process: `rows` of spans that do not overlap, and how many spans found no row."""

    name: str
    rows: list[list[Span]]
    left_out: int = 0


@dataclass(frozen=True)
class Process:
    """`counters` {name: [(time, value)]}. `full`: its trace ended early, at trace.max_mb."""

    name: str
    tracks: Sequence[Track]
    counters: Mapping[str, Sequence[tuple[int, float]]]
    full: bool


@dataclass(frozen=True)
class Timeline:
    """What an attempt did from `start` to `end`: its `steps` {number: (start, end)}, of all that it `traced` (first and
    last). Spans shorter than `resolution` microseconds may be joined (0: none is). `left_out`: processes not shown."""

    attempt: int
    traced: tuple[int, int] | None
    start: int
    end: int
    steps: Mapping[int, tuple[int, int]]
    processes: Sequence[Process]
    resolution: int
    left_out: int


def traces(root: Path) -> dict[int, list[Path]]:
    """The files of every attempt that has a trace, in the order in which rooms are shown; attempts in order."""
    found: dict[int, dict[tuple[int, int], Path]] = defaultdict(dict)
    for file in root.glob("trace/attempt_*/*.json"):
        if match := re.fullmatch(rf"attempt_(\d+)/({'|'.join(ROOMS)})_(\d+)\.json", f"{file.parent.name}/{file.name}"):
            found[int(match[1])][ROOMS.index(match[2]), int(match[3])] = file
    return {attempt: [found[attempt][place] for place in sorted(found[attempt])] for attempt in sorted(found)}


def files_of(found: Mapping[int, Sequence[Path]], attempt: int) -> tuple[Sequence[Path], list[Path]]:
    """Of `traces`, the files of `attempt`; and those of replicas that may go on in it, of an earlier one: a replica
    outlives the attempt in which it was started."""
    own = found[attempt]
    names = {file.name for file in own}
    older = {file.name: file for earlier in found if earlier < attempt for file in found[earlier]}
    return own, [file for name, file in older.items() if name.startswith("inference_") and name not in names]


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file that has one a line, also if they are an array; a line that a crash tore is none."""
    with file.open("rb") as lines:
        for line in lines:
            try:
                value = json.loads(line.lstrip(b"[,"))
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def target_of(config: Mapping[str, Any], row: Mapping[str, Any] | None) -> str:
    """The last step of a run; of one that counts epochs (`max_steps` = 0) as its newest row says."""
    if config.get("max_steps") or not row or not row.get("progress"):
        return str(config.get("max_steps") or "?")
    return str(round((row["step"] + 1) / row["progress"]))


def join_files(files: Iterable[Path], out: Path) -> None:
    """Writes the events of several processes as one file in Chrome's format. Raises OSError."""
    with out.open("w") as joined:
        joined.write("[\n")
        joined.write(",\n".join(json.dumps(event) for file in files for event in json_lines(file)))
        joined.write("\n]\n")


# ------------------------------------------------------------------------------------------------------------ choosing


def timeline(root: Path, wanted: tuple[int, int] | None, on_file: Callable[[Path], None]) -> Timeline | None:
    """The newest attempt that traced one of the `wanted` steps (first and last), or the newest of all and its newest
    steps. None without any trace. `on_file` is told which file is read. Raises BadInput when no attempt traced them."""
    found = traces(root)
    steps = {attempt: _steps(files) for attempt, files in found.items()}
    for attempt in reversed(found):
        shown = _shown(steps[attempt], wanted)
        if shown or wanted is None:
            later = [start for other in steps if other > attempt for start, _ in steps[other].values()]
            until = min(later, default=NEVER)  # replicas write on
            return _read(attempt, *files_of(found, attempt), steps[attempt], shown, until, on_file)
    if wanted is None:
        return None
    ranges = [f"{min(known)}:{max(known)} (attempt {attempt})" for attempt, known in steps.items() if known]
    raise Refusal(
        f"--steps {wanted[0]}:{wanted[1]}, none of which is in a trace",
        f"some of the steps that are: {', '.join(ranges) or 'there are none yet'}",
        "choose others, or leave --steps out",
    ).error()


def _steps(files: Sequence[Path]) -> dict[int, tuple[int, int]]:
    """When each step began and ended, by the driver."""
    spans = [
        event for file in files if file.stem == "driver_0" for event in json_lines(file) if event["name"] == "step"
    ]
    return {event["args"]["step"]: (event["ts"], event["ts"] + event["dur"]) for event in spans}


def _shown(steps: Mapping[int, tuple[int, int]], wanted: tuple[int, int] | None) -> dict[int, tuple[int, int]]:
    if wanted:
        return {step: when for step, when in steps.items() if wanted[0] <= step <= wanted[1]}
    return dict(sorted(steps.items())[-NEWEST_STEPS:])


# ------------------------------------------------------------------------------------------------------------- reading


def _read(
    attempt: int,
    files: Sequence[Path],
    older: Sequence[Path],
    steps: Mapping[int, tuple[int, int]],
    shown: Mapping[int, tuple[int, int]],
    until: int,
    on_file: Callable[[Path], None],
) -> Timeline:
    """What happened in the steps `shown`; before them too if they are the first, and after if they are the last. Of the
    files of `older` attempts: since the first event of this one; of all: `until` the next one."""
    from_the_start = not shown or min(shown) == min(steps)
    to_the_end = not shown or max(shown) == max(steps)
    window = Window(
        0 if from_the_start else min(start for start, _ in shown.values()),
        until if to_the_end else max(end for _, end in shown.values()),
    )
    processes = []
    for file in files[:MOST_PROCESSES]:
        on_file(file)
        processes.append(_process(file, window))
    begun = Window(min((span.start for span in _spans(processes)), default=NEVER), window.end)
    outlived = []
    for file in older[: MOST_PROCESSES - len(processes)]:
        on_file(file)
        outlived.append(_process(file, begun))
    processes += [process for process in outlived if process.tracks]
    times = [t for span in _spans(processes) for t in (span.start, span.end) if t is not None]
    times += [t for when in shown.values() for t in when]
    start, end = max(window.start, min(times, default=0)), min(window.end, max(times, default=0))
    return Timeline(
        attempt=attempt,
        traced=(min(steps), max(steps)) if steps else None,
        start=start,
        end=end,
        steps=shown,
        processes=processes,
        resolution=_bound(processes, end - start),
        left_out=len(files[MOST_PROCESSES:]),
    )


def _spans(processes: Sequence[Process]) -> list[Span]:
    return [span for process in processes for track in process.tracks for row in track.rows for span in row]


def _process(file: Path, window: Window) -> Process:
    """What a process did in `window`."""
    reader = Reader(window)
    for event in json_lines(file):
        reader.take(event)
    reader.end()
    tracks = [Track(name, _nested(spans)) for name, spans in reader.nested.items() if spans]
    tracks += [_packed(name, spans) for name, spans in reader.overlapping.items() if spans]
    return Process(file.stem, tracks, {name: _thinned(points) for name, points in reader.counters.items()}, reader.full)


class Reader:
    """Takes the events of a process one by one, and keeps what meets `window`: spans by track, and counters."""

    def __init__(self, window: Window) -> None:
        self.nested: dict[str, list[Span]] = defaultdict(list)
        self.overlapping: dict[str, list[Span]] = defaultdict(list)
        self.counters: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self.full = False
        self._window = window
        self._tracks: dict[int, str] = {}
        self._under_way: dict[tuple[str, int], Event] = {}

    def take(self, event: Event) -> None:
        match event:
            case {"ph": "M", "name": "thread_name"}:
                self._tracks[event["tid"]] = event["args"]["name"]
            case {"ph": "X", "ts": start, "dur": duration, "name": name}:
                if name != "step" and duration >= SHORTEST_US:
                    self._keep(self.nested[self._tracks[event["tid"]]], event, start + duration)
            case {"ph": "b"}:
                self._under_way[event["cat"], event["id"]] = event
            case {"ph": "e"}:
                if begin := self._under_way.pop((event["cat"], event["id"]), None):
                    args = {**begin.get("args", {}), **event.get("args", {})}
                    self._keep(self.overlapping[event["cat"]], {**begin, "args": args}, event["ts"])
            case {"ph": "C", "ts": at, "args": {"number": value}}:
                if self._window.meets(at, at):
                    self.counters[event["name"]].append((at, value))
            case {"ph": "i"}:
                self.full = True

    def end(self) -> None:
        """There are no more events: what has not ended is still under way."""
        for event in self._under_way.values():
            self._keep(self.overlapping[event["cat"]], event, None)

    def _keep(self, spans: list[Span], event: Event, end: int | None) -> None:
        if self._window.meets(event["ts"], NEVER if end is None else end):
            spans.append(Span(event["name"], event["ts"], end, event.get("args", {})))


def _nested(spans: Sequence[Span]) -> list[list[Span]]:
    """A row for each depth: spans within others are below them."""
    rows: list[list[Span]] = []
    ends: list[int] = []
    for span in sorted(spans, key=lambda span: (span.start, -_end(span))):
        while ends and ends[-1] <= span.start:
            ends.pop()
        rows += [[]] if len(rows) == len(ends) else []
        rows[len(ends)].append(span)
        ends.append(_end(span))
    return rows


def _packed(name: str, spans: Sequence[Span]) -> Track:
    """Each span in the first row that is free."""
    track = Track(name, [])
    taken: list[tuple[int, int]] = []
    free: list[int] = []
    for span in sorted(spans, key=lambda span: span.start):
        while taken and taken[0][0] <= span.start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if not free and len(track.rows) == MOST_ROWS:
            track.left_out += 1
            continue
        if not free:
            track.rows.append([])
            free.append(len(track.rows) - 1)
        row = heapq.heappop(free)
        track.rows[row].append(span)
        heapq.heappush(taken, (_end(span), row))
    return track


def _end(span: Span) -> int:
    return NEVER if span.end is None else span.end


# ------------------------------------------------------------------------------------------------------------ bounding


def _bound(processes: Sequence[Process], length: int) -> int:
    """Joins short spans until at most MOST_SPANS are left, however many there were; the resolution that this took."""
    rows = [row for process in processes for track in process.tracks for row in track.rows]
    resolution, joined = 0, rows
    while sum(map(len, joined)) > MOST_SPANS:
        resolution = 2 * resolution or max(length // 10_000, 1)
        joined = [list(_joined(row, resolution)) for row in rows]
    for row, fewer in zip(rows, joined, strict=True):
        row[:] = fewer
    return resolution


def _joined(row: Sequence[Span], resolution: int) -> Iterator[Span]:
    """The row with what is shorter than `resolution`, and begins within it, as one span under the name that took most
    of the time."""
    cell: list[Span] = []
    for span in row:
        short = _end(span) - span.start < resolution
        if cell and not (short and span.start - cell[0].start < resolution):
            yield _as_one(cell)
            cell = []
        if short:
            cell.append(span)
        else:
            yield span
    if cell:
        yield _as_one(cell)


def _as_one(cell: Sequence[Span]) -> Span:
    if len(cell) == 1:
        return cell[0]
    taken: dict[str, int] = defaultdict(int)
    for span in cell:
        taken[span.name] += _end(span) - span.start
    return Span(max(taken, key=lambda name: taken[name]), cell[0].start, cell[-1].end, {}, len(cell))


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most MOST_POINTS of them: of neighbours, the highest."""
    size = -(-len(points) // MOST_POINTS)
    return [max(points[i : i + size], key=lambda point: point[1]) for i in range(0, len(points), size or 1)]
