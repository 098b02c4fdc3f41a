"""Calls through a proxy of an actor are checked as calls of its methods."""

import re
from pathlib import Path

import pytest
from mypy import api

SOURCE = Path(__file__).parents[3] / "src"
PREAMBLE = """
from trireme.core.actors import ActorProxy, Ref, as_argument, remote_method

class Adder:
    @remote_method
    async def add(self, first: int, second: int = 1) -> int:
        return first + second

    @remote_method
    def text(self, total: int) -> str:
        return str(total)

    def local(self) -> None: ...

async def use(adder: ActorProxy[Adder], instance: Adder) -> None:
    total: int = await adder.add.remote(1, second=2)
    total = await instance.add(total)
    text: str = await adder.text.remote(as_argument(adder.add.remote(total)))
    text = instance.text(total)
"""
WRONG = {
    "    adder.sum.remote(1)": 'has no attribute "sum"',
    "    adder.local.remote()": 'has no attribute "remote"',
    '    adder.add.remote("1")': 'has incompatible type "str"',
    "    adder.add.remote()": "Missing positional argument",
    "    adder.text(1)": "not callable",
    "    text = adder.text.remote(1)": "Incompatible types in assignment",
    '    await instance.add("1")': 'has incompatible type "str"',
}
"""Statements that are refused, and a part of mypy's message for each."""


def test_a_call_that_does_not_fit_its_method_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYPYPATH", str(SOURCE))
    file = tmp_path / "calls.py"
    file.write_text(PREAMBLE + "\n".join(WRONG) + "\n")
    report, errors, _ = api.run(["--config-file=", f"--cache-dir={tmp_path / 'cache'}", str(file)])
    assert not errors
    messages = dict(re.findall(r"^\S*calls\.py:(\d+): error: (.*)$", report, re.MULTILINE))
    first = PREAMBLE.count("\n") + 1
    assert list(messages) == [str(first + index) for index in range(len(WRONG))], report
    for message, part in zip(messages.values(), WRONG.values(), strict=True):
        assert part in message
