"""`trireme watch RUN`: shows the state of a run in the terminal, redrawn every second until the run ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trireme.supervision.roster import Incident, PartHealth
from trireme.supervision.status import Status, read_incidents
from trireme.tools.curves import FIRST_CURVES, RunCurves
from trireme.tools.following import driver_state, is_live, run_config
from trireme.tools.standing import age_of, headline, standing, troubles

REFRESH_S = 1.0
NEWEST_INCIDENTS = 8
AVERAGED = 10
"""The number of steps in the mean that is shown next to the newest value."""
HEALTH_STYLES = {PartHealth.HEALTHY: "green", PartHealth.SUSPECT: "yellow", PartHealth.DEAD: "bold red"}
"""The colour of a part; one that changes its state is cyan."""


def watch(root: Path, console: Console) -> None:
    """Draws the state of the run in `root` every REFRESH_S seconds. Returns when the run has no driver. If `console` is
    no terminal, only the last drawing is printed."""
    curves = RunCurves(root)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            driver = driver_state(root)  # first: the run's last rows must not be missed
            curves.look(most_bytes=None)
            live.update(drawing(root, curves, driver, datetime.now(UTC)), refresh=True)
            if not is_live(driver):
                return
            time.sleep(REFRESH_S)


def drawing(root: Path, curves: RunCurves, driver: str, now: datetime) -> RenderableType:
    """Returns what the terminal shows of the run in `root`: headline, curves, parts, incidents. `driver`: from
    `driver_state`."""
    status = Status.read(root)
    lines = [Text(f"{root.name}  {headline(run_config(root), curves.newest, driver)}", style="bold")]
    if is_live(driver):
        lines.append(Text(troubles(status, now.timestamp()), style="bold red"))
    lines.append(Text(standing(status, driver)))
    return Group(
        *(line for line in lines if line),
        Text(),
        curves_table(curves),
        Text(),
        parts_table(status, driver, now),
        Text(),
        incidents_text(read_incidents(root), now),
    )


def curves_table(curves: RunCurves) -> Table:
    """Returns a table with a line for each metric of FIRST_CURVES: the newest value, and the mean of the last AVERAGED
    steps."""
    table = Table(box=None)
    for column in ("", "newest", f"mean of {AVERAGED}"):
        table.add_column(column, no_wrap=True)
    for name in FIRST_CURVES:
        values = curves.values(name)
        if values:
            table.add_row(name, f"{values[-1]:.4g}", f"{mean(values[-AVERAGED:]):.4g}")
    return table


def parts_table(status: Status | None, driver: str, now: datetime) -> Table:
    """Returns a table with a line for each part of the run; grey if the driver is not alive. `driver`: from
    `driver_state`."""
    table = Table(box=None, style="" if is_live(driver) else "dim")
    for column in ("part", "health", "since", "successors", "processes", "node"):
        table.add_column(column, no_wrap=True)
    table.add_column("reason")
    for part in status.parts if status else ():
        health = Text(part.health, style=HEALTH_STYLES.get(part.health, "cyan"))
        pids = " ".join(map(str, part.pids))
        since = age_of(part.since, now)
        table.add_row(part.name, health, since, str(part.restarts or ""), pids, part.node[:8], Text(part.why))
    return table


def incidents_text(incidents: Sequence[Incident], now: datetime) -> Text:
    """Returns a text with the NEWEST_INCIDENTS last incidents, the newest first."""
    text = Text()
    for incident in reversed(incidents[-NEWEST_INCIDENTS:]):
        text.append(f"{age_of(incident.at, now)}  ", style="dim")
        text.append(f"attempt {incident.attempt}, step {incident.step}  {incident.part}: {incident.what}\n")
    if len(incidents) > NEWEST_INCIDENTS:
        text.append(f"{len(incidents) - NEWEST_INCIDENTS} older ones are in incidents.jsonl", style="dim")
    if incidents:
        return text
    return Text("no incidents", style="dim")
