"""The commands of README and docs, run: those that train as a dry run, those that look at a run on a real one, those
that need a service on one, and those that serve until they are stopped.

tests/unit/test_readme.py tries all of them up to where they would start something.
"""

import ast
import asyncio
import builtins
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_support import free_port, listens
from page_fences import ALL, Fence, words_of
from run_support import DEADLINE_S, ROOT, TINY, key_in, wait_until_disconnected
from served_tinker import Server

from trireme.supervision.status import Status

MODULES = {name: ["-m", f"trireme.cli.{name}"] for name in ("rl", "sft", "trireme", "inference")}
MODULES |= {"python": []}
FENCES = [fence for fence in ALL if fence.language == "bash" and not fence.mark and "alias recipe=" not in fence.text]
COMMANDS = [words for fence in FENCES for command in fence.commands for words in words_of(command)]
PORT = "8000"
"""The port in the pages."""
PORT_FLAGS = {"inference": "--service.port", "trireme serve": "--service.port", "trireme watch": "--port"}
PORT_FLAGS |= {"python": "--port"}
VLLM = "vllm.entrypoints.openai.api_server"
ELSEWHERE = ("pip", "uv", "pytest", "bash", "ray", "curl", "mkdocs", "trireme fetch", "trireme scale")
"""What is installed, downloaded (test_fetch.py) or tests, the site (.ci/run builds it), what a cluster takes
(test_job.py), and what this file tries on a running service."""
SCRIPTS = ("scripts/", "examples/recipes/", "examples/rl_loop.py", "examples/sl_loop.py")
"""What test_gpu_check.py, test_examples.py, test_distill_recipe.py and others run."""


def kind_of(words: list[str]) -> str:
    """Returns how a command is tried here."""
    program, tool = words[0], " ".join(words[:2])
    if program in ELSEWHERE or tool in ELSEWHERE or "answers.jsonl" in words:
        return "elsewhere"
    if program == "python" and (words[1] == "-" or words[1].startswith(SCRIPTS)):
        return "elsewhere"
    if "--help" in words or "--dry-run" in words or program in ("rl", "sft") or tool == "trireme sweep":
        return "plan"
    if program == "inference" or VLLM in words or tool == "trireme serve" or "--web" in words:
        return "server"
    if program == "python" and words[1].startswith("examples/envs/"):
        return "server"
    if "--merge" in words or (program == "python" and words[1] == "-c"):
        return "adapter"
    if program == "python":
        return "agent"
    if tool == "trireme doctor" and "--cluster.address" in words:
        return "elsewhere"
    assert program == "trireme", f"nothing here tries `{shlex.join(words)}`"
    return "look"


KINDS: dict[str, list[list[str]]] = {}
for command_line in COMMANDS:
    if command_line not in KINDS.setdefault(kind_of(command_line), []):
        KINDS[kind_of(command_line)].append(command_line)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of the repository and a finished run of the name `sort`."""
    directory = tmp_path_factory.mktemp("docs")
    for name in ("configs", "assets", "examples", "scripts"):
        (directory / name).symlink_to(ROOT / name)
    for fence in ALL:
        if fence.file and "/" not in fence.file:
            (directory / fence.file).write_text(fence.text)
    run(directory, "rl", "@", "configs/quickstart.toml", "--run.name", "sort", "--checkpoint.every", "1", *TINY)
    (directory / "outputs" / "downloaded").symlink_to(directory / "outputs" / "sort")
    return directory


def run(directory: Path, *words: str) -> str:
    command = [sys.executable, *MODULES[words[0]], *words[1:]]
    environ = {**os.environ, "PYTHONPATH": "examples/agents"}  # as the page of sessions says
    options = {"cwd": directory, "env": environ, "capture_output": True, "text": True, "timeout": DEADLINE_S}
    process = subprocess.run(command, **options)
    assert process.returncode == 0, process.stdout + process.stderr
    return str(process.stdout)


def of_a_short_run(words: list[str]) -> list[str]:
    """Returns a command with steps that a short run has."""
    text = re.sub(r"--(resume\.)?step [\d,]+", r"--\1step 2", shlex.join(words))
    text = re.sub(r"step_\d{6}", "step_000002", text)
    return shlex.split(text)


@pytest.mark.long
@pytest.mark.parametrize("words", KINDS["plan"], ids=" ".join)
def test_a_command_that_trains_is_right_up_to_its_plan(words: list[str], place: Path) -> None:
    if words[0] == "sft":  # there is no run of it to resume
        words = [word for word in words if word != "--resume"]
    printed = run(place, *of_a_short_run(words), *([] if "--dry-run" in words else ["--dry-run"]))
    assert re.search(r"staleness|written to|plan of", printed) or "--help" in words


@pytest.mark.long
@pytest.mark.parametrize("words", KINDS["look"], ids=" ".join)
def test_a_command_that_looks_at_a_run(words: list[str], place: Path, tmp_path: Path) -> None:
    arguments = of_a_short_run(words)
    if arguments[1] == "export":
        arguments += ["--out", str(tmp_path / "model")]
    assert run(place, *arguments)


@pytest.mark.long
def test_a_model_of_adapters_is_exported_and_opened(place: Path) -> None:
    flags = ["--trainer.lora.rank", "8", "--run.output-dir", "adapters/outputs", "--run.name", "sort"]
    run(place, "rl", "@", "configs/quickstart.toml", "--checkpoint.every", "1", *flags, *TINY)
    for name in ("assets", "configs"):
        (place / "adapters" / name).symlink_to(ROOT / name)
    for words in KINDS["adapter"]:
        run(place / "adapters", *of_a_short_run(words))
    (served,) = [words for words in KINDS["server"] if VLLM in words]
    serve_until_it_listens(served, place / "adapters")


@pytest.mark.long
@pytest.mark.parametrize("words", [words for words in KINDS["server"] if VLLM not in words], ids=" ".join)
def test_a_command_that_serves(words: list[str], place: Path) -> None:
    serve_until_it_listens(words, place)


def serve_until_it_listens(words: list[str], directory: Path) -> None:
    """Starts a command at a port of its own, waits until that is open, and stops the command."""
    port, program = free_port(), words[0] if words[0] != "trireme" else " ".join(words[:2])
    arguments = of_a_short_run(words)
    flag = PORT_FLAGS[program]
    if flag in arguments:
        arguments[arguments.index(flag) + 1] = str(port)
    else:
        arguments += [flag, str(port)]
    log = directory / f"served-{port}.log"

    def is_ready() -> bool:
        return listens(port) and (program != "trireme serve" or "TINKER_BASE_URL" in log.read_text())

    with serving([*MODULES[words[0]], *arguments[1:]], directory, log, is_ready, {"VLLM_CPU_KVCACHE_SPACE": "1"}):
        pass


@contextmanager
def serving(
    arguments: list[str], directory: Path, log: Path, is_ready: Callable[[], bool], environ: Mapping[str, str]
) -> Iterator[None]:
    """Starts a command of Python that writes a log, waits until it is ready, and stops it in the end."""
    mark = f"TRIREME_TEST_MARK={time.time_ns()}"
    with log.open("w") as out:
        env = {**os.environ, **environ, **dict([mark.split("=")])}
        running = subprocess.Popen([sys.executable, *arguments], cwd=directory, env=env, stdout=out, stderr=out)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not is_ready():
            assert running.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for `{shlex.join(arguments)}`"
            time.sleep(0.2)
        yield
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(60)
        assert wait_until_disconnected(mark, 30.0) == []


@pytest.fixture(scope="module")
def service(place: Path) -> Iterator[SimpleNamespace]:
    """The run with a service of docs/service.md, which goes on until the end; its port, and what replaces the names and
    keys of the pages."""
    (words,) = [words for words in KINDS["plan"] if words[0] == "rl" and "--service.port" in words]
    port, log, metrics = free_port(), place / "served.log", place / "outputs" / "served" / "metrics.jsonl"
    flags = ["--run.name", "served", "--max-steps", "100000", "--checkpoint.every", "0", *TINY[:-2]]
    arguments = [*MODULES["rl"], *(word.replace(PORT, str(port)) for word in words[1:]), *flags]
    with serving(arguments, place, log, lambda: listens(port) and metrics.exists(), {}):
        text = " ".join(log.read_text().split())
        keys = {role: key_in(text, role) for role in ("client", "admin")}
        yield SimpleNamespace(port=str(port), **keys)


def one(text: str, language: str) -> Fence:
    """Returns the fence of the pages that has `text`."""
    (fence,) = [fence for fence in ALL if text in fence.text and fence.language == language]
    return fence


def execute(text: str, **values: Any) -> dict[str, Any]:
    value = builtins.eval(compile(text, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), values)
    if inspect.iscoroutine(value):
        asyncio.run(value)
    return values


@pytest.mark.long
def test_a_client_asks_a_run(service: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    text = one("client = OpenAI(base_url=", "python").text
    execute(text.replace(PORT, service.port).replace("tr-client-...", service.client))
    assert capsys.readouterr().out.split()[-1].isdigit(), "the version of the weights"


@pytest.mark.long
def test_a_harness_opens_a_session_for_an_agent(service: SimpleNamespace, place: Path) -> None:
    """Each line in one shell after the other; the names that the first answer gives replace those of the page."""
    fence = one("/reward", "bash")
    output, environ = "", {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    exports = fence.commands[0].replace("tr-admin-...", service.admin)
    printed = []
    for command in [command for command in fence.commands[1:] if not command.startswith("#")]:
        opened = json.loads(output) if output else {"session": "", "key": ""}
        command = command.replace("tr-session-9f…", opened["key"]).replace("9f…", opened["session"])
        command = command.replace(PORT, service.port).replace("curl ", "curl --fail-with-body -s ")
        command = command.replace("uv run --no-sync ", "")
        script = ["bash", "-euc", f"{exports}\n{command}"]
        process = subprocess.run(script, cwd=place, env=environ, capture_output=True, text=True, timeout=60)
        assert process.returncode == 0, f"{command}: {process.stdout}{process.stderr}"
        output = output or process.stdout
        printed.append(process.stdout)
    (exported,) = [json.loads(text) for text in printed if '"turns": [' in text or '"turns":[' in text]
    assert exported["reward"] == 1.0
    assert len(exported["turns"]) == 1


@pytest.mark.long
def test_an_agent_of_a_page_plays_a_session(service: SimpleNamespace) -> None:
    play = execute(one("async def play(run)", "python").text)["play"]
    url = f"http://127.0.0.1:{service.port}/v1"
    rollout = SimpleNamespace(base_url=url, api_key=service.client, model="policy", problem="Sort: 31")
    reward, metrics = asyncio.run(play(rollout))
    assert reward in (0.0, 1.0)
    assert metrics["letters"] >= 0


@pytest.mark.long
def test_a_run_that_serves_is_scaled(service: SimpleNamespace, place: Path) -> None:
    scaled = [words for words in COMMANDS if words[:2] == ["trireme", "scale"]]
    assert scaled
    run(place, "trireme", "scale", "outputs/served", "--replicas", "2")
    status = Status.read(place / "outputs" / "served")
    assert status is not None
    assert sum(part.serves and part.room == "inference" for part in status.parts) == 2


@pytest.mark.long
def test_a_program_of_tinkers_client_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    server = Server(tmp_path)
    try:
        text = one("ServiceClient(", "python").text
        values = execute(text.replace(f":{PORT}", f":{server.port}").replace("tml-client-...", server.key))
        assert values["sampler"] is not None
    finally:
        server.stop()
