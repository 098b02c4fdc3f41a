"""Reads the traces of an attempt. Returns a bounded number of spans for a chart, or writes one file for Perfetto."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from trireme.checkpoint.rows import shown_step
from trireme.core.finite_json import JsonObject, to_json
from trireme.process.trace import ROOMS

NEWEST_STEPS = 50
"""The most steps in a report: a screen cannot show more."""
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
    "hand_over": "update",
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
"""{name of a span: its kind, which decides its colour}. A span with any other name has the kind of its track
(KINDS_OF_TRACKS), else "other"."""
KINDS_OF_TRACKS = {"update": "update", "environment": "environment"}

LIVE_BYTES = 32 << 20
"""Most bytes of all traces that are read for the newest steps of a run."""
BEGINNING_BYTES = 1 << 16
OTHER_TRACK = "other"
"""The name of the track for a span if the part of the trace that names its track is not read."""
NEVER = 1 << 62
SHORTEST_US = 10
"""Microseconds. Shorter spans are not read: they cannot be seen."""

Window = tuple[int, int]
"""Start and end, in microseconds since 1970."""


@dataclass(frozen=True)
class Span:
    """An activity of a process. Times are in microseconds since 1970."""

    name: str
    start: int
    end: int | None  # None: it was not over when the trace was read
    args: Mapping[str, object]


@dataclass
class Track:
    """The spans of one kind of work of a process, in rows of a chart."""

    name: str
    rows: list[list[Span]]  # spans of a row do not overlap
    left_out: int = 0  # spans that found no row


@dataclass(frozen=True)
class Process:
    """The trace of one process: its tracks and its counters."""

    name: str
    tracks: Sequence[Track]
    counters: Mapping[str, Sequence[tuple[int, float]]]  # time and value, by name
    full: bool  # its trace ended early, at trace.max_mb


@dataclass(frozen=True)
class Timeline:
    """The activities of all processes of an attempt between `start` and `end`, in microseconds since 1970."""

    attempt: int
    traced: tuple[int, int] | None  # the first and the last step in its trace
    start: int
    end: int
    steps: Mapping[int, Window]
    processes: Sequence[Process]
    resolution: int  # spans shorter than these microseconds are left out; 0: none is
    left_out: int  # processes that are not shown


def traces(root: Path) -> dict[int, list[Path]]:
    """Returns {attempt: its trace files} for the run in `root`. Attempts without a trace file are left out. The files
    of an attempt are sorted by room, as in ROOMS, then by number."""
    by_attempt: dict[int, dict[tuple[int, int], Path]] = defaultdict(dict)
    for file in root.glob("trace/attempt_*/*.json"):
        match = re.fullmatch(rf"attempt_(\d+)/({'|'.join(ROOMS)})_(\d+)\.json", f"{file.parent.name}/{file.name}")
        if match:
            by_attempt[int(match[1])][ROOMS.index(match[2]), int(match[3])] = file
    return {
        attempt: [by_attempt[attempt][place] for place in sorted(by_attempt[attempt])] for attempt in sorted(by_attempt)
    }


def _outlived(by_attempt: Mapping[int, Sequence[Path]], attempt: int) -> list[Path]:
    """Returns the trace files of replicas that were started before `attempt` and may still run in it. Such a replica
    still writes to its trace file from the attempt in which it was started. Returns one file for each replica.
    `by_attempt`: {attempt: its trace files}."""
    names = {file.name for file in by_attempt[attempt]}
    older = {file.name: file for earlier in by_attempt if earlier < attempt for file in by_attempt[earlier]}
    return [file for name, file in older.items() if name.startswith("inference_") and name not in names]


def json_lines(file: Path, most_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file with one object on each line; the lines may also form an array. Skips lines
    that a crash left incomplete. Yields nothing if the file does not exist. `most_bytes`: if the file is longer, reads
    only its beginning (where a trace names its tracks) and its end, `most_bytes` in total."""
    if not file.exists():
        return
    with file.open("rb") as lines:
        size = os.fstat(lines.fileno()).st_size
        if most_bytes is None or size <= most_bytes:
            beginning = size
        else:
            beginning = min(BEGINNING_BYTES, most_bytes // 4)
        yield from _objects(lines, beginning)
        if most_bytes is not None and size > most_bytes:
            lines.seek(size - (most_bytes - beginning))
            lines.readline()  # the rest of a line
            yield from _objects(lines, most_bytes)


def _objects(lines: BinaryIO, most_bytes: int) -> Iterator[JsonObject]:
    """Yields the JSON objects on the next lines. Stops after the line with which at least `most_bytes` bytes have been
    read."""
    for line in lines:
        most_bytes -= len(line)
        try:
            value = json.loads(line.lstrip(b"[,"))
        except ValueError:
            value = None
        if isinstance(value, dict):
            yield value
        if most_bytes <= 0:
            return


def export_trace(root: Path, out: Path) -> int | None:
    """Writes the events of all processes of the newest attempt to the file `out`, in Chrome's trace format. Returns the
    number of the attempt. If there is no trace, writes nothing and returns None. Raises OSError."""
    by_attempt = traces(root)
    if not by_attempt:
        return None
    attempt = max(by_attempt)
    files = [*by_attempt[attempt], *_outlived(by_attempt, attempt)]
    with out.open("w") as joined:
        joined.write("[\n")
        joined.write(",\n".join(to_json(event) for file in files for event in json_lines(file)))
        joined.write("\n]\n")
    return attempt


def timeline(root: Path, steps: int = NEWEST_STEPS, most_bytes: int = LIVE_BYTES) -> Timeline | None:
    """Returns the activities in the newest `steps` steps of the newest attempt, read from at most `most_bytes` of its
    traces. Returns None if there is no trace. The timeline includes the time after the last of these steps. It includes
    the time before the first of them only if no earlier step was read."""
    by_attempt = traces(root)
    if not by_attempt:
        return None
    attempt = max(by_attempt)
    files = by_attempt[attempt]
    outlived = _outlived(by_attempt, attempt)
    share = most_bytes // min(len(files) + len(outlived), MOST_PROCESSES)
    traced = _steps(files, share)
    shown = {step: traced[step] for step in sorted(traced)[-steps:]}
    from_the_start = len(shown) == len(traced)
    if from_the_start:
        since = 0
    else:
        since = min(start for start, _ in shown.values())
    processes = [_process(file, since, share) for file in files[:MOST_PROCESSES]]
    begun = min((span.start for span in _spans(processes)), default=NEVER)
    older = [_process(file, begun, share) for file in outlived[: MOST_PROCESSES - len(processes)]]
    processes += [process for process in older if process.tracks]
    times = [t for span in _spans(processes) for t in (span.start, span.end) if t is not None]
    times += [t for when in shown.values() for t in when]
    start = max(since, min(times, default=0))
    end = max(times, default=0)
    return Timeline(
        attempt=attempt,
        traced=(min(traced), max(traced)) if traced else None,
        start=start,
        end=end,
        steps=shown,
        processes=processes,
        resolution=_bound(processes),
        left_out=len(files[MOST_PROCESSES:]),
    )


def _steps(files: Sequence[Path], most_bytes: int) -> dict[int, Window]:
    """Returns {step: when it began and ended} from the driver's trace, one of `files`. Steps are counted from 1."""
    drivers = [file for file in files if file.stem == "driver_0"]
    spans = [event for file in drivers for event in json_lines(file, most_bytes) if event["name"] == "step"]
    return {shown_step(event["args"]): (event["ts"], event["ts"] + event["dur"]) for event in spans}


def _spans(processes: Sequence[Process]) -> list[Span]:
    return [span for process in processes for track in process.tracks for row in track.rows for span in row]


def _process(file: Path, since: int, most_bytes: int) -> Process:
    """Reads the trace `file` of a process. Returns its spans that end after the time `since` (microseconds since 1970),
    and its counters."""
    nested: dict[str, list[Span]] = defaultdict(list)
    overlapping: dict[str, list[Span]] = defaultdict(list)
    counters: dict[str, list[tuple[int, float]]] = defaultdict(list)
    names: dict[int, str] = {}
    open_spans: dict[tuple[str, int], Mapping[str, Any]] = {}
    full = False

    def keep(spans: list[Span], event: Mapping[str, Any], end: int | None) -> None:
        if end is None or end > since:
            spans.append(Span(event["name"], event["ts"], end, event.get("args", {})))

    for event in json_lines(file, most_bytes):
        match event:
            case {"ph": "M", "name": "thread_name"}:
                names[event["tid"]] = event["args"]["name"]
            case {"ph": "X", "ts": start, "dur": duration, "name": name}:
                if name != "step" and duration >= SHORTEST_US:
                    keep(nested[names.get(event["tid"], OTHER_TRACK)], event, start + duration)
            case {"ph": "b"}:
                open_spans[event["cat"], event["id"]] = event
            case {"ph": "e"}:
                begin = open_spans.pop((event["cat"], event["id"]), None)
                if begin:
                    args = {**begin.get("args", {}), **event.get("args", {})}
                    keep(overlapping[event["cat"]], {**begin, "args": args}, event["ts"])
            case {"ph": "C", "ts": at, "args": {"number": value}}:
                if at > since:
                    counters[event["name"]].append((at, value))
            case {"ph": "i"}:
                full = True
    for unended in open_spans.values():
        keep(overlapping[unended["cat"]], unended, None)
    tracks = [_packed(name, spans) for by_track in (nested, overlapping) for name, spans in by_track.items() if spans]
    return Process(file.stem, tracks, {name: _thinned(points) for name, points in counters.items()}, full)


def _packed(name: str, spans: Sequence[Span]) -> Track:
    """Returns a track that has each span in the first row that is free at the span's start. If a span lies within
    another span, it is thus in a lower row. The track has at most MOST_ROWS rows, and counts the spans that find no
    row."""
    track = Track(name, [])
    for span in sorted(spans, key=lambda span: (span.start, -_end(span))):
        free = next((row for row in track.rows if _end(row[-1]) <= span.start), None)
        if free is not None:
            free.append(span)
        elif len(track.rows) < MOST_ROWS:
            track.rows.append([span])
        else:
            track.left_out += 1
    return track


def _end(span: Span) -> int:
    if span.end is None:
        return NEVER
    return span.end


def _bound(processes: Sequence[Process]) -> int:
    """Removes the shortest spans from `processes`, so that at most MOST_SPANS stay. Returns the length in microseconds
    of the shortest span that stays; 0 if all stay."""
    spans = _spans(processes)
    if len(spans) <= MOST_SPANS:
        return 0
    longest = nlargest(MOST_SPANS, spans, key=_length)
    numbers = set(map(id, longest))
    for track in (track for process in processes for track in process.tracks):
        track.rows = [[span for span in row if id(span) in numbers] for row in track.rows]
    return _length(longest[-1])


def _length(span: Span) -> int:
    return _end(span) - span.start


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns at most MOST_POINTS of `points`: the highest point of each group of neighbours."""
    size = -(-len(points) // MOST_POINTS)
    return [max(points[i : i + size], key=itemgetter(1)) for i in range(0, len(points), size or 1)]


def timeline_to_json(timeline: Timeline) -> JsonObject:
    """Returns the timeline as JSON values. Times are in seconds since its start. If a span has not ended yet, its end
    is the end of the timeline."""

    def seconds(at: int | None) -> float:
        return round(((timeline.end if at is None else at) - timeline.start) / 1e6, 5)

    return {
        "attempt": timeline.attempt,
        "traced": timeline.traced,
        "start": datetime.fromtimestamp(timeline.start / 1e6, UTC).isoformat(timespec="seconds"),
        "seconds": seconds(timeline.end),
        "steps": [(step, seconds(start), seconds(end)) for step, (start, end) in sorted(timeline.steps.items())],
        "processes": [_process_to_json(process, seconds) for process in timeline.processes],
        "resolution": timeline.resolution / 1e6,
        "full": [process.name for process in timeline.processes if process.full],
        "leftOut": timeline.left_out,
    }


def _process_to_json(process: Process, seconds: Callable[[int | None], float]) -> JsonObject:
    return {
        "name": process.name,
        "tracks": [
            {
                "name": track.name,
                "leftOut": track.left_out,
                "rows": [[_span_to_json(span, track.name, seconds) for span in row] for row in track.rows],
            }
            for track in process.tracks
        ],
        "counters": [
            {"name": name, "points": [(seconds(at), value) for at, value in points]}
            for name, points in process.counters.items()
        ],
    }


def _span_to_json(span: Span, track: str, seconds: Callable[[int | None], float]) -> tuple[float, float, str, str, str]:
    """Returns (start, end, name, kind, details as text) of a span; start and end as `seconds` converts them."""
    args = {**span.args, **({"step": shown_step(span.args)} if span.args.get("step") is not None else {})}
    details = [f"{name} {value}" for name, value in args.items() if value is not None]
    details += ["not over"] if span.end is None else []
    kind = KINDS.get(span.name) or KINDS_OF_TRACKS.get(track, "other")
    return seconds(span.start), seconds(span.end), span.name, kind, ", ".join(details)
