"""The commands of README and docs, run: those that train as a dry run, those that look at a run on a real one.

tests/unit/test_readme.py tries all of them up to where they would start something.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from run_support import DEADLINE_S, ROOT, TINY

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
FENCES = re.findall(r"(?<! -->\n)^```bash\n(.*?)^```$", TEXT, re.M | re.S)
COMMANDS = re.findall(
    r"^(?:pip install uv && )?uv run (?:--no-sync )?((?:rl|sft|trireme) .*)$",
    re.sub(r"\\\n\s*", " ", "\n".join(FENCES)),
    re.M,
)
MODULES = {name: f"trireme.cli.{name}" for name in ("rl", "sft", "trireme")}
TRAINS = [words for words in (shlex.split(line, comments=True) for line in COMMANDS) if words[0] == "rl"]
LOOKS = [
    words
    for words in (shlex.split(line, comments=True) for line in COMMANDS)
    if words[0] == "trireme"
    and words[1] in ("inspect", "export", "report", "watch", "plot", "eval")
    and "outputs/sort" in words
    and "--web" not in words  # a server, which tests/unit/tools/test_watch_web.py starts and ends
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of the repository and a finished run of the name `sort`."""
    directory = tmp_path_factory.mktemp("docs")
    for name in ("configs", "assets", "examples", "scripts"):
        (directory / name).symlink_to(ROOT / name)
    run(directory, "rl", "@", "configs/quickstart.toml", "--run.name", "sort", "--checkpoint.every", "1", *TINY)
    return directory


def run(directory: Path, *words: str) -> str:
    """Runs a command and returns what it printed."""
    command = [sys.executable, "-m", MODULES[words[0]], *words[1:]]
    ended = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.long
@pytest.mark.parametrize("words", TRAINS, ids=" ".join)
def test_a_command_that_trains_is_right_up_to_its_plan(words: list[str], place: Path) -> None:
    printed = run(place, *words, "--dry-run")
    assert "staleness" in printed or "--help" in words


@pytest.mark.long
@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_a_command_that_looks_at_a_run(words: list[str], place: Path, tmp_path: Path) -> None:
    """On a short run: with steps that it has."""
    text = re.sub(r"--step \d+", "--step 2", shlex.join(words))
    text = re.sub(r"--steps \S+", "--steps 1:2", text)
    given = shlex.split(text)
    if given[1] == "export":
        given += ["--out", str(tmp_path / "model")]
    assert run(place, *given)
