"""`trireme eval CHECKPOINT`: measures how good a model is, by the evaluations that a run makes, without training
anything.

    trireme eval outputs/sort --step 100 --eval.samples 4       a commit of a run, with the configuration of that run
    trireme eval some/model @ env.toml --inference.replicas 2   any Hugging Face model, with the keys of `rl`

Replicas load the weights from the directory themselves, so no trainer starts and no weights travel. The files of a
commit are verified against its manifest first. If the commit holds LoRA adapters, replicas load the output of `trireme
export --merge`, which lies in the run's exports/ during the evaluation.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trireme.checkpoint.manifest import MANIFEST, Manifest, step_of
from trireme.checkpoint.store import HEAD, VerifiedCommit
from trireme.cli.common import Parser, planned
from trireme.config import Config
from trireme.config.load import Loaded, load
from trireme.config.trainer import LoraConfig
from trireme.core.class_tensors import refuse_other_tensors
from trireme.core.errors import CheckpointInvalid
from trireme.core.finite_json import to_json
from trireme.core.refusals import Refusal
from trireme.core.types import WeightIdentity
from trireme.launch.common import prepare_cluster
from trireme.plan.base import Plan
from trireme.plan.rl import EVALUATION_ROOMS
from trireme.process import signals
from trireme.tools.export import chosen_commit, export
from trireme.tools.merge import BASE

AS_LOADED = "as-loaded"
"""Replaces a digest, because these weights were not published."""
UNREAD = Path(__file__).with_name("eval.toml")


@dataclass(frozen=True)
class Subject:
    """The model to evaluate or to serve, and the run that it comes from."""

    model: str
    """A Hugging Face directory, or a name on the hub."""
    identity: WeightIdentity
    """The identity of its weights."""
    run: Path | None
    """The run of a commit, which provides the configuration."""
    base: str | None = None
    """The model that the adapters in `model` belong to."""

    @classmethod
    def of(cls, name: str, step: int | None) -> Subject:
        """Returns the model that `name` stands for: a run directory (its commit of `step`; None: the newest that
        verifies), the directory of a commit, or a Hugging Face model. Raises BadInput."""
        path = Path(name).expanduser().absolute()
        if (path / HEAD).exists():
            return cls._of_commit(chosen_commit(path, step))
        if step is not None:
            raise Refusal(f"--step {step} for {name}", "the directory of a run before it", "leave --step out").error()
        for commit in (path, path.parent):
            if (commit / MANIFEST).exists():
                return cls._of_commit(_verified(commit))
        return cls(str(path) if path.is_dir() else name, WeightIdentity(1, 0, AS_LOADED), None)

    @classmethod
    def _of_commit(cls, commit: VerifiedCommit) -> Subject:
        model = commit.path / "inference"
        if (model / BASE).exists():
            base = json.loads((model / BASE).read_text())["name"]
        else:
            base = None
        parents = commit.path.parents
        run = next((place for place in parents if (place / "config.json").exists()), parents[1])
        return cls(str(model), commit.manifest.identity, run, base)

    def __str__(self) -> str:
        if self.run is None:
            return f"the model {self.model}"
        commit = Path(self.model).parent
        return f"{commit.name} of {self.run} (weights {self.identity.version}:{self.identity.digest[:8]})"

    def whole(self, console: Console, ending: ExitStack) -> str:
        """Returns the directory, or the name on the hub, of the whole model. Adapters are first merged into their base,
        in a directory that `ending` removes. Raises BadInput if the base has changed, or if a directory lacks
        tensors of the model's class. Raises StorageFailed."""
        if self.run is None:
            if Path(self.model).is_dir():  # one on the hub is fetched by the nodes of the replicas, and not here
                advice = "save it again with save_pretrained, or evaluate another model"
                refuse_other_tensors(self.model, str(self), advice)
            return self.model
        commit = Path(self.model).parent
        if self.base is None:
            return self.model
        out = self.run / "exports" / f"{commit.name}-evaluated-{secrets.token_hex(4)}"
        console.print(f"merging the adapters of {commit.name} into {self.base}")
        ending.callback(shutil.rmtree, out, ignore_errors=True)
        export(commit.parents[1], step_of(commit.name), None, out, lambda _: None, merge=True)
        return str(out)


def _verified(commit: Path) -> VerifiedCommit:
    try:
        return VerifiedCommit(commit, Manifest.verified(commit))
    except CheckpointInvalid as error:
        raise Refusal(f"the commit {commit}: {error}", "one that verifies", "choose another").error() from None


def main(argv: Sequence[str], console: Console) -> None:
    """Runs the command with the arguments `argv`. Raises TriremeError."""
    options, arguments = _parser().parse_known_args(argv)
    subject = Subject.of(options.checkpoint, options.step)
    loaded = configured(subject, UNREAD, [*arguments, "--eval.every", "1"])
    config = loaded.config
    plan = planned(loaded, EVALUATION_ROOMS, console)
    if plan is None:
        return
    with ExitStack() as ending:
        model = config.model.model_copy(update={"name": subject.whole(console, ending)})
        config = config.model_copy(update={"model": model}).with_absolute_paths()
        console.print(f"evaluating {subject}, on {' and '.join(env.label for env in config.eval_envs)}")
        row = _measure(config, plan, subject.identity, console)
    console.print(table(row))
    if options.output:
        options.output.write_text(to_json({"model": subject.model, "identity": str(subject.identity), **row}) + "\n")
        console.print(f"{options.output}: the same numbers as JSON")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="trireme eval",
        description="Evaluates a model. All keys of `rl` may follow: @ files and --flags, above all eval.*",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run, a commit, or a Hugging Face model; first")
    parser.add_argument("--step", type=int, help="which commit of a run (default: the newest that verifies)")
    parser.add_argument("--output", type=Path, help="a JSON file for the numbers")
    return parser


def configured(subject: Subject | None, unread: Path, arguments: Sequence[str]) -> Loaded[Config]:
    """Returns the configuration of a command that trains nothing. Later ones override earlier ones: the configuration
    of the run that `subject` comes from; the file `unread`, which sets keys that the command does not read; the keys
    in `arguments`; the model of `subject`. Raises BadInput."""
    files = ["@", str(unread)]
    model_flags = list[str]()
    if subject:
        model_flags = ["--model.name", subject.base or subject.model]
        if subject.run:
            record = subject.run / "config.json"
            files = ["@", str(record), *files]
            model = json.loads(record.read_text()).get("model", {})
            start = model.get("start") or model.get("name")
            if start:  # environments know the model that the run started from
                model_flags += ["--model.start", start]
    loaded = load([*files, *arguments, *model_flags])
    trainer = loaded.config.trainer.model_copy(update={"lora": LoraConfig()})  # what is merged is a whole model
    return replace(loaded, config=loaded.config.model_copy(update={"trainer": trainer}))


def _measure(config: Config, plan: Plan, identity: WeightIdentity, console: Console) -> Mapping[str, float]:
    """Starts the rooms, evaluates the model, and returns the metrics (a row of `orchestrator.evaluation`). After a
    failure the directory of logs that the error names is kept."""
    prepare_cluster(config, plan)
    from trireme.launch import rl as launch
    from trireme.launch.starting import joined

    started = time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="trireme-eval-"))
    with joined(replace(plan, config=config)) as plan, ExitStack() as ending:
        signals.arm()
        orchestrator = launch.evaluation_rooms(config, plan, identity, logs, console, ending)
        console.print(f"rooms ready after {time.monotonic() - started:.1f} s")
        row = orchestrator.evaluate(identity.version)
    shutil.rmtree(logs)
    return row


def table(row: Mapping[str, float]) -> Table:
    """Returns a table of the evaluation's metrics for each environment: means with their 95 % intervals, and counts."""
    shown = Table("environment", "what", "value", box=None)
    for name, value in row.items():
        if not name.startswith("eval/") or name.endswith(("/ci95", "/version")):
            continue
        _, env, metric = name.split("/", 2)
        if f"{name}/ci95" in row:
            interval = f" +- {row[f'{name}/ci95']:.4f}"
        else:
            interval = ""
        shown.add_row(env, metric, f"{value:.4f}{interval}" if interval else f"{value:g}")
    return shown
