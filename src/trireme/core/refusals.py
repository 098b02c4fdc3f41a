"""Refusals of an input, in three parts: what was given, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Sequence

from trireme.core.errors import BadInput


class Refusal(BadInput):
    """Says why an input cannot be used: what was given, what was expected, what to do. Raise it, or collect several for
    `refuse`."""

    def __init__(self, value: str, expected: str, do: str) -> None:
        """`value`: the given input, as text with its name: "--port 99999". `expected`: the values that are accepted,
        and why. `do`: the change that a user can make."""
        super().__init__(value, expected, do)
        self.value = value
        self.expected = expected
        self.do = do

    def __str__(self) -> str:
        return f"given: {self.value}\n  expected: {self.expected}\n  to do: {self.do}"


def refuse(refusals: Sequence[Refusal]) -> None:
    """If there is exactly one refusal, raises this refusal. If there are several, raises a BadInput that lists them
    all. If `refusals` is empty, does nothing."""
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        numbered = [f"({n}) " + str(r).replace("\n", "\n    ") for n, r in enumerate(refusals, 1)]
        raise BadInput(f"{len(refusals)} problems:\n" + "\n".join(numbered))
