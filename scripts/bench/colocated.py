"""Rollouts per second of a synchronous run whose trainer and replica take turns, against one where both are split.

    python scripts/bench/colocated.py [--repeats 3] [--steps 12]

Both are whole runs of `rl` with K = 0 (max_steps_off_policy), 256 answers of 28 tokens a step, one shard and one
replica, in turn; they differ in `placement` alone. With K = 0 a split run alternates by itself, so this measures what
the change of hands costs. The last line of the output is the result as one JSON object. Leave the machine alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from _common import Result, RunMeasured, median, run_rl
from _rooms import Rate, Task, let_actors_import_benchmarks
from counting import make_model

TASK = Task(hidden=256, layers=4, batch_size=32, group_size=8, sequences=256, prompt=8, median=28, sigma=0.0)
TARGET = 1.3
FIRST = 2
"""Steps of a run before the measured ones."""
PLACEMENTS = ("split", "colocated")
PARTS = ("step", "wait_for_batch", "hand_over", "forward_backward", "optim", "publish", "update_replicas")


def run(config: Path, placement: str, steps: int) -> RunMeasured:
    flags = ("--placement", placement, "--max-steps", str(FIRST + steps))
    measured = run_rl(config, *flags, "--orchestrator.max-steps-off-policy", "0")
    print(f"placement = {placement}: {rate_of(measured).rollouts_per_s:.2f} rollouts/s", flush=True)
    return measured


def rate_of(measured: RunMeasured) -> Rate:
    return Rate.of_rows(measured.rows, FIRST, len(measured.rows) - 1)


def detail_of(runs: Sequence[RunMeasured]) -> dict[str, object]:
    """Details of the rate of one placement."""
    rates = [rate_of(measured) for measured in runs]
    rows = [row for measured in runs for row in measured.rows[FIRST:]]
    return {
        "rollouts_per_s": [round(rate.rollouts_per_s, 2) for rate in rates],
        "mean_length": [round(rate.mean_length, 2) for rate in rates],
        "step_s": {part: round(mean(row.get(f"time/{part}", 0.0) for row in rows), 3) for part in PARTS},
        "load_before": [round(measured.load_before, 2) for measured in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each run (default: 12)")
    args = parser.parse_args()
    if min(args.repeats, args.steps) < 1:
        parser.error("--repeats and --steps: expected at least 1 of each")

    let_actors_import_benchmarks()
    runs: dict[str, list[RunMeasured]] = {placement: [] for placement in PLACEMENTS}
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        model = Path(directory) / "model"
        config = Path(directory) / "task.json"
        parameters = make_model(model, hidden=TASK.hidden, layers=TASK.layers)
        config.write_text(json.dumps(TASK.config(model)))
        for _ in range(args.repeats):
            for placement in PLACEMENTS:
                runs[placement].append(run(config, placement, args.steps))
    against, value = (median([rate_of(measured).rollouts_per_s for measured in runs[p]]) for p in PLACEMENTS)
    Result(
        name="colocated",
        value=value,
        unit="rollouts/s of the colocated run",
        ratio=round(value / against, 3),
        target=TARGET,
        holds=value / against >= TARGET,
        against="the same run with placement = split, in turn",
        detail={
            **{placement: detail_of(runs[placement]) for placement in PLACEMENTS},
            "measured_steps": args.steps,
            "parameters": parameters,
            "task": asdict(TASK),
        },
    ).print()


if __name__ == "__main__":
    main()
