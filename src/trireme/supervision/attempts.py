"""Training to the end of a run, whatever dies of its core on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from trireme.config import CommonConfig
from trireme.core.errors import RoomFailed
from trireme.run.rundir import RunDir

if TYPE_CHECKING:
    from trireme.supervision.supervisor import Supervisor  # imports Ray

Rooms = TypeVar("Rooms")


def attempts(
    config: CommonConfig,
    run: RunDir,
    fixed: Mapping[str, Any],
    supervisor: Supervisor,
    begun: Callable[[RunDir], AbstractContextManager[Rooms]],
    work: Callable[[RunDir, Rooms], None],
    say: Callable[[str], None],
) -> None:
    """Calls `work` with an attempt and what `begun` makes for it: rooms that have loaded what the attempt starts from.
    When one of them fails, does so again from the newest commit, as often as `supervisor` allows. `fixed` is what a
    resume must find unchanged."""
    while True:
        try:
            with begun(run) as rooms:
                supervisor.goes_on()
                work(run, rooms)
            return
        except RoomFailed as failure:
            supervisor.may_rebuild(failure)
        run = run.next_attempt(config, fixed)
        for note in run.start.notes:
            say(note)
