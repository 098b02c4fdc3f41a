"""The README's commands: those on files of this repository are understood as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from trireme.config.load import load
from trireme.tools.sweep import read_request

ROOT = Path(__file__).parents[2]
COMMANDS = [
    shlex.split(line, comments=True)
    for line in re.findall(r"^(?:pip install uv && )?(uv run .*)$", (ROOT / "README.md").read_text(), re.M)
]
OWN = [command[3:] for command in COMMANDS if command[2] == "rl" and all((ROOT / f).exists() for f in command[4:5])]


@pytest.mark.parametrize("arguments", OWN, ids=" ".join)
def test_a_run_is_understood(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert load(arguments).config.model.name


def test_the_sweep_is_understood() -> None:
    (words,) = [command[4:] for command in COMMANDS if command[2:4] == ["trireme", "sweep"]]
    kind, *rest = words
    assert len(read_request(kind, rest).runs()) == 2


def test_there_are_such_commands_and_scripts_exist() -> None:
    assert len(OWN) >= 5
    scripts = [part for command in COMMANDS for part in command if part.endswith(".py")]
    assert scripts
    assert [script for script in scripts if not (ROOT / script).exists()] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`(?:src/)?((?:trireme|trainer|orchestrator|inference)/[a-z_/]+(?:\.py|/))`", page.read_text())
    assert [path for path in named if not (ROOT / "src" / path).exists()] == []
