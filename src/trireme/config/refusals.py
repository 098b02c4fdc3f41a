"""What is wrong with an input, in the three parts of every refusal: what was given, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trireme.core.errors import BadInput


@dataclass(frozen=True)
class Refusal:
    given: str
    expected: str
    do: str

    def __str__(self) -> str:
        return f"given: {self.given}\n  expected: {self.expected}\n  to do: {self.do}"

    def error(self) -> BadInput:
        return BadInput(str(self))


def refuse(problems: Sequence[Refusal]) -> None:
    """Raises one BadInput that lists all `problems`; does nothing when there is none."""
    if len(problems) == 1:
        raise problems[0].error()
    if problems:
        numbered = [f"({n}) " + str(p).replace("\n", "\n    ") for n, p in enumerate(problems, 1)]
        raise BadInput(f"{len(problems)} problems:\n" + "\n".join(numbered))
