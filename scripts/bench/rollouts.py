"""Measures what a turn costs the orchestrator, with 10,000 rollouts in flight, and over Ray by the context's length.

    python scripts/bench/rollouts.py [--only in_flight|over_ray] [--rollouts 10000] [--repeats 3] [--rounds 3]

`in_flight`: turns per second with 10,000 rollouts in flight that play the guessing game of `configs/guess.toml`, whose
guesses are never right here, so that each game has three turns. Nothing of the orchestrator is left out; the replica is
none: it holds all answers of a turn back until every rollout has asked, and then gives them at once. So all rollouts
are in flight the whole time, each with what it has said so far. Each repeat is a process of its own, after a warm-up,
with all its threads on one core, and plays all rollouts `--rounds` times. The result: turns a second of wall time, and
what a rollout takes of memory.

`over_ray`: CPU milliseconds of a turn where the replica is an actor behind the client of a real run, whose answers of
128 tokens are ready; 1, 8, 16 or 64 of them travel together. Contexts and turns: 512/1, 8192/12, 32768/50 (`turns.py`).
The result counts the process of the orchestrator, with a driver that asks for minibatches (`caller_ms`), against the
largest share of its target from 16 answers per message on; the replica's is printed beside it (`callee_ms`).

The last lines of the output are the results, a JSON object each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import _over_ray
from _common import ROOT, Result, median, run_for_json
from pipeline import (
    DISTINCT_ANSWERS,
    GROUP_SIZE,
    ORCHESTRATOR_CORE,
    Measured,
    ReadyAnswers,
    make_pipeline,
    measure,
    pin,
)
from turns import LONG, MIDDLE, SHORT

from trireme.core.types import SampledSequence, SampleRequest

TURNS = 3
CONFIG = ROOT / "configs" / "guess.toml"
FLAGS = ("@", str(CONFIG), "--env.args.max-turns", str(TURNS), "--model.max-seq-len", "64")
WARM_UP_ROLLOUTS = 512
TARGET_TURNS_PER_S = 3000.0
PER_MESSAGE = (1, 8, 16, 64)
JUDGED_FROM = 16
OVER_RAY = {SHORT: (32, 0.35), MIDDLE: (8, 0.45), LONG: (8, 0.6)}
"""Groups of a step, and the target in CPU milliseconds of a turn."""


class TurnByTurn(ReadyAnswers):
    """Answers nobody before all of `rollouts` have asked; then all of them, and the next turn begins."""

    def __init__(self, rollouts: int) -> None:
        super().__init__()
        self._rollouts = self._to_ask = rollouts
        self._turn = asyncio.Event()

    async def sample(self, requests: list[SampleRequest]) -> AsyncIterator[tuple[int, SampledSequence]]:
        turn = self._turn
        self._to_ask -= len(requests)
        if not self._to_ask:
            self._to_ask, self._turn = self._rollouts, asyncio.Event()
            turn.set()
        await turn.wait()
        for index, request in enumerate(requests):
            yield index, self._answers[(request.params.seed or 0) % DISTINCT_ANSWERS]


def play(rollouts: int) -> Measured:
    """All rollouts at once: at K = 1 those of two steps, which are all of the run."""
    return measure(TurnByTurn(rollouts), rollouts // GROUP_SIZE // 2, 2, FLAGS)


def measure_here(rollouts: int, rounds: int) -> Measured:
    """The costs of several rounds are added; the memory is the first one's."""
    from trireme.process.collector import spare_collector

    pin({ORCHESTRATOR_CORE})
    make_pipeline(ReadyAnswers(), 8, 1, FLAGS)  # imports what there is to import
    spare_collector()  # as in the actor
    play(WARM_UP_ROLLOUTS)
    runs = [play(rollouts) for _ in range(rounds)]
    return Measured(
        rollouts=sum(run.rollouts for run in runs),
        wall_s=sum(run.wall_s for run in runs),
        cpu_s=sum(run.cpu_s for run in runs),
        peak_bytes=runs[0].peak_bytes,
        load_before=runs[0].load_before,
    )


def print_in_flight(rollouts: int, rounds: int, repeats: int) -> None:
    sizes = ["--rollouts", str(rollouts), "--rounds", str(rounds)]
    command = [sys.executable, str(Path(__file__)), "--measure", *sizes]
    runs = [Measured(**run_for_json(command, {})[1]) for _ in range(repeats)]
    rate = median([TURNS * run.rollouts / run.wall_s for run in runs])
    Result(
        name="rollouts",
        value=rate,
        unit="turns/s",
        ratio=round(rate / TARGET_TURNS_PER_S, 3),
        target=TARGET_TURNS_PER_S,
        holds=rate >= TARGET_TURNS_PER_S,
        against="the target",
        detail={
            "turns_per_cpu_s": median([TURNS * run.rollouts / run.cpu_s for run in runs]),
            "kb_per_rollout": median([run.peak_bytes / rollouts / 1000 for run in runs]),
            "runs": [asdict(run) for run in runs],
        },
    ).print()


def print_over_ray(repeats: int) -> None:
    """Rounds of all contexts and sizes of messages, in turn; medians."""
    found: dict[str, list[_over_ray.OverRay]] = defaultdict(list)
    for _ in range(repeats):
        for shape, (groups, _target) in OVER_RAY.items():
            for per_message in PER_MESSAGE:
                sizes = map(str, (shape.context, shape.turns, groups, per_message))
                command = [sys.executable, str(Path(__file__)), "--measure-over-ray", *sizes]
                run = _over_ray.OverRay(**run_for_json(command, {})[1])
                found[f"{shape}, {per_message} per message"].append(run)
                print(f"{shape}, {per_message} per message: {run}", flush=True)
    medians = {
        name: {key: median([getattr(run, key) for run in runs]) for key in vars(runs[0])}
        for name, runs in found.items()
    }
    shares = {
        f"{shape}, {n} per message": medians[f"{shape}, {n} per message"]["caller_ms"] / target
        for shape, (_, target) in OVER_RAY.items()
        for n in PER_MESSAGE
        if n >= JUDGED_FROM
    }
    worst = max(shares, key=shares.__getitem__)
    Result(
        name="rollouts, over Ray",
        value=medians[worst]["caller_ms"],
        unit=f"CPU ms of the host per turn, {worst}",
        ratio=round(shares[worst], 3),
        target=1.0,
        holds=shares[worst] <= 1.0,
        against="the target of that context; that with the largest share of its target",
        detail={"targets_ms": {str(shape): target for shape, (_, target) in OVER_RAY.items()}, **medians},
    ).print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("in_flight", "over_ray"), help="one of the two (default: both)")
    parser.add_argument("--rollouts", type=int, default=10_000, help="in flight at once (default: 10000)")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="in each process, in_flight (default: 3)")
    parser.add_argument("--measure", action="store_true", help="one repeat of in_flight, in this process")
    parser.add_argument("--measure-over-ray", nargs=4, metavar=("CONTEXT", "TURNS", "GROUPS", "PER_MESSAGE"))
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(asdict(measure_here(args.rollouts, args.rounds))), flush=True)
        return
    if args.measure_over_ray:
        _over_ray.main(*args.measure_over_ray)
        return
    if args.only in (None, "in_flight"):
        print_in_flight(args.rollouts, args.rounds, args.repeats)
    if args.only in (None, "over_ray"):
        print_over_ray(args.repeats)


if __name__ == "__main__":
    main()
