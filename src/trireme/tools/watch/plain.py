"""`trireme watch` without a terminal to draw on: prints a line for each step, until the run ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from trireme.tools.timeline import target_of
from trireme.tools.watch import drawing
from trireme.tools.watch.following import Follower

REFRESH_S = 1.0


def follow(follower: Follower, say: Callable[[str], None]) -> None:
    """Says every step and every incident, old and new, to `say`; returns when the run has no driver."""
    steps = incidents = 0
    while True:
        driver = follower.driver()  # first: what a run writes last must not be missed
        follower.poll()
        happened = follower.incidents()
        if steps > len(follower.rows):
            steps = 0
            say("the run has gone back to a commit")
        lines = [(row.get("time/unix", 0.0), _step_line(follower, row)) for row in follower.rows[steps:]]
        lines += [(incident.at, f"! {drawing.incident_line(incident)}") for incident in happened[incidents:]]
        for _, line in sorted(lines, key=lambda line: line[0]):
            say(line)
        steps, incidents = len(follower.rows), len(happened)
        if not drawing.goes_on(driver):
            say(drawing.headline(follower.config, follower.rows, driver))
            if status := follower.status():
                say(drawing.standing(status, driver))
            return
        time.sleep(REFRESH_S)


def _step_line(follower: Follower, row: Mapping[str, Any]) -> str:
    told = [f"{name} {row[name]:.4g}" for name in drawing.FIRST_CURVES if name in row]
    return f"step {row['step'] + 1}/{target_of(follower.config, row)}  {'  '.join(told)}"
