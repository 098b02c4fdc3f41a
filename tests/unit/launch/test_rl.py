"""The rooms of an attempt of `rl`: how they begin, and in which order they end."""

import socket
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from checkpoint_support import manifest
from config_support import small

from trireme.cli import rl as command
from trireme.core.errors import EXIT_BAD_INPUT
from trireme.launch import rl, run
from trireme.launch.rl import ON_UPDATE, RlRun


def test_each_attempt_has_rooms_of_its_own_and_the_orchestrator_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes its environments while the trainer, dead or alive, is still there."""
    log: list[str] = []

    def room(name: str) -> Any:
        return Mock(source=None, followers=[], stop=partial(log.append, f"{name} {next(numbers)}"))

    training: Any = object.__new__(RlRun)
    training.config = SimpleNamespace(timeouts=SimpleNamespace(update_s=1.0))
    training.plan = SimpleNamespace(resolved=lambda config: config, taken_share=0.0, offloads=False)
    training.places = {"trainer": [], "orchestrator": [{}]}
    training._service = training._incarnations = None
    numbers = iter(range(1, 7))
    monkeypatch.setattr(rl, "TrainerHandle", SimpleNamespace(start=lambda *_: room("trainer")))
    monkeypatch.setattr(rl, "ReplicaSetHandle", lambda *_: room("replica set"))
    monkeypatch.setattr(RlRun, "_start_orchestrator", lambda *_: room("orchestrator"))
    run: Any = SimpleNamespace(logs=None, start=SimpleNamespace(attempt=1))
    for _ in range(2):
        with ExitStack() as ending:
            core = training.start(run, ending)
            assert {core.trainer, core.other_rooms["orchestrator"]} < set(core.rooms)
    assert log == [*("orchestrator 3", "trainer 2", "replica set 1"), *("orchestrator 6", "trainer 5", "replica set 4")]


@pytest.mark.parametrize(
    ("placement", "chosen", "stored", "expected"),
    [
        ("auto", "auto", {ON_UPDATE: "keep_kv"}, "keep_kv"),
        ("auto", "auto", {ON_UPDATE: "recompute_kv"}, "recompute_kv"),
        ("auto", "auto", {}, "auto"),
        ("auto", "drain", {ON_UPDATE: "keep_kv"}, "drain"),
        ("colocated", "auto", {ON_UPDATE: "keep_kv"}, "auto"),
    ],
)
def test_a_resumed_run_keeps_what_auto_meant(
    placement: str, chosen: str, stored: dict[str, str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for a run that was split: replicas that sleep keep no cache."""
    training: Any = object.__new__(RlRun)
    training.config = small(placement=placement, inference={"on_update": chosen})
    training._say = print
    run: Any = SimpleNamespace(start=SimpleNamespace(manifest=replace(manifest(3), decided=stored)))
    training.enter(run)
    assert training.config.inference.on_update == expected
    assert (f"inference.on_update = auto: {expected}" in capsys.readouterr().out) == (chosen != expected)
    training.plan = SimpleNamespace(resolved=lambda config: config)
    assert training.decided == {ON_UPDATE: expected}


def test_a_port_that_is_taken_is_refused_before_there_is_a_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "prepare_cluster", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ["--run.output-dir", str(tmp_path / "runs"), "--service.port", str(taken.getsockname()[1])]
        assert command.main(["@", "configs/quickstart.toml", *flags]) == EXIT_BAD_INPUT
    assert "a port that is free" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_rooms_are_launched_once_the_environments_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched: list[object] = []
    monkeypatch.setattr(command, "prepare_cluster", lambda *_: None)
    monkeypatch.setattr(run, "launch", lambda training, _: launched.append(training))
    assert command.main(["@", "configs/quickstart.toml", "--run.output-dir", str(tmp_path / "runs")]) == 0
    assert [type(training) for training in launched] == [RlRun]
