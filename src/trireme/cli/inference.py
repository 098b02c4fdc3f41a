"""The command `inference`: serves a model to OpenAI's and Anthropic's clients, without training anything.

    inference outputs/sort --step 100                         a checkpoint of a run
    inference some/model @ serve.toml --inference.replicas 2  any Hugging Face model, an export too
    inference @ configs/quickstart.toml                       the model that the file names

Replicas load the weights from the directory themselves. A checkpoint of LoRA adapters is merged with its base first.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from trireme.cli.common import Parser, planned, run_command
from trireme.cli.eval import Subject, configured
from trireme.config import Config
from trireme.core.types import WeightIdentity
from trireme.launch.common import prepare_cluster
from trireme.plan.rl import SERVED_ROOMS
from trireme.plan.whole import Plan
from trireme.process import signals

UNREAD = Path(__file__).with_name("inference.toml")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv` (None: `sys.argv`) and returns its exit code (`trireme.core.errors`)."""
    return run_command(_inference, sys.argv[1:] if argv is None else argv)


def _inference(argv: list[str], console: Console) -> None:
    options, arguments = parsed(argv)
    if options.model:
        subject = Subject.of(options.model, options.step)
    else:
        subject = None
    loaded = configured(subject, UNREAD, arguments)
    config = loaded.config
    plan = planned(loaded, SERVED_ROOMS, console)
    if plan is None:
        return
    with ExitStack() as ending:
        if subject:
            model = config.model.model_copy(update={"name": subject.whole(console, ending)})
            config = config.model_copy(update={"model": model})
        console.print(f"serving {subject or f'the model {config.model.name}'}")
        if subject:
            identity = subject.identity
        else:
            identity = WeightIdentity(1, 0, "as-loaded")
        _serve(config.with_absolute_paths(), plan, _names(subject), identity, console)


def parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses a command line. Returns (the options `model` and `step`, the remaining words, which are keys of the
    configuration). `model` is the first word, unless that is a flag or begins with `@`; `step` is the step of the
    checkpoint. Raises BadInput."""
    parser = Parser(
        prog="inference",
        description="Serves a model over HTTP. All keys of `rl` may follow: @ files and --flags, above all service.*",
        add_help=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a run, a checkpoint, or a Hugging Face model; first")
    parser.add_argument("--step", type=int, help="which checkpoint of a run (default: the newest that verifies)")
    has_model = bool(argv) and not argv[0].startswith(("@", "-"))
    options, arguments = parser.parse_known_args(argv if has_model else ["", *argv])
    return options, arguments


def _names(subject: Subject | None) -> tuple[str, ...]:
    """Returns the names by which clients may request the model: "policy", and for a checkpoint also its step
    ("step-000100")."""
    if subject and subject.run:
        return ("policy", f"step-{subject.identity.version:06d}")
    return ("policy",)


def _serve(
    config: Config,
    plan: Plan,
    names: tuple[str, ...],
    identity: WeightIdentity,
    console: Console,
) -> None:
    """Starts the rooms and serves the model until a signal comes. Then removes the logs. After a failure, keeps them:
    the error names their directory."""
    prepare_cluster(config, plan)
    from trireme.launch import service as launch
    from trireme.launch.starting import joined

    launch.check_port(config)
    directory = Path(tempfile.mkdtemp(prefix="trireme-inference-"))
    try:
        keys = launch.keys_of(config, directory, console.print)
        with joined(replace(plan, config=config)) as plan:
            signals.arm()
            launch.serve(config, plan, names, keys, identity, directory, console, console.print)
    except signals.Stopped:
        shutil.rmtree(directory)
        raise


if __name__ == "__main__":
    sys.exit(main())
