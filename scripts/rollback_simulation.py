"""Prints what share of unfinished rollouts a rollback keeps: the real pipeline with simulated replicas and trainer.

    python scripts/rollback_simulation.py [--deaths 8]

For each commit interval whole runs in virtual time, with the simulation that the tests use (`tests/sim/simulation.py`),
in each of which the trainer dies once, at moments that are spread evenly over a commit interval. Takes a minute or two
of one core; its figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sim"))

from simulation import Scenario, simulate

INTERVALS = (1, 2, 5, 10)
WARM_UP = 4
"""Steps before the commit that a run goes back to."""
ANSWERS = Scenario("requeue", 2, batch_size=8, group_size=4, replicas=2, slots=32, median=100, spread=0.8, train_s=4.0)
"""An answer takes about as long as a step."""
GAMES = replace(ANSWERS, turns=6, median=12, tool_s=3.0)
KINDS = {
    "single answers": ANSWERS,
    "six turns with a tool": GAMES,
    "the same, and environments say their state": replace(GAMES, says_state=True),
}
HEAD = "| rollouts | commit every | kept | live on |"


def row(name: str, scenario: Scenario, deaths: int) -> str:
    """Returns a line of the table, of as many runs as there are deaths."""
    every = scenario.commit_every
    commit = every * math.ceil(WARM_UP / every)
    scenario = replace(scenario, steps=commit + every + scenario.max_steps_off_policy + 1)
    ended_s = simulate(scenario).ended_s
    first, last = ended_s[commit - 1], ended_s[commit + every - 1]
    moments = [first + (last - first) * (number + 0.5) / deaths for number in range(deaths)]
    runs = [simulate(replace(scenario, trainer_dies_at_s=[at_s])) for at_s in moments]
    shares = [share for outcome in runs for share in outcome.kept]
    rollouts = max(sum(share.rollouts for share in shares), 1)
    living, restored = (sum(getattr(share, kind) for share in shares) for kind in ("living", "restored"))
    return f"| {name} | {every} | {(living + restored) / rollouts:.0%} | {living / rollouts:.0%} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=8, help="runs for each line of the table")
    deaths = parser.parse_args(argv).deaths
    print(HEAD)
    print("|---|" + "---:|" * (HEAD.count("|") - 2))
    for name, scenario in KINDS.items():
        for every in INTERVALS:
            print(row(name, replace(scenario, commit_every=every), deaths), flush=True)


if __name__ == "__main__":
    main()
