"""The curves of a run, as columns of numbers that grow with its metrics."""

from __future__ import annotations

import json
import math
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trireme.checkpoint.rows import METRICS, TRAINED
from trireme.tools.report import panels_of, thinned
from trireme.tools.watch.drawing import FIRST_CURVES
from trireme.tools.watch.following import LineFollower

LOOK_BYTES = 16 << 20
"""Bytes of a file that one look reads."""
FRESH_S = 5.0
"""Seconds for which the panels that were drawn last are good enough."""
NO_CURVES = ("step", "version", "progress", "attempt", "time/unix")


class RunCurves:
    """Numbers of `metrics.jsonl`, 16 bytes each. `newest` is the newest row; empty before there is one."""

    def __init__(self, root: Path) -> None:
        self._lines = LineFollower(root / METRICS)
        self.newest: Mapping[str, Any] = {}
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._rows = 0
        self._drawn: tuple[int, float, list[dict[str, Any]]] = (-1, 0.0, [])

    @property
    def rows(self) -> int:
        """The number of rows so far."""
        return self._rows

    @property
    def unread(self) -> int:
        """The bytes that further looks will read."""
        return self._lines.unread

    def look(self) -> None:
        """Takes the rows that are new. After the run has gone back to a commit, all are read again."""
        again, lines = self._lines.poll(LOOK_BYTES)
        if again:
            self.newest, self._columns, self._rows = {}, {}, 0
            self._drawn = (-1, 0.0, [])
        for line in lines:
            self.newest = json.loads(line)
            self._rows += 1
            for name, value in self.newest.items():
                if isinstance(value, int | float) and math.isfinite(value) and name not in NO_CURVES:
                    steps, values = self._columns.setdefault(name, (array("q"), array("d")))
                    steps.append(self.newest["step"])
                    values.append(value)

    def names(self) -> list[str]:
        """Returns the names of all metrics that are numbers, those that matter first."""
        first = [name for name in FIRST_CURVES if name in self._columns]
        return first + sorted(self._columns.keys() - set(first))

    def panels(self) -> list[dict[str, Any]]:
        """Returns the charts of `trireme report`."""
        rows, at, drawn = self._drawn
        if rows != self._rows and time.monotonic() - at > FRESH_S:
            drawn = panels_of(list(self._columns), self._points)
            self._drawn = self._rows, time.monotonic(), drawn
        return drawn

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Returns the steps and values of one metric, thinned; empty where there is none of that name."""
        return thinned(self._points(name))

    def _points(self, name: str) -> list[tuple[float, float | None]]:
        return list(zip(*self._columns.get(name, ()), strict=True))


class GroupAges:
    """Counts the ages (step - floor) of all groups of `trained.jsonl`."""

    def __init__(self, root: Path) -> None:
        self._lines = LineFollower(root / TRAINED)
        self._counts: Counter[int] = Counter()

    def look(self) -> list[tuple[int, int]]:
        """Takes the rows that are new. Returns (age, groups), youngest first."""
        again, lines = self._lines.poll(LOOK_BYTES)
        if again:
            self._counts.clear()
        for row in map(json.loads, lines):
            self._counts.update(row["step"] - group["floor"] for group in row.get("groups", ()))
        return sorted(self._counts.items())
