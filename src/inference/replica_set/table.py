"""The replicas of a run as routers read them: an immutable table, the newest one that a process has, and the calls of a
process to one replica, which all end when the replica is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from trireme.core.errors import ProvenanceError, RoomFailed, TriremeError, WeightsGone, WeightsRefused
from trireme.core.types import WeightIdentity
from trireme.core.weights import UpdateReport

if TYPE_CHECKING:
    from inference.handle import ReplicaClient

Value = TypeVar("Value")
NAMED = 4
Number = tuple[int, int]
"""Orders tables: (incarnation of the replica set that published the table, number of the table in this incarnation)."""
Generation = tuple[int, int]
"""Names one replica for ever, while its successor gets the same number: chosen by the replica's owner, or (incarnation
of the set that it joined, how many had joined this set by then)."""


@dataclass(frozen=True)
class ReplicaRow:
    """The row of one replica in a `Table`: how to call the replica, its weights, and whether it serves."""

    generation: Generation
    client: ReplicaClient
    issued: tuple[WeightIdentity, ...] = ()
    """The newest weights and adapters that the replica was given, and any that it is about to take."""
    acknowledged: int | None = None
    """The newest version that the replica has acknowledged; None before the first."""
    updating: bool = False
    behind: bool = True
    """True: the replica gets no requests until it has the newest weights."""
    draining: bool = False
    """True: the replica gets no new requests, because it is to leave."""
    asleep: bool = False
    """True: the replica sleeps; it has no weights, and gets no requests until the next update."""
    stranded: WeightsGone | None = None
    """Why the replica gets no weights before the next update: the bytes of the newest weights are nowhere any more.
    None in all other cases."""

    @property
    def serves(self) -> bool:
        """True if the replica takes requests."""
        return not (self.behind or self.draining or self.asleep)


@dataclass(frozen=True)
class EndedUpdate:
    """An update that has ended, with the replicas' reports or the failure."""

    identity: WeightIdentity
    reports: Sequence[UpdateReport] = ()
    failure: TriremeError | None = None


@dataclass(frozen=True)
class Departure:
    """A replica that has left a replica set, and the reason."""

    generation: Generation
    reason: TriremeError


@dataclass(frozen=True)
class Table:
    """All replicas of a set at one moment, the replicas that left, and the last update."""

    number: Number = (0, 0)
    rows: Mapping[int, ReplicaRow] = field(default_factory=dict)
    """{number of the replica: row}, ascending: in deterministic mode their order decides where a request goes."""
    departed: Mapping[int, Departure] = field(default_factory=dict)
    """{number of a replica: the departure of the last replica with this number that has left}."""
    update: EndedUpdate | None = None
    """The last update that has ended; None before the first."""
    patience_s: float | None = None
    """How long to wait for a replica to join when none is left; None: for ever."""
    asleep: bool = False
    """All replicas sleep, until the next update."""

    def serves(self, index: int, generation: Generation) -> bool | None:
        """Returns True if the replica with this number and generation takes requests, or would take them if it did not
        sleep. Returns False if it has to get the newest weights first, or is to leave. Returns None if this table has
        no such replica."""
        row = self.rows.get(index)
        if row is None or row.generation != generation:
            return None
        return not (row.behind or row.draining)

    def reason(self, index: int, generation: Generation) -> TriremeError | None:
        """Returns why the replica with this number and generation is gone. Returns None if it is not gone, or if a
        later replica with its number has left since."""
        departure = self.departed.get(index)
        if departure and departure.generation == generation:
            return departure.reason
        return None


class NewestTable:
    """Keeps the newest table that this process has, and waits for tables."""

    def __init__(self) -> None:
        self.table = Table()
        self._changed = asyncio.Event()

    def take(self, table: Table) -> bool:
        """Keeps `table` if it is newer than the present one. Returns True if it is."""
        if table.number <= self.table.number:
            return False
        self.table = table
        self._changed.set()
        return True

    async def wait_until(self, condition: Callable[[Table], bool]) -> Table:
        """Waits for a table for which `condition` is true, and returns it."""
        while not condition(self.table):
            self._changed.clear()
            await self._changed.wait()
        return self.table

    async def wait_for_serving(self) -> None:
        """Waits until some replica takes requests. As long as there are replicas that take weights or sleep, waits for
        them without a limit. If there are no such replicas, waits up to `Table.patience_s` seconds for one to join.

        When no replica comes, raises an error with all failures: WeightsRefused if all replicas refused weights, else
        RoomFailed. Raises WeightsGone at once if only the next update can make a replica serve.
        """
        with suppress(TimeoutError):
            while not any(row.serves for row in self.table.rows.values()):
                self._changed.clear()
                returning = [row for row in self.table.rows.values() if not row.draining]
                if returning and all(row.stranded for row in returning):
                    raise WeightsGone(f"no inference replica has the newest weights: {returning[0].stranded}")
                async with asyncio.timeout(None if returning else self.table.patience_s):
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


class ReplicaCalls:
    """Makes the calls to one replica until the replica is given up. If a call raises a TriremeError other than
    WeightsGone, passes the error to the function `fails`, which has to give the replica up by calling `end`."""

    def __init__(self, fails: Callable[[TriremeError], None]) -> None:
        self.failure: TriremeError | None = None
        """Why the replica was given up; None while it is used."""
        self._fails = fails
        self._tasks: set[asyncio.Task[object]] = set()

    def add(self, task: asyncio.Task[object]) -> None:
        """Makes sure that `task` is cancelled when the replica is given up."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def call(self, work: Awaitable[Value]) -> Value:
        """Waits for `work`, a call to the replica, and returns its value. If the replica was given up, or is given up
        meanwhile, raises the reason at once. If `work` raises a TriremeError, gives the replica up and raises the
        error. After WeightsGone the replica is kept, because it is not to blame."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        if self.failure:
            task.cancel()  # nobody would end it
        try:
            await asyncio.wait({task})
            if not task.cancelled():
                return task.result()
        except WeightsGone:
            raise
        except TriremeError as failure:
            self._fails(failure)
            raise
        finally:
            task.cancel()
            self._tasks.discard(task)
        assert self.failure is not None, "tasks are cancelled only when the replica is gone"
        raise self.failure

    def end(self, reason: TriremeError) -> None:
        """Gives the replica up for `reason`: cancels all its calls and tasks."""
        self.failure = reason
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()


def check_issued(says: str, identities: Sequence[WeightIdentity], issued: Collection[WeightIdentity]) -> None:
    """Raises ProvenanceError unless all `identities` are in `issued`, the weights that the replica was given. `says`:
    the beginning of the error message, for example "NAME sampled tokens from"."""
    strange = [identity for identity in identities if identity not in issued]
    if strange:
        raise ProvenanceError(
            f"{says} weights {', '.join(map(str, strange))} (attempt:version:digest); "
            f"it was given {', '.join(map(str, list(issued)[-NAMED:])) or 'none'}"
        )
