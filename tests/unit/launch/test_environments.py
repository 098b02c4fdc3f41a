"""Environments are made for a trial in a process of their own before a run starts, and in a dry run."""

from pathlib import Path

import pytest

from trireme.cli import rl
from trireme.cli.rl import main
from trireme.core.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK

ROOT = Path(__file__).parents[3]


def dry_run(*flags: str) -> int:
    return main(["@", "configs/quickstart.toml", "--dry-run", *flags])


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(rl, "WAIT_LINE_S", 600.0)


def test_a_dry_run_says_why_an_environment_cannot_be_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("print('noise')\nraise RuntimeError('boom')\n")
    assert dry_run("--env.id", "mine:Dataset") == EXIT_BAD_INPUT
    output = capfd.readouterr()
    file = tmp_path / "mine.py"
    assert output.err == f"error: env.id = 'mine:Dataset' cannot be imported: RuntimeError: boom ({file}, line 2)\n"
    assert output.out == ""


PROBLEM = """
from orchestrator.env import Env, EnvGroupBuilder, RLDataset

class Broken(Env):
    async def initial_observation(self):
        {does}
    async def step(self, action):
        raise AssertionError("an environment that cannot begin takes no step")

class Problem(EnvGroupBuilder):
    async def make_env(self, sample):
        return Broken()

class Dataset(RLDataset):
    def __init__(self, context):
        pass
    def get_batch(self, index):
        return [Problem()]
    def __len__(self):
        return 1
"""


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("raise KeyError('prompt')", "KeyError: 'prompt'"),
        ("return 'Sort: 123', ()", "environment mine:Dataset, problem 0.0.0: gave the observation 'Sort: 1"),
        ("return [5, 10**6], ()", "environment mine:Dataset, problem 0.0.0: gave token 1000000"),
        ("return [5]", "ValueError: not enough values to unpack"),
    ],
)
def test_a_first_problem_must_be_built(
    does: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(PROBLEM.format(does=does))
    assert dry_run("--env.id", "mine:Dataset") == EXIT_BAD_INPUT
    assert f"its first problem cannot be built: {message}" in capsys.readouterr().err


def test_a_process_that_dies_or_hangs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("import os\nprint('last words', flush=True)\nos._exit(7)\n")
    assert dry_run("--env.id", "mine:Dataset") == EXIT_BAD_INPUT
    assert "ended with code 7: ...last words" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(rl, "WAIT_LINE_S", 0.05)
    assert dry_run("--env.id", "mine:Dataset", "--timeouts.start-s", "0.1") == EXIT_FAILED
    output = capsys.readouterr().err
    assert "waiting for the environments and their first problems (0 s)\n" in output
    assert "the environments were not made within 0.1 s (timeouts.start_s)" in output


WARNING = """
import logging
from orchestrator.envs.sort import SortDataset

class Dataset(SortDataset):
    def __init__(self, context):
        super().__init__(context)
        logging.getLogger("orchestrator.mine").warning("only two distinct questions")
"""


def test_a_dry_run_shows_what_an_environment_warns_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(WARNING)
    assert dry_run("--env.id", "mine:Dataset") == EXIT_OK
    assert "warning: only two distinct questions\n" in capfd.readouterr().err
