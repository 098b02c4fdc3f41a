"""Fault points: which process they hit, how often, and what they do there. Processes are real ones."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from waiting import wait_for

from trireme.process import faults
from trireme.process.faults import InjectedFault, fault_point, number_process

PASSES = "from trireme.process.faults import fault_point; [print(fault_point('here'), flush=True) for _ in '123']"
DEADLINE_S = 60


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resets the state to that of a process that has passed no point and has no number."""
    monkeypatch.setattr(faults, "_passed", Counter())
    monkeypatch.setattr(faults, "_claimed", set())
    monkeypatch.setenv("TRIREME_FAULT_NUMBER", "")


def start(code: str, **environ: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRIREME_FAULT")}
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**environment, **environ}, stdout=subprocess.PIPE, text=True
    )


def ends(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    out, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out.split()


@pytest.mark.parametrize(
    ("armed", "acts"),
    [
        ("", [None] * 4),
        ("elsewhere=raise", [None] * 4),
        ("here@2=corrupt,there=skip", [None, "corrupt", None, None]),
        ("here@2+=corrupt", [None, "corrupt", "corrupt", "corrupt"]),
    ],
)
def test_it_acts_at_its_passages_alone(monkeypatch: pytest.MonkeyPatch, armed: str, acts: list[str | None]) -> None:
    monkeypatch.setenv("TRIREME_FAULTS", armed)
    assert [fault_point("here") for _ in range(4)] == acts
    monkeypatch.setenv("TRIREME_FAULTS", "there=raise")
    with pytest.raises(InjectedFault, match="there, passage 1"):
        fault_point("there")


@pytest.mark.parametrize("spec", ["here", "here=", "here@x=kill", "here@+=kill", "here[a]=kill", "here kill"])
def test_what_cannot_be_read_is_refused(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test whose fault never happens proves nothing."""
    monkeypatch.setenv("TRIREME_FAULTS", spec)
    with pytest.raises(ValueError, match="TRIREME_FAULTS"):
        fault_point("here")


def test_a_number_means_one_process_of_a_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIREME_FAULTS", "here[1]=corrupt")
    number_process(0)
    assert fault_point("here") is None
    number_process(1)
    assert fault_point("here") == "corrupt"


def test_once_means_once_in_all_processes_also_of_many_at_once(tmp_path: Path) -> None:
    """The successor of the killed passes; another item is another fault."""
    armed = {"TRIREME_FAULTS": "here@2=kill,here@3=corrupt", "TRIREME_FAULT_ONCE": str(tmp_path)}
    assert ends(start(PASSES, **armed)) == (-signal.SIGKILL, ["None"])
    assert ends(start(PASSES, **armed)) == (0, ["None", "None", "corrupt"])
    assert ends(start(PASSES, **armed)) == (0, ["None", "None", "None"])
    armed = {"TRIREME_FAULTS": "here@3=kill", "TRIREME_FAULT_ONCE": str(tmp_path)}
    codes = [ends(process)[0] for process in [start(PASSES, **armed) for _ in range(4)]]
    assert sorted(codes) == [-signal.SIGKILL, 0, 0, 0]


def test_stopped_and_frozen_processes_go_on(tmp_path: Path) -> None:
    process = start(PASSES, TRIREME_FAULTS="here@2=stop")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    assert ends(process) == (0, ["None", "stop", "None"])
    reached = tmp_path / "reached"
    process = start(PASSES, TRIREME_FAULTS="here@2=freeze", TRIREME_FAULT_REACHED=str(reached))
    wait_for(reached.exists, "the process to freeze")
    reached.unlink()
    assert ends(process) == (0, ["None", "freeze", "None"])
