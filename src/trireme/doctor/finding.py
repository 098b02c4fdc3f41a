"""A fault that an examination found, in four parts: the node, the actual state, the expected state, the remedy."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.core.refusals import Refusal

CLUSTER = "cluster"
"""Replaces the node in a finding about all nodes."""


@dataclass(frozen=True)
class Finding:
    """One fault of a node, or of the cluster."""

    node: str
    """The name of the node; CLUSTER for a finding about all nodes."""
    check: str
    """A word for the check that failed, such as "port"."""
    actual: str
    """The state of the node."""
    expected: str
    """The state that a run needs, and why."""
    do: str
    """The command to type, and where."""
    fatal: bool = True
    """True: a run is refused. False: a run works, but it is slower or may fail later."""

    def refusal(self) -> Refusal:
        """Returns the finding as the reason why a run is refused."""
        return Refusal(f"{self._place}: {self.actual}", self.expected, self.do)

    def line(self) -> str:
        """Returns the finding as a sentence, for a warning."""
        return f"{self._place}: {self.actual}; expected: {self.expected}; to do: {self.do}"

    @property
    def _place(self) -> str:
        if self.node == CLUSTER:
            return self.node
        return f"node {self.node}"
