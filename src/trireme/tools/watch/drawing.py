"""Makes the text that `trireme watch` shows: pure functions of what the run directory says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any

from rich.table import Table
from rich.text import Text

from trireme.supervision.roster import Incident, PartHealth
from trireme.supervision.status import Status
from trireme.tools.inspection import age
from trireme.tools.timeline import target_of

Row = Mapping[str, Any]
TokenText = Callable[[int], str]
FIRST_CURVES = (
    "reward/total",
    "train_mean_nll",
    "test/nll",
    "off_policy/mean",
    "optim/kl_sample_train_v2",
    "optim/entropy",
    "time/step",
)
"""The first curves; the others follow in order of name."""

ROOMS = {
    "trainer": "time/forward_backward time/optim time/publish perf/trainer_idle_frac optim/grad_norm "
    "optim/kl_sample_train_v2",
    "orchestrator": "time/wait_for_batch off_policy/in_flight off_policy/in_queue off_policy/mean perf/max_concurrent "
    "perf/event_loop_lag",
    "inference": "perf/tokens_per_s perf/rollouts_per_s perf/inference_idle_frac perf/replicas time/update "
    "time/update_pause weights/reprefill_tokens",
}
"""The metrics of the newest row that tell how each room is doing, separated by spaces."""

HEALTH_STYLES = {PartHealth.HEALTHY: "green", PartHealth.SUSPECT: "yellow", PartHealth.DEAD: "bold red"}
"""The colour of a part; one that changes its state is cyan."""
SILENT_S = 30.0
"""A driver that works writes STATUS more often than this."""


def headline(config: Mapping[str, Any], rows: Sequence[Row], driver: str) -> str:
    """Returns one line: how far the run is, and its driver."""
    target = target_of(config, rows[-1] if rows else None)
    if not rows:
        return f"step 0/{target}  {driver}"
    row = rows[-1]
    reward = f"reward {row['reward/total']:.3f}  " if "reward/total" in row else ""
    return f"step {row['step'] + 1}/{target}  attempt {row.get('attempt', 1)}  {reward}{driver}"


def goes_on(driver: str) -> bool:
    """Returns True if `Follower.driver` says that the run is live."""
    return driver.startswith(("running", "driver on"))


def troubles(status: Status | None, now: float) -> str:
    """Returns the parts that are not healthy; nothing while all are."""
    if status is None or status.ended:
        return ""
    if now - status.at > SILENT_S:
        return f"no word from the driver for {now - status.at:.0f} s"
    return ", ".join(f"{part.name} {part.health}" for part in status.parts if part.health != PartHealth.HEALTHY)


def standing(status: Status | None, driver: str) -> str:
    """Says if the table of parts is current, and how the run ended. `driver`: from `Follower.driver`."""
    if status is None:
        return "this run says nothing of its parts: it has not begun, or has no supervisor"
    begins = goes_on(driver) and not driver.endswith(f"process {status.pid}")
    before = "a new command begins; the one before it " if begins else ""
    if status.ended:
        return f"{before}ended with exit code {status.ended.exit_code}: {status.ended.why}"
    if begins:
        return f"{before}was killed, and all its parts with it"
    return "" if goes_on(driver) else "the driver was killed, and all parts with it; so they were before"


def parts_table(status: Status | None, driver: str, now: datetime) -> Table:
    """Returns a table with a line for each part of the run; grey after it has ended."""
    table = Table(expand=True, box=None, style="" if goes_on(driver) else "dim")
    for column in ("part", "is", "since", "successors", "processes", "node"):
        table.add_column(column, no_wrap=True)
    table.add_column("because")
    for part in status.parts if status else ():
        health, pids = Text(part.health, style=HEALTH_STYLES.get(part.health, "cyan")), " ".join(map(str, part.pids))
        since, successors = _age(part.since, now), str(part.restarts or "")
        table.add_row(part.name, health, since, successors, pids, part.node[:8], Text(part.why))
    return table


def incidents_text(incidents: Sequence[Incident], now: datetime) -> Text:
    """Returns the incidents, the newest first."""
    text = Text()
    for incident in reversed(incidents):
        text.append(f"{_age(incident.at, now):<12}", style="dim")
        text.append(f"{incident_line(incident)}\n")
    return text if incidents else Text("nothing has happened to any part", style="dim")


def incident_line(incident: Incident) -> str:
    """Returns one incident without its time."""
    return f"attempt {incident.attempt}, step {incident.step}  {incident.part}: {incident.what}"


def _age(at: float, now: datetime) -> str:
    return age(datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds"), now)


def curve_names(rows: Sequence[Row]) -> list[str]:
    """Returns the names of all metrics that are numbers, those of FIRST_CURVES first."""
    numbers = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    names = sorted(numbers - {"step", "version", "progress", "time/unix"})
    return [name for name in FIRST_CURVES if name in numbers] + [name for name in names if name not in FIRST_CURVES]


def curve(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """Returns the steps and values of a metric, in the rows that have a number for it."""
    points = [(float(row["step"]), float(row[name])) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def rooms_table(rows: Sequence[Row]) -> Table:
    """Returns a table of the newest step, with a column for each room."""
    table = Table(expand=True, box=None, title="" if rows else "no step is done yet")
    for room in ROOMS:
        table.add_column(room)
    if rows:
        newest = rows[-1]
        rooms = [names.split() for names in ROOMS.values()]
        columns = [[f"{name} {newest[name]:.4g}" for name in names if name in newest] for names in rooms]
        for cells in zip_longest(*columns, fillvalue=""):
            table.add_row(*cells)
    return table


def group_title(group: Mapping[str, Any]) -> str:
    """Returns a line for one recorded group."""
    rewards = group["rewards"]
    return f"{group['step']:>6} {group['why']:<6} {sum(rewards) / len(rewards):+.3f}  {group['problem']}"


def group_text(group: Mapping[str, Any], token_text: TokenText | None, per_token: bool) -> Text:
    """Returns the rollouts of a recorded group, as text coloured by log-probability (`token_text` None: uncoloured);
    `per_token`: with each sampled token on its own line, its log-probability and its version."""
    text = Text(
        f"problem {group['problem']}  {' '.join(group['tags'])}  step {group['step'] + 1}  floor {group['floor']}\n"
    )
    both = zip(group["rollouts"], group["rewards"], group["advantages"], strict=True)
    for number, (rollout, reward, advantage) in enumerate(both):
        title = f"\n── rollout {number}  reward {reward:g}  advantage {advantage:+g}  {rollout['stop_reason']}\n"
        text.append(title, style="bold")
        for turn in rollout["turns"]:
            text.append_text(_turn_text(turn, token_text, per_token))
    return text


def _turn_text(turn: Mapping[str, Any], token_text: TokenText | None, per_token: bool) -> Text:
    text = Text(turn.get("observation_text", str(turn["observation"])), style="dim")
    if per_token:
        text.append("\n")
        versions = [version for version, count in turn["versions"] for _ in range(count)]
        for token, logprob, version in zip(turn["action"], turn["logprobs"], versions, strict=True):
            shown = repr(token_text(token)) if token_text else ""
            text.append(f"{token:>8} {shown:<16} {logprob:>9.4f}  version {version}\n", style=_colour(logprob))
        return text
    if token_text is None:
        text.append(turn.get("action_text", str(turn["action"])), style="cyan")
    else:
        for token, logprob in zip(turn["action"], turn["logprobs"], strict=True):
            text.append(token_text(token), style=_colour(logprob))
    spans = ", ".join(f"{count} of version {version}" for version, count in turn["versions"])
    text.append(f"\n  [{spans} tokens; reward {turn['reward']:g}", style="dim italic")
    told = {**turn["metrics"], **turn["logs"]}
    return text.append("".join(f"; {name} {value}" for name, value in told.items()) + "]\n", style="dim italic")


def _colour(logprob: float) -> str:
    """Returns the colour of a token: likely, less likely, or a surprise."""
    if logprob > -0.1:
        return "green"
    return "yellow" if logprob > -1.5 else "red"
