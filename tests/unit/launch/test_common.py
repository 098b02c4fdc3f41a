"""What a start says while it waits."""

import io
from pathlib import Path

import pytest
from plan_support import plan
from rich.console import Console

from trireme.config.run import RunConfig
from trireme.core.errors import BadInput
from trireme.launch.common import PROGRESS_EVERY_S, StartProgress, prepare_cluster
from trireme.supervision.roster import PartHealth, Roster


def test_a_long_start_says_why_it_waits_and_status_how_far_each_part_is(tmp_path: Path) -> None:
    """A line of a log without its time, level and module; parts that have started stay as they are."""
    line = "2026-11-22 20:00:01,234 INFO trainer.shard: proving that the model is computed right\n"
    (tmp_path / "trainer_1.log").touch()
    (tmp_path / "trainer_2.log").write_text(line)
    (tmp_path / "inference_0.log").write_text("INFO [one]\nLoading weights [1/2]\n\n")
    roster = Roster(lambda: 0.0)
    for name in ("trainer_0", "trainer_2", "orchestrator_0"):
        roster.set(name, PartHealth.STARTING)
    roster.set("inference_0", PartHealth.CATCHING_UP)
    out = io.StringIO()
    progress = StartProgress(Console(file=out, width=400), tmp_path, roster)
    names = ["trainer shard 0", "trainer shard 1", "trainer shard 2", "orchestrator", "inference replica 0"]
    progress([*names, "Ray to place 3 actors"], PROGRESS_EVERY_S - 1)
    assert out.getvalue() == ""
    assert {part.name: part.why for part in roster.parts} == {
        "trainer_0": "its process is starting",
        "trainer_2": "proving that the model is computed right",
        "orchestrator_0": "its process is starting",
        "inference_0": "",
    }
    roster.set("trainer_2", PartHealth.HEALTHY)
    progress([*names[:2], names[4], "Ray to place 3 actors"], PROGRESS_EVERY_S)
    assert out.getvalue() == (
        "waiting for trainer shard 0: its process is starting, trainer shard 1: importing packages, inference replica "
        "0: Loading weights [1/2], Ray to place 3 actors (5 s)\n"
    )
    assert roster.parts[1].why == ""


def test_a_run_directory_in_a_submitted_copy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    unpacked.mkdir(parents=True)
    monkeypatch.chdir(unpacked)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(BadInput, match=r"absolute --run\.output-dir"):
        prepare_cluster(plan().config, plan())
    in_a_store = plan().config.model_copy(update={"run": RunConfig(output_dir="s3://bucket/runs")})
    with pytest.raises(BadInput, match=r"run\.local_dir = outputs.*\n.*\n.*absolute --run\.local-dir"):
        prepare_cluster(in_a_store, plan())
    elsewhere = plan().config.model_copy(update={"run": RunConfig(output_dir=str(tmp_path))})
    prepare_cluster(elsewhere, plan())
