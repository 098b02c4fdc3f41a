"""Draws the reward of one or more runs over their steps, as an SVG file. Needs the extra `plot`.

    python scripts/plot_reward.py outputs/my-run/metrics.jsonl [more/metrics.jsonl ...] [--output reward.svg]

Without `--output` the curve is written beside the first metrics file. Thin: each step; thick: the mean of a window of
steps that ends there. Any other column by `--key`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trireme.core.errors import BadInput
from trireme.tools.plot import draw_runs, read_curve


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
