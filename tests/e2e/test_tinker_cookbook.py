"""Recipes of Tinker's cookbook against `trireme serve`: as they are, from the package index, each in its own process.

`examples/recipes/cookbook.py` gives them local data and the tokenizer of the shipped model. All learn on one server,
each an adapter. What a recipe has logged tells whether it learnt, and whether it continued after a kill. The commands
are those of docs/tinker.md.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from page_fences import ALL, calls_of
from served_tinker import Server
from test_tinker_versions import installed

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "examples" / "recipes" / "cookbook.py"
NAMED = "Qwen/Qwen3-8B-Base"
PACKAGES = ("tinker-cookbook[math-rl]>=0.5", f"tinker=={version('tinker')}")
"""The newest cookbook that can be installed with the client that is tested; those before 0.5 have other recipes."""
RECIPE_S = 600.0
STEPS = 20
"""What a recipe makes of its data."""
MODES = ("synchronous", "asynchronous", "streaming")
"""`rl.train` in its three ways."""


def printed(name: str) -> list[str]:
    """Returns the module and the flags of the recipe that docs/tinker.md starts with the log `name`."""
    (fence,) = [fence for fence in ALL if "alias recipe=" in fence.text]
    (words,) = [words for words in calls_of("recipe", fence.text) if f"log_path=/tmp/{name}" in words]
    return [word for word in words if not word.startswith(("model_name=", "base_url=", "log_path="))]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the cookbook."""
    environment = tmp_path_factory.mktemp("cookbook") / "venv"
    assert installed(environment, *PACKAGES) == ""
    return environment / "bin" / "python"


@pytest.fixture(scope="module")
def server(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--trainer.lora.rank", "32", "--model.max-seq-len", "64", "--service.tinker.names", json.dumps([NAMED]))
    server = Server(tmp_path_factory.mktemp("served"), *flags)
    yield server
    server.stop()


class Recipe:
    """A recipe and what it has logged; it can be killed, and started again with the same directory."""

    def __init__(self, python: Path, server: Server, log: Path, module: str, *flags: str) -> None:
        self.log = log
        self._output = log.with_suffix(".out")
        at = (f"base_url={server.url}", f"model_name={NAMED}", f"log_path={log}")
        self._command = [str(python), str(DRIVER), module, *at, *flags]
        self._environ = {**os.environ, "TINKER_API_KEY": server.key, "TINKER_TELEMETRY": "0"}
        self.start()

    def start(self) -> None:
        with self._output.open("a") as output:
            self._process = subprocess.Popen(
                self._command, env=self._environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """Waits for its end, which is a good one."""
        try:
            assert self._process.wait(RECIPE_S) == 0, self.tail
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the recipe did not end within {RECIPE_S:g} s: {self.tail}")

    def wait_until(self, is_so: Callable[[], bool], label: str) -> None:
        until = time.monotonic() + RECIPE_S
        while not is_so():
            assert self._process.poll() is None, f"it ended before {label}: {self.tail}"
            assert time.monotonic() < until, f"waited for {label}: {self.tail}"
            time.sleep(0.1)

    @property
    def tail(self) -> str:
        return self._output.read_text()[-3000:]

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.log / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def saved(self, batch: int) -> bool:
        """Tells whether it has saved the state before `batch` in its log of checkpoints."""
        return any(row.get("batch") == batch and "state_path" in row for row in self.rows("checkpoints.jsonl"))

    def series(self, key: str) -> list[tuple[int, float]]:
        """What it logged under `key`, with the steps, in the order of time."""
        return [(row["step"], row[key]) for row in self.rows("metrics.jsonl") if key in row]

    def killed_and_resumed(self, batch: int, key: str) -> list[tuple[int, float]]:
        """Kills it at the first step after `batch` was saved; starts it again, and waits for its end. Returns the
        series, once it is sure that it continued at that batch, and not from the start."""
        self.wait_until(lambda: self.saved(batch) and self.series(key)[-1][0] >= batch, f"step {batch}")
        self.kill()
        before = len(self.series(key))
        self.start()
        self.end()
        series = self.series(key)
        assert series[before][0] == batch
        assert all(after[0] == step[0] + 1 for step, after in pairwise(series[before:]))
        return series


def assert_rises(series: list[tuple[int, float]], by: float) -> None:
    values = [value for _, value in series]
    first, last = sum(values[:4]) / 4, sum(values[-4:]) / 4
    assert last > first + by, values


def test_sl_loop_learns_and_continues_where_it_was_killed(python: Path, server: Server, tmp_path: Path) -> None:
    recipe = Recipe(python, server, tmp_path / "sl", *printed("sl-loop"))
    series = recipe.killed_and_resumed(10, "train_mean_nll")
    assert series[-1][0] == STEPS - 1
    assert series[-1][1] < series[0][1] / 2, series
    twice = [[value for step, value in series if step == again] for again in {step for step, _ in series if step >= 10}]
    for values in twice:
        assert values[0] == pytest.approx(values[-1], rel=1e-3), "a state has the weights and the optimiser's moments"


def test_rl_loop_learns_and_continues_where_it_was_killed(python: Path, server: Server, tmp_path: Path) -> None:
    recipe = Recipe(python, server, tmp_path / "rl", *printed("rl-loop"))
    series = recipe.killed_and_resumed(10, "reward/total")
    assert series[-1][0] == STEPS - 1
    assert_rises(series, 0.15)


@pytest.mark.parametrize("mode", MODES)
def test_rl_train_learns(python: Path, server: Server, tmp_path: Path, mode: str) -> None:
    """The synchronous and the streaming one are killed and resumed. Under the asynchronous one the server is killed and
    started again."""
    flags = printed(mode)
    if mode == "asynchronous":  # the recipe makes fewer steps if groups become too old, as they do on a busy machine
        assert "max_steps_off_policy=2" in flags
        flags = [*(flag for flag in flags if flag != "max_steps_off_policy=2"), f"max_steps_off_policy={STEPS}"]
    recipe = Recipe(python, server, tmp_path / mode, *flags)
    reward = "env/all/reward/total"
    if mode != "asynchronous":
        series = recipe.killed_and_resumed(10, reward)
        assert series[-1][0] == STEPS - 1
        assert_rises(series, 0.1)
        return
    recipe.wait_until(lambda: len(recipe.series(reward)) >= 7, "seven steps")
    server.kill_all()
    server.start()
    recipe.end()
    series = recipe.series(reward)
    assert [step for step, _ in series] == list(range(STEPS)), "no step was lost, and none came twice"
    assert_rises(series, 0.1)
