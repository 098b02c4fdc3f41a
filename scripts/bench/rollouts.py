"""Measures what a turn costs the orchestrator where the replica is an actor behind Ray, by the length of the context.

    python scripts/bench/rollouts.py [--repeats 3]

The replica's answers of 128 tokens are ready; 1, 8, 16 or 64 of them travel together. Contexts and turns: 512/1,
8192/12, 32768/50 (`turns.py`). The result counts CPU milliseconds of the orchestrator's process, with a driver that
asks for minibatches (`caller_ms`), against the largest share of its target from 16 answers per message on; the
replica's is printed alongside it (`callee_ms`). Each measurement is a process of its own, with all its threads on one
core (`_over_ray.py`).

The last line of the output is the result, a JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import _over_ray
from _common import Result, median, run_for_json
from turns import LONG, MIDDLE, SHORT

PER_MESSAGE = (1, 8, 16, 64)
JUDGED_FROM = 16
OVER_RAY = {SHORT: (32, 0.35), MIDDLE: (8, 0.45), LONG: (8, 0.6)}
"""Groups of a step, and the target in CPU milliseconds of a turn."""


def print_over_ray(repeats: int) -> None:
    """Rounds of all contexts and sizes of messages, in turn; medians."""
    results: dict[str, list[_over_ray.OverRay]] = defaultdict(list)
    for _ in range(repeats):
        for shape, (groups, _target) in OVER_RAY.items():
            for per_message in PER_MESSAGE:
                sizes = map(str, (shape.context, shape.turns, groups, per_message))
                command = [sys.executable, str(Path(__file__)), "--measure-over-ray", *sizes]
                run = _over_ray.OverRay(**run_for_json(command, {})[1])
                results[f"{shape}, {per_message} per message"].append(run)
                print(f"{shape}, {per_message} per message: {run}", flush=True)
    medians = {
        name: {key: median([getattr(run, key) for run in runs]) for key in vars(runs[0])}
        for name, runs in results.items()
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
    parser.add_argument("--repeats", type=int, default=3, help="processes of each (default: 3)")
    parser.add_argument("--measure-over-ray", nargs=4, metavar=("CONTEXT", "TURNS", "GROUPS", "PER_MESSAGE"))
    args = parser.parse_args()
    if args.measure_over_ray:
        _over_ray.main(*args.measure_over_ray)
        return
    print_over_ray(args.repeats)


if __name__ == "__main__":
    main()
