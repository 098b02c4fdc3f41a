"""Texts for people on the state of a run, shown by `trireme watch` and by the console alike."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trireme.checkpoint.manifest import step_of
from trireme.checkpoint.resume import leaves
from trireme.checkpoint.rows import shown_step
from trireme.checkpoint.store import CheckpointStore
from trireme.supervision.roster import PartHealth
from trireme.supervision.status import Status
from trireme.tools.following import is_live
from trireme.tools.inspection import age

Row = Mapping[str, Any]
"""One line of `metrics.jsonl`."""

ROOMS = {
    "trainer": "time/forward_backward time/optim time/publish perf/trainer_idle_frac optim/grad_norm "
    "optim/kl_sample_train_v2",
    "orchestrator": "time/wait_for_batch off_policy/in_flight off_policy/in_queue off_policy/mean perf/max_concurrent "
    "perf/event_loop_lag",
    "inference": "perf/tokens_per_s perf/rollouts_per_s perf/inference_idle_frac perf/replicas time/update "
    "time/update_pause weights/reprefill_tokens",
}
"""The metrics of the newest row that show how each room is doing, separated by spaces."""

DESCRIBED = (
    "model.name",
    "model.dtype",
    "env",
    "orchestrator.batch_size",
    "orchestrator.group_size",
    "orchestrator.max_steps_off_policy",
    "orchestrator.stale_policy",
    "data.train",
    "data.train_on",
    "data.batch_size",
    "trainer.loss_fn",
    "trainer.learning_rate",
    "trainer.shards",
    "inference.replicas",
    "seed",
)
"""Keys of the configuration that usually differ between runs."""

SILENT_S = 30.0
"""Seconds. A driver that works writes the file STATUS more often than this."""


def target_of(config: Mapping[str, object], row: Row | None) -> str:
    """Returns the number of the step at which the run will end, as text, or "?" if it is unknown. For a run that counts
    epochs (`max_steps` = 0) the number is computed from `row`, the newest row."""
    if config.get("max_steps") or not row or not row.get("progress"):
        return str(config.get("max_steps") or "?")
    return str(round(shown_step(row) / row["progress"]))


def headline(config: Mapping[str, object], newest: Row, driver: str) -> str:
    """Returns one line of text: the newest step and the run's last step, the attempt, the reward and the driver.
    `newest`: the newest row, empty if there is none; `driver`: a text from `driver_state`."""
    target = target_of(config, newest)
    if not newest:
        return f"step 0/{target}  {driver}"
    if "reward/total" in newest:
        reward = f"reward {newest['reward/total']:.3f}  "
    else:
        reward = ""
    return f"step {shown_step(newest)}/{target}  attempt {newest.get('attempt', 1)}  {reward}{driver}"


def troubles(status: Status | None, now: float) -> str:
    """Returns a text that names the parts that are not healthy, or says that the driver is silent. Returns "" if there
    is no such trouble, if the run has ended, or if `status` is None. `now`: seconds since 1970."""
    if status is None or status.ended:
        return ""
    if now - status.at > SILENT_S:
        return f"no word from the driver for {now - status.at:.0f} s"
    return ", ".join(f"{part.name} {part.health}" for part in status.parts if part.health != PartHealth.HEALTHY)


def standing(status: Status | None, driver: str) -> str:
    """Returns a text that says how the run ended, or why the recorded states of its parts are not current; "" if they
    are current. `driver`: a text from `driver_state`."""
    if status is None:
        return "this run says nothing of its parts: it has not begun, or has no supervisor"
    restarting = is_live(driver) and not driver.endswith(f"process {status.pid}")
    if restarting:
        before = "a new command begins; the one before it "
    else:
        before = ""
    if status.ended:
        return f"{before}ended with exit code {status.ended.exit_code}: {status.ended.why}"
    if restarting:
        return f"{before}was killed, and all its parts with it"
    if is_live(driver):
        return ""
    return "the driver was killed, and all parts with it; this is their last state"


def age_of(at: float, now: datetime) -> str:
    """Returns the time from `at` (seconds since 1970) to `now` as text, such as "2 h ago"."""
    return age(datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds"), now)


def described(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (key, value) pairs as text for the keys DESCRIBED that the configuration has."""
    values = leaves(config)
    return [(key, str(values[key])) for key in DESCRIBED if key in values]


def lineage_facts(root: Path, attempts: Mapping[int, tuple[int, int]]) -> list[tuple[str, str]]:
    """Returns (name, text) pairs on the attempts and the checkpoints of the run in `root`.

    `attempts`: {number of the attempt: (its first step, its last step)}.
    """
    parts = [f"{attempt}: steps {first} to {last}" for attempt, (first, last) in attempts.items()]
    parts += [f"superseded: branches/{path.name}" for path in sorted(root.glob("branches/*"))]
    checkpoints = ", ".join(str(step_of(path.name)) for path in CheckpointStore(root).checkpoints())
    return [
        ("attempts", "; ".join(parts) or "none has finished a step"),
        ("checkpoints", f"of step {checkpoints}" if checkpoints else "none"),  # `trireme inspect` verifies them
    ]
