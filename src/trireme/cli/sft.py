"""The command `sft`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trireme.cli.common import StartProgress, prepare_cluster, run_command, telling_how_to_go_on, told_roster
from trireme.config.load import load_as
from trireme.config.model_facts import ModelFacts, with_absolute_paths
from trireme.config.resume_compat import common_parts
from trireme.config.sft import SftConfig
from trireme.config.sft_checks import check
from trireme.core.errors import LimitReached
from trireme.plan.base import Plan, Resources
from trireme.plan.sft import sft_plan
from trireme.process import signals
from trireme.run.metrics import WandbSink, wandb_run
from trireme.run.rundir import RunDir, resume_command
from trireme.sft.data import SftData, load_data, with_absolute_files, with_steps
from trireme.supervision.attempts import attempts
from trireme.supervision.roster import Roster
from trireme.train.guards import RefusedSteps

if TYPE_CHECKING:
    from trainer.handle import TrainerHandle


def sft() -> None:
    """Entry point: `sft @ config.toml --key value`."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code (`trireme.core.errors`)."""
    return run_command(_sft, argv)


def _sft(argv: list[str], console: Console) -> None:
    loaded = load_as(SftConfig, argv)
    config = loaded.config
    facts = ModelFacts.of(config, required=not loaded.dry_run)
    check(config, facts)
    config = with_absolute_files(with_absolute_paths(config))
    resources = Resources.of_this_machine()
    if facts is None:
        _show(sft_plan(config, None, resources), config, console)
        return
    data = load_data(config, facts, console.print)
    if loaded.dry_run:
        _show(sft_plan(with_steps(config, 0, data.cursor), facts, resources, data), config, console)
        return
    _run(config, facts, data, sft_plan(config, facts, resources), console)


def _show(plan: Plan, config: SftConfig, console: Console) -> None:
    console.print(plan.render())
    console.print(config.model_dump_json(indent=2), markup=False)


def fixed_parts(config: SftConfig, facts: ModelFacts, data: SftData) -> dict[str, Any]:
    """What a resume must find unchanged: the model, its tokenizer, the loss, the examples and their order."""
    loss = {"trainer.loss_normalization": config.trainer.loss_normalization}
    return {**common_parts(config, facts), "loss": loss, "data": data.fixed()}


def _run(config: SftConfig, facts: ModelFacts, data: SftData, plan: Plan, console: Console) -> None:
    prepare_cluster(config, plan)
    from trireme.launch import sft as launch
    from trireme.process import (
        ray_cluster as cluster,  # Ray and the trainer: only a run that starts pays for importing them
    )
    from trireme.supervision.supervisor import Supervisor

    started = time.monotonic()
    fixed = fixed_parts(config, facts, data)
    with RunDir.open(config, fixed) as run, telling_how_to_go_on(run):
        for note in run.start.notes:
            console.print(note)
        data.load_state(run.start.commit and run.start.commit / "data")
        config = with_steps(config, run.start.step, data.cursor)
        if run.start.step >= config.max_steps:
            console.print(f"{run.root} is at step {run.start.step}; it has {config.max_steps}: nothing to do")
            return
        with cluster.ray_cluster(config, plan) as resources:
            signals.arm()
            plan = sft_plan(config, facts, resources, data, run.root)
            plan.check_resources()
            console.print(plan.render())
            with (
                told_roster(run, console.print) as roster,
                wandb_run(config, run.run_id, run.root, roster) as wandb,
                Supervisor(config, roster, "the trainer") as supervisor,
            ):

                def begun(run: RunDir) -> AbstractContextManager[TrainerHandle]:
                    return launch.attempt(config, plan, run, data, supervisor, StartProgress(console), console.print)

                def work(run: RunDir, trainer: TrainerHandle) -> None:
                    train_and_commit(config, facts, run, fixed, trainer, data, roster, wandb, console)

                attempts(config, run, fixed, supervisor, begun, work, console.print)
    console.print(whats_next(config, run.root, time.monotonic() - started))


def train_and_commit(
    config: SftConfig,
    facts: ModelFacts,
    run: RunDir,
    fixed: Mapping[str, Any],
    trainer: TrainerHandle,
    data: SftData,
    roster: Roster,
    wandb: WandbSink | None,
    console: Console,
) -> None:
    """Trains, and commits where the run ends: at its last step, or where a signal or a limit of its own stops it."""
    from trireme.launch import sft as launch
    from trireme.run.commits import Commits
    from trireme.train.sft_loop import SftConsole, train

    with (
        launch.written_rows(config, run, roster, wandb, SftConsole(config.max_steps, sys.stdout)) as rows,
        Commits(config, run, fixed, trainer, {"data": data}, console.print) as commits,
        signals.graceful(config.checkpoint.grace_s) as stop,
    ):
        try:
            rate, guard = launch.learning_rate(config, facts), RefusedSteps(config, console.print)
            train(config, trainer, data, run.start.step, rate, rows, commits, guard, stop)
        except signals.GraceOver:
            raise
        except (signals.Stopped, LimitReached):
            commits.take()
            raise
        commits.finish()


def whats_next(config: SftConfig, root: Path, seconds: float) -> str:
    """What a user may want to do with a finished run."""
    weights = root / "checkpoints" / f"step_{config.max_steps:06d}" / "inference"
    model = f"uv run rl @ configs/quickstart.toml --model.name {weights}"
    if config.trainer.lora.on:
        model = f"uv run --no-sync trireme export {root} --merge"
    return "\n".join(
        [
            f"\nstep {config.max_steps} reached after {seconds:.0f} s. What next:",
            "the loss, as an SVG file:",
            f"  uv run --no-sync python scripts/plot_reward.py {root}/metrics.jsonl --key train_mean_nll",
            "the trained model, in Hugging Face layout; reinforcement learning goes on from it:",
            f"  {model}",
            "what the run holds, and its checkpoints:",
            f"  uv run --no-sync trireme inspect {root}",
            "all curves, and who did what when, as one HTML page:",
            f"  uv run --no-sync trireme report {root}",
            "the same run, for longer:",
            f"  {resume_command(root)} --max-steps {2 * config.max_steps}",
        ]
    )


if __name__ == "__main__":
    sft()
