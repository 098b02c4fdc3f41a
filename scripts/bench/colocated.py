"""Rollouts per second of a synchronous run whose trainer and replicas take turns, against a split run.

    python scripts/bench/colocated.py [--repeats 3] [--steps 12] [--shards 2] [--replicas 2]

Four whole runs of `rl`, in turn, with K = 0 (max_steps_off_policy) and 256 answers of 28 tokens a step: with one shard
and one replica, and with `--shards` and `--replicas`, each split and colocated. With K = 0 a split run with one of both
alternates by itself, and leaves one of two cores idle. Against this run, the colocated run with one of both measures
what the change of hands costs, and the other one what it gains that each room has all cores in its turn; the second
split run has the same processes, which may work at the same time. The last line of the output is the result as one JSON
object. Leave the machine alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Shape:
    """The placement of a run, and its numbers of shards and replicas."""

    placement: str
    shards: int
    replicas: int

    @property
    def name(self) -> str:
        return f"{self.placement}, {self.shards} + {self.replicas}"

    def run(self, config: Path, steps: int) -> RunMeasured:
        flags = ("--placement", self.placement, "--max-steps", str(FIRST + steps))
        sizes = ("--trainer.shards", str(self.shards), "--inference.replicas", str(self.replicas))
        measured = run_rl(config, *flags, *sizes, "--orchestrator.max-steps-off-policy", "0")
        print(f"{self.name}: {rate_of(measured).rollouts_per_s:.2f} rollouts/s", flush=True)
        return measured


def rate_of(measured: RunMeasured) -> Rate:
    return Rate.of_rows(measured.rows, FIRST, len(measured.rows) - 1)


def detail_of(runs: Sequence[RunMeasured]) -> dict[str, object]:
    """Details of the rate of one shape."""
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
    parser.add_argument("--repeats", type=int, default=3, help="runs of each shape (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each run (default: 12)")
    parser.add_argument("--shards", type=int, default=2, help="shards of the larger runs (default: 2)")
    parser.add_argument("--replicas", type=int, default=2, help="replicas of the larger runs (default: 2)")
    args = parser.parse_args()
    if min(args.repeats, args.steps, args.shards, args.replicas) < 1:
        parser.error("--repeats, --steps, --shards and --replicas: expected at least 1 of each")

    let_actors_import_benchmarks()
    sizes = ((1, 1), (args.shards, args.replicas))
    runs: dict[Shape, list[RunMeasured]] = {Shape(placement, *size): [] for size in sizes for placement in PLACEMENTS}
    split = Shape("split", 1, 1)
    several = Shape("colocated", args.shards, args.replicas)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        model = Path(directory) / "model"
        config = Path(directory) / "task.json"
        parameters = make_model(model, hidden=TASK.hidden, layers=TASK.layers)
        config.write_text(json.dumps(TASK.config(model)))
        for _ in range(args.repeats):
            for shape in runs:
                runs[shape].append(shape.run(config, args.steps))
    rates = {shape: median([rate_of(measured).rollouts_per_s for measured in runs[shape]]) for shape in runs}
    ratios = {shape: round(rate / rates[split], 3) for shape, rate in rates.items()}
    Result(
        name="colocated",
        value=rates[several],
        unit=f"rollouts/s of the run {several.name}",
        ratio=ratios[several],
        target=TARGET,
        holds=ratios[several] >= TARGET,
        against=f"the run {split.name}, in turn",
        detail={
            "ratios": {shape.name: ratio for shape, ratio in ratios.items()},
            **{shape.name: detail_of(runs[shape]) for shape in runs},
            "measured_steps": args.steps,
            "parameters": parameters,
            "task": asdict(TASK),
        },
    ).print()


if __name__ == "__main__":
    main()
