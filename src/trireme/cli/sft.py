"""The command `sft`: trains a model on given examples."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from trireme.cli.common import from_here, next_steps, run_command, show
from trireme.config.checks import check, check_trackers
from trireme.config.load import load_as
from trireme.config.model_facts import ModelFacts
from trireme.config.sft import SftConfig
from trireme.launch.common import prepare_cluster
from trireme.plan.sft import sft_plan
from trireme.process.environ import Resources
from trireme.sft.data import SftData


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `sft @ config.toml --key value` with `argv` (None: `sys.argv`). Returns the exit code
    (`trireme.core.errors`)."""
    return run_command(_sft, sys.argv[1:] if argv is None else argv)


def _sft(argv: list[str], console: Console) -> None:
    loaded = load_as(SftConfig, argv)
    config = loaded.config
    facts = ModelFacts.of(config, required=not loaded.dry_run)
    check(config, facts)
    check_trackers(config)
    config = config.with_absolute_paths()
    resources = Resources.of_this_machine()
    if facts is None or config.model.facts:  # as in `rl`
        show(sft_plan(config, facts, resources), config, console)
        return
    data = SftData.load(config, facts, console.print)
    if loaded.dry_run:
        show(sft_plan(data.cursor.with_steps(config, 0), facts, resources, data), config, console)
        return
    plan = replace(sft_plan(config, facts, resources, data), verbose=loaded.verbose)
    prepare_cluster(config, plan)
    from trireme.launch.run import launch  # imports Ray, which reads the environment that was just prepared
    from trireme.launch.sft import SftRun

    training = SftRun(config, facts, plan, data)
    started = time.monotonic()
    root = launch(training, console)
    if root:
        console.print(_next_steps(training.config, root, time.monotonic() - started))


def _next_steps(config: SftConfig, root: Path, seconds: float) -> str:
    place = from_here(root)
    plot = f"uv run --no-sync trireme plot {place} --key train_mean_nll"
    model = (
        f"uv run rl @ configs/quickstart.toml --model.name {place}/checkpoints/step_{config.max_steps:06d}/inference"
    )
    about_model = "reinforcement learning continues with the trained model"
    if config.trainer.lora.on:
        model = f"uv run --no-sync trireme export {place} --merge"
        about_model = "the trained model, in Hugging Face layout"
    return next_steps(place, config.max_steps, seconds, plot, model, about_model)


if __name__ == "__main__":
    sys.exit(main())
