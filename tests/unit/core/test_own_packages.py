"""A user's modules with the names of this project's packages: ours are found, theirs are named."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trireme.core.own_packages import ENTRY, OWN_PACKAGES, ROOT, hidden_modules, search

REPOSITORY = ROOT.parent
MODEL = ["@", str(REPOSITORY / "configs/quickstart.toml"), "--model.name", str(REPOSITORY / "assets/sort-base")]
LETTERS = "from orchestrator.envs.sort import SortDataset\n\n\nclass Letters(SortDataset):\n    pass\n"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A directory with an environment, and with modules that no process may import."""
    for name in OWN_PACKAGES:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a module of the user')\n")
    (tmp_path / "letters.py").write_text(LETTERS)
    return tmp_path


def run_command(name: str, words: list[str], directory: Path, path: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as its installed script does, in a directory, with a PYTHONPATH."""
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts[name].split(":")
    script = f"import sys; from {module} import {function}; sys.argv[1:] = {words!r}; sys.exit({function}())"
    environ = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-P", "-c", script]
    return subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("by", ["PYTHONPATH", "--env.path"])
def test_a_command_finds_its_own(theirs: Path, by: str) -> None:
    """In its own process, and in the one that makes the environments, which searches the working directory too."""
    flags = ["--env.id", "letters:Letters", "--dry-run", *(["--env.path", "."] if by == "--env.path" else [])]
    process = run_command("rl", [*MODEL, *flags], theirs, str(theirs) if by == "PYTHONPATH" else "")
    assert process.returncode == 0, process.stderr
    assert f"{theirs}/trireme.py is hidden" in process.stderr
    assert f"{theirs}/trainer.py is hidden" in process.stderr
    assert "another name" in process.stderr


def test_a_worker_finds_its_own(theirs: Path) -> None:
    script = (
        "import asyncio, math, orchestrator.workers as w\n"
        "async def main():\n"
        "    async with w.workers(1):\n"
        "        print(await w.run_in_worker(math.sqrt, 9, timeout_s=60))\n"
        "asyncio.run(main())\n"
    )
    (theirs / "program.py").write_text(f"import {ENTRY}\n{script}")
    process = subprocess.run([sys.executable, "program.py"], cwd=theirs, capture_output=True, text=True)
    assert process.stdout == "3.0\n", process.stderr


def test_what_is_hidden_is_named(theirs: Path) -> None:
    (theirs / "service").mkdir()
    (theirs / "service" / "__init__.py").touch()
    named = hidden_modules([str(theirs), str(ROOT), str(theirs)])
    assert [line.split(" is hidden")[0] for line in named] == [
        *(str(theirs / f"{name}.py") for name in OWN_PACKAGES),
        str(theirs / "service/__init__.py"),
    ]


def test_directories_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/installed"])
    search(["/theirs"])
    search(["/theirs"])
    assert sys.path == ["/theirs", "/installed"]
