"""`scripts/gpu_check.py`: what ends how, what is killed, and what a machine can check that has little installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_check.checks import FAILURE, NOT_RUN, PASS
from gpu_check.report import NOTHING_RAN
from gpu_check.runner import run_part

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "gpu_check.py"
FAKE = """
import os, time
from gpu_check.checks import Check, Failed, NotRun

def act(context):
    if NAME == "wrong": raise Failed("3 is not 4")
    if NAME == "raises": raise ValueError("odd")
    if NAME == "elsewhere": raise NotRun("too small")
    if NAME == "hangs": time.sleep(600)
    if NAME == "dies": os.kill(os.getpid(), 9)
    print("noise on standard output")
    return {"figure": 1.5}
"""
FAKE_CHECKS = """
CHECKS = (
    Check("right", act), Check("acts", act, only_gpu=ONLY_GPU), Check("needs", act, ("no_such_package",)),
    Check("later", act),
)
"""


def fake_part(directory: Path, acts: str) -> str:
    """Writes a part whose second check does what its name says."""
    rest = FAKE_CHECKS.replace('Check("acts", act', f'Check("acts", lambda c: vary(c, "{acts}")')
    vary = "\ndef vary(context, name):\n    global NAME\n    NAME = name\n    try: return act(context)\n"
    vary += "    finally: NAME = 'right'\n\nNAME = 'right'\nONLY_GPU = ''\n"
    (directory / f"part_that_{acts}.py").write_text(FAKE + vary + rest)
    return f"part_that_{acts}"


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a part, and gives how each check ended, by name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(acts: str, seconds: float = 60.0) -> dict[str, tuple[str, str]]:
        outcomes = run_part(fake_part(tmp_path, acts), "cpu", seconds, tmp_path / "log")
        assert [outcome.check for outcome in outcomes] == ["right", "acts", "needs", "later"]
        return {outcome.check: (outcome.ending, outcome.reason) for outcome in outcomes}

    return run


@pytest.mark.parametrize(
    ("acts", "ending", "reason"),
    [
        ("is_right", PASS, ""),
        ("wrong", FAILURE, "3 is not 4"),
        ("raises", FAILURE, "ValueError: odd"),
        ("elsewhere", NOT_RUN, "too small"),
    ],
)
def test_a_check_passes_fails_or_does_not_run(part: Any, acts: str, ending: str, reason: str) -> None:
    ended = part(acts)
    assert ended["acts"] == (ending, reason)
    assert ended["right"] == ended["later"] == (PASS, "")
    assert ended["needs"] == (NOT_RUN, "no_such_package is not installed")


def test_a_part_that_hangs_is_killed_and_says_where(part: Any) -> None:
    ended = part("hangs", seconds=3.0)
    assert ended["right"] == (PASS, "")
    assert ended["acts"][0] == FAILURE
    assert ended["acts"][1].startswith("the part was ended after 3 s while it waited for this check")
    assert ended["later"] == (NOT_RUN, "the part ended before it, at acts")


def test_a_part_that_dies_says_how(part: Any) -> None:
    ended = part("dies")
    assert ended["acts"][0] == FAILURE
    assert "its process ended (signal SIGKILL)" in ended["acts"][1]
    assert ended["later"][0] == NOT_RUN


# ----------------------------------------------------------------------------------------------------- the whole script


def gpu_check(
    logs: Path, *flags: str, python: str | Path = sys.executable, **environ: str
) -> tuple[int, dict[str, Any], str]:
    """Returns the exit code, the last line as JSON, and what stands above it; its logs go below `logs`."""
    ended = subprocess.run(
        [python, SCRIPT, *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(logs), **environ},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    table, _, last = ended.stdout.strip().rpartition("\n")
    return ended.returncode, json.loads(last), table


def test_without_a_gpu_nothing_passes_and_each_check_says_why(tmp_path: Path) -> None:
    code, result, table = gpu_check(tmp_path, "--json", str(tmp_path / "result.json"), CUDA_VISIBLE_DEVICES="")
    assert code == NOTHING_RAN
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert {check["ending"] for check in result["checks"]} == {NOT_RUN}
    assert {check["part"] for check in result["checks"]} == {"trainer", "engine", "system", "several"}
    for check in result["checks"]:
        assert re.match(r"no GPU: PyTorch 2\.\S+ .*; CUDA_VISIBLE_DEVICES is ''", check["reason"])
    assert table.splitlines()[-1] == f"0 passed, 0 failed, {len(result['checks'])} not run"
