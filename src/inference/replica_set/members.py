"""One replica, and what its replica set knows of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from inference.replica_set.client import ReplicaCalls
from inference.replica_set.table import ReplicaRow
from trireme.core.errors import TriremeError
from trireme.core.types import WeightIdentity
from trireme.core.weights import UpdateReport

ISSUED = 64
"""Weights and adapters that a table names of a replica, at most: routers remember those of the tables before."""


@dataclass(eq=False)
class Member:
    """One replica in a replica set: its row in the table, the calls to it, and its tasks."""

    index: int
    row: ReplicaRow
    """Its row in the table."""
    calls: ReplicaCalls
    publish: Callable[[], None]
    """Called when its row has changed."""
    adapters: set[str] = field(default_factory=set)
    """The names of the adapters that it was given."""
    report: UpdateReport | None = None
    rounds: int = 0
    """How often it has begun to take weights since it served last."""
    catching_up: asyncio.Task[None] | None = None
    """Brings it to the newest weights."""
    offering: asyncio.Task[TriremeError | None] | None = None
    """Asks it whether it is ready for what was offered; None: there is no such question without an answer."""

    @property
    def name(self) -> str:
        return self.row.client.name

    @property
    def failure(self) -> TriremeError | None:
        return self.calls.failure

    @property
    def waits(self) -> bool:
        """True if the replica gets no weights before the next update."""
        return self.catching_up is None or self.catching_up.done()

    @property
    def serves(self) -> bool:
        """True if the replica takes requests."""
        return self.row.serves and not self.failure

    def change(self, **columns: Any) -> None:
        """Changes these columns of the replica's row, and publishes a table."""
        self.row = replace(self.row, **columns)
        self.publish()

    def issue(self, identity: WeightIdentity, **columns: Any) -> None:
        """Notes in the row that the replica is about to get the weights `identity`; also changes other `columns`.
        Publishes a table."""
        self.change(issued=(*self.row.issued[1 - ISSUED :], identity), **columns)

    def enter(self) -> None:
        """Lets the replica serve, because it has the newest weights. Publishes a table."""
        self.rounds = 0
        self.change(behind=False, stranded=None, asleep=False)
