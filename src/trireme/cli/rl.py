"""The command `rl`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trireme.cli.common import StartProgress, prepare_cluster, run_command, telling_how_to_go_on
from trireme.config import Config
from trireme.config.checks import check, check_installed
from trireme.config.load import load
from trireme.config.model_facts import ModelFacts, with_absolute_paths
from trireme.config.resume_compat import fixed_parts
from trireme.core.errors import LimitReached
from trireme.plan.base import Plan, Resources
from trireme.plan.rl import RL_ROOMS
from trireme.process import signals
from trireme.run.metrics import WandbSink, wandb_run
from trireme.run.rundir import RunDir, resume_command
from trireme.supervision.attempts import attempts
from trireme.train.kl_reference import keep_reference, resolve_reference

if TYPE_CHECKING:
    from trireme.launch.rl import Rooms
    from trireme.supervision.supervisor import Supervisor


def rl() -> None:
    """Entry point: `rl @ config.toml --key value`."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code (`trireme.core.errors`)."""
    return run_command(_rl, argv)


def _rl(argv: list[str], console: Console) -> None:
    loaded = load(argv)
    config = loaded.config
    facts = ModelFacts.of(config, required=not loaded.dry_run)
    warnings = check(config, facts)
    plan = Plan(config, facts, Resources.of_this_machine(), RL_ROOMS, notes=warnings)
    if loaded.dry_run or facts is None:
        console.print(plan.render())
        console.print(config.model_dump_json(indent=2), markup=False)
        return
    check_installed()
    _run(resolve_reference(with_absolute_paths(config), facts), facts, plan, console)


def _run(config: Config, facts: ModelFacts, plan: Plan, console: Console) -> None:
    prepare_cluster(config, plan)
    from trireme.launch import rl as launch  # Ray and the rooms: only a run that starts pays for importing them
    from trireme.process import (
        ray_cluster as cluster,  # Ray and the rooms: only a run that starts pays for importing them
    )

    launch.check_rooms(config, plan)
    started = time.monotonic()
    fixed = fixed_parts(config, facts)
    with RunDir.open(config, fixed) as run, telling_how_to_go_on(run):
        for note in run.start.notes:
            console.print(note)
        if run.start.step >= config.max_steps:
            console.print(f"{run.root} is at step {run.start.step}; max_steps = {config.max_steps}: nothing to do")
            return
        keep_reference(config)
        with cluster.ray_cluster(config, plan) as resources:
            signals.arm()
            plan = replace(plan, config=config, resources=resources, run_dir=run.root)
            plan.check_resources()
            console.print(plan.render())
            with (
                launch.supervised(config, plan, run, StartProgress(console), console.print) as (places, supervisor),
                wandb_run(config, run.run_id, run.root, supervisor.roster) as wandb,
            ):

                def begun(run: RunDir) -> AbstractContextManager[Rooms]:
                    return launch.attempt(places, run, supervisor, StartProgress(console), console.print)

                def work(run: RunDir, rooms: Rooms) -> None:
                    train_and_commit(config, facts, run, fixed, rooms, supervisor, wandb, console)

                attempts(config, run, fixed, supervisor, begun, work, console.print)
    console.print(whats_next(config, run.root, time.monotonic() - started))


def train_and_commit(
    config: Config,
    facts: ModelFacts,
    run: RunDir,
    fixed: Mapping[str, Any],
    rooms: Rooms,
    supervisor: Supervisor,
    wandb: WandbSink | None,
    console: Console,
) -> None:
    """Trains, and commits where the run ends: at max_steps, or where a signal or a limit of its own stops it."""
    from trireme.launch import rl as launch
    from trireme.run.commits import Commits
    from trireme.train.guards import Guard
    from trireme.train.rl_loop import train

    with (
        launch.journal(config, run, wandb, sys.stdout) as journal,
        Commits(config, run, fixed, rooms.trainer, {"orchestrator": rooms.orchestrator}, console.print) as commits,
        signals.graceful(config.checkpoint.grace_s) as stop,
    ):
        try:
            rate, guard = launch.learning_rate(config, facts), Guard(config, console.print)
            train(config, rooms, run.start.step, rate, journal, commits, guard, stop, supervisor)
        except signals.GraceOver:
            raise
        except (signals.Stopped, LimitReached):
            commits.take()
            raise
        commits.finish()


def whats_next(config: Config, root: Path, seconds: float) -> str:
    """What a user may want to do with a finished run."""
    weights = root / "checkpoints" / f"step_{config.max_steps:06d}" / "inference"
    return "\n".join(
        [
            f"\nstep {config.max_steps} reached after {seconds:.0f} s. What next:",
            "the reward curve, as an SVG file:",
            f"  uv run --no-sync python scripts/plot_reward.py {root}/metrics.jsonl",
            "the trained model, in Hugging Face layout (put your prompt in):",
            '  uv run --no-sync python -c "from transformers import pipeline; '
            f"print(pipeline('text-generation', '{weights}')('PROMPT'))\"",
            "what the run holds, and its checkpoints:",
            f"  uv run --no-sync trireme inspect {root}",
            "curves, logs and rollouts, in the terminal (of a running one too):",
            f"  uv run --no-sync trireme watch {root}",
            "all curves, and who did what when, as one HTML page:",
            f"  uv run --no-sync trireme report {root}",
            "the same run, for longer:",
            f"  {resume_command(root)} --max-steps {2 * config.max_steps}",
            "a new run with another seed:",
            f"  uv run rl @ {root}/config.json --run.name {root.name}-seed-{config.seed + 1} --seed {config.seed + 1}",
        ]
    )


if __name__ == "__main__":
    rl()
