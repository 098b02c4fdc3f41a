"""`trireme eval CHECKPOINT`: measures how good a model is, by the evaluations that a run makes, without training
anything.

    trireme eval outputs/sort --step 100 --eval.samples 4       a checkpoint of a run, with that run's configuration
    trireme eval outputs/sort --step all --keep-best sort/avg@4 all checkpoints, one after the other
    trireme eval some/model @ env.toml --inference.replicas 2   any Hugging Face model, with the keys of `rl`

Replicas load the weights from the directory themselves, so no trainer starts and no weights travel. The files of a
checkpoint are verified against its manifest first. If the checkpoint holds LoRA adapters, replicas load the output of
`trireme export --merge`, which lies in the run's exports/ during the evaluation. The result of each checkpoint is
written to the run's evaluations/ when it is known, and each problem of it about a second after it has been evaluated.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trireme.checkpoint.manifest import MANIFEST, Manifest, step_of
from trireme.checkpoint.store import HEAD, KEEP, CheckpointStore, VerifiedCheckpoint
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
from trireme.plan.rl import EVALUATION_ROOMS
from trireme.plan.whole import Plan
from trireme.process import signals
from trireme.tools.evaluations import Evaluations, best, comparison, full_name, keep, value_text
from trireme.tools.export import chosen_checkpoint, export
from trireme.tools.merge import BASE

AS_LOADED = "as-loaded"
"""Takes the place of the digest in the identity of weights that a replica loads from files: they were never
published."""
UNREAD = Path(__file__).with_name("eval.toml")


@dataclass(frozen=True)
class Subject:
    """The model to evaluate or to serve, and the run that it comes from."""

    model: str
    """A Hugging Face directory, or a name on the hub."""
    identity: WeightIdentity
    """The identity of its weights."""
    run: Path | None
    """The directory of the run that the checkpoint is from, which provides the configuration; None for a model that is
    no checkpoint."""
    base: str | None = None
    """The model on which the adapters in `model` were trained; None if `model` is a whole model."""

    @classmethod
    def of(cls, name: str, step: int | None) -> Subject:
        """Returns the model that `name` stands for: a run directory, the directory of a checkpoint, or a Hugging Face
        model. `step` chooses a checkpoint of the run; None: the newest that verifies. Raises BadInput."""
        path = Path(name).expanduser().absolute()
        if (path / HEAD).exists():
            return cls._of_checkpoint(chosen_checkpoint(path, step))
        if step is not None:
            raise Refusal(f"--step {step} for {name}, which is no run", "the directory of a run", "leave --step out")
        for checkpoint in (path, path.parent):
            if (checkpoint / MANIFEST).exists():
                return cls._of_checkpoint(_verified(checkpoint))
        return cls(str(path) if path.is_dir() else name, WeightIdentity(1, 0, AS_LOADED), None)

    @classmethod
    def _of_checkpoint(cls, checkpoint: VerifiedCheckpoint) -> Subject:
        model = checkpoint.path / "inference"
        if (model / BASE).exists():
            base = json.loads((model / BASE).read_text())["name"]
        else:
            base = None
        parents = checkpoint.path.parents
        run = next((place for place in parents if (place / "config.json").exists()), parents[1])
        return cls(str(model), checkpoint.manifest.identity, run, base)

    def __str__(self) -> str:
        if self.run is None:
            return f"the model {self.model}"
        checkpoint = Path(self.model).parent
        return f"{checkpoint.name} of {self.run} (weights {self.identity.version}:{self.identity.digest[:8]})"

    @property
    def label(self) -> str:
        """A short name of the model for tables."""
        if self.run is None:
            return self.model
        return f"step {self.identity.version}"

    def whole(self, console: Console, ending: ExitStack) -> str:
        """Returns the directory, or the name on the hub, of the whole model. If `model` holds adapters, first merges
        them into their base, in a directory that `ending` removes. Raises BadInput if the base is gone or has changed,
        or if the files of a local Hugging Face model lack a tensor of the model's class or have it in another shape.
        Raises StorageFailed."""
        if self.run is None:
            if Path(self.model).is_dir():  # one on the hub is fetched by the nodes of the replicas, and not here
                advice = "save it again with save_pretrained, or evaluate another model"
                refuse_other_tensors(self.model, str(self), advice)
            return self.model
        checkpoint = Path(self.model).parent
        if self.base is None:
            return self.model
        out = self.run / "exports" / f"{checkpoint.name}-evaluated-{secrets.token_hex(4)}"
        console.print(f"merging the adapters of {checkpoint.name} into {self.base}")
        ending.callback(shutil.rmtree, out, ignore_errors=True)
        export(checkpoint.parents[1], step_of(checkpoint.name), None, out, lambda _: None, merge=True)
        return str(out)


def _verified(checkpoint: Path) -> VerifiedCheckpoint:
    try:
        return VerifiedCheckpoint(checkpoint, Manifest.verified(checkpoint))
    except CheckpointInvalid as error:
        raise Refusal(f"the checkpoint {checkpoint}: {error}", "one that verifies", "choose another") from None


def main(argv: Sequence[str], console: Console) -> None:
    """Runs the command with the arguments `argv`. Raises TriremeError."""
    options, arguments = _parser().parse_known_args(argv)
    subjects = subjects_of(options.checkpoint, options.step)
    if subjects[0].run is None and (options.resume or options.keep_best):
        raise Refusal(
            f"{'--resume' if options.resume else '--keep-best'} for {subjects[0]}",
            "a run or one of its checkpoints: results are stored in the run",
            "leave the option out",
        )
    loaded = configured(subjects[0], UNREAD, [*arguments, "--eval.every", "1"])
    plan = planned(loaded, EVALUATION_ROOMS, console)
    if plan is None:
        return
    with ExitStack() as ending:
        directory = subjects[0].run or Path(ending.enter_context(tempfile.TemporaryDirectory()))
        stored = Evaluations.of(directory, loaded.config)

        def add(subject: Subject, row: Mapping[str, float]) -> None:
            console.print(table(row))
            file = stored.write(subject.identity, row)
            if subject.run:
                console.print(f"written to {file}")
            if options.keep_best:
                full_name(options.keep_best, row)

        pending = []
        for subject in subjects:
            if options.resume and stored.has(subject.identity):
                console.print(f"{subject.label} was evaluated before")
                continue
            if not options.resume:
                stored.drop_lines(subject.identity)
            pending.append(subject)
        if pending:
            _evaluate(loaded.config, plan, pending, console, stored, add)
        rows = {subject.label: stored.read(subject.identity) for subject in subjects}
    metric = None
    if options.keep_best:
        metric = full_name(options.keep_best, rows[subjects[0].label])
    if len(rows) > 1:
        console.print(comparison(rows, metric))
    if metric:
        label = best(rows, metric)
        (subject,) = (subject for subject in subjects if subject.label == label)
        keep(Path(subject.model).parent, metric)
        console.print(f"{label} is the best by {metric}: its run will not delete it (file {KEEP})")
    if options.output:
        lines = [to_json({"model": s.model, "identity": str(s.identity), **rows[s.label]}) for s in subjects]
        options.output.write_text("".join(f"{line}\n" for line in lines))
        console.print(f"{options.output}: the same numbers as JSON, a line for each checkpoint")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="trireme eval",
        description="Evaluates a model. All keys of `rl` may follow: @ files and --flags, above all eval.*",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run, a checkpoint, or a Hugging Face model; first")
    steps = "which checkpoints of a run: 40, or 20,40,60, or all (default: the newest that verifies)"
    parser.add_argument("--step", metavar="STEPS", help=steps)
    resume = "take what an earlier call with the same options evaluated from RUN/evaluations, and evaluate the rest"
    parser.add_argument("--resume", action="store_true", help=resume)
    keeping = "mark the checkpoint with the highest METRIC, such as sort/avg@4, so that its run never deletes it"
    parser.add_argument("--keep-best", metavar="METRIC", help=keeping)
    parser.add_argument("--output", type=Path, help="a file for the numbers, a line of JSON for each checkpoint")
    return parser


def subjects_of(name: str, steps: str | None) -> list[Subject]:
    """Returns the models that `name` and the option --step stand for, in the order of `steps`. Raises BadInput."""
    if steps is None:
        return [Subject.of(name, None)]
    if steps == "all":
        store = CheckpointStore(Path(name).expanduser().absolute())
        numbers = [str(step_of(entry.name)) for entry in store.checkpoints()]
    else:
        numbers = list(dict.fromkeys(steps.split(",")))
    if not numbers or not all(number.isdecimal() for number in numbers):
        raise Refusal(
            f"--step {steps} for {name}" + (", which has no checkpoint" if steps == "all" else ""),
            "one step such as 40, several such as 20,40,60, or `all` for a run with checkpoints",
            f"choose from the steps that `trireme inspect {name}` lists",
        )
    return [Subject.of(name, int(number)) for number in numbers]


def configured(subject: Subject | None, unread: Path, arguments: Sequence[str]) -> Loaded[Config]:
    """Returns the configuration of a command that trains nothing, without `trainer.lora`. Raises BadInput. The
    configuration is merged from four sources; each source overrides the sources before it:

    1. the configuration of the run that `subject` comes from, if it comes from a run;
    2. the TOML file `unread`: the command's own defaults, and values for keys that `rl` requires but this command does
       not read;
    3. the keys in `arguments`;
    4. the model of `subject`.
    """
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


def _evaluate(
    config: Config,
    plan: Plan,
    subjects: Sequence[Subject],
    console: Console,
    stored: Evaluations,
    add: Callable[[Subject, Mapping[str, float]], None],
) -> None:
    """Evaluates `subjects` one after the other, and calls `add` with each subject and its metrics (a row of
    `orchestrator.evaluation`)."""
    prepare_cluster(config.with_absolute_paths(), plan)
    from trireme.launch.starting import joined

    with joined(replace(plan, config=config.with_absolute_paths())) as plan:
        signals.arm()
        for subject in subjects:
            add(subject, _measure(config, plan, subject, console, stored))


def _measure(
    config: Config, plan: Plan, subject: Subject, console: Console, stored: Evaluations
) -> Mapping[str, float]:
    """Starts the rooms, evaluates the model, and returns its metrics. Then removes the logs. After a failure, keeps
    them: the error names their directory."""
    from trireme.launch import rl as launch

    started = time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="trireme-eval-"))
    with ExitStack() as ending:
        model = config.model.model_copy(update={"name": subject.whole(console, ending)})
        config = config.model_copy(update={"model": model}).with_absolute_paths()
        console.print(f"evaluating {subject}, on {' and '.join(env.label for env in config.eval_envs)}")
        lines = stored.read_lines(subject.identity)
        if lines:
            console.print(f"an earlier call evaluated {len(lines)} of its problems")
        plan = replace(plan, config=config)
        orchestrator = launch.evaluation_rooms(config, plan, subject.identity, logs, console, ending)
        console.print(f"rooms ready after {time.monotonic() - started:.1f} s")
        row = orchestrator.evaluate(subject.identity.version, lines, partial(stored.append_lines, subject.identity))
    shutil.rmtree(logs)
    return row


def table(row: Mapping[str, float]) -> Table:
    """Returns a table of the evaluation's metrics for each environment: means with their 95 % intervals, and counts."""
    shown = Table("environment", "what", "value", box=None)
    for name in row:
        if not name.startswith("eval/") or name.endswith(("/ci95", "/version")):
            continue
        _, env, metric = name.split("/", 2)
        shown.add_row(env, metric, value_text(row, name))
    return shown
