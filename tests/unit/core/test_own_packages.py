"""A user's modules with the names of this project's packages: ours are found, theirs are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trireme.core.errors import EXIT_BAD_INPUT
from trireme.core.own_packages import OWN, ROOT, hidden_modules, search

REPOSITORY = ROOT.parent
LETTERS = "from orchestrator.envs.sort import SortDataset\n\n\nclass Letters(SortDataset):\n    pass\n"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A directory with an environment, and with modules that no process may import."""
    for name in OWN[1:]:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a module of the user')\n")
    (tmp_path / "letters.py").write_text(LETTERS)
    return tmp_path


@pytest.mark.parametrize("by", ["PYTHONPATH", "--env.path"])
def test_a_command_finds_its_own(theirs: Path, by: str) -> None:
    path = str(theirs) if by == "PYTHONPATH" else ""
    flags = ["@", str(REPOSITORY / "configs/quickstart.toml"), "--model.name", str(REPOSITORY / "assets/sort-base")]
    flags += ["--env.id", "letters:Letters", "--dry-run", *(["--env.path", "."] if by == "--env.path" else [])]
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from trireme.cli.start import rl; import sys; sys.argv[1:] = {flags!r}; sys.exit(rl())",
        ],
        cwd=theirs,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"{theirs}/trainer.py is hidden" in ended.stderr
    assert "another name" in ended.stderr


@pytest.mark.parametrize("name", ["trireme.py", "trireme/__init__.py"])
def test_a_module_that_would_hide_all_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Processes that are started by `python -m` in this directory would find it."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    start = "import sys; from trireme.cli.start import rl; sys.argv[1:] = ['--dry-run']; sys.exit(rl())"
    ended = subprocess.run([sys.executable, "-P", "-c", start], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == EXIT_BAD_INPUT
    assert f"given: {tmp_path / name}" in ended.stderr
    assert "give it another name" in ended.stderr


def test_a_worker_finds_its_own(theirs: Path) -> None:
    script = (
        "import asyncio, math, orchestrator.workers as w\n"
        "async def main():\n"
        "    async with w.workers(1):\n"
        "        print(await w.run_in_worker(math.sqrt, 9, timeout_s=60))\n"
        "asyncio.run(main())\n"
    )
    (theirs / "program.py").write_text(f"import trireme\n{script}")
    ended = subprocess.run([sys.executable, "program.py"], cwd=theirs, capture_output=True, text=True)
    assert ended.stdout == "3.0\n", ended.stderr


def test_what_is_hidden_is_named(theirs: Path) -> None:
    (theirs / "trireme").mkdir()
    (theirs / "trireme" / "__init__.py").touch()
    named = hidden_modules([str(theirs), str(ROOT), str(theirs)])
    assert [line.split(" is hidden")[0] for line in named] == [
        str(theirs / "trireme/__init__.py"),
        *(str(theirs / f"{name}.py") for name in OWN[1:]),
    ]


def test_directories_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/installed"])
    search(["/theirs"])
    search(["/theirs"])
    assert sys.path == ["/theirs", "/installed"]
