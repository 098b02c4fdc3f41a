"""Kills the parts of runs, and says what became of them.

    python scripts/chaos.py matrix [--victim shard ...] [--moment checkpoint ...] [--stop] [--results FILE]
    python scripts/chaos.py soak [--steps 300] [--every 20] [--seed 0]

`matrix`: every victim at every moment (`tests/e2e/chaos_support.py`), one small run for each: about a minute and a half
on two cores. `--stop`: SIGSTOP, for longer than the deadline, instead of SIGKILL. A run has come through when
everything that it left is whole: each step and each problem once, the bound, the last checkpoint, no process and no
file in shared memory. `--results` keeps the results, one line of JSON a cell; cells that are in it already are not run
again. The table of all cells is printed at the end, as Markdown.

`soak`: one long run that loses a random part again and again, and alongside it an undisturbed one. Prints how the
memory of every process of both went, and both reward curves.

Ends with 1 when something is not as it should be; the directories of such runs are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))

from chaos_support import (
    CHAOS,
    MOMENTS,
    PARTS,
    VICTIMS,
    Cell,
    assert_whole,
    end_of,
    parts_of,
    run_cell,
    started,
    victims,
)
from resume_support import rows_of
from run_support import Running

MEBI = 2**20
SOAK = [
    *CHAOS,
    *("--checkpoint.every", "10", "--checkpoint.keep-last", "2"),
    *("--cluster.max-restarts", "1000", "--eval.every", "0"),
]
LOOK_S = 0.5
LONG_LIFE = 40
"""Steps that a process must be sampled at for a slope to mean something."""
MEANS = 10
"""Points of a printed reward curve."""


# -------------------------------------------------------------------------------------------------------------- matrix


def matrix(args: argparse.Namespace) -> bool:
    sends = signal.SIGSTOP if args.stop else signal.SIGKILL
    results = rows_of(args.results) if args.results else []
    finished = {(row["victim"], row["moment"], row["sends"]) for row in results}
    cells = [Cell(victim, moment, sends) for moment in args.moment for victim in args.victim]
    for cell in cells:
        if (cell.victim, cell.moment, sends.name) in finished:
            continue
        results.append(run_one(cell))
        if args.results:
            with args.results.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
        print(f"{cell}: {summary_of(results[-1])}", flush=True)
    results = [row for row in results if row["sends"] == sends.name]
    print("\n" + table(results))
    return all(row["failure"] is None for row in results)


def run_one(cell: Cell) -> dict[str, object]:
    """The result of one cell. `failure`: what was wrong; None if everything was whole."""
    place = Path(tempfile.mkdtemp(prefix="chaos-"))
    started = time.monotonic()
    failure = None
    try:
        assert_whole(run_cell(place, cell))
    except Exception:
        failure = f"{place}: {traceback.format_exc()}"
    result = {
        "victim": cell.victim,
        "moment": cell.moment,
        "sends": cell.sends.name,
        "seconds": round(time.monotonic() - started),
        "incidents": [f"{row['part']}: {row['what']}" for row in rows_of(place / "run" / "incidents.jsonl")],
        "failure": failure,
    }
    if failure is None:
        shutil.rmtree(place)
    return result


def summary_of(result: dict[str, Any]) -> str:
    return result["failure"] or f"whole, after {result['seconds']} s, {len(result['incidents'])} incidents"


def table(results: Sequence[dict[str, object]]) -> str:
    """Moments by victims, as Markdown: the seconds of a whole cell, start and end of the run included. Empty: it was
    not run."""
    cells = {(row["victim"], row["moment"]): row for row in results}
    columns, lines = ([name for name in names if any(name in cell for cell in cells)] for names in (VICTIMS, MOMENTS))

    def told_in_a_cell(victim: str, moment: str) -> str:
        row = cells.get((victim, moment))
        if row is None:
            return ""
        if row["failure"]:
            return "FAILED"
        return f"{row['seconds']} s"

    rows = [["at", *columns], ["---"] * (len(columns) + 1)]
    rows += [[moment, *(told_in_a_cell(victim, moment) for victim in columns)] for moment in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# ---------------------------------------------------------------------------------------------------------------- soak


@dataclass
class Memory:
    """Resident bytes of each process of a run, by part and process id, with the step at which they were sampled. Shared
    bytes do not count: Ray's object store has a size of its own, and a process maps ever more of it."""

    samples: defaultdict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def look(self, running: Running, step: int) -> None:
        for part, pids in {"driver_0": [running.process.pid], **parts_of(running.mark)}.items():
            for place, pid in enumerate(pids[:2]):
                if place and part.startswith("inference"):
                    name = f"{part} engine"
                else:
                    name = part
                try:
                    memory = psutil.Process(pid).memory_info()
                    self.samples[name, pid].append((step, memory.rss - memory.shared))
                except psutil.NoSuchProcess:
                    continue

    def lines(self) -> list[str]:
        """Returns MiB at the end and the slope over the second half of life, for each long-lived process."""
        lines = []
        for (name, pid), points in sorted(self.samples.items()):
            steps, sizes = zip(*points[len(points) // 2 :], strict=True)
            if points[-1][0] - points[0][0] >= LONG_LIFE and len(set(steps)) > 1:
                slope = statistics.linear_regression(steps, sizes).slope / MEBI
                life = f"steps {points[0][0]} to {points[-1][0]}"
                lines.append(f"| {name} ({pid}) | {life} | {sizes[-1] / MEBI:.0f} | {100 * slope:+.2f} |")
        return ["| process | samples | MiB | MiB per 100 steps |", "|---|---|---|---|", *lines]


def soak(args: argparse.Namespace) -> bool:
    flags = [*SOAK, "--max-steps", str(args.steps), "--seed", str(args.seed)]
    given_up = threading.Event()
    with ThreadPoolExecutor(2) as runs:
        quiet = runs.submit(long_run, flags, args.steps, given_up)
        killed = runs.submit(long_run, flags, args.steps, given_up, args.every, random.Random(args.seed))
        try:
            (calm, calm_memory, whole_calm), (wild, memory, whole_wild) = quiet.result(), killed.result()
        finally:
            given_up.set()
    for name, usage in (("without kills", calm_memory), ("with kills", memory)):
        print(f"\n{name}:\n\n" + "\n".join(usage.lines()))
    print("\n| steps | reward without kills | with |\n|---|---|---|")
    size = max(args.steps // MEANS, 1)
    for first in range(0, args.steps, size):
        calm_mean, wild_mean = (mean_reward(rows[first : first + size]) for rows in (calm, wild))
        print(f"| {first} to {first + size - 1} | {calm_mean:.3f} | {wild_mean:.3f} |")
    return whole_calm and whole_wild


def mean_reward(rows: Sequence[dict[str, float]]) -> float:
    if rows:
        return statistics.fmean(row["reward/total"] for row in rows)
    return float("nan")


def long_run(
    flags: Sequence[str],
    steps: int,
    given_up: threading.Event,
    every: int | None = None,
    chance: random.Random | None = None,
) -> tuple[list[dict[str, float]], Memory, bool]:
    """Makes one run, and kills a random part whenever it has come `every` steps further than ever before: returns its
    rows, the memory of its processes, and whether everything that it left is whole. Kills the run itself once
    `given_up` is set."""
    place = Path(tempfile.mkdtemp(prefix="soak-"))
    memory = Memory()
    killed = 0
    metrics = place / "run" / "metrics.jsonl"
    looked = 0
    start = time.monotonic()
    with started(place, flags, {}) as running:
        while running.process.poll() is None:
            if given_up.wait(LOOK_S):
                raise AssertionError("given up")
            step = steps_done(metrics)
            if step != looked:
                memory.look(running, step)
                looked = step
            if every and chance and step >= (killed + 1) * every and step < steps - 1:
                killed += 1
                victim = chance.choice(list(PARTS))
                print(f"step {step}: SIGKILL to {victim}", flush=True)
                for pid in victims(victim, running, None):
                    os.kill(pid, signal.SIGKILL)
        outcome = end_of(running, place)
    print(f"{steps} steps, {killed} kills, {time.monotonic() - start:.0f} s, in {place}", flush=True)
    try:
        assert_whole(outcome, steps)
    except AssertionError:
        traceback.print_exc()
        return outcome.rows, memory, False
    return outcome.rows, memory, True


def steps_done(metrics: Path) -> int:
    """Returns the number of whole rows; the last one may be incomplete."""
    if metrics.exists():
        return metrics.read_bytes().count(b"\n")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("matrix")
    one.add_argument("--victim", nargs="+", choices=VICTIMS, default=VICTIMS)
    one.add_argument("--moment", nargs="+", choices=list(MOMENTS), default=list(MOMENTS))
    one.add_argument("--stop", action="store_true", help="SIGSTOP in place of SIGKILL")
    one.add_argument("--results", type=Path, help="a file that keeps what was found")
    one.set_defaults(run=matrix)
    other = commands.add_parser("soak")
    other.add_argument("--steps", type=int, default=300)
    other.add_argument("--every", type=int, default=20, help="steps between two kills")
    other.add_argument("--seed", type=int, default=0, help="of the run, and of who is killed")
    other.set_defaults(run=soak)
    args = parser.parse_args()
    # A token for the clusters of two nodes: without one Ray writes one into the home directory.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    sys.exit(0 if args.run(args) else 1)


if __name__ == "__main__":
    main()
