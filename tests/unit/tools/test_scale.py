"""`trireme scale`: what is refused, what the driver is asked, and when the command returns."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import refused
from supervision_support import answering, driven, roster_of

from trireme.cli.trireme import main
from trireme.config.load import load
from trireme.core.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK
from trireme.supervision.roster import PartHealth, Roster
from trireme.supervision.status import ScaleRequest, ScaleRequests, StatusWriter

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


def make_run(root: Path, **config: Any) -> Path:
    root.mkdir()
    values = load(["@", str(QUICKSTART)]).config.model_dump(mode="json")
    (root / "config.json").write_text(json.dumps(values | config))
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def accept(requests: ScaleRequests, request: ScaleRequest) -> None:
    requests.answer(request, f"{request.replicas} replicas from now on")


@pytest.mark.parametrize(
    ("config", "reason"), [({"deterministic": True}, "deterministic"), ({"data": {"train": "x"}}, "a run of sft")]
)
def test_another_run(config: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", **config)
    with driven(run):
        assert reason in refused(capsys, "scale", run, "--replicas", 2)


def test_no_number_no_run_or_no_driver(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "has no driver" in refused(capsys, "scale", run, "--replicas", 2)
    with driven(run):
        pass
    text = refused(capsys, "scale", run, "--replicas", 2)
    assert "--resume --inference.replicas 2" in text
    assert not (run / "scale").exists(), "no request is left for the next driver"
    assert "--replicas" in refused(capsys, "scale", run)
    assert "holds none" in refused(capsys, "scale", tmp_path, "--replicas", 2)
    with driven(run):
        assert "1 or more" in refused(capsys, "scale", run, "--replicas=0")
        assert "1 or more" in refused(capsys, "scale", run, "--replicas=-1")


def test_what_the_driver_accepts_and_refuses(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with driven(run), answering(run, accept):
        assert main(["scale", str(run), "--replicas", "3", "--no-wait"]) == EXIT_OK
    assert capsys.readouterr().out == "3 replicas from now on\n"
    assert list((run / "scale").iterdir()) == []

    def refuse(requests: ScaleRequests, request: ScaleRequest) -> None:
        requests.answer(request, "64 replicas, which need 90 GiB", accepted=False)

    with driven(run), answering(run, refuse):
        assert main(["scale", str(run), "--replicas", "64"]) == EXIT_BAD_INPUT
    assert "which need 90 GiB" in capsys.readouterr().err
    assert list((run / "scale").iterdir()) == []


def scaled(run: Path, roster: Roster, replicas: int, changes: Callable[[Roster], None]) -> int:
    """The exit code of a command whose request is accepted, after which `changes` happen."""

    def serve(requests: ScaleRequests, request: ScaleRequest) -> None:
        accept(requests, request)
        changes(roster)

    with driven(run), StatusWriter(run, roster), answering(run, serve):
        return main(["scale", str(run), "--replicas", str(replicas)])


def test_it_returns_when_all_serve(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def changes(roster: Roster) -> None:
        for health in (PartHealth.STARTING, PartHealth.CATCHING_UP, PartHealth.HEALTHY):
            for index in (1, 2):
                roster.set(f"inference_{index}", health)

    assert scaled(run, roster_of(PartHealth.HEALTHY), 3, changes) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 replicas from now on"
    assert lines[-1] == "3 of 3 replicas serve"


def test_nothing_is_waited_for_for_ever(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def ends(_requests: ScaleRequests, _request: ScaleRequest) -> None:
        (run / "driver.lock").write_text(f"pid 999999999 on {os.uname().nodename}\n")

    with driven(run), answering(run, ends):
        assert main(["scale", str(run), "--replicas", "3"]) == EXIT_FAILED
    assert "ended" in capsys.readouterr().err
    assert list((run / "scale").iterdir()) == []
    run = make_run(tmp_path / "impatient", timeouts={"start_s": 0.2, "update_s": 0.1})
    with driven(run):
        assert main(["scale", str(run), "--replicas", "3"]) == EXIT_FAILED
    assert "has not completed this change within 0 s" in capsys.readouterr().err
    assert scaled(run, roster_of(PartHealth.HEALTHY, PartHealth.STARTING), 3, lambda _: None) == EXIT_FAILED
    assert "1 of 3 replicas serve; inference_1 starting" in capsys.readouterr().err
