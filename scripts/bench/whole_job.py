"""Rollouts per second of a whole run at its defaults, over what its two cores could give to the bare work.

    python scripts/bench/whole_job.py [--only short|long|long_k2] [--rounds 3] [--steps 12] [--threads 1]

The job: 32 problems, 8 rollouts of each, of a random model whose answers end by chance (`ending.py`), at most 32
tokens long (`short`) or at most 384 (`long`, `long_k2`), on one shard and one replica. max_steps_off_policy is 1
(`long_k2`: 2). The learning rate is as good as 0. Everything else has its default.

The limit, which is printed first, is the smaller of two rates: all cores over the CPU seconds of the bare work, and 1
over the CPU seconds of its busiest thread. The bare work (`bare_job.py`) is `LLM.generate` with all sequences of a step
at once, and a plain Hugging Face forward and backward over as many answers, each alone in its process. It and the run
have the same number of threads, which never spin.

Rounds alternate between the bare work and the run. Each run is measured between two of its steps. The last lines of the
output are the results, a JSON object for each job:

    value         rollouts/s by the clock; it means little where others use the machine
    ratio         that over the limit
    detail        `cpu_ratio`: the rate if no core were ever idle, by the CPU seconds of all processes, over the limit;
                  `cpu_s`: CPU seconds for a step's 256 rollouts by room, and `over_bare`: what each adds to the bare
                  work; `idle_cores`: cores that no process of the run used, on average; the other parts of the loss
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from _common import DEADLINE_S, POLL_S, Result, cpu_by_room, median, room_of, run_for_json, run_rl
from _rooms import let_actors_import_benchmarks
from ending import ENV_ID, PROMPT, make_model

PROBLEMS, GROUP_SIZE = 32, 8
ROLLOUTS = PROBLEMS * GROUP_SIZE
FIRST, REST = 3, 2
"""Steps of a run before those that are measured, and after them: in its last ones it has nothing left to sample."""
BARE_REPEATS = 3


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
    seeded_s: float
    """`generate_s` where each sequence has a seed of its own."""
    length: float

    def limit(self, cores: int) -> float:
        """Returns the most rollouts per second."""
        return ROLLOUTS * min(cores / (self.generate_s + self.train_s), 1 / self.busiest_s)


@dataclass
class Usage:
    """CPU seconds so far of a run's rooms and threads."""

    rooms: Mapping[str, float]
    threads: Mapping[str, float]

    @classmethod
    def of(cls, driver: psutil.Process) -> Usage:
        rooms = {room: sum(seconds) for room, seconds in cpu_by_room(driver).items()}
        threads: dict[str, float] = {}
        for process in (driver, *driver.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                room = room_of(process) if process != driver else "driver"
                threads |= {f"{room} {t.id}": t.user_time + t.system_time for t in process.threads()}
        return cls(rooms, threads)

    def since(self, before: Usage) -> Usage:
        return Usage(
            {room: seconds - before.rooms.get(room, 0.0) for room, seconds in self.rooms.items()},
            {thread: seconds - before.threads.get(thread, 0.0) for thread, seconds in self.threads.items()},
        )


@dataclass
class Measured:
    """One run between two of its steps."""

    seconds: float
    rollouts: float
    length: float
    cpu_s: Mapping[str, float]
    """CPU seconds for ROLLOUTS, by room."""
    busiest: str
    """The room of the busiest thread."""
    busiest_s: float
    """CPU seconds of that thread for ROLLOUTS."""
    loss: Mapping[str, float] = field(default_factory=dict)
    load_before: float = 0.0

    @property
    def rate(self) -> float:
        return self.rollouts / self.seconds

    @property
    def total_s(self) -> float:
        return sum(self.cpu_s.values())


def measure_bare(job: Job, model: Path, threads: int) -> Bare:
    """Measures the bare work in processes of their own, one after the other."""
    found = {}
    for name, part, *flags in (("generate", "generate"), ("seeded", "generate", "--seeds"), ("train", "train")):
        sizes = [str(job.longest), str(ROLLOUTS), str(BARE_REPEATS)]
        command = [sys.executable, str(Path(__file__).parent / "bare_job.py"), part, str(model), *sizes, *flags]
        found[name] = run_for_json(command, without_spinning(threads))[1]
    busiest = max(found["generate"]["busiest_s"], found["train"]["busiest_s"])
    generate, train, seeded = (found[name]["cpu_s"] for name in ("generate", "train", "seeded"))
    return Bare(generate, train, busiest, seeded, found["generate"]["length"])


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

    run = run_rl(config, "--max-steps", str(last + 1 + REST), directory=directory, first_step=FIRST, then=watch)
    rows = run.rows[FIRST + 1 : last + 1]
    rollouts = sum(row["perf/rollouts"] for row in rows)
    used = usages[1].since(usages[0])
    of_step = ROLLOUTS / rollouts
    busiest = max(used.threads, key=used.threads.__getitem__)
    return Measured(
        seconds=rows[-1]["time/unix"] - run.rows[FIRST]["time/unix"],
        rollouts=rollouts,
        length=sum(row["perf/tokens"] for row in rows) / rollouts,
        cpu_s={room: round(seconds * of_step, 3) for room, seconds in used.rooms.items()},
        busiest=busiest.rpartition(" ")[0],
        busiest_s=round(used.threads[busiest] * of_step, 3),
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
    idle_s = cores * step_s - run.total_s
    return f"    a step of {step_s:.2f} s: CPU seconds {used}; idle {idle_s:.2f}\n    seconds of its loop: {waits}"


def judge(name: str, job: Job, bare: Sequence[Bare], runs: Sequence[Measured]) -> Result:
    """Returns the result of a job: medians of its rounds."""
    cores = len(os.sched_getaffinity(0))
    limit = median([each.limit(cores) for each in bare])
    rate, total_s = median([run.rate for run in runs]), median([run.total_s for run in runs])
    by_room: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for room, seconds in run.cpu_s.items():
            by_room[room].append(seconds)
    cpu_s = {room: median(seconds) for room, seconds in by_room.items()}
    of_bare = {"engine core": median([b.generate_s for b in bare]), "trainer shard": median([b.train_s for b in bare])}
    used = [run.total_s * run.rate / ROLLOUTS for run in runs]
    return Result(
        name=f"whole_job, {name}",
        value=rate,
        unit="rollouts/s",
        ratio=round(rate / limit, 3),
        target=job.target,
        holds=rate / limit >= job.target,
        against="the limit: cores over the bare work's CPU seconds, or 1 over those of its busiest thread",
        detail={
            "limit_rollouts_per_s": round(limit, 1),
            "limit_of_cores": round(median([ROLLOUTS * cores / (b.generate_s + b.train_s) for b in bare]), 1),
            "limit_of_busiest_thread": round(median([ROLLOUTS / b.busiest_s for b in bare]), 1),
            "cpu_ratio": round(ROLLOUTS * cores / total_s / limit, 3),
            "busiest_thread_ratio": round(ROLLOUTS / median([run.busiest_s for run in runs]) / limit, 3),
            "cpu_s_of_all": total_s,
            "cpu_s": cpu_s,
            "over_bare": {room: round(seconds - of_bare.get(room, 0.0), 3) for room, seconds in cpu_s.items()},
            "idle_cores": round(cores - median(used), 3),
            "loss": {key: median([run.loss[key] for run in runs]) for key in runs[0].loss},
            "bare": [asdict(each) for each in bare],
            "runs": [asdict(run) | {"rollouts_per_s": round(run.rate, 1)} for run in runs],
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=JOBS, help="one of the jobs (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="bare work and run, in turn (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each run (default: 12)")
    parser.add_argument("--threads", type=int, default=1, help="of each process that computes (default: 1, the run's)")
    args = parser.parse_args()
    let_actors_import_benchmarks()
    os.environ.update(without_spinning(args.threads))
    for name, job in JOBS.items():
        if args.only not in (None, name):
            continue
        bare: list[Bare] = []
        runs: list[Measured] = []
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            model, config = Path(directory) / "model", Path(directory) / "job.json"
            make_model(model, PROMPT + job.longest)
            config.write_text(json.dumps(job.config(model)))
            for round_ in range(args.rounds):
                bare.append(measure_bare(job, model, args.threads))
                if not round_:
                    print(f"{name}: limit {bare[0].limit(len(os.sched_getaffinity(0))):.1f} rollouts/s", flush=True)
                runs.append(measure_run(job, config, Path(directory) / f"round_{round_}", args.steps))
                print(f"{name}: {runs[-1].rate:.1f} rollouts/s, {runs[-1].total_s:.2f} CPU s a step", flush=True)
                print(account(runs[-1], len(os.sched_getaffinity(0))), flush=True)
        judge(name, job, bare, runs).print()


if __name__ == "__main__":
    main()
