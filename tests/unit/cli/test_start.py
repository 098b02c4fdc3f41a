"""The entry points of the commands."""

import signal
import sys
from types import SimpleNamespace

import pytest

from trireme.cli import start


@pytest.mark.parametrize("command", ["rl", "sft", "inference"])
def test_trireme_runs_the_commands_that_train_and_serve(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str]]] = []

    def import_module(name: str) -> SimpleNamespace:
        return SimpleNamespace(main=lambda: started.append((name, sys.argv[1:])) or 7)

    monkeypatch.setattr(start, "import_module", import_module)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["trireme", command, "--max-steps", "3"])
    assert start.trireme() == 7
    monkeypatch.setattr(sys, "argv", ["trireme", "watch", command])
    assert start.trireme() == 7
    assert started == [(f"trireme.cli.{command}", ["--max-steps", "3"]), ("trireme.cli.trireme", ["watch", command])]
