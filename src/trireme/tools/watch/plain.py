"""`trireme watch` where there is no terminal to draw on: a line for each step, until the run ends."""

from __future__ import annotations

import time
from collections.abc import Callable

from trireme.tools.timeline import target_of
from trireme.tools.watch import drawing
from trireme.tools.watch.following import Follower

REFRESH_S = 1.0


def follow(follower: Follower, say: Callable[[str], None]) -> None:
    """Says every step that is there, and those that come; returns when nobody drives the run any more."""
    said = 0
    while True:
        driver = follower.driver()  # first: what a run writes last must not be missed
        follower.poll()
        if said > len(follower.rows):
            said = 0
            say("the run has gone back to a commit")
        for row in follower.rows[said:]:
            told = [f"{name} {row[name]:.4g}" for name in drawing.FIRST_CURVES if name in row]
            say(f"step {row['step'] + 1}/{target_of(follower.config, row)}  {'  '.join(told)}")
        said = len(follower.rows)
        if not driver.startswith(("running", "driver on")):
            say(drawing.headline(follower.config, follower.rows, driver))
            return
        time.sleep(REFRESH_S)
