"""A run directory with rows and a trace, made by hand: what was when is known to the microsecond."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECOND = 1_000_000
START = 1_800_000_000 * SECOND

Event = dict[str, Any]

CONFIG = {
    "max_steps": 8,
    "seed": 7,
    "model": {"name": "m", "dtype": "auto"},
    "env": [{"id": "sort", "args": {}}],
    "orchestrator": {"batch_size": 16, "group_size": 8, "max_steps_off_policy": 2, "stale_policy": "drop"},
    "trainer": {"shards": 2, "loss_fn": "ppo", "learning_rate": 1e-4},
    "inference": {"replicas": 1},
}


def row(step: int, attempt: int = 1, **metrics: float) -> dict[str, Any]:
    return {
        "step": step,
        "attempt": attempt,
        "time/unix": START / SECOND + 2 * (step + 1),
        "time/step": 2.0,
        "reward/total": step / 10,
        "optim/entropy": 1.0,
        "perf/tokens_per_s": 100.0,
        **metrics,
    }


def make_run(root: Path, steps: int, floor_of: dict[int, Sequence[int]] | None = None) -> Path:
    """With a row for each step, each trained on groups of the floors given (two of floor 0 where none are)."""
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "metrics.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in range(steps)))
    groups = {step: [{"floor": floor} for floor in (floor_of or {}).get(step, (0, 0))] for step in range(steps)}
    (root / "trained.jsonl").write_text(
        "".join(json.dumps({"step": s, "attempt": 1, "groups": g}) + "\n" for s, g in groups.items())
    )
    return root


def span(name: str, track: int, start: float, end: float, **args: Any) -> Event:
    at = START + round(start * SECOND)
    return {"ph": "X", "name": name, "tid": track, "ts": at, "dur": START + round(end * SECOND) - at, "args": args}


def begin(number: int, at: float) -> Event:
    return {"ph": "b", "name": "group", "cat": "group", "id": number, "ts": START + round(at * SECOND)}


def end(number: int, at: float) -> Event:
    return begin(number, at) | {"ph": "e"}


def counter(name: str, at: float, value: int) -> Event:
    return {"ph": "C", "name": name, "ts": START + round(at * SECOND), "args": {"number": value}}


def write_trace(root: Path, attempt: int, process: str, tracks: Sequence[str], events: Sequence[Event]) -> Path:
    """The trace of a process; track number i is `tracks[i]`."""
    named = [{"ph": "M", "name": "thread_name", "tid": i, "args": {"name": name}} for i, name in enumerate(tracks)]
    file = root / "trace" / f"attempt_{attempt}" / f"{process}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("[" + "\n,".join(json.dumps({"pid": 1, **event}) for event in [*named, *events]))
    return file
