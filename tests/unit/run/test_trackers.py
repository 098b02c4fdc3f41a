"""Each tracker has the numbers, rollouts and incidents of a run: the real packages, on this machine."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from waiting import wait_for

from trireme.config.load import load
from trireme.run.sink import MetricsSink, metrics_sinks
from trireme.supervision.roster import Roster

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"
RECORD = {
    **{"step": 5, "why": "best", "problem": "p", "rewards": [1.0]},
    "rollouts": [
        {"turns": [{"observation_text": "Sort: 21", "action_text": "12", "versions": []}], "stop_reason": "stop"}
    ],
}
RUN_ID = "0123abcd"


@contextmanager
def opened(root: Path, *flags: str, start: int = 0) -> Iterator[tuple[MetricsSink, Roster, list[str]]]:
    """Yields the sink of the tracker in `flags`, its roster, and the lines that are printed."""
    roster = Roster(lambda: 0.0)
    roster.at_step(start)
    lines: list[str] = []
    config = load(["@", str(QUICKSTART), *flags], {}).config
    with metrics_sinks(config, RUN_ID, root, roster, lines.append) as (sink,):
        yield sink, roster, lines


def two_attempts(root: Path, *flags: str) -> list[str]:
    """Writes the steps 5 and 6, and after a resume step 6 again and an incident. Returns the lines that are printed."""
    printed = []
    for start, reward in ((4, 0.1), (5, 0.7)):
        with opened(root, *flags, start=start) as (sink, roster, lines):
            for step in range(start, 6):
                row = {"step": step, "reward/total": reward, "eval/sort/avg@4": reward, "name": "text"}
                sink.write(row, [json.dumps(RECORD)])
            roster.note("inference_1", "its engine died")
        printed += lines
    assert len(printed) == 2, printed  # a place for each attempt, and nothing that is lacking
    return printed


def test_an_incident_is_an_alert_of_weights_and_biases(tmp_path: Path) -> None:
    with opened(tmp_path, "--wandb.project", "test", "--wandb.mode", "offline", start=4) as (_, roster, _lines):
        roster.note("inference_1", f"its engine died {'x' * 100}")
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    text = f"inference_1: its engine died {'x' * 100}".encode()
    # Its process ends writing later than `close` returns.
    wait_for(lambda: text + b"\n\nat step 4" in written.read_bytes(), "the alert")
    assert text[:63] in written.read_bytes().replace(text, b""), "and a title that is short enough"


def test_wandb_continues_its_run_on_the_axis_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Mock()
    monkeypatch.setattr("wandb.init", started)
    with opened(tmp_path, "--wandb.project", "test", "--wandb.mode", "offline", start=4) as (sink, _, _lines):
        sink.write({"step": 4, "reward/total": 0.5}, [])
    assert (started.call_args.kwargs["id"], started.call_args.kwargs["resume"]) == (RUN_ID, "allow")
    started.return_value.define_metric.assert_called_once_with("*", step_metric="step")
    assert started.return_value.log.call_args.args[0] == {"step": 5, "reward/total": 0.5}


def test_wandb_is_tried_again_after_a_refused_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, because W&B remembers a key for the whole process."""
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path))
    program = f"""
from pathlib import Path
from trireme.config.load import load
from trireme.run import trackers
trackers.FINISH_S = 2.0
config = load(["@", {str(QUICKSTART)!r}, "--wandb.project", "x"], {{}}).config
for _ in range(2):
    try:
        trackers.WandbTracker(config, {RUN_ID!r}, Path("."))
    except Exception as error:
        print("refused:", type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused")]
    assert refused == ["refused: CommError"] * 2, done.stdout + done.stderr


def test_tensorboard_has_the_numbers_rollouts_and_incidents_of_a_run(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert str(tmp_path) in two_attempts(tmp_path, "--tensorboard")[0]
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, round(e.value, 3)) for e in read.Scalars("reward/total")] == [(5, 0.1), (6, 0.7)]
    texts = {tag: read.Tensors(tag)[-1].tensor_proto.string_val[0] for tag in read.Tags()["tensors"]}
    assert b"Sort: 2112" in texts["rollouts/text_summary"]
    assert texts["incidents/text_summary"] == b"inference_1: its engine died"


def test_mlflow_has_one_run_with_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    root = tmp_path / "sort-1"
    root.mkdir()
    places = two_attempts(root, "--mlflow.experiment", "sorting", "--mlflow.tracking-uri", uri)
    assert places[0] == f"MLflow at {uri}: run sort-1 of experiment sorting"
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("sorting").experiment_id])
    assert (run.info.run_name, run.info.status) == ("sort-1", "FINISHED")
    assert run.data.params["trainer.loss_fn"] == "ppo"
    assert run.data.tags["trireme.newest_incident"] == "inference_1: its engine died, at step 5"
    history = client.get_metric_history(run.info.run_id, "reward/total")
    assert [(entry.step, entry.value) for entry in history] == [(5, 0.1), (6, 0.1), (6, 0.7)]
    assert run.data.metrics["eval/sort/avg_4"] == 0.7
    texts = sorted(path for path in (tmp_path / "store").rglob("*.md"))
    assert [path.name for path in texts] == ["step_000005.md", "step_000006.md"]
    assert "Sort: 2112" in texts[0].read_text()


def test_trackio_has_one_run_with_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))  # read once, when Trackio is imported
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    pytest.importorskip("trackio")
    from trackio import sqlite_storage

    root = tmp_path / "sort-1"
    places = two_attempts(root, "--trackio.project", "sorting")
    assert places[0] == "Trackio: uv run --no-sync trackio show --project sorting"
    storage = sqlite_storage.SQLiteStorage
    name = f"sort-1-{RUN_ID}"
    assert storage.get_runs("sorting") == [name]
    logs = storage.get_logs("sorting", name)
    assert [(log["step"], log["reward/total"]) for log in logs] == [(5, 0.1), (6, 0.1), (6, 0.7)]
    assert "Sort: 2112" in str(logs[0]["rollouts"])
    assert {alert["title"] for alert in storage.get_alerts("sorting")} == {"inference_1"}
