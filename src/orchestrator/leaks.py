"""Tasks that environments start and leave behind: seen, cancelled, and counted.

An environment may start tasks of its own (a tool that runs beside the model, a connection). A rollout that is
cancelled, because it is too late or too old, may never get to ending them; over a run of days they would pile up. So
every task that is started while code of an environment runs belongs to its group, and what is left once the group has
been cleaned up is cancelled.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

Tasks = set["asyncio.Task[Any]"]
_owner: ContextVar[Tasks | None] = ContextVar("owner", default=None)


class LeakedTasks(Exception):
    """An environment left tasks behind."""


def watch(loop: asyncio.AbstractEventLoop) -> None:
    """From here on tasks of the loop know whose they are."""
    loop.set_task_factory(_start)


def _start(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, **options)
    if (tasks := _owner.get()) is not None:
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    return task


class owned_by:  # as contextlib's; a generator takes three times as long
    """Tasks that are started within the block, and within these, are added to `tasks`, and taken out when they end."""

    __slots__ = ("_tasks", "_token")

    def __init__(self, tasks: Tasks | None) -> None:
        self._tasks = tasks

    def __enter__(self) -> None:
        self._token = _owner.set(self._tasks)

    def __exit__(self, *_error: object) -> None:
        _owner.reset(self._token)


def disown(*tasks: asyncio.Task[Any]) -> None:
    """These are not the environment's."""
    if (owned := _owner.get()) is not None:
        owned.difference_update(tasks)


def end(tasks: Tasks, env: str, problem: str) -> LeakedTasks | None:
    """Cancels what is left; says what it was."""
    left = sorted(task.get_coro().__qualname__ for task in tasks)  # type: ignore[union-attr]
    for task in list(tasks):
        task.cancel()
    if not left:
        return None
    return LeakedTasks(
        f"environment {env}, problem {problem}: {len(left)} tasks were still running after cleanup(), and were "
        f"cancelled: {', '.join(left[:5])}. End them in cleanup()"
    )
