"""Curves of metrics as SVG that needs nothing else: over the steps of runs, or against a knob.

The background is transparent and the colours suit light and dark pages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 44, 48
COLORS = ("#2f81f7", "#d97706", "#2da44e", "#bf3989", "#8250df", "#cf222e")
MAX_TICKS = 7
MARGIN = 30
"""Between the frame and the first and last value of a knob."""
LOG_FROM = 8
"""From this ratio of the largest to the smallest on, a knob is drawn by its logarithm."""
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #57606a; }
.title { font-size: 15px; font-weight: 600; }
.grid { stroke: #8c959f; stroke-opacity: 0.3; }
.step { fill: none; stroke-width: 1; stroke-opacity: 0.4; }
.mean { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
@media (prefers-color-scheme: dark) { text { fill: #9da7b3; } }
"""


@dataclass(frozen=True)
class Curve:
    """One run: `steps` and the value at each, both of the same length, at least one."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Axis:
    """Maps `low` to `high` linearly onto pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """At most `MAX_TICKS` round values within the axis, at steps of 1, 2 or 5 times a power of ten."""
        rough = (self.high - self.low) / (MAX_TICKS - 1)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def read_curve(path: Path, key: str) -> Curve:
    """The column `key` of a metrics file; rows without it are passed over. Raises ValueError where no row has it."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    points = [(row["step"], row[key]) for row in rows if key in row]
    if not points:
        raise ValueError(f"{path}: none of its {len(rows)} rows has {key!r}")
    steps, values = zip(*points, strict=True)
    return Curve(path.absolute().parent.name, steps, values)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the up to `window - 1` before it.

    >>> moving_mean([1.0, 2.0, 6.0], 2)
    [1.0, 1.5, 4.0]
    """
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def axes(curves: Sequence[Curve]) -> tuple[Axis, Axis]:
    """Steps from 0; values from 0 to 1, or as far as they go beyond."""
    last_step = max(max(curve.steps) for curve in curves)
    low = min(0.0, *(min(curve.values) for curve in curves))
    high = max(1.0, *(max(curve.values) for curve in curves))
    return Axis(0, max(last_step, 1), LEFT, WIDTH - RIGHT), value_axis(low, high)


def value_axis(low: float, high: float) -> Axis:
    return Axis(low, high, HEIGHT - BOTTOM, TOP)


def polyline(kind: str, color: str, x: Axis, y: Axis, steps: Sequence[int], values: Sequence[float]) -> str:
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, values, strict=True))
    return f'<polyline class="{kind}" stroke="{color}" points="{points}"/>'


def frame(ticks: Sequence[tuple[float, str]], y: Axis, x_label: str, y_label: str) -> list[str]:
    """Grid, tick labels and the names of the axes. `ticks` of the horizontal one are pixels and texts."""
    parts = []
    for tick in y.ticks():
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for place, text in ticks:
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{escape(text)}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {middle})"'
    parts.append(f'<text x="14" y="{middle}" text-anchor="middle" {turned}>{escape(y_label)}</text>')
    return parts


def legend(names: Sequence[str]) -> list[str]:
    """Names of the lines, from the bottom right upwards."""
    parts = []
    for place, (name, color) in enumerate(zip(reversed(names), reversed(COLORS[: len(names)]), strict=True)):
        y = HEIGHT - BOTTOM - 14 - 18 * place
        parts.append(f'<text x="{WIDTH - RIGHT - 34}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        ends = f'x1="{WIDTH - RIGHT - 28}" x2="{WIDTH - RIGHT - 4}" y1="{y}" y2="{y}"'
        parts.append(f'<line class="mean" stroke="{color}" {ends}/>')
    return parts


def document(title: str, parts: Sequence[str]) -> str:
    """The SVG document of what is drawn."""
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def draw(curves: Sequence[Curve], *, title: str, label: str, window: int) -> str:
    """Runs over their steps. Raises ValueError for more runs than there are colours."""
    if len(curves) > len(COLORS):
        raise ValueError(f"{len(curves)} runs; at most {len(COLORS)} can be told apart in one plot")
    x, y = axes(curves)
    parts = frame([(x(tick), f"{tick:.6g}") for tick in x.ticks()], y, "step", label)
    for curve, color in zip(curves, COLORS, strict=False):
        parts.append(polyline("step", color, x, y, curve.steps, curve.values))
        parts.append(polyline("mean", color, x, y, curve.steps, moving_mean(curve.values, window)))
    return document(title, [*parts, *(legend([curve.name for curve in curves]) if len(curves) > 1 else [])])


@dataclass(frozen=True)
class Line:
    """A metric against a knob: `values` {value of the knob: what each run with it came to}, at least one of each."""

    name: str
    values: Mapping[Any, Sequence[float]]


def places(values: Sequence[Any]) -> dict[Any, float]:
    """Where the values of a knob stand on the horizontal axis, in pixels: numbers by their size, or by its logarithm
    where they span a decade or so; anything else side by side."""
    left, right = LEFT + MARGIN, WIDTH - RIGHT - MARGIN
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values) or len(set(numbers)) < 2:
        between = (right - left) / (len(values) + 1)
        return {value: left + (n + 1) * between for n, value in enumerate(values)}
    apart = min(numbers) > 0 and max(numbers) / min(numbers) >= LOG_FROM
    sizes = {value: math.log(value) if apart else float(value) for value in numbers}
    axis = Axis(min(sizes.values()), max(sizes.values()), left, right)
    return {value: axis(size) for value, size in sizes.items()}


def draw_knob(lines: Sequence[Line], *, title: str, knob: str, metric: str) -> str:
    """Lines through the means, a dot for each run. Raises ValueError for more lines than there are colours."""
    if len(lines) > len(COLORS):
        raise ValueError(f"{len(lines)} lines; at most {len(COLORS)} can be told apart in one plot")
    at = places(sorted_values({value for line in lines for value in line.values}))
    found = [value for line in lines for values in line.values.values() for value in values]
    low, high = min(found), max(found)
    room = (high - low) * 0.08 or max(abs(high) * 0.1, 1e-9)
    y = value_axis(low - room, high + room)
    parts = frame([(place, knob_text(value)) for value, place in at.items()], y, knob, metric)
    for line, color in zip(lines, COLORS, strict=False):
        known = [value for value in at if value in line.values]
        means = [sum(line.values[value]) / len(line.values[value]) for value in known]
        points = " ".join(f"{at[value]:.1f},{y(mean):.1f}" for value, mean in zip(known, means, strict=True))
        parts.append(f'<polyline class="mean" stroke="{color}" points="{points}"/>')
        parts += [
            f'<circle cx="{at[value]:.1f}" cy="{y(run):.1f}" r="4" fill="{color}"/>'
            for value in known
            for run in line.values[value]
        ]
    return document(title, [*parts, *(legend([line.name for line in lines]) if len(lines) > 1 else [])])


def sorted_values(values: Iterable[Any]) -> list[Any]:
    """Numbers by size, before texts and the like by their text."""
    return sorted(values, key=lambda v: (0, v, "") if isinstance(v, int | float) else (1, 0, knob_text(v)))


def knob_text(value: Any) -> str:
    """A value of a knob as a person writes it."""
    return f"{value:g}" if isinstance(value, float) else str(value)
