"""The replicas of a run as routers read them: an immutable table, and the newest one that a process has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from inference.replica_set.client import ReplicaClient
from trireme.core.errors import ProvenanceError, RoomFailed, TriremeError, WeightsGone, WeightsRefused
from trireme.core.types import WeightIdentity
from trireme.core.weights import UpdateReport

NAMED = 4
Number = tuple[int, int]
"""Orders tables: the incarnation of the replica set that published one, and how many it published before."""
Generation = tuple[int, int]
"""Names one replica for ever: chosen by its owner, or the incarnation of the set that it joined and a number there."""


@dataclass(frozen=True)
class ReplicaRow:
    """A replica in a table."""

    generation: Generation
    client: ReplicaClient
    issued: tuple[WeightIdentity, ...] = ()
    """The newest weights and adapters that it was given, also one that it is about to take."""
    acknowledged: int | None = None
    """The version that it has acknowledged."""
    updating: bool = False
    behind: bool = True
    """It gets no requests until it has the newest weights."""
    draining: bool = False
    """It gets no new requests."""
    stranded: WeightsGone | None = None
    """Why it is behind until the next update: the newest weights can be had nowhere any more."""

    @property
    def serves(self) -> bool:
        """It takes requests."""
        return not (self.behind or self.draining)


@dataclass(frozen=True)
class EndedUpdate:
    """An update that has ended."""

    identity: WeightIdentity
    reports: Sequence[UpdateReport] = ()
    failure: TriremeError | None = None


@dataclass(frozen=True)
class Departure:
    """The end of a replica in a replica set."""

    generation: Generation
    reason: TriremeError


@dataclass(frozen=True)
class Table:
    """All replicas at one moment."""

    number: Number = (0, 0)
    rows: Mapping[int, ReplicaRow] = field(default_factory=dict)
    """By number of the replica, ascending: in deterministic mode their order decides where a request goes."""
    departed: Mapping[int, Departure] = field(default_factory=dict)
    """By number: the last replica of that number that is gone."""
    update: EndedUpdate | None = None
    """The last one."""
    patience_s: float | None = None
    """How long to wait for a replica to join when none is left; None: for ever."""

    def reason(self, index: int, generation: Generation) -> TriremeError | None:
        """Returns why that replica is gone; None if it is not, or another of its number went after it."""
        departure = self.departed.get(index)
        if departure and departure.generation == generation:
            return departure.reason
        return None


class NewestTable:
    """The newest table that this process has."""

    def __init__(self) -> None:
        self.table = Table()
        self._changed = asyncio.Event()

    def take(self, table: Table) -> bool:
        """Takes a table, and returns True if it is newer than the one before."""
        if table.number <= self.table.number:
            return False
        self.table = table
        self._changed.set()
        return True

    async def wait_until(self, condition: Callable[[Table], bool]) -> Table:
        """Returns the first table of which `condition` is true."""
        while not condition(self.table):
            self._changed.clear()
            await self._changed.wait()
        return self.table

    async def wait_for_serving(self) -> None:
        """Returns when a replica takes requests. When there is none, waits for those that take weights, and for others
        to join. Raises, with all failures, when none comes: WeightsRefused if all replicas refused weights, else
        RoomFailed; and WeightsGone at once where only the next update brings one."""
        with suppress(TimeoutError):
            while not any(row.serves for row in self.table.rows.values()):
                self._changed.clear()
                behind = [row for row in self.table.rows.values() if row.behind and not row.draining]
                if behind and all(row.stranded for row in behind):
                    raise WeightsGone(f"no inference replica has the newest weights: {behind[0].stranded}")
                async with asyncio.timeout(None if behind else self.table.patience_s):
                    await self._changed.wait()
            return
        table = self.table
        failures = [departure.reason for index, departure in sorted(table.departed.items()) if index not in table.rows]
        refused = failures and all(isinstance(failure, WeightsRefused) for failure in failures)
        kind = WeightsRefused if refused else RoomFailed
        if table.patience_s:
            waited = f", and none joined within {table.patience_s:g} s"
        else:
            waited = ""
        reasons = "; ".join(map(str, failures))
        raise kind(f"no inference replica is left{waited}: {reasons or 'none has ever joined'}")


def check_issued(says: str, identities: Sequence[WeightIdentity], issued: Collection[WeightIdentity]) -> None:
    """Raises ProvenanceError unless all `identities` are among the weights that a replica was given."""
    strange = [identity for identity in identities if identity not in issued]
    if strange:
        raise ProvenanceError(
            f"{says} weights {', '.join(map(str, strange))} (attempt:version:digest); "
            f"it was given {', '.join(map(str, list(issued)[-NAMED:])) or 'none'}"
        )
