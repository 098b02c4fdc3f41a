"""Compares the quickstart's time to its first completed step with a bare vLLM start on the same machine.

    python scripts/bench/quickstart.py [--repeats 3] [--steps 20] [--full] [--replicas N]

Runs and bare starts alternate, each alone. The first of each warms the caches (vLLM's compiled functions, the page
cache) and is reported apart. `--full` adds one run of all steps of the configuration, with its reward.
The last line of the output is the result as one JSON object. Leave the machine alone while it runs: `load_before`
above about 0.5, or CPU seconds far below wall seconds, says that it was not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from _common import ROOT, Result, RunMeasured, median, run_for_json, run_rl

from trireme.config import Config
from trireme.config.load import load

CONFIG = ROOT / "configs" / "quickstart.toml"
BARE = Path(__file__).with_name("bare_vllm.py")
TARGET_RATIO = 2.0


@dataclass(frozen=True)
class BareMeasured:
    """One bare start: wall and CPU seconds from the command to the first token."""

    seconds: float
    cpu_s: float


def bare_start(config: Config) -> BareMeasured:
    """vLLM alone with the model, context and KV size that a replica of `config` has."""
    model_and_sizes = [config.model.name, str(config.model.max_seq_len), str(int(config.inference.memory_gb * 2**30))]
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    seconds, reported = run_for_json([sys.executable, str(BARE), *model_and_sizes], environ)
    return BareMeasured(seconds, reported["cpu_s"])


def alternate(config: Config, repeats: int, flags: Sequence[str]) -> tuple[list[RunMeasured], list[BareMeasured]]:
    """`repeats` runs and as many bare starts in turn, after one of each that warms the caches: index 0."""
    runs = []
    bares = []
    for i in range(repeats + 1):
        bares.append(bare_start(config))
        print(f"bare start {i}: {bares[-1].seconds:.1f} s, {bares[-1].cpu_s:.1f} CPU s", flush=True)
        runs.append(run_rl(CONFIG, *flags))
        print(f"run {i}: first step after {runs[-1].first_step_s:.1f} s, {runs[-1].total_cpu_s:.1f} CPU s", flush=True)
    return runs, bares


def column(rows: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows]


def rates(run: RunMeasured) -> dict[str, float]:
    """Speed from the end of the first step to the end of the last, and how long each side waited for the other."""
    rows = run.rows[1:]
    seconds = rows[-1]["time/unix"] - run.rows[0]["time/unix"]
    return {
        "seconds_per_step": round(seconds / len(rows), 3),
        "rollouts_per_s": round(sum(column(rows, "perf/rollouts")) / seconds, 1),
        "tokens_per_s": round(sum(column(rows, "perf/tokens")) / seconds, 1),
        "trainer_idle_frac": round(mean(column(rows, "perf/trainer_idle_frac")), 3),
        "inference_idle_frac": round(mean(column(rows, "perf/inference_idle_frac")), 3),
    }


def full_run(flags: Sequence[str]) -> dict[str, object]:
    """One run of all steps of the configuration: times, speed and the rise of the reward."""
    run = run_rl(CONFIG, *flags)
    rewards = column(run.rows, "reward/total")
    return {
        "steps": len(run.rows),
        "first_step_s": round(run.first_step_s, 2),
        "total_s": round(run.total_s, 2),
        **rates(run),
        "reward_first_5": round(mean(rewards[:5]), 3),
        "reward_last_10": round(mean(rewards[-10:]), 3),
    }


def start_detail(runs: Sequence[RunMeasured], bares: Sequence[BareMeasured]) -> dict[str, object]:
    """Details of the ratio: every repeat, and the warm-up separately."""
    return {
        "first_step_s": [round(run.first_step_s, 2) for run in runs[1:]],
        "bare_s": [round(bare.seconds, 2) for bare in bares[1:]],
        "warm_up_s": {"first_step": round(runs[0].first_step_s, 2), "bare": round(bares[0].seconds, 2)},
        "end_s": median([run.total_s for run in runs[1:]]),
        "cpu_s_at_first_step": median([run.total_cpu_s for run in runs[1:]]),
        "bare_cpu_s": median([bare.cpu_s for bare in bares[1:]]),
        "load_before": [round(run.load_before, 2) for run in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="measured pairs of run and bare start (default: 3)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each of these runs (default: 20)")
    parser.add_argument("--replicas", type=int, help="inference replicas; default: the configuration's")
    parser.add_argument("--full", action="store_true", help="also one run of all steps of the configuration")
    args = parser.parse_args()
    if args.repeats < 1 or args.steps < 2:
        parser.error(f"--repeats {args.repeats} --steps {args.steps}: expected at least 1 repeat of 2 steps")

    flags = ["--inference.replicas", str(args.replicas)] if args.replicas else []
    config = load(["@", str(CONFIG), *flags]).config
    runs, bares = alternate(config, args.repeats, [*flags, "--max-steps", str(args.steps)])
    value = median([run.first_step_s for run in runs[1:]])
    bare = median([bare.seconds for bare in bares[1:]])
    detail = start_detail(runs, bares) | {"steps": args.steps, "replicas": config.inference.replicas}
    if args.full:
        detail["full"] = full_run(flags)
    Result(
        name="quickstart",
        value=value,
        unit="s from the command to the first completed step",
        ratio=round(value / bare, 3),
        target=TARGET_RATIO,
        holds=value / bare <= TARGET_RATIO,
        against="one bare in-process vLLM start to its first token, on the same machine in turn",
        detail=detail,
    ).print()


if __name__ == "__main__":
    main()
