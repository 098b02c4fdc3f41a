"""What a run says of itself while it runs, and what it can be asked for, as files in its directory.

    STATUS             the health of every part and the newest incidents, as JSON: `Status`
    incidents.jsonl    all incidents of all attempts, one a line: `Incident`; only ever added to
    scale/             requests for another number of replicas, and the driver's answers

A run never reads STATUS or incidents again, and nothing that is compared or resumed depends on them. No Ray here:
`trireme watch` and `trireme scale` are at the other end.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from trireme.checkpoint.rows import read_rows
from trireme.core.errors import EXIT_FAILED, EXIT_OK
from trireme.run.rundir import LOCK
from trireme.supervision.roster import Health, Incident, Part, Roster

STATUS, INCIDENTS, SCALE = "STATUS", "incidents.jsonl", "scale"
SHORTEST_S = 0.5
"""Between two versions of STATUS."""
LONGEST_S = 10.0
"""So old is STATUS at most while its driver works, whether anything has changed or not."""
RECENT = 10
"""Incidents that stand in STATUS."""
JOIN_S = 5.0
HOLDER = re.compile(r"pid (\d+) on ([^\s,]+)")
"""Contents of the lock file."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ended:
    """How the driver's command ended: its exit code (`trireme.core.errors`), and one line of why."""

    exit_code: int
    why: str


@dataclass(frozen=True)
class Status:
    """The contents of STATUS. `at`: when it was written, in seconds since 1970. `pid`, `node`: of the driver. `step`:
    how many steps are done. `incidents_total`: of this command, of which `recent` are the newest. `ended` None: the
    driver works, or it was killed (`driver_of` knows)."""

    at: float
    pid: int
    node: str
    attempt: int
    step: int
    parts: tuple[Part, ...]
    incidents_total: int
    recent: tuple[Incident, ...]
    ended: Ended | None


def read_status(root: Path) -> Status | None:
    """What the run in `root` said last of itself; None when there is nothing, or a crash of the machine tore it."""
    try:
        said = json.loads((root / STATUS).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    parts = (Part(**part | {"health": Health(part["health"]), "pids": tuple(part["pids"])}) for part in said["parts"])
    recent = (Incident(**incident) for incident in said["recent"])
    ended = Ended(**said["ended"]) if said["ended"] else None
    return Status(**said | {"parts": tuple(parts), "recent": tuple(recent), "ended": ended})


def read_incidents(root: Path) -> list[Incident]:
    """All that ever happened to the run in `root`, oldest first."""
    return [Incident(**row.values) for row in read_rows(root / INCIDENTS)[0]]


def room_of(part: str) -> str:
    """`inference` of `inference_1`."""
    return part.rpartition("_")[0]


def in_service(parts: Iterable[Part]) -> int:
    """How many replicas sample, of all parts."""
    return sum(room_of(part.name) == "inference" and part.health == Health.HEALTHY for part in parts)


def roster_metrics(roster: Roster) -> dict[str, float]:
    """What a step's row says of the roster."""
    return {"perf/incidents": float(roster.incidents_total), "perf/replicas": float(in_service(roster.parts))}


# ------------------------------------------------------------------------------------------------------------- writing


class StatusWriter:
    """Keeps STATUS and incidents.jsonl of the run in `root` as `roster` says, until the end of its block; then STATUS
    says how that ended. To be entered by the process that holds the run's lock, in it.

    Nothing that goes wrong here ends a run: a file that cannot be written is warned of, once.
    """

    def __init__(self, root: Path, roster: Roster) -> None:
        self._root, self._roster = root, roster
        self._changed, self._ending = threading.Event(), threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._follow, name="status", daemon=True)

    def __enter__(self) -> StatusWriter:
        self._end_torn_line()
        self._roster.listen(self._listen)
        self._write(None)
        self._thread.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ending.set()
        self._changed.set()
        self._thread.join(JOIN_S)
        self._write(_ended(error))

    def _listen(self, _roster: Roster, incident: Incident | None) -> None:
        if incident:
            with self._warning(), (self._root / INCIDENTS).open("a") as file:
                file.write(json.dumps(asdict(incident)) + "\n")
        self._changed.set()

    def _follow(self) -> None:
        while not self._ending.wait(SHORTEST_S):
            self._changed.wait(LONGEST_S)
            self._changed.clear()
            self._write(None)

    def _write(self, ended: Ended | None) -> None:
        roster = self._roster
        said = Status(
            at=time.time(),
            pid=os.getpid(),
            node=os.uname().nodename,
            attempt=roster.attempt,
            step=roster.step,
            parts=tuple(roster.parts),
            incidents_total=roster.incidents_total,
            recent=tuple(roster.incidents[-RECENT:]),
            ended=ended,
        )
        with self._warning():
            _put(self._root / STATUS, asdict(said))

    def _end_torn_line(self) -> None:
        """What a driver that was killed while it wrote left at the end of incidents.jsonl stays a line of its own."""
        file = self._root / INCIDENTS
        with self._warning():
            if file.exists() and not file.read_bytes().endswith(b"\n"):
                with file.open("a") as lines:
                    lines.write("\n")

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._warned:
                log.warning("the status of the run cannot be written (%s); it goes on without", error)
            self._warned = True


def _ended(error: BaseException | None) -> Ended:
    if error is None:
        return Ended(EXIT_OK, "done")
    why = " ".join(str(error).split()) or type(error).__name__
    return Ended(getattr(error, "exit_code", EXIT_FAILED), why[:1000])


def _put(file: Path, value: dict[str, Any]) -> None:
    """Whoever reads `file` finds it whole. Not forced onto the disk: after a crash of the machine it is old news."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(value, indent=1) + "\n")
    new.replace(file)


# ---------------------------------------------------------------------------------------------------------- the driver


@dataclass(frozen=True)
class Driver:
    """The process that a run's lock file names. `alive` None: it is on another machine, where nobody can see it."""

    pid: int
    node: str
    alive: bool | None


def driver_of(root: Path) -> Driver | None:
    """Who drives, or drove, the run in `root`; None before anybody did. Takes no lock."""
    file = root / LOCK
    holder = HOLDER.match(file.read_text()) if file.exists() else None
    if holder is None:
        return None
    pid, node = int(holder[1]), holder[2]
    return Driver(pid, node, _holds(pid, file) if node == os.uname().nodename else None)


def _holds(pid: int, lock: Path) -> bool:
    """Whether process `pid` has the lock file open: its number alone may be another one's by now."""
    try:
        return any(Path(opened.path) == lock for opened in psutil.Process(pid).open_files())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


# --------------------------------------------------------------------------------------------------------------- scale


@dataclass(frozen=True)
class ScaleRequest:
    """Somebody wants so many `replicas`, those that are reserved for evaluations among them (as `inference.replicas`).
    More than 0 and more than are reserved, and the run is not deterministic: who asks has seen to that. `at`: seconds
    since 1970. `driver`: whom it was asked, as the run's lock file names it."""

    id: str
    at: float
    driver: str
    replicas: int


@dataclass(frozen=True)
class ScaleAnswer:
    """`what`, for people: what happens now, or why nothing does. Accepted is not done: STATUS says how far it is."""

    accepted: bool
    what: str


class ScaleRequests:
    """The driver's side; made by the process that holds the run's lock. What a driver before this one was asked is
    forgotten."""

    def __init__(self, root: Path) -> None:
        self._place = root / SCALE
        driver = (root / LOCK).read_text()
        for file in self._place.glob("*.json"):
            if (request := _request(file)) and request.driver != driver:
                file.unlink(missing_ok=True)
        for file in self._place.glob("*.answer"):  # this driver has given none yet
            file.unlink(missing_ok=True)

    def poll(self) -> ScaleRequest | None:
        """The oldest request that has no answer; returns at once."""
        found = [request for file in self._place.glob("*.json") if (request := _request(file))]
        return min(found, key=lambda request: request.at, default=None)

    def answer(self, request: ScaleRequest, accepted: bool, what: str) -> None:
        """Raises OSError."""
        _put(self._place / f"{request.id}.answer", asdict(ScaleAnswer(accepted, what)))
        (self._place / f"{request.id}.json").unlink(missing_ok=True)


def _request(file: Path) -> ScaleRequest | None:
    """None of a file that is gone by now, or that no `trireme scale` wrote."""
    try:
        return ScaleRequest(**json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def asked_scale(root: Path, replicas: int) -> Iterator[Callable[[], ScaleAnswer | None]]:
    """Asks the driver of the run in `root` for `replicas`. Yields a function that says what was answered: None as long
    as there is nothing. The request is withdrawn at the end of the block. Raises OSError."""
    request = ScaleRequest(secrets.token_hex(8), time.time(), (root / LOCK).read_text(), replicas)
    question, answer = (root / SCALE / f"{request.id}.{kind}" for kind in ("json", "answer"))
    question.parent.mkdir(exist_ok=True)
    _put(question, asdict(request))

    def answered() -> ScaleAnswer | None:
        return ScaleAnswer(**json.loads(answer.read_bytes())) if answer.exists() else None

    try:
        yield answered
    finally:
        question.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
