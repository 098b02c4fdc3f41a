"""Prints a table of the gain and the cost of staleness: the real pipeline with simulated replicas and trainer.

    python scripts/staleness_simulation.py [--steps 60] [--max-concurrent auto] [--draws 1]

For each `stale_policy` and K = 0, 1, 2, 4, 8 a whole run in virtual time, with the simulation that the tests use
(`tests/sim/simulation.py`). The lengths of the answers are the same in all of them. Takes a minute or two of one core;
its figures do not depend on the machine. With `--draws N` it simulates N independent draws of the lengths, and prints
the tokens per second of each after the table: which group happens to be the longest moves a single run by several per
cent.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sim"))

from simulation import LONGEST, Outcome, Scenario, simulate

POLICIES = ("wait", "drop")
AGES = (0, 1, 2, 4, 8)
BALANCED = Scenario(batch_size=16, group_size=8, replicas=4, slots=10, median=20, spread=1.3, train_s=8.0)
"""Decoding a batch keeps all places busy for about as long as training on it takes; its longest answer takes five times
as long."""
HEAD = "| policy | K | rollouts/s | tokens/s | waste | trainer idle | replicas idle | length bias | longest trained |"


def row(outcome: Outcome) -> str:
    scenario = outcome.scenario
    cells = (
        f"`{scenario.policy}`",
        scenario.max_steps_off_policy,
        f"{len(outcome.trained_lengths) / outcome.seconds:.1f}",
        f"{outcome.trained_tokens / outcome.seconds:.0f}",
        f"{outcome.waste:.0%}",
        f"{outcome.trainer_idle:.0%}",
        f"{outcome.replicas_idle:.0%}",
        f"{outcome.length_bias:.2f}",
        max(outcome.trained_lengths),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run")
    parser.add_argument("--max-concurrent", default="auto", help="rollouts in flight at most: a number, or auto")
    parser.add_argument("--draws", type=int, default=1, help="independent draws of all lengths; the table is the first")
    arguments = parser.parse_args(argv)
    limit = arguments.max_concurrent
    common = vars(BALANCED) | {"steps": arguments.steps, "max_concurrent": limit if limit == "auto" else int(limit)}
    print(
        f"{arguments.steps} steps of {BALANCED.batch_size} groups of {BALANCED.group_size} rollouts, "
        f"{BALANCED.train_s:g} s of training each; {BALANCED.replicas} replicas of {BALANCED.slots} places; lognormal "
        f"lengths, median {BALANCED.median} tokens, the longest {LONGEST} times that\n"
    )
    speeds: dict[tuple[str, int], list[float]] = {}
    print(HEAD)
    print("|---|" + "---:|" * (HEAD.count("|") - 2))
    for policy in POLICIES:
        for max_steps_off_policy in AGES:
            options = common | {"policy": policy, "max_steps_off_policy": max_steps_off_policy}
            outcomes = [simulate(Scenario(**(options | {"draw": draw}))) for draw in range(arguments.draws)]
            print(row(outcomes[0]), flush=True)
            speeds[policy, max_steps_off_policy] = [outcome.trained_tokens / outcome.seconds for outcome in outcomes]
    if arguments.draws > 1:
        print("\nTokens per second, mean of all draws, and of each:")
        for (policy, max_steps_off_policy), rates in speeds.items():
            draws = " ".join(f"{rate:.0f}" for rate in rates)
            print(f"{policy} K = {max_steps_off_policy}: {statistics.mean(rates):.1f} ({draws})")


if __name__ == "__main__":
    main()
