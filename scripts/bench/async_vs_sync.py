"""Rollouts per second of an asynchronous run (max_steps_off_policy = 1) against a synchronous one (0).

    python scripts/bench/async_vs_sync.py [--repeats 1] [--steps 6] [--minibatches auto] [--sequences N] [--prompt N]

Both are whole runs of `rl` (Ray, vLLM on CPU, an FSDP2 shard over gloo, the orchestrator) that differ in this one key,
in turn; each model has a core of its own in both. The lengths of answers are lognormal: the longest of a batch is some
ten times the median. Sizes are such that in the synchronous run a batch takes about as long to sample as to train on,
which is said in `stages_s`. `--minibatches 1` has both train on whole batches; by default (`trainer.num_minibatches`)
the synchronous run trains on the groups that have finished while it samples the others, so that it overlaps both as
well. The last line of the output is the result as one JSON object. Leave the machine alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean

from _common import Result, RunMeasured, median, run_rl
from _rooms import CORES, OTHERS_CORE, Rate, Task, let_actors_import_benchmarks, pin
from counting import make_model

TASK = Task(hidden=256, layers=4, batch_size=16, group_size=8, sequences=32, prompt=64, median=48, sigma=1.0)
TARGET = 1.6
FIRST = 2
REST = 1
"""Steps of a run before the measured ones (rooms are pinned after the first), and after them: in the last one an
asynchronous run has nothing left to sample."""
SYNC = 0
ASYNC = 1


def run(config: Path, max_steps_off_policy: int, steps: int, minibatches: str) -> RunMeasured:
    flags = {
        "orchestrator.max-steps-off-policy": max_steps_off_policy,
        "max-steps": FIRST + steps + REST,
        "trainer.num-minibatches": minibatches,
    }
    measured = run_rl(config, *(part for key, value in flags.items() for part in (f"--{key}", str(value))), then=pin)
    rate = rate_of(measured)
    print(f"max_steps_off_policy = {max_steps_off_policy}: {rate.rollouts_per_s:.2f} rollouts/s", flush=True)
    return measured


def measured_rows(measured: RunMeasured) -> Sequence[Mapping[str, float]]:
    return measured.rows[FIRST : len(measured.rows) - REST]


def rate_of(measured: RunMeasured) -> Rate:
    return Rate.of_rows(measured.rows, FIRST, len(measured.rows) - REST - 1)


def step_s(measured: RunMeasured) -> dict[str, float]:
    """Mean seconds of a step and of its parts."""
    parts = ("step", "wait_for_batch", "forward_backward", "optim", "publish", "update_replicas")
    return {part: round(mean(row[f"time/{part}"] for row in measured_rows(measured)), 3) for part in parts}


def detail_of(runs: Sequence[RunMeasured]) -> dict[str, object]:
    """Details of the rate of one mode."""
    rates = [rate_of(run) for run in runs]
    last = [measured_rows(run)[-1] for run in runs]
    return {
        "rollouts_per_s": [round(rate.rollouts_per_s, 2) for rate in rates],
        "tokens_per_s": [round(rate.tokens_per_s, 1) for rate in rates],
        "mean_length": [round(rate.mean_length, 2) for rate in rates],
        "measured_s": [round(rate.seconds, 1) for rate in rates],
        "step_s": [step_s(run) for run in runs],
        "inference_idle_frac": [
            round(mean(row["perf/inference_idle_frac"] for row in measured_rows(run)), 3) for run in runs
        ],
        "groups_evicted": [row["ledger/dropped"] for row in last],
        "load_before": [round(run.load_before, 2) for run in runs],
    }


def stages_s(runs: Sequence[RunMeasured]) -> dict[str, float]:
    """Seconds of the two stages of a step that is synchronous."""
    parts = [step_s(run) for run in runs]
    return {
        "sampling": median([p["wait_for_batch"] for p in parts]),
        "training": median([p["forward_backward"] + p["optim"] for p in parts]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1, help="pairs of runs (default: 1)")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each run (default: 6)")
    parser.add_argument("--minibatches", default="auto", help="trainer.num_minibatches of both runs (default: auto)")
    parser.add_argument("--batch-size", type=int, default=TASK.batch_size, help="smaller ones only try the script")
    parser.add_argument("--sequences", type=int, default=TASK.sequences, help="those that the engine decodes at once")
    parser.add_argument("--prompt", type=int, default=TASK.prompt, help="tokens of a prompt")
    args = parser.parse_args()
    if min(args.repeats, args.steps, args.batch_size, args.sequences, args.prompt) < 1:
        parser.error("--repeats, --steps, --batch-size, --sequences and --prompt: expected at least 1 of each")

    let_actors_import_benchmarks()
    task = replace(TASK, batch_size=args.batch_size, sequences=args.sequences, prompt=args.prompt)
    runs: dict[int, list[RunMeasured]] = {SYNC: [], ASYNC: []}
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        model = Path(directory) / "model"
        config = Path(directory) / "task.json"
        parameters = make_model(model, hidden=TASK.hidden, layers=TASK.layers)
        config.write_text(json.dumps(task.config(model)))
        for _ in range(args.repeats):
            for mode in (SYNC, ASYNC):
                runs[mode].append(run(config, mode, args.steps, args.minibatches))
    value, against = (median([rate_of(run).rollouts_per_s for run in runs[mode]]) for mode in (ASYNC, SYNC))
    Result(
        name="async_vs_sync",
        value=value,
        unit="rollouts/s of the asynchronous run (max_steps_off_policy = 1)",
        ratio=round(value / against, 3),
        target=TARGET,
        holds=value / against >= TARGET,
        against="the same run with max_steps_off_policy = 0, in turn",
        detail={
            "stages_s": stages_s(runs[SYNC]),
            "synchronous": detail_of(runs[SYNC]),
            "asynchronous": detail_of(runs[ASYNC]),
            "measured_steps": args.steps,
            "minibatches": args.minibatches,
            "parameters": parameters,
            "task": asdict(task),
            "cores": {**CORES, "all others": OTHERS_CORE},
        },
    ).print()


if __name__ == "__main__":
    main()
