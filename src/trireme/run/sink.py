"""Metrics on their way to trackers. A tracker that hangs or refuses never delays a step.

    Journal.write -> MetricsSink.write -> queue (PENDING items) -> thread -> Tracker

A sink has a thread that connects to its tracker and makes all calls to it. The training loop only adds to the queue. A
step is dropped if the queue is full, or if the tracker raises an error. Incidents of the run, and a line at the end,
say which tracker lacks steps, and why. metrics.jsonl has all steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from textwrap import shorten
from threading import Thread
from typing import Any, TypeVar

from trireme.checkpoint.rows import shown_step
from trireme.config import CommonConfig
from trireme.core.redaction import redact
from trireme.process.faults import fault_point
from trireme.run.rollout_records import table_rows
from trireme.run.trackers import Tracker, connections
from trireme.supervision.roster import Incident, Roster

PENDING = 200
"""The most steps and incidents that wait for a tracker. Later ones are dropped."""
SILENT_S = 60.0
"""Seconds. A call to a tracker that takes longer is an incident."""
CLOSE_S = 30.0
"""Seconds in which a tracker can get its last steps at the end of a command."""

LONGEST_REASON = 300
"""The most characters of an error that are shown."""

Value = TypeVar("Value")
Step = tuple[Mapping[str, Any], Sequence[str]]
"""The row of a step, and its recorded rollouts, each group as JSON."""


class MetricsSink:
    """Passes the steps and incidents of a run to the tracker `name`. `connect()` returns the tracker. `say` prints a
    line. Call `write` and `close` only from the thread of the training loop."""

    def __init__(self, name: str, connect: Callable[[], Tracker], roster: Roster, say: Callable[[str], None]) -> None:
        self._name = name
        self._connect = connect
        self._roster = roster
        self._say = say
        self._items: SimpleQueue[Step | Incident | None] = SimpleQueue()
        self._steps = 0
        self._written = 0
        self._failures = 0
        self._reason = ""
        self._call_began: float | None = None
        self._noted_silence = False
        self._closed = False
        self._abandoned = False
        self._thread = Thread(target=self._work, name=f"sink of {name}", daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, Any], records: Sequence[str]) -> None:
        """Gives the tracker the row of a step and its recorded rollouts (`Tracker.write`). Returns at once."""
        self._steps += 1
        self._watch()
        if self._items.qsize() < PENDING:
            self._items.put((row, records))
        else:
            self._fail(f"{PENDING} steps and incidents wait for it")

    def alert(self, roster: Roster, incident: Incident | None) -> None:
        """Passes `incident` to the tracker, unless it is None or the tracker itself caused it. The roster, which has
        the states of all parts of the run, calls this after each change."""
        if incident and incident.part != self._name and self._items.qsize() < PENDING:
            self._items.put(incident)

    def close(self) -> None:
        """Waits until the tracker has all steps and is closed, for at most CLOSE_S seconds. Prints how many steps the
        tracker lacks, and why."""
        self._items.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._abandoned = True
            self._reason = f"no answer for {CLOSE_S:g} s at the end"
        lacking = self._steps - self._written
        if lacking:
            self._say(f"! {self._name} lacks {lacking} of {self._steps} steps: {self._reason}. metrics.jsonl has all")
        elif not self._closed:
            self._say(f"! {self._name} may lack the last steps: {self._reason}. metrics.jsonl has all")

    def _watch(self) -> None:
        """Notes an incident if the present call to the tracker has taken longer than SILENT_S; once for each call."""
        start = self._call_began
        if start and time.monotonic() - start > SILENT_S and not self._noted_silence:
            self._noted_silence = True
            self._roster.note(self._name, f"no answer for {SILENT_S:g} s; steps go on, and wait for it here")

    def _work(self) -> None:
        tracker = self._attempt(self._connected)
        while (item := self._items.get()) and not self._abandoned:
            tracker = tracker or self._attempt(self._connected)
            if tracker:
                self._attempt(partial(self._give, tracker, item))
        if tracker and not self._abandoned:
            self._attempt(partial(self._close, tracker))

    def _attempt(self, call: Callable[[], Value]) -> Value | None:
        """Calls `call` and returns its result. If `call` raises an error, counts a failure and returns None."""
        self._call_began = time.monotonic()
        try:
            return call()
        except Exception as error:  # libraries of trackers raise errors of any type
            self._fail(f"{type(error).__name__}: {error}")
            return None
        finally:
            self._call_began = None
            self._noted_silence = False

    def _connected(self) -> Tracker:
        fault_point(f"tracker.connect.{self._name}")
        tracker = self._connect()
        self._say(tracker.place)
        return tracker

    def _give(self, tracker: Tracker, item: Step | Incident) -> None:
        fault_point(f"tracker.write.{self._name}")
        if isinstance(item, Incident):
            tracker.alert(item)
        else:
            row, records = item
            values = {name: value for name, value in row.items() if isinstance(value, int | float)}
            del values["step"]
            tracker.write(shown_step(row), values, table_rows([json.loads(record) for record in records]))
            self._written += 1

    def _close(self, tracker: Tracker) -> None:
        fault_point(f"tracker.close.{self._name}")
        tracker.close()
        self._closed = True

    def _fail(self, reason: str) -> None:
        """Counts a failure with this `reason`. Notes an incident after 1, 2, 4, 8 ... failures, so that a tracker that
        always fails makes few incidents. Does nothing after `close` has given up the tracker."""
        if self._abandoned:
            return
        self._failures += 1
        self._reason = redact(shorten(reason, LONGEST_REASON)).rstrip(".")
        if self._failures & (self._failures - 1) == 0:
            count = f"failure {self._failures}; " if self._failures > 1 else ""
            self._roster.note(self._name, f"{count}{self._reason}; steps go on without it")


@contextmanager
def metrics_sinks(
    config: CommonConfig, run_id: str, root: Path, roster: Roster, say: Callable[[str], None]
) -> Iterator[list[MetricsSink]]:
    """A context manager. Connects the run in `root` to the configured trackers. The connections serve all attempts of
    the command, and are closed at the end of the `with` block. Makes `roster` report each incident to the trackers.
    Yields a list with one sink for each tracker. A sink takes the row and the rollouts of each step. `say` prints where
    each tracker shows the run, and at the end how many steps the tracker lacks."""
    with ExitStack() as ending:
        sinks = [
            MetricsSink(name, connect, roster, say)
            for name, connect in connections(config, run_id, root, roster.step).items()
        ]
        for sink in sinks:
            ending.callback(sink.close)
            ending.callback(roster.listen(sink.alert))
        yield sinks
