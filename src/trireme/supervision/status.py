"""Reports the state of a run while it runs, and takes requests, as files in its directory.

    STATUS             the health of each part and the newest incidents, as JSON: `Status`
    incidents.jsonl    all incidents of all attempts, one `Incident` a line; only appended to
    scale/             requests for another number of replicas, and the driver's answers

A run never reads STATUS or incidents again, and no comparison or resume depends on them. Imports no Ray:
`trireme watch` and `trireme scale` read and write these files from outside.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from trireme.checkpoint.rows import read_rows
from trireme.checkpoint.store import LOCK
from trireme.core.errors import EXIT_FAILED, EXIT_OK, BadInput
from trireme.core.finite_json import to_json
from trireme.supervision.roster import Incident, Roster, RunPart

STATUS = "STATUS"
INCIDENTS = "incidents.jsonl"
SCALE = "scale"
SHORTEST_S = 0.5
"""Shortest time between two versions of STATUS."""
LONGEST_S = 10.0
"""Longest time between two versions of STATUS while the driver works, even if nothing has changed."""
RECENT = 10
"""Number of incidents in STATUS."""
JOIN_S = 5.0
HOLDER = re.compile(r"pid (\d+) on ([^\s,]+)")
"""The pattern of the text in the lock file."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunEnd:
    """The end of the driver's command: its exit code and the reason."""

    exit_code: int  # one of `trireme.core.errors`
    why: str  # one line


@dataclass(frozen=True)
class Status:
    """The contents of the file STATUS: health of the parts, newest incidents, and how the command ended."""

    at: float  # when it was written, in seconds since 1970
    pid: int  # the driver's
    node: str  # the driver's host name
    attempt: int
    step: int  # training steps completed
    parts: tuple[RunPart, ...]
    incidents_total: int  # incidents of this command
    recent: tuple[Incident, ...]  # the newest of them, oldest first
    ended: RunEnd | None  # None: the driver works or was killed (`DriverProcess` tells)
    start_s: float = 0.0  # seconds that parts have to start; 0: not known yet

    @classmethod
    def read(cls, root: Path) -> Status | None:
        """Reads the last status of the run in `root`; None if there is none or a crash of the machine damaged it."""
        with suppress(FileNotFoundError, ValueError):
            return TypeAdapter(cls).validate_json((root / STATUS).read_bytes())
        return None


def read_incidents(root: Path) -> list[Incident]:
    """Reads all incidents of the run in `root`, oldest first."""
    return [Incident(**row.values) for row in read_rows(root / INCIDENTS)[0]]


# ------------------------------------------------------------------------------------------------------------- writing


class StatusWriter:
    """Writes STATUS and incidents.jsonl of the run in `root` whenever `roster` changes. Stops writing once another
    driver has taken the lock file. If a file cannot be written, this causes one warning and does not end the run.

    A context manager for the process that holds the run's lock. At the end of the `with` block, the writer records in
    STATUS how the command ended.
    """

    def __init__(self, root: Path, roster: Roster) -> None:
        self._root = root
        self._roster = roster
        self._changed = threading.Event()
        self._ending = threading.Event()
        self._warned = False
        self._driver = _driver_of(root)
        self._thread = threading.Thread(target=self._follow, name="status", daemon=True)

    def __enter__(self) -> StatusWriter:
        incidents = self._root / INCIDENTS
        with self._warning():  # a driver that was killed may have left a line unfinished: the next is a new one
            if incidents.exists() and not incidents.read_bytes().endswith(b"\n"):
                with incidents.open("a") as lines:
                    lines.write("\n")
        self._roster.listen(self._listen)
        self._write(None)
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._ending.set()
        self._changed.set()
        self._thread.join(JOIN_S)
        if error is None:
            reason = "done"
        else:
            reason = " ".join(str(error).split()) or type(error).__name__
        if error is None:
            exit_code = EXIT_OK
        else:
            exit_code = getattr(error, "exit_code", EXIT_FAILED)
        self._write(RunEnd(exit_code, reason[:1000]))

    def _listen(self, _roster: Roster, incident: Incident | None) -> None:
        if incident and _driver_of(self._root) == self._driver:
            with self._warning(), (self._root / INCIDENTS).open("a") as file:
                file.write(to_json(asdict(incident)) + "\n")
        self._changed.set()

    def _follow(self) -> None:
        while not self._ending.wait(SHORTEST_S):
            self._changed.wait(LONGEST_S)
            self._changed.clear()
            self._write(None)

    def _write(self, end: RunEnd | None) -> None:
        roster = self._roster
        status = Status(
            at=time.time(),
            pid=os.getpid(),
            node=os.uname().nodename,
            attempt=roster.attempt,
            step=roster.step,
            parts=tuple(roster.parts),
            incidents_total=roster.incidents_total,
            recent=tuple(roster.incidents[-RECENT:]),
            ended=end,
            start_s=roster.start_s,
        )
        if _driver_of(self._root) == self._driver:
            with self._warning():
                _replace_json(self._root / STATUS, asdict(status))

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._warned:
                log.warning("the status of the run cannot be written (%s); the run continues without it", error)
            self._warned = True


def _driver_of(root: Path) -> str:
    """Returns the text of the lock file of the run in `root`, which is unique to each driver; "" if there is no such
    file."""
    with suppress(FileNotFoundError):
        return (root / LOCK).read_text()
    return ""


def _replace_json(file: Path, value: dict[str, object]) -> None:
    """Replaces the contents of `file` with `value` as JSON, atomically: no reader sees half of it. Does not force the
    file onto the disk, because after a crash of the machine its contents are out of date anyway. Raises OSError."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(to_json(value, indent=1) + "\n")
    new.replace(file)


# ---------------------------------------------------------------------------------------------------------- the driver


@dataclass(frozen=True)
class DriverProcess:
    """The process that a run's lock file names."""

    pid: int
    node: str  # host name
    alive: bool | None  # None: it is on another machine, where it cannot be seen

    @classmethod
    def read(cls, root: Path) -> DriverProcess | None:
        """Returns the process that drives, or last drove, the run in `root`; None if the run never had a driver. Takes
        no lock."""
        file = root / LOCK
        if file.exists():
            holder = HOLDER.match(file.read_text())
        else:
            holder = None
        if holder is None:
            return None
        pid = int(holder[1])
        node = holder[2]
        if node != os.uname().nodename:
            return cls(pid, node, None)
        try:  # the number alone may belong to another process by now
            opened = psutil.Process(pid).open_files()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            opened = []
        return cls(pid, node, any(Path(file_of_process.path) == file for file_of_process in opened))


# --------------------------------------------------------------------------------------------------------------- scale


@dataclass(frozen=True)
class ScaleRequest:
    """A request for another number of replicas. The sender has checked that the run is not deterministic."""

    id: str
    at: float  # seconds since 1970
    driver: str  # text of the lock file, which names the driver that is asked
    replicas: int  # number wanted


class ScaleRequests:
    """Receives requests for another number of replicas, in the driver of the run in `root`, which holds the run's lock.
    The constructor deletes requests that were meant for an earlier driver."""

    def __init__(self, root: Path) -> None:
        self._place = root / SCALE
        driver = _driver_of(root)
        for file, request in self._requests():
            if request.driver != driver:
                file.unlink(missing_ok=True)
        for file in self._place.glob("*.answer"):  # this driver has given none yet
            file.unlink(missing_ok=True)

    def poll(self) -> ScaleRequest | None:
        """Returns the oldest request that has no answer, or None, without waiting."""
        return min((request for _, request in self._requests()), key=lambda request: request.at, default=None)

    def answer(self, request: ScaleRequest, text: str, *, accepted: bool = True) -> None:
        """Answers `request` and deletes it. `text` tells people which changes begin now, or why there are none
        (`accepted` False); STATUS shows their progress. Raises OSError."""
        _replace_json(self._place / f"{request.id}.answer", {"accepted": accepted, "what": text})
        (self._place / f"{request.id}.json").unlink(missing_ok=True)

    def _requests(self) -> Iterator[tuple[Path, ScaleRequest]]:
        """Yields (file, request) for each file that `trireme scale` wrote; skips other files, and files that vanish
        meanwhile."""
        for file in self._place.glob("*.json"):
            with suppress(OSError, ValueError, TypeError):
                yield file, ScaleRequest(**json.loads(file.read_bytes()))


@contextmanager
def request_scale(root: Path, replicas: int) -> Iterator[Callable[[], str | None]]:
    """A context manager. Asks the driver of the run in `root` to have `replicas` replicas, and withdraws the request at
    the end of the `with` block. Yields a function that returns the driver's answer, or None if there is no answer yet.
    The function raises BadInput if the driver refuses. Raises OSError."""
    request = ScaleRequest(secrets.token_hex(8), time.time(), _driver_of(root), replicas)
    question, answer = (root / SCALE / f"{request.id}.{kind}" for kind in ("json", "answer"))
    question.parent.mkdir(exist_ok=True)
    _replace_json(question, asdict(request))

    def answered() -> str | None:
        if not answer.exists():
            return None
        written = json.loads(answer.read_bytes())
        if not written["accepted"]:
            raise BadInput(written["what"])
        return str(written["what"])

    try:
        yield answered
    finally:
        question.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
