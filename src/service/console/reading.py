"""Reads of a run directory what the console shows, a bounded part at a time.

Requests come in threads. Each reads under the lock of its part, as parts keep what they have read.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from service.console.curves import GroupAges, RunCurves
from service.console.logs import RunLogs
from service.console.rollouts import RecordedRollouts
from service.console.sessions import RunSessions
from trireme.config.run import is_url
from trireme.core.tokenizer import Decode
from trireme.supervision.status import INCIDENTS, Status
from trireme.tools.report import described, timeline_to_json
from trireme.tools.timeline import newest_steps, target_of
from trireme.tools.watch import drawing
from trireme.tools.watch.following import Follower, LineFollower

SESSIONS = "sessions"
"""The directory of the journal of sessions, in the run directory."""
MOST_INCIDENTS = 200
TIMELINE_S = 2.0
"""Seconds for which a timeline that was read is good enough."""
log = logging.getLogger(__name__)


class RunReader:
    """Reads the run in `root`. `open_tokenizer` is called when tokens are first shown; None: tokens stay numbers, and
    texts are those of the records."""

    def __init__(self, root: Path, open_tokenizer: Callable[[], Any] | None) -> None:
        self.root, self._open_tokenizer = root, open_tokenizer
        self.rollouts, self.sessions = RecordedRollouts(root), RunSessions(root / SESSIONS)
        self._follower = Follower(root)
        self.logs = RunLogs(self._follower)
        self._curves, self._ages = RunCurves(root), GroupAges(root)
        self._incidents = LineFollower(root / INCIDENTS)
        self._newest_incidents: deque[dict[str, Any]] = deque(maxlen=MOST_INCIDENTS)
        self._decode: Decode | None = None
        self._timelines: dict[int, tuple[float, dict[str, Any] | None]] = {}
        self.lock, self._tokenizer_lock, self._timeline_lock = (threading.Lock() for _ in range(3))

    def overview(self) -> dict[str, Any]:
        """Tells how far the run is, and how all its parts are."""
        with self.lock:
            self._curves.look()
            newest, config = self._curves.newest, self._follower.config
            driver, status, now = self._follower.driver(), Status.read(self.root), time.time()
            goes_on = drawing.goes_on(driver)
            return {
                "run": self.root.name,
                "headline": drawing.headline(config, [newest] if newest else [], driver),
                "goes_on": goes_on,
                "step": newest["step"] + 1 if newest else 0,
                "target": target_of(config, newest or None),
                "trouble": drawing.troubles(status, now) if goes_on else "",
                "standing": drawing.standing(status, driver),
                "facts": [*described(config), ("directory", str(self.root)), *_stored(config)],
                "now": now,
                "status_at": status.at if status else None,
                "parts": [asdict(part) for part in status.parts] if status else [],
                "rooms": {room: _shown(names, newest) for room, names in drawing.ROOMS.items()},
                "incidents": self._incidents_so_far(),
                "unread": self._curves.unread,
            }

    def curves(self) -> dict[str, Any]:
        """Returns the charts, the names of all metrics, and the ages of all groups that were trained on."""
        with self.lock:
            self._curves.look()
            bound = self._follower.config.get("orchestrator", {}).get("max_steps_off_policy")
            return {
                "rows": self._curves.rows,
                "panels": self._curves.panels(),
                "names": self._curves.names(),
                "ages": {"counts": self._ages.look(), "bound": bound},
            }

    def curve(self, name: str) -> dict[str, Any]:
        """Returns one metric, as a chart."""
        with self.lock:
            self._curves.look()
            points = self._curves.curve(name)
            return {"title": name, "unit": "", "curves": [{"name": name, "points": points}] if points else []}

    def timeline(self, steps: int) -> dict[str, Any] | None:
        """Returns who did what in the newest steps; None where there is no trace."""
        with self._timeline_lock:
            at, shown = self._timelines.get(steps, (-TIMELINE_S, None))
            if time.monotonic() - at >= TIMELINE_S:
                found = newest_steps(self.root, steps)
                shown = timeline_to_json(found) if found else None
                self._timelines = {steps: (time.monotonic(), shown)}
            return shown

    def decode(self) -> Decode | None:
        """Returns what turns tokens into text; None where the run's tokenizer is not on this machine, or is broken."""
        with self._tokenizer_lock:
            if self._decode is None and self._open_tokenizer is not None:
                try:
                    self._decode = self._open_tokenizer().decode
                except Exception:  # of whichever kind: the page shows numbers
                    log.exception("the tokenizer of %s cannot be opened; tokens are shown as numbers", self.root)
                    self._open_tokenizer = None
            return self._decode

    def _incidents_so_far(self) -> list[dict[str, Any]]:
        """Returns the newest incidents, newest first."""
        again, lines = self._incidents.poll(1 << 20)
        if again:
            self._newest_incidents.clear()
        for line in lines:
            try:
                self._newest_incidents.append(json.loads(line))
            except ValueError:  # a driver that was killed left it unfinished
                continue
        return [
            {**each, "at": f"{datetime.fromtimestamp(each['at'], UTC):%Y-%m-%d %H:%M:%S}"}
            for each in reversed(self._newest_incidents)
        ]


def _shown(names: str, row: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(name, row[name]) for name in names.split() if row.get(name) is not None]


def _stored(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Says of a run in object storage that this is its local directory."""
    place = config.get("run", {}).get("output_dir", "")
    if not is_url(place):
        return []
    return [("kept in", f"{place}; this page shows what its directory on this machine has")]
