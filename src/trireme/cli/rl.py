"""The command `rl`: trains a model by reinforcement learning."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from trireme.cli.common import from_here, next_steps, run_command, show
from trireme.config import Config
from trireme.config.checks import check, check_trackers
from trireme.config.installed import check_installed
from trireme.config.load import load
from trireme.config.model_facts import ModelFacts
from trireme.core.errors import RoomFailed
from trireme.launch.common import prepare_cluster
from trireme.launch.environments import checked_environments
from trireme.plan.rl import RL_ROOMS
from trireme.plan.whole import Plan
from trireme.process.environ import Resources, cluster_address
from trireme.run.rollout_records import newest_prompt
from trireme.train.kl_reference import resolve_reference

ENVIRONMENTS_S = 30.0
"""Seconds that a start waits at most for its environments to be made on trial. The start does not wait longer for slow
environments."""
WAIT_LINE_S = 5.0
"""Seconds between lines that say that the start waits for its environments."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `rl @ config.toml --key value` with `argv` (None: `sys.argv`). Returns the exit code
    (`trireme.core.errors`)."""
    return run_command(_rl, sys.argv[1:] if argv is None else argv)


def _rl(argv: list[str], console: Console) -> None:
    loaded = load(argv)
    config = loaded.config
    facts = ModelFacts.of(config, required=not loaded.dry_run)
    warnings = check(config, facts)
    check_trackers(config)
    plan = Plan(config, facts, Resources.of_this_machine(), RL_ROOMS, notes=warnings, verbose=loaded.verbose)
    if facts is None or config.model.facts:  # a dry run without a hub, where no tokenizer can be reached either
        show(plan, config, console)
        return
    with checked_environments(config) as environments_are_made:
        if loaded.dry_run:
            if not _waited(environments_are_made, config.timeouts.start_s):
                raise RoomFailed(
                    f"the environments were not made within {config.timeouts.start_s:g} s (timeouts.start_s): the "
                    "loading of a dataset, get_batch(0), make_env(0) or initial_observation() took too long. Speed it "
                    "up, or raise timeouts.start_s"
                )
            show(plan, config, console)
            return
        check_installed()
        config = resolve_reference(config.with_absolute_paths(), facts)
        prepare_cluster(config, plan)
        from trireme.launch.rl import RlRun  # imports Ray, which reads the environment that was just prepared
        from trireme.launch.run import launch

        training = RlRun(config, facts, plan)
        if cluster_address(config) is None:  # else they are made on another machine
            _waited(environments_are_made, ENVIRONMENTS_S)
    started = time.monotonic()
    root = launch(training, console)
    if root:
        console.print(_next_steps(config, root, time.monotonic() - started))


def _waited(are_made: Callable[[float], bool], limit_s: float) -> bool:
    """Waits until the environments have been made, and prints a line every WAIT_LINE_S seconds. Returns False if
    `limit_s` seconds pass first. `are_made` takes a number of seconds, waits at most that long, and returns True once
    the environments have been made."""
    started = time.monotonic()
    while not are_made(min(WAIT_LINE_S, limit_s)):
        waited_s = time.monotonic() - started
        if waited_s >= limit_s:
            return False
        print(f"waiting for the environments and their first problems ({waited_s:.0f} s)", file=sys.stderr, flush=True)
    return True


def _next_steps(config: Config, root: Path, seconds: float) -> str:
    place = from_here(root)
    weights = place / "checkpoints" / f"step_{config.max_steps:06d}" / "inference"
    model = f"uv run --no-sync python -c {_quoted(_ask(weights, newest_prompt(root), config))}"
    plot = f"uv run --no-sync trireme plot {place}"
    return next_steps(place, config.max_steps, seconds, plot, model, "the trained model, on a prompt of the run")


def _ask(weights: Path, prompt: str | None, config: Config) -> str:
    """Returns Python code that prints an answer to `prompt` by the model in the directory `weights`. If `prompt` is
    None, the code has the word PROMPT in place of a prompt."""
    longest = config.inference.sampling.max_tokens
    return (
        f"from transformers import pipeline; print(pipeline('text-generation', '{weights}')("
        f"{(prompt or 'PROMPT')!r}, max_new_tokens={longest})[0]['generated_text'])"
    )


def _quoted(code: str) -> str:
    """Returns Python code, which contains single quotes, as one quoted word for a shell. Puts the code in double quotes
    if the shell does not change it there; else quotes it with shlex, which is harder to read."""
    if re.search(r'["$`!]|\\\\', code):
        return shlex.quote(code)
    return f'"{code}"'


if __name__ == "__main__":
    sys.exit(main())
