"""`trireme env try`: typed into a terminal, for environments of each kind, a server and an agent."""

from __future__ import annotations

import os
import pty
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import calculator
import pytest
from waiting import wait_for

from trireme.cli.trireme import main
from trireme.core.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED

pytestmark = pytest.mark.usefixtures("in_the_repository")
Types = Callable[..., None]


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch) -> Types:
    """Types into the terminal that is standard input; lines that are typed ahead wait there."""
    terminal, slave = pty.openpty()
    monkeypatch.setattr(sys, "stdin", os.fdopen(slave))

    def typed(*lines: str) -> None:
        os.write(terminal, "".join(f"{line}\n" for line in lines).encode())

    return typed


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text('{"prompt": "2 + 2 = ", "question": "2 + 2?", "answer": "4"}\n' * 2)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "mine.py").write_text("def score(said, answer): return said == answer\ndef none(said): return None\n")
    return tmp_path


FACTORS = calculator.problems("train", 0)
random.Random("agent:0").shuffle(FACTORS)
A, B = FACTORS[0]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


TYPED = {
    "sort": (["sort"], ["01234477"], "reward 1  success 1"),
    "guess": (["guess"], ["5", "6"], "reward 0.9  success 1"),
    "questions": (
        ["question_answer", "--env.args.path", "{files}/data.jsonl", "--env.args.grading", "exact"],
        ["It is #### 4"],
        "reward 1  parse_error 0  success 1",
    ),
    "twenty questions": (["twenty_questions"], ["x" * 121, "Is it a {secret}?"], "reward 1  parse_error 0  success 1"),
    "rewards": (
        ["reward:{files}/mine.py:score", "--env.args.path", "{files}/data.jsonl"],
        ["4"],
        "reward 1  parse_error 0  score 1",
    ),
    "a chat": (["higher_lower:HigherLower", "--env.path", "examples/envs"], ["none"], "reward 0  parse_error 0"),
    "a server": (["{server}"], [call("add", '{"a": 1, "b": 2}'), "none"], "reward 0  parse_error 0  success 0"),
    "a program": (
        [
            "agent:command",
            "--env.args",
            "{{command = ['{python}', '{files}/agent.py'], problems = '{files}/data.jsonl'}}",
        ],
        ["none", "4"],
        "reward 0.5",
    ),
    "an agent": (
        ["agent:calculator:play"],
        [call("multiply", f'{{"a": {A}, "b": {B}}}'), str(A * B)],
        "reward 1  session/turns 2",
    ),
}


AGENT = """
import json, os, sys
from urllib.request import Request, urlopen

problem = json.loads(sys.stdin.read())
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
messages = [{"role": "user", "content": problem["prompt"]}]
for tries in (1, 2):
    body = json.dumps({"model": os.environ["TRIREME_MODEL"], "messages": messages}).encode()
    request = Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    message = json.load(urlopen(request, timeout=60))["choices"][0]["message"]
    if message["content"] == problem["answer"]:
        print(1 / tries)
        break
    messages += [message, {"role": "user", "content": "No."}]
"""


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def server() -> Iterator[str]:
    """The address of the server of environments in examples/envs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "examples/envs/server.py", "--port", str(port), "--tool-s", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: is_open(port), "the server")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.mark.parametrize("name", TYPED)
def test_an_episode_that_is_typed(
    name: str, types: Types, files: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    words, lines, last = TYPED[name]
    places = {"files": str(files), "python": sys.executable}
    if name == "a server":
        places["server"] = request.getfixturevalue("server")
    words = [word.format(**places) for word in words]
    secret = ""
    if name == "twenty questions":
        assert main(["env", "try", *words, "--known"]) == 0
        (secret,) = set(re.findall(r"Is it a (\w+)\?", capsys.readouterr().out))
    types(*(line.replace("{secret}", secret) for line in lines))
    assert main(["env", "try", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.count("answer> ") == len(lines)
    turn = shown.partition(f"turn {len(lines)},")[2].splitlines()
    assert [line.split(" tokens")[0].split()[:2] for line in turn[1:3]] == [["mask", "0"], ["mask", "1"]]
    assert last in turn[3]
    assert turn[3].endswith(" ms")


def test_answers_of_the_environment_and_of_a_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "try", "guess", "--known"]) == 0
    assert "reward 1" in capsys.readouterr().out
    (files / "answers.txt").write_text('"4\\n"\n7\n')
    assert main(["env", "try", "guess", "--answers", str(files / "answers.txt"), "--env.args.max-turns", "2"]) == 0
    assert r"'4\n<eos>'" in capsys.readouterr().out


def test_what_is_refused(files: Path, capsys: pytest.CaptureFixture[str], types: Types) -> None:
    words = ["env", "try", f"reward:{files}/mine.py:none", "--env.args.path", str(files / "data.jsonl")]
    assert main(words) == EXIT_BAD_INPUT
    assert "none of " in (output := capsys.readouterr()).err
    assert "gave the reward 'None'" in output.err
    assert output.out == ""
    types("5", "\x04")
    assert main(["env", "try", "guess"]) == EXIT_BAD_INPUT
    assert "no answer is left" in capsys.readouterr().err


def test_an_interrupt_ends_it_while_it_waits_for_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits:
        def readline(self) -> str:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
            return "too late"

    monkeypatch.setattr(sys, "stdin", Waits())
    with pytest.raises(SystemExit) as exited:
        main(["env", "try", "guess"])
    assert exited.value.code == EXIT_INTERRUPTED
