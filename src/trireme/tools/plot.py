"""Draws metrics as SVG with matplotlib: over the steps of runs, or against a knob.

The background is transparent, and the colours suit light and dark pages. The same data give the same file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from trireme.core.extras import require

COLORS = ("#2f81f7", "#d97706", "#2da44e", "#bf3989", "#8250df", "#cf222e")
GREY = "#7d8590"
AVERAGED = "seed"
"""Runs that differ only in this key are one point against a knob."""
LOG_FROM = 8
"""A knob is drawn by its logarithm from this ratio of the largest to the smallest value on."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "trireme",
    "font.family": "sans-serif",
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


Curve = tuple[Sequence[int], Sequence[float]]
"""Steps, and the value at each."""


def read_curve(path: Path, key: str) -> Curve:
    """Returns the column `key` of a metrics file; rows without it are skipped.

    Raises ValueError where no row has it.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [row for row in rows if key in row]
    if not found:
        raise ValueError(f"{path}: none of its {len(rows)} rows has {key!r}")
    return [row["step"] for row in found], [row[key] for row in found]


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns the mean of each value and the up to `window - 1` before it.

    >>> moving_mean([1.0, 2.0, 6.0], 2)
    [1.0, 1.5, 4.0]
    """
    return [mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def draw_runs(curves: Mapping[str, Curve], *, title: str, label: str, window: int) -> bytes:
    """Draws runs over their steps: each step thin, the mean of `window` steps thick. The axis of values holds 0 and 1.

    `curves` are named by their run. Raises ValueError for more runs than there are colours.
    """
    if len(curves) > len(COLORS):
        raise ValueError(f"{len(curves)} runs; at most {len(COLORS)} can be told apart in one plot")
    figure, axes = _axes(title, "step", label)
    for color, (name, (steps, values)) in zip(COLORS, curves.items(), strict=False):
        axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.4)
        axes.plot(steps, moving_mean(values, window), color=color, linewidth=2, label=name)
    shown = [value for _, values in curves.values() for value in values]
    axes.set_xlim(left=0)
    axes.set_ylim(min(0.0, *shown), max(1.0, *shown))
    return _svg(figure, axes, curves)


def draw_knob(points: Sequence[tuple[Mapping[str, Any], float]], *, knob: str, metric: str) -> bytes:
    """Draws a metric against a knob: a line through the means of `lines_of`, a dot for each run.

    `points`: the values of each run's keys, and its metric.
    """
    lines = lines_of(points, knob)
    figure, axes = _axes(f"{metric} by {knob}", knob, metric)
    known = sorted_values({value for line in lines.values() for value in line})
    at, logarithmic = places(known)
    if logarithmic:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks([at[value] for value in known], [knob_text(value) for value in known])
    for color, (name, line) in zip(COLORS, lines.items(), strict=False):
        values = [value for value in known if value in line]
        axes.plot([at[v] for v in values], [mean(line[v]) for v in values], color=color, linewidth=2, label=name)
        dots = [(at[value], run) for value in values for run in line[value]]
        axes.plot(*zip(*dots, strict=True), "o", color=color, markersize=5)
    return _svg(figure, axes, lines)


def lines_of(points: Sequence[tuple[Mapping[str, Any], float]], knob: str) -> dict[str, dict[Any, list[float]]]:
    """Returns the metrics of runs by the value of the knob, in a line for each combination of the other keys but the
    seed; in one line where these are more than there are colours."""
    names = [
        ", ".join(
            f"{key.rpartition('.')[2]} = {knob_text(values[key])}" for key in values if key not in (knob, AVERAGED)
        )
        for values, _ in points
    ]
    if len(set(names)) > len(COLORS):
        names = [""] * len(points)
    lines: dict[str, dict[Any, list[float]]] = {}
    for name, (values, metric) in zip(names, points, strict=True):
        lines.setdefault(name, {}).setdefault(values[knob], []).append(metric)
    return lines


def places(values: Sequence[Any]) -> tuple[dict[Any, float], bool]:
    """Returns where the values of a knob stand on the horizontal axis, and True if that is logarithmic: numbers by
    their size, anything else side by side."""
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values) or len(set(numbers)) < 2:
        return {value: float(n) for n, value in enumerate(values)}, False
    return {value: float(value) for value in numbers}, min(numbers) > 0 and max(numbers) / min(numbers) >= LOG_FROM


def sorted_values(values: Iterable[Any]) -> list[Any]:
    """Sorts numbers by size, then other values by their text."""
    return sorted(values, key=lambda v: (0, v, "") if isinstance(v, int | float) else (1, 0, knob_text(v)))


def knob_text(value: Any) -> str:
    """Returns a value of a knob as a person writes it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _axes(title: str, horizontal: str, vertical: str) -> tuple[Any, Any]:
    matplotlib = require("matplotlib", extra="plot", what_for="a plot")
    figures = require("matplotlib.figure", extra="plot", what_for="a plot")
    with matplotlib.rc_context(STYLE):
        figure = figures.Figure(figsize=(7.5, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_xlabel(horizontal)
        axes.set_ylabel(vertical)
    return figure, axes


def _svg(figure: Any, axes: Any, names: Mapping[str, Any]) -> bytes:
    """Returns the figure as an SVG file, with a legend if it has several names."""
    matplotlib = require("matplotlib", extra="plot", what_for="a plot")
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        if len(names) > 1:
            axes.legend(loc="lower right")
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return file.getvalue()
