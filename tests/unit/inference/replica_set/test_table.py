"""Tables name a replica by its number and its generation: a successor has the number, and another generation."""

import asyncio
from typing import Any

import pytest

from inference.replica_set.table import Departure, ReplicaCalls, ReplicaRow, Table
from trireme.core.errors import RoomFailed

CLIENT: Any = None


def test_a_table_answers_for_one_generation_of_a_number() -> None:
    lost = RoomFailed("it died")
    table = Table(
        rows={0: ReplicaRow((1, 2), CLIENT, behind=False), 1: ReplicaRow((1, 3), CLIENT)},
        departed={0: Departure((1, 0), lost)},
    )
    assert table.serves(0, (1, 2)) is True
    assert table.serves(1, (1, 3)) is False, "it is behind"
    assert table.serves(0, (1, 0)) is None, "its successor serves"
    assert table.serves(2, (1, 2)) is None
    assert table.reason(0, (1, 0)) is lost
    assert table.reason(0, (1, 2)) is None


async def test_a_call_that_begins_after_the_replica_was_given_up_is_not_made() -> None:
    """An update has chosen its members, and one of them is removed before the update calls it."""
    calls = ReplicaCalls(lambda _: None)
    calls.end(RoomFailed("it was removed"))
    with pytest.raises(RoomFailed, match="it was removed"):
        await asyncio.wait_for(calls.call(asyncio.Event().wait()), 5.0)
