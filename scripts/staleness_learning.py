"""Measures learning under staleness: the quickstart at several values of max_steps_off_policy, with several seeds.

    python scripts/staleness_learning.py DIRECTORY [--steps 150] [--seeds 0 1 2] [--cases ppo:0 ppo:4 ...]

A case is `loss:K`. Each run is a run directory in DIRECTORY; finished runs are not repeated, so the script may be
stopped and started again. Prints a table in Markdown: for each case and seed the mean reward of the first
5 and of the last 10 steps, and extremes over all its runs. Rewards do not depend on what else the machine does, ages
may: a slow trainer finds older groups.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.toml"
CASES = ("ppo:0", "ppo:1", "ppo:2", "ppo:4", "importance_sampling:4")
DEADLINE_S = 1800.0
FIRST, LAST = 5, 10

Row = dict[str, Any]


def rows_of(run: Path) -> list[Row]:
    """Returns the metrics that a run has written so far, a row for each step."""
    metrics = run / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def train(directory: Path, name: str, case: str, seed: int, steps: int) -> list[Row]:
    """Returns the rows of run `name`, after running it unless it has finished. Raises CalledProcessError."""
    rows = rows_of(directory / name)
    if len(rows) >= steps:
        return rows
    loss, max_steps_off_policy = case.split(":")
    options = {
        "clean": "true",
        "seed": seed,
        "max-steps": steps,
        "trainer.loss-fn": loss,
        "orchestrator.max-steps-off-policy": max_steps_off_policy,
        "checkpoint.every": 0,
        "run.output-dir": directory,
        "run.name": name,
    }
    flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "trireme.cli.rl", "@", str(CONFIG), *flags]
    with (directory / f"{name}.log").open("w") as log:
        subprocess.run(
            command, cwd=CONFIG.parents[1], stdout=log, stderr=subprocess.STDOUT, check=True, timeout=DEADLINE_S
        )
    return rows_of(directory / name)


def table_row(case: str, runs: Sequence[Sequence[Row]]) -> str:
    """Returns one line of the table."""
    rows = [row for run in runs for row in run]
    starts = [mean(row["reward/total"] for row in run[:FIRST]) for run in runs]
    ends = [mean(row["reward/total"] for row in run[-LAST:]) for run in runs]
    loss, max_steps_off_policy = case.split(":")
    cells = (
        loss,
        max_steps_off_policy,
        " ".join(f"{start:.3f}" for start in starts),
        " ".join(f"{end:.3f}" for end in ends),
        f"{mean(ends):.3f}",
        f"{mean(row['off_policy/mean'] for row in rows):.2f}",
        f"{max(row['off_policy/max'] for row in rows):.0f}",
        f"{mean(row.get('optim/clip_frac', 0.0) for row in rows):.4f}",
        f"{max(row['optim/ratio_max'] for row in rows):.2g}",
        f"{max(row['optim/grad_norm'] for row in rows):.2g}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", default=CASES)
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)

    table = []
    for case in args.cases:
        runs = []
        for seed in args.seeds:
            name = f"{case.replace(':', '-')}-{seed}"
            runs.append(train(args.directory, name, case, seed, args.steps))
            print(f"{name}: {mean(row['reward/total'] for row in runs[-1][-LAST:]):.3f}", file=sys.stderr, flush=True)
        table.append(table_row(case, runs))

    seeds = ", ".join(map(str, args.seeds))
    print(
        f"| loss | K | reward, first {FIRST} steps (seeds {seeds}) | last {LAST} steps | mean "
        "| mean age | largest age | clipped | largest ratio | largest gradient norm |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *table,
        sep="\n",
    )


if __name__ == "__main__":
    main()
