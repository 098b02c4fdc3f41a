"""The command `rl`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from trireme import signals
from trireme.config import Config
from trireme.config.checks import check, check_installed
from trireme.config.load import load
from trireme.config.model_facts import ModelFacts, with_absolute_paths
from trireme.environ import cluster_address, prepare_existing_cluster, prepare_local_cluster
from trireme.errors import EXIT_OK, TriremeError
from trireme.plan import Plan, Resources
from trireme.rundir import RunDir

PROGRESS_EVERY_S = 5.0


def rl() -> None:
    """Entry point: `rl @ config.toml --key value`."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code (`trireme.errors`)."""
    signals.arm()
    console = Console(highlight=False, soft_wrap=True)
    try:
        return _rl(list(argv), console)
    except TriremeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except signals.Stopped as stopped:
        print("stopped by a signal; all rooms are down", file=sys.stderr)
        return stopped.exit_code


def _rl(argv: list[str], console: Console) -> int:
    loaded = load(argv)
    config = loaded.config
    facts = ModelFacts.of(config, required=not loaded.dry_run)
    warnings = check(config, facts)
    plan = Plan.of(config, facts, Resources.of_this_machine(), None, warnings)
    if loaded.dry_run or facts is None:
        console.print(plan.render())
        console.print(config.model_dump_json(indent=2), markup=False)
        return EXIT_OK
    check_installed()
    _run(with_absolute_paths(config), facts, plan, console)
    return EXIT_OK


def _run(config: Config, facts: ModelFacts, plan: Plan, console: Console) -> None:
    if cluster_address(config) is None:
        plan.check_resources()
        prepare_local_cluster(plan.threads)
    else:
        prepare_existing_cluster()
    from trireme import launch  # Ray and the rooms: only a run that starts pays for importing them
    from trireme.driver import train

    launch.check_rooms(config, plan)
    started = time.monotonic()
    with RunDir.create(config) as run, launch.ray_cluster(config, plan) as resources:
        signals.arm()
        plan = Plan.of(config, facts, resources, run.root, plan.notes)
        plan.check_resources()
        console.print(plan.render())
        with (
            launch.rooms(config, plan, run.logs(1), StartProgress(console)) as rooms,
            launch.sinks(config, run, sys.stdout) as sinks,
        ):
            where = "1 node" if rooms.nodes == 1 else f"{rooms.nodes} nodes"
            console.print(f"rooms on {where} ready after {time.monotonic() - started:.1f} s")
            train(config, rooms, launch.learning_rate(config, facts), sinks)
            rooms.trainer.save_weights(run.weights)
    console.print(whats_next(config, run.root, run.weights, time.monotonic() - started))


class StartProgress:
    """Says every few seconds of a long start what is waited for."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = PROGRESS_EVERY_S

    def __call__(self, names: list[str], waited_s: float) -> None:
        if waited_s >= self._next_s:
            self._next_s = waited_s + PROGRESS_EVERY_S
            self._console.print(f"waiting for {', '.join(names)} ({waited_s:.0f} s)")


def whats_next(config: Config, root: Path, weights: Path, seconds: float) -> str:
    """What a user may want to do with a finished run."""
    return "\n".join(
        [
            f"\n{config.max_steps} steps in {seconds:.0f} s. What next:",
            "the reward curve, as an SVG file:",
            f"  uv run --no-sync python scripts/plot_reward.py {root}/metrics.jsonl",
            "the trained model, in Hugging Face layout (put your prompt in):",
            '  uv run --no-sync python -c "from transformers import pipeline; '
            f"print(pipeline('text-generation', '{weights}')('PROMPT'))\"",
            "the same run with another seed:",
            f"  uv run rl @ {root}/config.json --seed {config.seed + 1}",
        ]
    )


if __name__ == "__main__":
    rl()
