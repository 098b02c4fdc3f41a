"""Rollouts per second of a whole run at its defaults, over what its two cores could give to the bare work.

    python scripts/bench/whole_job.py [--only short|long|long_k2] [--rounds 3] [--steps 12] [--threads 1]

The job: 32 problems, 8 rollouts of each, of a random model with answers that end by chance (`ending.py`), at most 32
tokens long (`short`) or at most 384 (`long`, `long_k2`), on one shard and one replica. max_steps_off_policy is 1
(`long_k2`: 2). The learning rate is as good as 0. Everything else has its default.

The limit, which is printed first, is the smaller of two rates: all cores over the CPU seconds of the bare work, and 1
over the CPU seconds of its busiest thread. The bare work (`bare_job.py`) is `LLM.generate` with all sequences of a step
at once, and a plain Hugging Face forward and backward over as many answers, each alone in its process. It and the run
have the same number of threads, which never spin.

A machine may change its speed from minute to minute, so bare work is measured before and after each run, and the mean
of both sets the run's limit. Each run is measured between two of its steps. Alongside everything, a fixed calculation
of some milliseconds is repeated once a second (`speed.py`). The last lines of the output are the results, a JSON object
for each job. Values are medians of the rounds.

    value         rollouts/s by the clock; it means little where others use the machine
    ratio         that over the limit
    detail        `ratios`: of each round; `slowdown`: CPU time of the fixed calculation alongside the run over its CPU
                  time alongside the bare work, and `ratio_at_one_speed`: the ratio times that;
                  `cpu_ratio`: the rate if no core were ever idle, by the CPU seconds of all processes, over the limit;
                  `ratio_with_others`: the rate over a limit that counts the use of processes next to engine and shard;
                  `share_of_engine_and_shard`: of the CPU seconds of all processes;
                  `cpu_s`: CPU seconds for a step's 256 rollouts by room, and `over_bare`: what each adds to the bare
                  work; `idle_cores`: cores that no process of the run used, on average
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from pathlib import Path

import psutil
from _common import DEADLINE_S, POLL_S, Result, cpu_by_room, median, run_for_json, run_rl
from _rooms import let_actors_import_benchmarks
from ending import ENV_ID, PROMPT, make_model
from speed import Calculating

PROBLEMS = 32
GROUP_SIZE = 8
ROLLOUTS = PROBLEMS * GROUP_SIZE
FIRST = 3
REST = 2
"""Steps of a run before the measured ones, and after them: in its last ones it has nothing left to sample."""
BARE_REPEATS = 3
PARTS = ("generate", "train")
COMPUTING = ("engine core", "trainer shard")
"""The rooms that do the bare work, in the order of its parts."""


@dataclass(frozen=True)
class Job:
    """One of the jobs that are measured."""

    longest: int
    """Tokens of an answer, at most."""
    max_steps_off_policy: int
    target: float
    """Least share of the limit."""

    def config(self, model: Path) -> dict[str, object]:
        """Returns the run's configuration: what has a default keeps it."""
        return {
            "model": {"name": str(model), "max_seq_len": PROMPT + self.longest},
            "env": {"id": ENV_ID},
            "orchestrator": {
                "batch_size": PROBLEMS,
                "group_size": GROUP_SIZE,
                "max_steps_off_policy": self.max_steps_off_policy,
            },
            "trainer": {"shards": 1, "learning_rate": 1e-30},
            "inference": {"replicas": 1, "sampling": {"max_tokens": self.longest}},
            "cluster": {"device": "cpu"},
        }


JOBS = {"short": Job(32, 1, 0.77), "long": Job(384, 1, 0.80), "long_k2": Job(384, 2, 0.88)}


@dataclass(frozen=True)
class Bare:
    """The bare work for a step: CPU seconds of its parts, and of the busiest thread of each."""

    generate_s: float
    train_s: float
    busiest_s: float
    length: float
    calculation_ms: float
    """CPU milliseconds of the fixed calculation meanwhile."""

    def limit(self, cores: int, others_s: float = 0.0) -> float:
        """Returns the most rollouts per second. `others_s`: CPU seconds that other processes need too."""
        return ROLLOUTS * min(cores / (self.generate_s + self.train_s + others_s), 1 / self.busiest_s)

    @classmethod
    def mean(cls, before: Bare, after: Bare) -> Bare:
        """Returns the mean of what was measured before and after a run."""
        pairs = zip(astuple(before), astuple(after), strict=True)
        return cls(*(round((first + second) / 2, 3) for first, second in pairs))


def cpu_of_rooms(driver: psutil.Process) -> dict[str, float]:
    """Returns the CPU seconds so far of a run's rooms."""
    return {room: sum(seconds) for room, seconds in cpu_by_room(driver).items()}


@dataclass
class Measured:
    """One run between two of its steps."""

    seconds: float
    rollouts: float
    length: float
    cpu_s: Mapping[str, float]
    """CPU seconds for ROLLOUTS, by room."""
    calculation_ms: float
    """CPU milliseconds of the fixed calculation meanwhile."""
    load_before: float = 0.0

    @property
    def rate(self) -> float:
        return self.rollouts / self.seconds

    @property
    def total_s(self) -> float:
        return sum(self.cpu_s.values())

    @property
    def others_s(self) -> float:
        """CPU seconds for ROLLOUTS of all processes but engine and shard."""
        return sum(seconds for room, seconds in self.cpu_s.items() if room not in COMPUTING)


def measure_bare(job: Job, model: Path, threads: int) -> Bare:
    """Measures the bare work in processes of their own: one after the other."""

    def bare(part: str) -> dict[str, float]:
        sizes = [str(job.longest), str(ROLLOUTS), str(BARE_REPEATS)]
        command = [sys.executable, str(Path(__file__).parent / "bare_job.py"), part, str(model), *sizes]
        return run_for_json(command, without_spinning(threads))[1]

    with Calculating() as calculating:
        generate, train = map(bare, PARTS)
    return Bare(
        generate_s=generate["cpu_s"],
        train_s=train["cpu_s"],
        busiest_s=max(generate["busiest_s"], train["busiest_s"]),
        length=generate["length"],
        calculation_ms=calculating.mean_ms(),
    )


def without_spinning(threads: int) -> dict[str, str]:
    """Returns the variables for `threads` threads that sleep while they wait for each other."""
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def measure_run(job: Job, config: Path, directory: Path, steps: int) -> Measured:
    """Runs the job and measures `steps` steps of it."""
    last = FIRST + steps
    usages = []
    metrics = directory / "run" / "metrics.jsonl"

    def watch(driver: psutil.Process) -> None:
        usages.append(cpu_of_rooms(driver))
        deadline = time.monotonic() + DEADLINE_S
        while len(metrics.read_text().splitlines()) <= last and driver.is_running() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        usages.append(cpu_of_rooms(driver))

    with Calculating() as calculating:
        run = run_rl(config, "--max-steps", str(last + 1 + REST), directory=directory, first_step=FIRST, then=watch)
    rows = run.rows[FIRST + 1 : last + 1]
    rollouts = sum(row["perf/rollouts"] for row in rows)
    before, after = usages
    cpu_s = {room: (seconds - before.get(room, 0.0)) * ROLLOUTS / rollouts for room, seconds in after.items()}
    return Measured(
        seconds=rows[-1]["time/unix"] - run.rows[FIRST]["time/unix"],
        rollouts=rollouts,
        length=sum(row["perf/tokens"] for row in rows) / rollouts,
        cpu_s={room: round(seconds, 3) for room, seconds in cpu_s.items()},
        calculation_ms=calculating.mean_ms(first=run.rows[FIRST]["time/unix"], last=rows[-1]["time/unix"]),
        load_before=run.load_before,
    )


def judge(name: str, job: Job, bare: Sequence[Bare], runs: Sequence[Measured]) -> Result:
    """Returns the result of a job: medians of its rounds. `bare`: around each of `runs`, so one more."""
    cores = len(os.sched_getaffinity(0))
    around = [Bare.mean(*pair) for pair in pairwise(bare)]
    ratios = [run.rate / bound.limit(cores) for run, bound in zip(runs, around, strict=True)]
    slower = [run.calculation_ms / bound.calculation_ms for run, bound in zip(runs, around, strict=True)]
    by_room: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for room, seconds in run.cpu_s.items():
            by_room[room].append(seconds)
    cpu_s = {room: median(seconds) for room, seconds in by_room.items()}
    engine_core, trainer_shard = COMPUTING
    of_bare = {
        engine_core: median([bound.generate_s for bound in around]),
        trainer_shard: median([bound.train_s for bound in around]),
    }
    used = [run.total_s * run.rate / ROLLOUTS for run in runs]

    def of_limit(rate: Callable[[Measured], float], *, other_processes: bool = False) -> float:
        limits = [bound.limit(cores, run.others_s * other_processes) for run, bound in zip(runs, around, strict=True)]
        return median([rate(run) / limit for run, limit in zip(runs, limits, strict=True)])

    ratio = median(ratios)
    return Result(
        name=f"whole_job, {name}",
        value=median([run.rate for run in runs]),
        unit="rollouts/s",
        ratio=ratio,
        target=job.target,
        holds=ratio >= job.target,
        against="the limit: cores over the bare work's CPU seconds, or 1 over those of its busiest thread",
        detail={
            "ratios": [round(bound, 3) for bound in ratios],
            "slowdown": [round(bound, 3) for bound in slower],
            "ratio_at_one_speed": [round(bound * slow, 3) for bound, slow in zip(ratios, slower, strict=True)],
            "limit_rollouts_per_s": round(median([bound.limit(cores) for bound in around]), 1),
            "limit_of_cores": round(median([ROLLOUTS * cores / (b.generate_s + b.train_s) for b in around]), 1),
            "limit_of_busiest_thread": round(median([ROLLOUTS / b.busiest_s for b in around]), 1),
            "cpu_ratio": of_limit(lambda run: ROLLOUTS * cores / run.total_s),
            "ratio_with_others": of_limit(lambda run: run.rate, other_processes=True),
            "share_of_engine_and_shard": median([1 - run.others_s / run.total_s for run in runs]),
            "cpu_s_of_all": median([run.total_s for run in runs]),
            "cpu_s": cpu_s,
            "over_bare": {room: round(seconds - of_bare.get(room, 0.0), 3) for room, seconds in cpu_s.items()},
            "idle_cores": round(cores - median(used), 3),
            "bare": [asdict(bound) for bound in bare],
            "runs": [asdict(run) | {"rollouts_per_s": round(run.rate, 1)} for run in runs],
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=JOBS, help="one of the jobs (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs, with bare work around each (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each run (default: 12)")
    parser.add_argument("--threads", type=int, default=1, help="of each process that computes (default: 1, the run's)")
    args = parser.parse_args()
    let_actors_import_benchmarks()
    os.environ.update(without_spinning(args.threads))
    cores = len(os.sched_getaffinity(0))
    for name, job in JOBS.items():
        if args.only not in (None, name):
            continue
        bare: list[Bare] = []
        runs: list[Measured] = []
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            model = Path(directory) / "model"
            config = Path(directory) / "job.json"
            make_model(model, PROMPT + job.longest)
            config.write_text(json.dumps(job.config(model)))
            bare.append(measure_bare(job, model, args.threads))
            print(f"{name}: limit {bare[0].limit(cores):.1f} rollouts/s ({bare[0]})", flush=True)
            for round_ in range(args.rounds):
                run = measure_run(job, config, Path(directory) / f"round_{round_}", args.steps)
                runs.append(run)
                print(f"{name}: {run.rate:.1f} rollouts/s, {run.total_s:.2f} CPU s a step", flush=True)
                bare.append(measure_bare(job, model, args.threads))
                around = Bare.mean(*bare[-2:])
                print(
                    f"    {run.rate / around.limit(cores):.3f} of {around.limit(cores):.1f} rollouts/s, {around}",
                    flush=True,
                )
        judge(name, job, bare, runs).print()


if __name__ == "__main__":
    main()
