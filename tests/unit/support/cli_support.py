"""Commands of `trireme` in the process of a test."""

import pytest

from trireme.cli.trireme import main
from trireme.core.errors import EXIT_BAD_INPUT


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Returns what a command says when it refuses its arguments, in the form of all refusals."""
    assert main([*map(str, argv)]) == EXIT_BAD_INPUT
    text = capsys.readouterr().err
    for part in ("given: ", "expected: ", "to do: "):
        assert part in text
    return text
