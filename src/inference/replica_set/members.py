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
"""Most weights and adapters that a table lists for a replica: routers remember what earlier tables listed."""


@dataclass(eq=False)
class Member:
    """One replica in a replica set: its row in the table, the calls to it, and its tasks."""

    index: int
    row: ReplicaRow
    """Its row in the table."""
    calls: ReplicaCalls
    publish: Callable[[], None]
    """Called when the row has changed."""
    adapters: set[str] = field(default_factory=set)
    """The names of the adapters that the replica was given."""
    report: UpdateReport | None = None
    rounds: int = 0
    """How often the replica has begun to take weights since it served last."""
    catching_up: asyncio.Task[None] | None = None
    """The task that brings the newest weights to the replica, or puts it to sleep."""
    offering: asyncio.Task[TriremeError | None] | None = None
    """The task that waits for the replica's answer to an offer; None: the replica owes no answer."""

    @property
    def name(self) -> str:
        return self.row.client.name

    @property
    def failure(self) -> TriremeError | None:
        return self.calls.failure

    @property
    def waits(self) -> bool:
        """True if no weights are on their way to the replica; it keeps its version until the next update."""
        return self.catching_up is None or self.catching_up.done()

    @property
    def serves(self) -> bool:
        """True if the replica takes requests."""
        return self.row.serves and not self.failure

    @property
    def receives(self) -> bool:
        """True if the replica can receive a version while the trainer sends it: it serves, or it sleeps until the next
        update."""
        return (self.row.serves or (self.row.asleep and not self.row.draining)) and not self.failure

    def change(self, **columns: Any) -> None:
        """Changes fields of the replica's ReplicaRow, given by name, and publishes a table with the new row."""
        self.row = replace(self.row, **columns)
        self.publish()

    def issue(self, identity: WeightIdentity, **columns: Any) -> None:
        """Notes in the replica's row that it is about to get the weights `identity`, and changes other fields of the
        row, given by name, as `change` does. Publishes a table with the new row."""
        self.change(issued=(*self.row.issued[1 - ISSUED :], identity), **columns)

    def enter(self) -> None:
        """Lets the replica serve, because it has the newest weights. Publishes a table."""
        self.rounds = 0
        self.change(behind=False, stranded=None, asleep=False)
