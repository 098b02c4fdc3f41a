"""Records of rollouts in a run directory: `rollouts/step_000012.jsonl`, one group a line (`orchestrator.recorder`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trireme.checkpoint.rows import ROLLOUTS, shown_step


def write_records(directory: Path, step: int, records: Sequence[str]) -> None:
    """Writes the file of a step at once, one of `records` (JSON) a line; does nothing if there are none. Raises
    OSError."""
    if not records:
        return
    directory.mkdir(exist_ok=True)
    file = directory / f"step_{step:06d}.jsonl"
    unfinished = file.with_suffix(".new")
    unfinished.write_text("".join(f"{line}\n" for line in records), encoding="utf-8")
    unfinished.rename(file)


def read_records(file: Path) -> list[Mapping[str, Any]]:
    """Returns all recorded groups in `file`."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def records_in(file: Path, most_bytes: int | None = None) -> Iterator[Mapping[str, Any]]:
    """Yields the recorded groups in `file`, one at a time. `most_bytes`: only groups that begin in the first
    `most_bytes` bytes; None: all."""
    with file.open("rb") as lines:
        for line in lines:
            yield json.loads(line)
            if most_bytes is not None and lines.tell() >= most_bytes:
                return


def newest_prompt(root: Path) -> str | None:
    """Returns the prompt of a rollout that the run in `root` recorded last, as text; None if it recorded none."""
    files = sorted((root / ROLLOUTS).glob("step_*.jsonl"))
    prompts = (read_records(file)[0]["rollouts"][0]["turns"][0].get("observation_text") for file in files[-1:])
    return next(prompts, None)


TABLE_COLUMNS = ["step", "why", "problem", "prompt", "conversation", "reward", "stop_reason", "versions"]


def table_rows(groups: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Returns a row for each rollout of `groups`, with the columns TABLE_COLUMNS."""
    return [
        _table_row(group, rollout["turns"], reward, rollout["stop_reason"])
        for group in groups
        for rollout, reward in zip(group["rollouts"], group["rewards"], strict=True)
    ]


def _table_row(group: Mapping[str, Any], turns: Sequence[Mapping[str, Any]], reward: float, end: str) -> list[Any]:
    prompt, *texts = [turn.get(text, "") for turn in turns for text in ("observation_text", "action_text")]
    versions = " ".join(str(version) for turn in turns for version, _ in turn["versions"])
    return [shown_step(group), group["why"], group["problem"], prompt, "".join(texts), reward, end, versions]
