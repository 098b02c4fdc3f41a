"""Refusals of an input, in three parts: what was given, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trireme.core.errors import BadInput


@dataclass(frozen=True)
class Refusal:
    """Says why an input cannot be used: what was given, what was expected, what to do."""

    value: str
    """The input, and its value."""
    expected: str
    """The values that are accepted, and why."""
    do: str
    """The change that a user can make."""

    def __str__(self) -> str:
        return f"given: {self.value}\n  expected: {self.expected}\n  to do: {self.do}"

    def error(self) -> BadInput:
        """Returns the BadInput to raise, with this refusal as its message."""
        return BadInput(str(self))


def refuse(refusals: Sequence[Refusal]) -> None:
    """Raises one BadInput that lists all `refusals`; does nothing when there is none."""
    if len(refusals) == 1:
        raise refusals[0].error()
    if refusals:
        numbered = [f"({n}) " + str(r).replace("\n", "\n    ") for n, r in enumerate(refusals, 1)]
        raise BadInput(f"{len(refusals)} problems:\n" + "\n".join(numbered))
