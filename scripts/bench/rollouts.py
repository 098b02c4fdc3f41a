"""Measures how many turns per second the orchestrator processes with 10,000 rollouts of three turns in flight.

    python scripts/bench/rollouts.py [--rollouts 10000] [--repeats 3] [--rounds 3]

The guessing game of `configs/guess.toml`, whose guesses are never right here, so that each game has three turns.
Nothing of the orchestrator is left out; the replica is none: it holds all answers of a turn back until every rollout
has asked, and then gives them at once. So all rollouts are in flight the whole time, each with what it has said so far.

Each repeat is a process of its own, after a warm-up, with all its threads on one core, and plays all rollouts
`--rounds` times. The last line of the output is the result: turns a second of wall time, and what a rollout takes of
memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

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

from trireme.core.types import SampledSequence, SampleRequest

TURNS = 3
CONFIG = ROOT / "configs" / "guess.toml"
FLAGS = ("@", str(CONFIG), "--env.args.max-turns", str(TURNS), "--model.max-seq-len", "64")
WARM_UP_ROLLOUTS = 512
TARGET_TURNS_PER_S = 3000.0


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
    from orchestrator.actor import spare_collector

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000, help="at once (default: 10000)")
    parser.add_argument("--repeats", type=int, default=3, help="processes (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="in each process (default: 3)")
    parser.add_argument("--measure", action="store_true", help="one repeat, in this process")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(asdict(measure_here(args.rollouts, args.rounds))), flush=True)
        return
    sizes = ["--rollouts", str(args.rollouts), "--rounds", str(args.rounds)]
    command = [sys.executable, str(Path(__file__)), "--measure", *sizes]
    runs = [Measured(**run_for_json(command, {})[1]) for _ in range(args.repeats)]
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
            "kb_per_rollout": median([run.peak_bytes / args.rollouts / 1000 for run in runs]),
            "runs": [asdict(run) for run in runs],
        },
    ).print()


if __name__ == "__main__":
    main()
