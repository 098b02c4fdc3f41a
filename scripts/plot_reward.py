"""Draws the reward of one or more runs over their steps, as an SVG file that needs nothing else.

    python scripts/plot_reward.py outputs/my-run/metrics.jsonl [more/metrics.jsonl ...] [--output reward.svg]

Without `--output` the curve is written beside the first metrics file. Thin: each step; thick: the mean of a window of
steps that ends there. The background is transparent and the colours suit light and dark pages.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 44, 48
COLORS = ("#2f81f7", "#d97706", "#2da44e", "#bf3989", "#8250df", "#cf222e")
MAX_TICKS = 7
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
    return Axis(0, max(last_step, 1), LEFT, WIDTH - RIGHT), Axis(low, high, HEIGHT - BOTTOM, TOP)


def polyline(kind: str, color: str, x: Axis, y: Axis, steps: Sequence[int], values: Sequence[float]) -> str:
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, values, strict=True))
    return f'<polyline class="{kind}" stroke="{color}" points="{points}"/>'


def frame(x: Axis, y: Axis, label: str) -> list[str]:
    """Grid, tick labels and the names of the axes."""
    parts = []
    for tick in y.ticks():
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for tick in x.ticks():
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{tick:.6g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {middle})"'
    parts.append(f'<text x="14" y="{middle}" text-anchor="middle" {turned}>{escape(label)}</text>')
    return parts


def legend(curves: Sequence[Curve]) -> list[str]:
    """Names of the runs, from the bottom right upwards."""
    parts = []
    for place, (curve, color) in enumerate(zip(reversed(curves), reversed(COLORS[: len(curves)]), strict=True)):
        y = HEIGHT - BOTTOM - 14 - 18 * place
        parts.append(f'<text x="{WIDTH - RIGHT - 34}" y="{y + 4}" text-anchor="end">{escape(curve.name)}</text>')
        ends = f'x1="{WIDTH - RIGHT - 28}" x2="{WIDTH - RIGHT - 4}" y1="{y}" y2="{y}"'
        parts.append(f'<line class="mean" stroke="{color}" {ends}/>')
    return parts


def draw(curves: Sequence[Curve], *, title: str, label: str, window: int) -> str:
    """The SVG document. Raises ValueError for more runs than there are colours."""
    if len(curves) > len(COLORS):
        raise ValueError(f"{len(curves)} runs; at most {len(COLORS)} can be told apart in one plot")
    x, y = axes(curves)
    parts = [f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>"]
    parts.append(f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>')
    parts += frame(x, y, label)
    for curve, color in zip(curves, COLORS, strict=False):
        parts.append(polyline("step", color, x, y, curve.steps, curve.values))
        parts.append(polyline("mean", color, x, y, curve.steps, moving_mean(curve.values, window)))
    parts += legend(curves) if len(curves) > 1 else []
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>', *parts, "</svg>", ""])


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics.jsonl of a run")
    parser.add_argument("--output", type=Path, help="SVG file; default: reward.svg beside the first metrics file")
    parser.add_argument("--key", default="reward/total", help="column to draw (default: %(default)s)")
    parser.add_argument("--window", type=int, default=10, help="steps that the thick line averages (default: 10)")
    parser.add_argument("--title", help="heading; default: the column and the window")
    args = parser.parse_args(argv)
    if args.window < 1:
        parser.error(f"--window {args.window}: expected at least 1")
    output = args.output or args.metrics[0].parent / "reward.svg"
    title = args.title or f"{args.key} per step, and its mean over {args.window} steps"
    try:
        curves = [read_curve(path, args.key) for path in args.metrics]
        output.write_text(draw(curves, title=title, label=args.key, window=args.window), encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"wrote {output}")


if __name__ == "__main__":
    main(sys.argv[1:])
