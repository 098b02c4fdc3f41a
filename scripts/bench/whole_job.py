"""Rollouts per second of a whole run at its defaults, over what its two cores could give to the bare work.

    python scripts/bench/whole_job.py [--only short|long|long_k2] [--rounds 3] [--steps 12] [--threads 1]

The job: 32 problems, 8 rollouts of each, of a random model whose answers end by chance (`ending.py`), at most 32
tokens long (`short`) or at most 384 (`long`, `long_k2`), on one shard and one replica. max_steps_off_policy is 1
(`long_k2`: 2). The learning rate is as good as 0. Everything else has its default.

The limit, which is printed first, is the smaller of two rates: all cores over the CPU seconds of the bare work, and 1
over the CPU seconds of its busiest thread. The bare work (`bare_job.py`) is `LLM.generate` with all sequences of a step
at once, and a plain Hugging Face forward and backward over as many answers, each alone in its process. It and the run
have the same number of threads, which never spin.

A machine may change its speed from minute to minute, so bare work is measured before and after each run, whose limit is
that of the mean of both. Each run is measured between two of its steps. Beside everything, a fixed calculation of some
milliseconds is repeated once a second (`speed.py`). The last lines of the output are the results, a JSON object for
each job. Values are medians of the rounds.

    value         rollouts/s by the clock; it means little where others use the machine
    ratio         that over the limit
    detail        `ratios`: of each round; `slowdown`: CPU time of the fixed calculation beside the run over that beside
                  its bare work, and `ratio_at_one_speed`: the ratio times that;
                  `cpu_ratio`: the rate if no core were ever idle, by the CPU seconds of all processes, over the limit;
                  `ratio_beside`: the rate over a limit for which both parts of the bare work are measured at the same
                  time, since cores share memory and caches;
                  `ratio_with_others`: the rate over a limit that counts what the processes beside engine and shard use;
                  `share_of_engine_and_shard`: of the CPU seconds of all processes;
                  `cpu_s`: CPU seconds for a step's 256 rollouts by room, and `over_bare`: what each adds to the bare
                  work; `idle_cores`: cores that no process of the run used, on average; `cores_s`: seconds of a step of
                  cores without work, and of those that the host took; the other parts of the loss
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from _common import DEADLINE_S, POLL_S, Result, cpu_by_room, median, room_of, run_for_json, run_rl
from _rooms import let_actors_import_benchmarks
from ending import ENV_ID, PROMPT, make_model
from speed import Calculating

PROBLEMS, GROUP_SIZE = 32, 8
ROLLOUTS = PROBLEMS * GROUP_SIZE
FIRST, REST = 3, 2
"""Steps of a run before those that are measured, and after them: in its last ones it has nothing left to sample."""
BARE_REPEATS = 3
BUSIEST = 12
"""Threads of a run that are listed."""
PARTS = ("generate", "train")
COMPUTING = ("engine core", "trainer shard")
"""The rooms whose work the bare work is, in the order of its parts."""


@dataclass(frozen=True)
class Job:
    """One of the jobs that are measured."""

    longest: int
    """Tokens of an answer, at most."""
    max_steps_off_policy: int
    target: float
    """Least share of the limit."""

    def config(self, model: Path) -> dict[str, Any]:
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
    generate_beside_s: float
    """`generate_s` while the other part is computed on another core, as it is in a run."""
    train_beside_s: float
    """The same of `train_s`."""

    def limit(self, cores: int, others_s: float = 0.0) -> float:
        """Returns the most rollouts per second. `others_s`: CPU seconds that other processes need too."""
        return ROLLOUTS * min(cores / (self.generate_s + self.train_s + others_s), 1 / self.busiest_s)

    def limit_beside(self, cores: int) -> float:
        """Returns the most rollouts per second while both parts compute at the same time."""
        both, busier = self.generate_beside_s + self.train_beside_s, max(self.generate_beside_s, self.train_beside_s)
        return ROLLOUTS * min(cores / both, 1 / busier)

    @classmethod
    def mean(cls, before: Bare, after: Bare) -> Bare:
        """Returns the mean of what was measured before and after a run."""
        pairs = zip(astuple(before), astuple(after), strict=True)
        return cls(*(round((first + second) / 2, 3) for first, second in pairs))


@dataclass
class Usage:
    """Seconds so far of a run's rooms and threads: on a core, and of threads also waiting for one; and of the machine's
    cores: without work, and taken by its host."""

    rooms: Mapping[str, float]
    threads: Mapping[str, float]
    waits: Mapping[str, float]
    cores: Mapping[str, float]

    @classmethod
    def of(cls, driver: psutil.Process) -> Usage:
        rooms = {room: sum(seconds) for room, seconds in cpu_by_room(driver).items()}
        threads: dict[str, float] = {}
        waits: dict[str, float] = {}
        for process in (driver, *driver.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, FileNotFoundError):  # one of its threads may end meanwhile
                room = room_of(process) if process != driver else "driver"
                for thread in process.threads():
                    task = Path(f"/proc/{process.pid}/task/{thread.id}")
                    name = f"{room}, {(task / 'comm').read_text().strip()} {thread.id}"
                    threads[name] = thread.user_time + thread.system_time
                    waits[name] = int((task / "schedstat").read_text().split()[1]) / 1e9
        times = psutil.cpu_times()
        return cls(rooms, threads, waits, {"idle": times.idle + times.iowait, "stolen": times.steal})

    def since(self, before: Usage, share: float) -> Usage:
        """Returns `share` of what was used since `before`."""

        def used(now: Mapping[str, float], then: Mapping[str, float]) -> dict[str, float]:
            return {name: round((seconds - then.get(name, 0.0)) * share, 3) for name, seconds in now.items()}

        kinds = zip(astuple(self), astuple(before), strict=True)
        return Usage(*(used(now, then) for now, then in kinds))


@dataclass
class Measured:
    """One run between two of its steps."""

    seconds: float
    rollouts: float
    length: float
    cpu_s: Mapping[str, float]
    """CPU seconds for ROLLOUTS, by room."""
    threads: Mapping[str, tuple[float, float]]
    """Of the busiest ones, the busiest first: CPU seconds for ROLLOUTS, and seconds in which it waited for a core."""
    cores: Mapping[str, float]
    """Seconds for ROLLOUTS of cores without work (`idle`), and of those that the host took (`stolen`)."""
    calculation_ms: float
    """CPU milliseconds of the fixed calculation meanwhile."""
    loss: Mapping[str, float] = field(default_factory=dict)
    load_before: float = 0.0

    @property
    def rate(self) -> float:
        return self.rollouts / self.seconds

    @property
    def busiest_s(self) -> float:
        """CPU seconds of the busiest thread for ROLLOUTS."""
        return next(iter(self.threads.values()))[0]

    @property
    def busiest_waited_s(self) -> float:
        """Seconds for ROLLOUTS in which the busiest thread waited for a core."""
        return next(iter(self.threads.values()))[1]

    @property
    def total_s(self) -> float:
        return sum(self.cpu_s.values())

    @property
    def others_s(self) -> float:
        """CPU seconds for ROLLOUTS of all processes but engine and shard."""
        return sum(seconds for room, seconds in self.cpu_s.items() if room not in COMPUTING)


def measure_bare(job: Job, model: Path, threads: int) -> Bare:
    """Measures the bare work in processes of their own: one after the other, then both at the same time."""

    def bare(part: str, *flags: str) -> dict[str, Any]:
        sizes = [str(job.longest), str(ROLLOUTS), str(BARE_REPEATS)]
        command = [sys.executable, str(Path(__file__).parent / "bare_job.py"), part, str(model), *sizes, *flags]
        return run_for_json(command, without_spinning(threads))[1]

    with Calculating() as calculating:
        generate, train = map(bare, PARTS)
    with tempfile.TemporaryDirectory(prefix="bench-") as meeting, ThreadPoolExecutor(len(PARTS)) as threads_of_parts:
        beside = threads_of_parts.map(lambda part: bare(part, "--beside", meeting), PARTS)
        generate_beside, train_beside = beside
    return Bare(
        generate_s=generate["cpu_s"],
        train_s=train["cpu_s"],
        busiest_s=max(generate["busiest_s"], train["busiest_s"]),
        length=generate["length"],
        calculation_ms=calculating.mean_ms(),
        generate_beside_s=generate_beside["cpu_s"],
        train_beside_s=train_beside["cpu_s"],
    )


def without_spinning(threads: int) -> dict[str, str]:
    """Returns the variables for `threads` threads that sleep while they wait for each other."""
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def measure_run(job: Job, config: Path, directory: Path, steps: int) -> Measured:
    """Runs the job and measures `steps` steps of it."""
    last, usages = FIRST + steps, []
    metrics = directory / "run" / "metrics.jsonl"

    def watch(driver: psutil.Process) -> None:
        usages.append(Usage.of(driver))
        deadline = time.monotonic() + DEADLINE_S
        while len(metrics.read_text().splitlines()) <= last and driver.is_running() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        usages.append(Usage.of(driver))

    with Calculating() as calculating:
        run = run_rl(config, "--max-steps", str(last + 1 + REST), directory=directory, first_step=FIRST, then=watch)
    rows = run.rows[FIRST + 1 : last + 1]
    rollouts = sum(row["perf/rollouts"] for row in rows)
    used = usages[1].since(usages[0], ROLLOUTS / rollouts)
    busiest = sorted(used.threads, key=used.threads.__getitem__, reverse=True)[:BUSIEST]
    return Measured(
        seconds=rows[-1]["time/unix"] - run.rows[FIRST]["time/unix"],
        rollouts=rollouts,
        length=sum(row["perf/tokens"] for row in rows) / rollouts,
        cpu_s=used.rooms,
        threads={name: (used.threads[name], used.waits[name]) for name in busiest},
        cores=used.cores,
        calculation_ms=calculating.mean_ms(first=run.rows[FIRST]["time/unix"], last=rows[-1]["time/unix"]),
        loss=loss_of(rows, run.rows[FIRST]),
        load_before=run.load_before,
    )


def loss_of(rows: Sequence[Mapping[str, Any]], before: Mapping[str, Any]) -> dict[str, float]:
    """Returns what a run says of its own losses between the row `before` and the last of `rows`."""
    endings = ("trained", "requeued", "dropped", "failed")
    groups = {name: rows[-1].get(f"ledger/{name}", 0.0) - before.get(f"ledger/{name}", 0.0) for name in endings}
    step_s = sum(row["time/step"] for row in rows)
    parts = ("wait_for_batch", "forward_backward", "optim", "publish", "update_replicas", "checkpoint_stall")
    return {
        "wasted_groups": round(1 - groups["trained"] / (sum(groups.values()) or 1.0), 4),
        "step_s": round(step_s / len(rows), 4),
        **{f"{part}_s": round(sum(row[f"time/{part}"] for row in rows) / len(rows), 4) for part in parts},
        "update_pause_s": round(sum(row["time/update_pause"] for row in rows) / len(rows), 4),
        "cut_wait_s": round(sum(row["perf/cut_wait_s"] for row in rows) / len(rows), 4),
        "inference_idle_frac": round(sum(row["perf/inference_idle_s"] for row in rows) / step_s, 4),
    }


def account(run: Measured, cores: int) -> str:
    """Says where the time of a step went: on which process, on none, and what its loop waited for."""
    step_s = ROLLOUTS / run.rate
    used = ", ".join(f"{room} {seconds:.2f}" for room, seconds in sorted(run.cpu_s.items(), key=lambda each: -each[1]))
    waits = ", ".join(
        f"{part.removesuffix('_s')} {seconds:.3f}" for part, seconds in run.loss.items() if part[-2:] == "_s"
    )
    unused_s = cores * step_s - run.total_s
    others_s = unused_s - sum(run.cores.values())
    rest = ", ".join([*(f"{kind} {seconds:.2f}" for kind, seconds in run.cores.items()), f"others {others_s:.2f}"])
    threads = "; ".join(f"{name} {on:.2f} + {waiting:.2f}" for name, (on, waiting) in run.threads.items())
    return (
        f"    a step of {step_s:.2f} s: CPU seconds {used}; not used {unused_s:.2f} ({rest})\n"
        f"    seconds of its loop: {waits}\n"
        f"    threads, seconds on a core and waiting for one: {threads}"
    )


def judge(name: str, job: Job, bare: Sequence[Bare], runs: Sequence[Measured]) -> Result:
    """Returns the result of a job: medians of its rounds. `bare`: around each of `runs`, so one more."""
    cores = len(os.sched_getaffinity(0))
    around = [Bare.mean(*pair) for pair in pairwise(bare)]
    ratios = [run.rate / each.limit(cores) for run, each in zip(runs, around, strict=True)]
    slower = [run.calculation_ms / each.calculation_ms for run, each in zip(runs, around, strict=True)]
    by_room: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for room, seconds in run.cpu_s.items():
            by_room[room].append(seconds)
    cpu_s = {room: median(seconds) for room, seconds in by_room.items()}
    engine_core, trainer_shard = COMPUTING
    of_bare = {
        engine_core: median([each.generate_s for each in around]),
        trainer_shard: median([each.train_s for each in around]),
    }
    used = [run.total_s * run.rate / ROLLOUTS for run in runs]

    def of_limit(rate: Callable[[Measured], float], *, others: bool = False) -> float:
        limits = [each.limit(cores, run.others_s * others) for run, each in zip(runs, around, strict=True)]
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
            "ratios": [round(each, 3) for each in ratios],
            "slowdown": [round(each, 3) for each in slower],
            "ratio_at_one_speed": [round(each * slow, 3) for each, slow in zip(ratios, slower, strict=True)],
            "limit_rollouts_per_s": round(median([each.limit(cores) for each in around]), 1),
            "limit_of_cores": round(median([ROLLOUTS * cores / (b.generate_s + b.train_s) for b in around]), 1),
            "limit_beside": round(median([each.limit_beside(cores) for each in around]), 1),
            "ratio_beside": median([r.rate / each.limit_beside(cores) for r, each in zip(runs, around, strict=True)]),
            "limit_of_busiest_thread": round(median([ROLLOUTS / b.busiest_s for b in around]), 1),
            "cpu_ratio": of_limit(lambda run: ROLLOUTS * cores / run.total_s),
            "busiest_thread_ratio": of_limit(lambda run: ROLLOUTS / run.busiest_s),
            "ratio_with_others": of_limit(lambda run: run.rate, others=True),
            "share_of_engine_and_shard": median([1 - run.others_s / run.total_s for run in runs]),
            "cpu_s_of_all": median([run.total_s for run in runs]),
            "cpu_s": cpu_s,
            "over_bare": {room: round(seconds - of_bare.get(room, 0.0), 3) for room, seconds in cpu_s.items()},
            "idle_cores": round(cores - median(used), 3),
            "cores_s": {kind: median([run.cores[kind] for run in runs]) for kind in runs[0].cores},
            "busiest_thread_waited_for_a_core_s": median([run.busiest_waited_s for run in runs]),
            "loss": {key: median([run.loss[key] for run in runs]) for key in runs[0].loss},
            "bare": [asdict(each) for each in bare],
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
            model, config = Path(directory) / "model", Path(directory) / "job.json"
            make_model(model, PROMPT + job.longest)
            config.write_text(json.dumps(job.config(model)))
            bare.append(measure_bare(job, model, args.threads))
            print(f"{name}: limit {bare[0].limit(cores):.1f} rollouts/s ({bare[0]})", flush=True)
            for round_ in range(args.rounds):
                run = measure_run(job, config, Path(directory) / f"round_{round_}", args.steps)
                runs.append(run)
                print(f"{name}: {run.rate:.1f} rollouts/s, {run.total_s:.2f} CPU s a step", flush=True)
                print(account(run, cores), flush=True)
                bare.append(measure_bare(job, model, args.threads))
                around = Bare.mean(*bare[-2:])
                print(
                    f"    {run.rate / around.limit(cores):.3f} of {around.limit(cores):.1f} rollouts/s, {around}",
                    flush=True,
                )
        judge(name, job, bare, runs).print()


if __name__ == "__main__":
    main()
