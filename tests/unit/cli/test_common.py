"""What all commands share."""

import pytest

from trireme.cli.common import run_command


def test_text_of_a_library_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = "! core: connection closed by peer [/src/gloo/pair.cc:553] [bold]\n"
    assert run_command(lambda _, console: console.print(text, end=""), []) == 0
    assert capsys.readouterr().out == text
