"""Records the work of each process over time as Chrome's trace events, which Perfetto and `trireme report` draw.

    <run>/trace/attempt_1/trainer_0.json     the events of one process; named like its log

    with trace.span("publish", version=3):   spans of one track nest
    with trace.overlapping("step", "env"):   spans of one track may overlap; under a millisecond: left out
    with trace.life("group", 17):            begin and end are separate events: a killed process leaves the begin
    busy = trace.Busy("sampling"); with busy: one span from the first block that begins until the last one ends

Each process calls `start` once, next to where it opens its log; until then, and with `trace.max_mb` = 0, a span is only
timed. Events are put into a queue; a thread writes the queue twice a second, so a process that is killed loses
less than a second. Every event is a whole line of a JSON array that is never closed, as the format allows: the file can
be read at any time.

All times are microseconds since 1970, by the system's clock at the start of the process, and by the monotonic clock
from then on. Processes of one machine agree to microseconds. Processes of several machines agree as well as their
system clocks do: under NTP a span may seem to begin a few milliseconds before its cause on another node.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO

from trireme.core.finite_json import JsonObject, to_json

WRITE_EVERY_S = 0.5
CLOSE_S = 5.0
SHORTEST_NS = 1_000_000
"""Shortest overlapping span that is recorded: a rollout has many, most of them very short."""
MB = 1_000_000
LAST_LINE_BYTES = 300
FULL = "the trace ends here: it has trace.max_mb megabytes"
ROOMS = ("driver", "orchestrator", "trainer", "inference")
"""The driver and the rooms, in the order in which viewers show their processes."""

_log = logging.getLogger(__name__)
_numbers = count()
_to_json = partial(to_json, separators=(",", ":"))  # ASCII: as many bytes as characters
_writer: TraceWriter | None = None


def start(log_dir: Path | None, process: str, max_mb: int) -> None:
    """Starts the trace of this process. `process`: room and number (`trainer_0`); the file is named after them. An
    attempt that logs to `<run>/logs/attempt_N` traces to `<run>/trace/attempt_N`. The trace ends when its file has
    `max_mb` megabytes. If `log_dir` is None or `max_mb` is 0, there is no trace."""
    global _writer
    stop()
    if log_dir is not None and max_mb:
        directory = log_dir.parent.parent / "trace" / log_dir.name
        _writer = TraceWriter(directory / f"{process}.json", max_mb * MB)


def stop() -> None:
    """Writes the events that are left, and ends the trace of this process."""
    global _writer
    writer = _writer
    _writer = None
    if writer:
        writer.close()


@contextmanager
def span(name: str, track: str = "main", **args: object) -> Iterator[None]:
    """Records the `with` block as a span on `track`. Two spans of this track must not overlap, unless one contains the
    other. `args` are shown with the span."""
    started = _now()
    try:
        yield
    finally:
        if _writer:
            _writer.add_span(name, track, args, started, _now())


@contextmanager
def overlapping(name: str, track: str, **args: object) -> Iterator[None]:
    """Records the `with` block as a span on `track`, where spans may overlap. Blocks under SHORTEST_NS are not
    recorded."""
    started = _now()
    try:
        yield
    finally:
        end = _now()
        if _writer and end - started >= SHORTEST_NS:
            same = {"cat": track, "id": next(_numbers)}
            _writer.add("b", name, track, started, args=args, **same)
            _writer.add("e", name, track, end, **same)


@contextmanager
def life(name: str, number: int, **args: object) -> Iterator[JsonObject]:
    """Records the `with` block as the life of one object, such as a group. `name`: the kind of object. `number`
    distinguishes objects of one kind. `args` are recorded at the beginning. Yields a dict; the entries that the block
    puts into the dict are recorded at the end."""
    ending: JsonObject = {}
    writer = _writer
    if writer:
        writer.add("b", name, name, _now(), cat=name, id=number, args=args)
    try:
        yield ending
    finally:
        if writer:
            writer.add("e", name, name, _now(), cat=name, id=number, args=ending)


class Busy:
    """Records periods of work as spans on a track called `name`. `with busy:` blocks may overlap: a span lasts from the
    beginning of the first block until no block is running. Also records the number of running blocks, as a counter."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._working = 0
        self._since: int | None = None
        self._paused = False
        self._args: JsonObject = {}

    def __enter__(self) -> None:
        self._count(+1)
        if self._since is None and not self._paused:
            self._since = _now()

    def __exit__(self, *error: object) -> None:
        self._count(-1)
        if not self._working:
            self._end()

    def pause(self) -> None:
        """Ends the span, because all work is paused; blocks that begin now record no span until `resume`."""
        self._paused = True
        self._end()

    def resume(self, **args: object) -> None:
        """Ends a pause, and begins a new span if there is work. `args` are recorded with the spans from now on."""
        if self._paused and self._working:
            self._since = _now()
        self._paused = False
        self._args = args

    def _end(self) -> None:
        if _writer and self._since is not None:
            _writer.add_span(self._name, self._name, self._args, self._since, _now())
        self._since = None

    def _count(self, change: int) -> None:
        self._working += change
        if _writer:
            _writer.counters[self._name] = self._working


def _now() -> int:
    return time.perf_counter_ns()


class TraceWriter:
    """Writes the trace file of one process in a thread. `counters` {name: value}: the values are written whenever they
    have changed since the last write."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.counters: dict[str, int] = {}
        self._path = path
        self._max_bytes = max_bytes
        self._epoch = (time.time_ns() - _now()) // 1000 * 1000
        room, _, index = path.stem.rpartition("_")
        self._rank = ROOMS.index(room)
        self._pid = (self._rank + 1) * 1_000_000 + int(index) * 100  # the system's are not unique over several nodes
        self._tids: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        self._queue: deque[dict[str, Any]] = deque()
        self._closing = Event()
        self._thread = Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def add(self, phase: str, name: str, track: str, at: int, **fields: object) -> None:
        """Adds an event on `track`, from any thread. `phase`: the event's type in Chrome's format. `at`: ns of the
        monotonic clock. `fields`: further fields of the event."""
        self._queue.append({"ph": phase, "name": name, "tid": track, "ts": self._us(at), **fields})

    def add_span(self, name: str, track: str, args: JsonObject, started: int, end: int) -> None:
        """Adds a complete span, from any thread. `started` and `end`: ns of the monotonic clock."""
        self.add("X", name, track, started, dur=end // 1000 - started // 1000, args=args)

    def close(self) -> None:
        """Writes the events that are left, and ends the thread; gives up after CLOSE_S seconds."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        """Runs the thread. If the file cannot be written (a full disk), the trace ends with a warning and the run
        continues."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                last = not self._append(file, self._about())
                while not last:
                    last = self._closing.wait(WRITE_EVERY_S)
                    last = not self._append(file, self._news()) or last
        except OSError as error:
            _log.warning("the trace %s ends here, the run continues: %s", self._path, error)
        finally:
            self._queue = deque(maxlen=0)  # which takes nothing

    def _append(self, file: BinaryIO, events: Iterator[JsonObject]) -> bool:
        """Writes `events`. Returns False if the file is full; its last line then says so."""
        lines = []
        size = file.tell()
        room = True
        for event in events:
            # A line begins with the end of the one before it, which a process that was killed may have left torn.
            lines.append(("\n," if size else "[") + _to_json(event))
            size += len(lines[-1])
            room = size <= self._max_bytes - LAST_LINE_BYTES
            if not room:
                lines[-1] = "\n," + _to_json(self._event("i", FULL, s="p"))
                break
        file.write("".join(lines).encode())
        file.flush()
        return room

    def _about(self) -> Iterator[JsonObject]:
        """Yields the events that tell viewers the name of this process, its position in the list of processes, its pid
        and its host."""
        yield self._meta("process_name", name=self._path.stem)
        yield self._meta("process_sort_index", sort_index=self._rank)
        yield self._meta("process_labels", labels=f"process {os.getpid()} on {socket.gethostname()}")

    def _news(self) -> Iterator[JsonObject]:
        """Yields the events that were added, and the counters that changed, since the last call."""
        for _ in range(len(self._queue)):
            event = self._queue.popleft()
            track = event["tid"]
            if track not in self._tids:
                self._tids[track] = self._pid + 1 + len(self._tids)
                yield self._meta("thread_name", name=track) | {"tid": self._tids[track]}
            event["pid"] = self._pid
            event["tid"] = self._tids[track]
            yield event
        for name, value in self.counters.copy().items():
            if self._counted.get(name) != value:
                self._counted[name] = value
                yield self._event("C", name, args={"number": value})

    def _event(self, phase: str, name: str, **fields: object) -> JsonObject:
        """Returns an event of the process as a whole, on no track, with the present time."""
        return {"ph": phase, "name": name, "pid": self._pid, "ts": self._us(_now()), **fields}

    def _meta(self, about: str, **args: object) -> JsonObject:
        return {"ph": "M", "name": about, "pid": self._pid, "args": args}

    def _us(self, at: int) -> int:
        return (at + self._epoch) // 1000
