"""Draws metrics as SVG with matplotlib.

The background is transparent, and the colours suit light and dark pages. The same data give the same file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from trireme.checkpoint.rows import METRICS, read_rows, shown_step
from trireme.core.extras import require
from trireme.core.refusals import Refusal
from trireme.tools.curves import moving_mean

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
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def plot_runs(roots: Sequence[Path], key: str, window: int, title: str | None) -> bytes:
    """Draws the metric `key` of the runs in `roots` over their steps, as an SVG file: thin lines are steps, thick ones
    the mean of the last `window` steps. The axis of values holds 0 and 1. Raises BadInput."""
    if len(roots) > len(COLORS):
        raise Refusal(
            f"{len(roots)} runs", f"at most {len(COLORS)}, which can be told apart in one plot", "plot fewer at a time"
        ).error()
    curves = {root.name: read_curve(root, key) for root in roots}
    values = [value for _, column in curves.values() for value in column]

    def add_lines(axes: Any) -> None:
        for color, (name, (steps, column)) in zip(COLORS, curves.items(), strict=False):
            axes.plot(steps, column, color=color, linewidth=0.8, alpha=0.4)
            axes.plot(steps, moving_mean(column, window), color=color, linewidth=2, label=name)
        axes.set_xlim(left=0)
        axes.set_ylim(min(0.0, *values), max(1.0, *values))

    return draw(title or f"{key} per step, and its mean over {window} steps", "step", key, add_lines)


def read_curve(root: Path, key: str) -> tuple[list[int], list[float]]:
    """Returns the steps and the values of a metric of the run in `root`; rows without a number there are skipped.
    Raises BadInput where no row has it."""
    rows = read_rows(root / METRICS)[0]
    points = [(shown_step(row.values), row.values[key]) for row in rows if row.values.get(key) is not None]
    if not points:
        raise Refusal(
            f"--key {key}, which none of the {len(rows)} rows of {root / METRICS} has",
            "a metric of the run",
            f"look at the names in {root / METRICS}",
        ).error()
    return [step for step, _ in points], [value for _, value in points]


def draw_knob(points: Sequence[tuple[Mapping[str, Any], float]], *, knob: str, metric: str) -> bytes:
    """Draws a metric against a knob: a line through the means of `lines_of`, a dot for each run.

    `points`: the values of each run's keys, and its metric.
    """
    lines = lines_of(points, knob)
    found = {value for line in lines.values() for value in line}
    known = sorted(found, key=lambda v: (0, v, "") if isinstance(v, int | float) else (1, 0, knob_text(v)))
    at, logarithmic = places(known)

    def add_lines(axes: Any) -> None:
        if logarithmic:
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xticks([at[value] for value in known], [knob_text(value) for value in known])
        for color, (name, line) in zip(COLORS, lines.items(), strict=False):
            values = [value for value in known if value in line]
            axes.plot([at[v] for v in values], [mean(line[v]) for v in values], color=color, linewidth=2, label=name)
            dots = [(at[value], run) for value in values for run in line[value]]
            axes.plot(*zip(*dots, strict=True), "o", color=color, markersize=5)

    return draw(f"{metric} by {knob}", knob, metric, add_lines)


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


def knob_text(value: Any) -> str:
    """Returns a value of a knob as a person writes it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def draw(title: str, horizontal: str, vertical: str, add_lines: Callable[[Any], None]) -> bytes:
    """Returns a plot as an SVG file. `add_lines` draws on matplotlib's axes; several labels become a legend."""
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
