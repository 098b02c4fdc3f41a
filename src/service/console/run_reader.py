"""Reads a run directory for the console, a bounded part at a time.

Only one thread at a time may call its methods, because its parts cache contents.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from service.console.logs import RunLogs
from service.console.rollouts import RecordedRollouts
from service.console.sessions import RunSessions, StoredSessions
from service.sessions.session import SessionBook
from trireme.checkpoint.rows import shown_step
from trireme.config.run import is_url
from trireme.core.finite_json import JsonObject
from trireme.core.tokenizer import Decode
from trireme.supervision.status import Status, read_incidents
from trireme.tools.curves import GroupAges, RunCurves
from trireme.tools.following import driver_state, is_live, run_config
from trireme.tools.standing import ROOMS, described, headline, lineage_facts, standing, target_of, troubles
from trireme.tools.timeline import timeline, timeline_to_json

SESSIONS = "sessions"
"""The directory of the store of sessions, in the run directory."""
MOST_INCIDENTS = 200
log = logging.getLogger(__name__)


class RunReader:
    """Reads the run in the directory `root`. `open_tokenizer` is called when tokens are first shown; None: tokens are
    shown as numbers, with their text only where the text was stored. `sessions` returns the sessions of the service in
    this process; None: sessions are read from the store in `root`."""

    def __init__(
        self,
        root: Path,
        open_tokenizer: Callable[[], Any] | None,
        sessions: Callable[[], SessionBook] | None = None,
    ) -> None:
        self.root = root
        self._open_tokenizer = open_tokenizer
        self.rollouts = RecordedRollouts(root, self.decode)
        self.sessions = RunSessions(sessions or StoredSessions(root / SESSIONS), self.decode)
        self.logs = RunLogs(root)
        self._curves = RunCurves(root)
        self._ages = GroupAges(root)
        self._decode: Decode | None = None

    def overview(self) -> JsonObject:
        """Returns the progress of the run, and the state of all its parts."""
        self._curves.look()
        newest = self._curves.newest
        config = run_config(self.root)
        now = datetime.now(UTC)
        driver = driver_state(self.root)
        status = Status.read(self.root)
        incidents = read_incidents(self.root)
        return {
            "run": self.root.name,
            "headline": headline(config, newest, driver),
            "step": shown_step(newest) if newest else 0,
            "target": target_of(config, newest),
            "trouble": troubles(status, now.timestamp()) if is_live(driver) else "",
            "standing": standing(status, driver),
            "facts": [
                *self._curves.facts(now),
                *described(config),
                *lineage_facts(self.root, self._curves.attempts),
                ("directory", str(self.root)),
                *_stored(config),
            ],
            "now": now.timestamp(),
            "parts": [asdict(part) for part in status.parts] if status else [],
            "rooms": {room: _shown(names, newest) for room, names in ROOMS.items()},
            "incidents": [
                {**asdict(incident), "at": f"{datetime.fromtimestamp(incident.at, UTC):%Y-%m-%d %H:%M:%S}"}
                for incident in incidents[: -MOST_INCIDENTS - 1 : -1]
            ],
            "incidents_older": max(0, len(incidents) - MOST_INCIDENTS),
            "unread": self._curves.unread,
        }

    def curves(self) -> dict[str, Any]:
        """Returns the charts, the names of all metrics, and the ages of all groups that were trained on."""
        self._curves.look()
        bound = run_config(self.root).get("orchestrator", {}).get("max_steps_off_policy")
        return {
            "rows": self._curves.rows,
            "panels": self._curves.panels(),
            "names": self._curves.names(),
            "ages": {"counts": self._ages.look(), "bound": bound},
        }

    def curve(self, name: str) -> JsonObject:
        """Returns the values of the metric `name`, as a chart with at most one curve."""
        self._curves.look()
        points = self._curves.curve(name)
        return {"title": name, "unit": "", "curves": [{"name": name, "points": points}] if points else []}

    def read_all(self) -> None:
        """Reads the files of metrics and ages to their ends. Without this call, each request reads a further part of
        the files, up to a limit of bytes."""
        self._curves.look(most_bytes=None)
        self._ages.look(most_bytes=None)

    def timeline(self, steps: int) -> JsonObject | None:
        """Returns the timeline of the newest steps; None where there is no trace."""
        newest = timeline(self.root, steps)
        return timeline_to_json(newest) if newest else None

    def decode(self) -> Decode | None:
        """Returns the function that turns tokens into text; None if the run's tokenizer is not on this machine, or
        cannot be opened."""
        if self._decode is None and self._open_tokenizer is not None:
            try:
                self._decode = self._open_tokenizer().decode
            except Exception:  # of whichever kind: the page shows numbers
                log.exception("the tokenizer of %s cannot be opened; tokens are shown as numbers", self.root)
                self._open_tokenizer = None
        return self._decode


def _shown(names: str, row: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(name, row[name]) for name in names.split() if row.get(name) is not None]


def _stored(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (label, text) rows for the overview. If the run is in object storage, there is one row, which says that
    the page shows only the run's local directory. Otherwise there is none."""
    place = config.get("run", {}).get("output_dir", "")
    if not is_url(place):
        return []
    return [("kept in", f"{place}; this page shows what its directory on this machine has")]
