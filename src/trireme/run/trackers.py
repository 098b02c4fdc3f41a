"""Services and programs that show the metrics of runs: TensorBoard, Weights & Biases, MLflow and Trackio.
`trireme.run.sink` calls each in a thread of its own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trireme.checkpoint.resume import leaves
from trireme.config import CommonConfig
from trireme.core.redaction import redact_values
from trireme.run.rollout_records import TABLE_COLUMNS
from trireme.supervision.roster import Incident

LONGEST_TITLE = 63
"""The most characters of the title of a W&B alert."""
FINISH_S = 25.0
"""Seconds that W&B has to connect, and to upload the last rows; less than `sink.CLOSE_S`."""
MLFLOW_MARK = "trireme.run_id"
"""The tag by which a resume finds the run in MLflow."""
MLFLOW_BATCH = 100
"""The most parameters that MLflow takes at a time."""
_NOT_IN_MLFLOW = re.compile(r"[^/\w.\- :]")
"""Characters that MLflow refuses in names."""
_LOGIN = re.compile(r"://[^/@]+@")
"""The name and the password in an address."""


Table = Sequence[Sequence[object]]
"""A row for each rollout, with the columns TABLE_COLUMNS."""


class Tracker(Protocol):
    """A service or a program that shows the metrics of runs. All calls come from one thread. They may hang, and may
    raise any error."""

    place: str
    """A text for people that says where the tracker shows the run, such as a URL."""

    def write(self, step: int, values: Mapping[str, float], rollouts: Table) -> None:
        """Writes the metrics of a step and its recorded rollouts. `step`: the number of the step, from 1."""

    def alert(self, incident: Incident) -> None:
        """Reports `incident`."""

    def close(self) -> None:
        """Writes buffered rows, and ends the connection or closes the files."""


class TensorboardTracker:
    """Writes metrics for TensorBoard to the directory `tensorboard` of the run in `root`. `start`: the number of
    completed steps. An earlier attempt may have written later steps, which TensorBoard then drops."""

    def __init__(self, root: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = root / "tensorboard"
        self.place = f"TensorBoard: uv run --no-sync tensorboard --logdir {directory}"
        self._writer = SummaryWriter(str(directory), purge_step=start + 1)

    def write(self, step: int, values: Mapping[str, float], rollouts: Table) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if rollouts:
            self._writer.add_text("rollouts", _rollouts_text(rollouts), step)
        self._writer.flush()

    def alert(self, incident: Incident) -> None:
        self._writer.add_text("incidents", f"{incident.part}: {incident.what}", incident.step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Writes to Weights & Biases, on an explicit `step` axis. Offline mode needs no account.

    `run_id` is the same in all attempts, so a resume continues the W&B run. (Offline, each attempt writes a directory
    of its own; `wandb sync` joins them by the id.) W&B's history cannot be rewritten: steps that are done again appear
    twice there, but once in metrics.jsonl.
    """

    def __init__(self, config: CommonConfig, run_id: str, root: Path) -> None:
        import wandb

        self._wandb = wandb
        options = config.wandb
        try:
            self._run = wandb.init(
                **options.model_dump(include={"project", "entity", "tags", "mode"}),
                name=options.name or root.name,
                id=run_id,
                resume="allow",
                dir=str(root),
                settings=wandb.Settings(quiet=True, init_timeout=FINISH_S, finish_timeout=FINISH_S),
                config=redact_values(config.model_dump(mode="json")),
            )
        except Exception:
            wandb.teardown()  # else the next try is refused: the id would be in use
            raise
        self._run.define_metric("*", step_metric="step")
        if options.mode == "offline":
            self.place = f"W&B, offline; to upload: uv run --no-sync wandb sync {self._run.settings.sync_dir}"
        else:
            self.place = f"W&B: {self._run.url}"

    def write(self, step: int, values: Mapping[str, float], rollouts: Table) -> None:
        if rollouts:
            table = self._wandb.Table(columns=TABLE_COLUMNS, data=rollouts)
            self._run.log({"step": step, "rollouts": table}, commit=False)
        self._run.log({**values, "step": step})

    def alert(self, incident: Incident) -> None:
        """Sends `incident` as a W&B alert. W&B drops an alert if it got an alert with the same title less than a minute
        before."""
        message = f"{incident.part}: {incident.what}"
        self._run.alert(message[:LONGEST_TITLE], f"{message}\n\nat step {incident.step}", level="WARN")

    def close(self) -> None:
        """Ends the W&B run and W&B's own process. Otherwise the process is killed with the cluster, and W&B reports a
        crash."""
        self._run.finish()
        self._wandb.teardown()


class MlflowTracker:
    """Writes to a run of an MLflow experiment. All attempts use the same MLflow run, which they find by a tag with
    `run_id`. If a step is repeated, MLflow has it twice. In names of metrics `_` replaces the characters that MLflow
    refuses: `avg@4` is `avg_4`."""

    def __init__(self, config: CommonConfig, run_id: str, root: Path) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(config.mlflow.tracking_uri)
        title = config.mlflow.experiment
        experiment = self._client.get_experiment_by_name(title)
        number = experiment.experiment_id if experiment else self._client.create_experiment(title)
        earlier = self._client.search_runs([number], f"tags.`{MLFLOW_MARK}` = '{run_id}'")
        if earlier:
            self._run = earlier[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._client.create_run(number, tags={MLFLOW_MARK: run_id}, run_name=root.name).info.run_id
            values = leaves(redact_values(config.model_dump(mode="json"))).items()
            params = [Param(_mlflow_name(name), str(value)) for name, value in values]
            for first in range(0, len(params), MLFLOW_BATCH):
                self._client.log_batch(self._run, params=params[first : first + MLFLOW_BATCH])
        server = _LOGIN.sub("://", self._client.tracking_uri)
        self.place = f"MLflow at {server}: run {root.name} of experiment {title}"

    def write(self, step: int, values: Mapping[str, float], rollouts: Table) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(_mlflow_name(name), value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics)
        if rollouts:
            self._client.log_text(self._run, _rollouts_text(rollouts), f"rollouts/step_{step:06d}.md")

    def alert(self, incident: Incident) -> None:
        """Sets a tag of the MLflow run to `incident`, because MLflow has no alerts. The tag has the newest incident."""
        text = f"{incident.part}: {incident.what}, at step {incident.step}"
        self._client.set_tag(self._run, "trireme.newest_incident", text)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class TrackioTracker:
    """Writes to Trackio: to its directory on this machine, or to a Space of the hub. The Trackio run is named after the
    run and `run_id`, so a resume continues it. If a step is repeated, Trackio has it twice."""

    def __init__(self, config: CommonConfig, run_id: str, root: Path) -> None:
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            config.trackio.project,
            name=f"{root.name}-{run_id}",
            space_id=config.trackio.space_id,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            config=redact_values(config.model_dump(mode="json")),
        )
        if config.trackio.space_id:
            self.place = f"Trackio: the Space {config.trackio.space_id} of the hub"
        else:
            self.place = f"Trackio: uv run --no-sync trackio show --project {config.trackio.project}"

    def write(self, step: int, values: Mapping[str, float], rollouts: Table) -> None:
        shown: dict[str, Any] = dict(values)
        if rollouts:
            shown["rollouts"] = self._trackio.Markdown(_rollouts_text(rollouts))
        self._run.log(shown, step=step)

    def alert(self, incident: Incident) -> None:
        self._run.alert(incident.part, incident.what, step=incident.step)

    def close(self) -> None:
        self._run.finish()


def connections(config: CommonConfig, run_id: str, root: Path, start: int) -> dict[str, Callable[[], Tracker]]:
    """Returns {name of a configured tracker: a function that connects to it}, for the run in `root`. `start`: the
    number of steps that the run has completed before."""
    connecting: dict[str, Callable[[], Tracker]] = {}
    if config.wandb.project:
        connecting["wandb"] = partial(WandbTracker, config, run_id, root)
    if config.mlflow.experiment:
        connecting["mlflow"] = partial(MlflowTracker, config, run_id, root)
    if config.trackio.project:
        connecting["trackio"] = partial(TrackioTracker, config, run_id, root)
    if config.tensorboard:
        connecting["tensorboard"] = partial(TensorboardTracker, root, start)
    return connecting


def _mlflow_name(name: str) -> str:
    return _NOT_IN_MLFLOW.sub("_", name)


def _rollouts_text(rollouts: Table) -> str:
    """Returns Markdown that shows `rollouts`."""
    rows = [dict(zip(TABLE_COLUMNS, row, strict=True)) for row in rollouts]
    return "\n\n---\n\n".join(f"reward {row['reward']:g}\n\n{row['prompt']}{row['conversation']}" for row in rows)
