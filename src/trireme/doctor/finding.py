"""One thing that is wrong, in four parts: where, what was found, what was expected, what to type."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.core.refusals import Refusal

CLUSTER = "cluster"
"""Stands for the node where a finding is about all of them."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a node."""

    node: str
    """The name of the node; CLUSTER if it is about all of them."""
    check: str
    """A word for what was looked at."""
    found: str
    """What is there."""
    expected: str
    """What should be there, and why."""
    do: str
    """What to type, and where."""
    fatal: bool = True
    """True: a run is refused. False: it works, but something is lost or slow."""

    def refusal(self) -> Refusal:
        """Returns it as the reason why a run is refused."""
        return Refusal(f"{self._where}: {self.found}", self.expected, self.do)

    def line(self) -> str:
        """Returns it as a sentence, for a warning."""
        return f"{self._where}: {self.found}; expected: {self.expected}; to do: {self.do}"

    @property
    def _where(self) -> str:
        return self.node if self.node == CLUSTER else f"node {self.node}"
