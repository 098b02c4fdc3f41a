"""Draws the reward of one or more runs over their steps, as an SVG file. Needs the extra `plot`.

    python scripts/plot_reward.py outputs/my-run/metrics.jsonl [more/metrics.jsonl ...] [--output reward.svg]

Without `--output` the curve is written beside the first metrics file. Thin: each step; thick: the mean of a window of
steps that ends there. Any other column by `--key`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from trireme.core.errors import BadInput
from trireme.tools.plot import COLORS, draw

Curve = tuple[Sequence[int], Sequence[float]]
"""Steps, and the value at each."""


def read_curve(path: Path, key: str) -> Curve:
    """Returns the column `key` of a metrics file; rows without a number there are skipped.

    Raises ValueError where no row has it.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [row for row in rows if row.get(key) is not None]
    if not found:
        raise ValueError(f"{path}: none of its {len(rows)} rows has {key!r}")
    return [row["step"] for row in found], [row[key] for row in found]


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns the mean of each value and the up to `window - 1` before it."""
    return [mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def draw_runs(curves: Mapping[str, Curve], *, title: str, label: str, window: int) -> bytes:
    """Draws runs over their steps: each step thin, the mean of `window` steps thick. The axis of values holds 0 and 1.

    `curves` are named by their run. Raises ValueError for more runs than there are colours.
    """
    if len(curves) > len(COLORS):
        raise ValueError(f"{len(curves)} runs; at most {len(COLORS)} can be told apart in one plot")
    shown = [value for _, values in curves.values() for value in values]

    def add_lines(axes: Any) -> None:
        for color, (name, (steps, values)) in zip(COLORS, curves.items(), strict=False):
            axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.4)
            axes.plot(steps, moving_mean(values, window), color=color, linewidth=2, label=name)
        axes.set_xlim(left=0)
        axes.set_ylim(min(0.0, *shown), max(1.0, *shown))

    return draw(title, "step", label, add_lines)


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
        curves = {path.absolute().parent.name: read_curve(path, args.key) for path in args.metrics}
        output.write_bytes(draw_runs(curves, title=title, label=args.key, window=args.window))
    except (BadInput, OSError, ValueError) as error:
        parser.error(str(error))
    print(f"wrote {output}")


if __name__ == "__main__":
    main(sys.argv[1:])
