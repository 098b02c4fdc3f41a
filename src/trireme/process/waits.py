"""The only place where a process waits for another. Each wait has a time limit, and its error names the other process.

A lint (tests/unit/test_laws.py) forbids the bare `ray.get` and `ray.wait` elsewhere.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from trireme.core.actors import Ref
from trireme.core.errors import RoomFailed, TriremeError

Value = TypeVar("Value")
TICK_S = 1.0
COLOURS = re.compile(r"\x1b\[\d+m")


def failure(error: BaseException, owner: str, log: Path | None) -> TriremeError:
    """Converts `error`, which Ray raised for a call to the process `owner`, into the error that people read: the
    TriremeError that the call itself raised, else a RoomFailed. `log`: the process's log, which the error names."""
    log_note = f"; its log: {log}" if log else ""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, TriremeError):
            return with_log(cause, log)
        return RoomFailed(f"{owner} raised {type(cause).__name__}: {cause}{log_note}\n{COLOURS.sub('', str(error))}")
    if isinstance(error, RayActorError):
        return RoomFailed(f"{owner} died: {_cause_of_death(error)}{log_note}")
    return RoomFailed(f"{owner}: {type(error).__name__}: {error}{log_note}")


def with_log(error: TriremeError, log: Path | None) -> TriremeError:
    """Returns a RoomFailed of another process with the path of that process's log added; returns any other error
    unchanged."""
    if type(error) is RoomFailed and log and "its log:" not in str(error):
        return RoomFailed(f"{error}; its log: {log}")
    return error


def _cause_of_death(error: RayActorError) -> str:
    """Returns what Ray says about the death of a process, without Ray's advice, which is about its own commands."""
    message = " ".join(COLOURS.sub("", str(error)).split())
    pid = re.search(r"pid: (\d+)", message)
    detail = re.search(r"exit detail: (.*?)(?: Some common causes|$)", message)
    if pid and "connection error code 2" in message:  # all that is known of a process that was killed
        return f"process {pid[1]} was killed or crashed, or ran out of memory"
    if pid and detail:
        return f"process {pid[1]}: {detail[1]}"
    return message[:600]


def _overdue(owner: str, timeout_s: float, log: Path | None, limit: str = "") -> RoomFailed:
    limit_note = f" ({limit})" if limit else ""
    text = f"waited {timeout_s:.0f} s{limit_note} for {owner} and got no answer"
    return RoomFailed(text + (f"; its log: {log}" if log else ""))


def get_all(
    refs: Sequence[Ref[Value]],
    *,
    owners: Sequence[str],
    timeout_s: float,
    log: Path | None = None,
    on_tick: Callable[[list[str], float], None] | None = None,
    limit: str = "",
) -> list[Value]:
    """Waits for all `refs` and returns their values in order. `owners`: for each reference, the name of the process
    that computes its value. If a call fails, raises its error immediately, without waiting for the others (which may
    hang in a collective). Raises RoomFailed after `timeout_s` seconds. Calls `on_tick` about once a second with the
    names of the processes still waited for and the seconds waited. Errors name `log`. The error of a timeout also has
    the text `limit`, which says where the time limit comes from."""
    started = time.monotonic()
    pending = list(refs)
    owner = dict(zip(refs, owners, strict=True))
    values: dict[Ref[Value], Value] = {}
    while pending:
        waited = time.monotonic() - started
        if waited > timeout_s:
            raise _overdue(", ".join(owner[ref] for ref in pending), timeout_s, log, limit)
        ready, pending = ray.wait(pending, num_returns=1, timeout=min(TICK_S, timeout_s))
        for ref in ready:
            try:
                values[ref] = ray.get(ref)
            except RayError as error:
                raise failure(error, owner[ref], log) from error
        if on_tick and not ready:
            on_tick([owner[ref] for ref in pending], time.monotonic() - started)
    return [values[ref] for ref in refs]


@dataclass
class LongWait:
    """Prints a line every `every_s` seconds of a wait; used as `on_tick` of `get_all`. `ask` requests a text on the
    progress of the work, and returns a reference to that text. Without `ask` the line says only how long the wait has
    been, and for which processes."""

    label: str
    every_s: float
    ask: Callable[[], Ref[str]] | None = None
    _requests: dict[Ref[str], str] = field(default_factory=dict)
    _said_s: float = 0.0

    def __call__(self, names: list[str], waited_s: float) -> None:
        if self._requests and (answers := ready(self._requests, 0)):
            self._requests = {}
            self._say(waited_s, *(words for words in answers.values() if isinstance(words, str)))
        if waited_s - self._said_s < self.every_s:
            return
        self._said_s = waited_s
        if self._requests:
            self._say(waited_s, f"no answer from {', '.join(names)}")
        elif self.ask:
            self._requests = {self.ask(): "progress"}
        else:
            self._say(waited_s, f"waiting for {', '.join(names)}")

    def _say(self, waited_s: float, *words: str) -> None:
        print("  ", ": ".join([f"{self.label} ({waited_s:.0f} s)", *words]), sep="", flush=True)


def ready(refs: Mapping[Ref[Value], str], timeout_s: float) -> dict[Ref[Value], Value | TriremeError]:
    """Waits up to `timeout_s` seconds until at least one of `refs` {reference: name of its process} is ready. Returns
    {reference: its value, or the TriremeError of its call} for all references that are ready then."""
    if not refs:
        time.sleep(timeout_s)
        return {}
    if not ray.wait(list(refs), num_returns=1, timeout=timeout_s)[0]:
        return {}
    outcomes: dict[Ref[Value], Value | TriremeError] = {}
    for ref in ray.wait(list(refs), num_returns=len(refs), timeout=0)[0]:
        try:
            outcomes[ref] = ray.get(ref)
        except RayError as error:
            lost = failure(error, refs[ref], None)
            lost.__cause__ = error
            outcomes[ref] = lost
    return outcomes


def died(error: BaseException) -> bool:
    """Returns True if `error`, raised by this module, reports the end of a process, not an error raised by its code."""
    cause = error.__cause__
    raised = isinstance(cause, RayTaskError) or (isinstance(cause, RayActorError) and cause.actor_init_failed)
    return isinstance(cause, RayError) and not raised


def unreached(error: BaseException) -> bool:
    """Returns True if `error` says that a call did not reach its actor, and Ray does not know yet whether the actor
    lives. If the actor's node is lost, calls fail in this way until Ray gives up the node. Do not start a successor of
    the actor before that: Ray would place it on the lost node."""
    return isinstance(error.__cause__, ActorUnavailableError)


def get(ref: Ref[Value], *, owner: str, timeout_s: float, log: Path | None = None) -> Value:
    """Waits for one reference and returns its value. Raises the errors of `get_all`."""
    return get_all([ref], owners=[owner], timeout_s=timeout_s, log=log)[0]


@dataclass(frozen=True)
class Pending(Generic[Value]):
    """Calls in progress in other processes; each call returns a list."""

    refs: Sequence[Ref[list[Value]]]  # to the lists
    owners: Sequence[str]  # their owners
    log: Path | None = None  # directory of the owners' logs

    def wait(self, timeout_s: float) -> list[Value]:
        """Waits until all calls have ended, and returns the items of all lists as one list. Raises the errors of
        `get_all`."""
        parts = get_all(self.refs, owners=self.owners, timeout_s=timeout_s, log=self.log)
        return [item for part in parts for item in part]


async def get_async(awaitable: Awaitable[Value], *, owner: str, timeout_s: float, log: Path | None = None) -> Value:
    """Waits for one reference inside an event loop and returns its value. Raises the errors of `get_all`."""
    try:
        return await asyncio.wait_for(awaitable, timeout_s)
    except TimeoutError:
        raise _overdue(owner, timeout_s, log) from None
    except RayError as error:
        raise failure(error, owner, log) from error
