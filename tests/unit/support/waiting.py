"""Waits for a condition, within a deadline."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 60.0


def wait_for(condition: Callable[[], T], label: str, seconds: float = DEADLINE_S) -> T:
    """Waits until other processes or threads make a condition true; returns its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {label}"
        time.sleep(0.01)
    return value


async def wait_for_tasks(condition: Callable[[], object], label: str) -> None:
    """Waits until other tasks of this event loop make a condition true."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s for {label}"
        await asyncio.sleep(0.001)


async def turns(n: int = 20) -> None:
    """Lets other tasks of this event loop go on."""
    for _ in range(n):
        await asyncio.sleep(0)
