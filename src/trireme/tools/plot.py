"""Draws metrics as SVG with matplotlib.

The background is transparent, and the colours suit light and dark pages. The same data give the same file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from trireme.checkpoint.rows import METRICS
from trireme.core.extras import require
from trireme.core.refusals import Refusal
from trireme.tools.curves import RunCurves, moving_mean

COLORS = ("#2f81f7", "#d97706", "#2da44e", "#bf3989", "#8250df", "#cf222e")
GREY = "#7d8590"
AVERAGED = "seed"
"""Runs that differ only in this key are one point of a line in `draw_knob`, at the mean of their metrics."""
LOG_FROM = 8
"""The axis of a knob is logarithmic if the ratio of the largest to the smallest value is at least this."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "trireme",
    "font.family": "sans-serif",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def plot_runs(roots: Sequence[Path], key: str, window: int, title: str | None) -> bytes:
    """Draws the metric `key` of the runs in `roots` over their steps. Returns the SVG file. Thin lines show each step,
    thick lines the mean of the last `window` steps. The vertical axis contains 0 and 1. Raises BadInput for too many
    runs, or if a run has no such metric."""
    if len(roots) > len(COLORS):
        raise Refusal(
            f"{len(roots)} runs", f"at most {len(COLORS)}, which can be told apart in one plot", "plot fewer at a time"
        )
    curves = {root.name: read_curve(root, key) for root in roots}
    values = [value for _, column in curves.values() for value in column]

    def add_lines(axes: Any) -> None:
        for color, (name, (steps, column)) in zip(COLORS, curves.items(), strict=False):
            axes.plot(steps, column, color=color, linewidth=0.8, alpha=0.4)
            axes.plot(steps, moving_mean(column, window), color=color, linewidth=2, label=name)
        axes.set_xlim(left=0)
        axes.set_ylim(min(0.0, *values), max(1.0, *values))

    return draw(title or f"{key} per step, and its mean over {window} steps", "step", key, add_lines)


def read_curve(root: Path, key: str) -> tuple[Sequence[float], Sequence[float]]:
    """Returns (steps, values) of the metric `key` of the run in `root`. Skips rows without a finite number for `key`.
    Raises BadInput if no row has such a number."""
    curves = RunCurves(root)
    curves.look(most_bytes=None)
    points = curves.points(key)
    if points:
        steps, values = zip(*points, strict=True)
        return steps, values
    raise Refusal(
        f"--key {key}, which none of the {curves.rows} rows of {root / METRICS} has",
        "a metric of the run",
        f"look at the names in {root / METRICS}",
    )


def draw_knob(points: Sequence[tuple[Mapping[str, object], float]], *, knob: str, metric: str) -> bytes:
    """Draws the metric `metric` of several runs against the knob `knob`, a key of the configuration that differs
    between them. Returns the SVG file. Each run is a dot. Lines connect the means of runs that differ only in the seed;
    `lines_of` groups the runs.

    `points` has one pair for each run: a dict {key: value} of all keys that differ between the runs, and the run's
    value of `metric`.
    """
    lines = lines_of(points, knob)
    places, scale = axis_of(list(dict.fromkeys(values[knob] for values, _ in points)))

    def add_lines(axes: Any) -> None:
        axes.set_xscale(scale)
        axes.minorticks_off()
        axes.set_xticks(list(places.values()), map(knob_text, places))
        for color, (name, line) in zip(COLORS, lines.items(), strict=False):
            means = [(place, mean(line[value])) for value, place in places.items() if value in line]
            axes.plot(*zip(*means, strict=True), color=color, linewidth=2, label=name)
            dots = [(places[value], run) for value, runs in line.items() for run in runs]
            axes.plot(*zip(*dots, strict=True), "o", color=color, markersize=5)

    return draw(f"{metric} by {knob}", knob, metric, add_lines)


def lines_of(points: Sequence[tuple[Mapping[str, object], float]], knob: str) -> dict[str, dict[object, list[float]]]:
    """Groups the metrics of runs into the lines of a plot. Returns {label of a line: {value of the knob: metrics of the
    runs with this value}}. There is one line for each combination of values of the other keys; the seed does not count.
    If there are more combinations than colours, all runs share a single line."""
    names = [
        ", ".join(
            f"{key.rpartition('.')[2]} = {knob_text(values[key])}" for key in values if key not in (knob, AVERAGED)
        )
        for values, _ in points
    ]
    if len(set(names)) > len(COLORS):
        names = [""] * len(points)
    lines: dict[str, dict[object, list[float]]] = {}
    for name, (values, metric) in zip(names, points, strict=True):
        lines.setdefault(name, {}).setdefault(values[knob], []).append(metric)
    return lines


def axis_of(values: Sequence[Any]) -> tuple[dict[Any, float], str]:
    """Returns {value of the knob: its position on the horizontal axis}, and the axis's scale ("linear" or "log"). If
    all values are numbers, they are sorted and positioned by size; else they are evenly spaced in the given order."""
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return {value: float(n) for n, value in enumerate(values)}, "linear"
    is_wide = min(values) > 0 and max(values) / min(values) >= LOG_FROM
    return {value: float(value) for value in sorted(values)}, "log" if is_wide else "linear"


def knob_text(value: object) -> str:
    """Returns the value of a knob as text: floating-point numbers in short form."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def draw(title: str, horizontal: str, vertical: str, add_lines: Callable[[Any], None]) -> bytes:
    """Returns a plot as an SVG file. `add_lines` draws on matplotlib's axes, its argument; a legend is added for two or
    more labels."""
    matplotlib = require("matplotlib", extra="plot", what_for="a plot")
    figures = require("matplotlib.figure", extra="plot", what_for="a plot")
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = figures.Figure(figsize=(7.5, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_xlabel(horizontal)
        axes.set_ylabel(vertical)
        add_lines(axes)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(loc="lower right")
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return file.getvalue()
