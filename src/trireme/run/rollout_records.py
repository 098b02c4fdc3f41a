"""Records of rollouts in a run directory: `rollouts/step_000012.jsonl`, one group a line (`orchestrator.recorder`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from trireme.checkpoint.rows import ROLLOUTS, shown_step


class RecordedTexts(TypedDict, total=False):
    """The texts of a turn, which are there if the recorder had a tokenizer."""

    observation_text: str
    action_text: str


class TurnRecord(RecordedTexts):
    """A turn of a recorded rollout. `orchestrator.recorder` describes the fields."""

    continues: bool
    observation: list[int]
    action: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]
    reward: float
    in_loss: NotRequired[bool]
    metrics: dict[str, float]
    logs: Mapping[str, object]


class RolloutRecord(TypedDict):
    """A recorded rollout."""

    reward: float
    stop_reason: str
    turns: list[TurnRecord]


class GroupRecord(TypedDict):
    """A recorded group: one line of a file of records."""

    step: int
    why: str
    problem: str
    tags: list[str]
    floor: int
    rewards: list[float]
    advantages: list[float]
    rollouts: list[RolloutRecord]


def write_records(directory: Path, step: int, records: Sequence[str]) -> None:
    """Writes the file of records of `step`. Each line is one of `records`, a group as JSON. The file appears only when
    it is complete. Does nothing if there are no records. Raises OSError."""
    if not records:
        return
    directory.mkdir(exist_ok=True)
    file = directory / f"step_{step:06d}.jsonl"
    unfinished = file.with_suffix(".new")
    unfinished.write_text("".join(f"{line}\n" for line in records), encoding="utf-8")
    unfinished.rename(file)


def read_records(file: Path) -> list[GroupRecord]:
    """Returns all recorded groups in `file`."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def records_in(file: Path, most_bytes: int | None = None) -> Iterator[GroupRecord]:
    """Yields the recorded groups in `file`, one at a time. `most_bytes`: only groups that begin in the first
    `most_bytes` bytes; None: all."""
    with file.open("rb") as lines:
        for line in lines:
            yield json.loads(line)
            if most_bytes is not None and lines.tell() >= most_bytes:
                return


def newest_prompt(root: Path) -> str | None:
    """Returns the text of the first prompt in the newest file of records of the run in `root`; None if there is no such
    file, or if it has no texts."""
    files = sorted((root / ROLLOUTS).glob("step_*.jsonl"))
    prompts = (read_records(file)[0]["rollouts"][0]["turns"][0].get("observation_text") for file in files[-1:])
    return next(prompts, None)


TABLE_COLUMNS = ["step", "why", "problem", "prompt", "conversation", "reward", "stop_reason", "versions"]


def table_rows(groups: Sequence[GroupRecord]) -> list[list[object]]:
    """Returns a row for each rollout of `groups`, with the columns TABLE_COLUMNS."""
    return [
        _table_row(group, rollout["turns"], reward, rollout["stop_reason"])
        for group in groups
        for rollout, reward in zip(group["rollouts"], group["rewards"], strict=True)
    ]


def _table_row(group: GroupRecord, turns: Sequence[TurnRecord], reward: float, end: str) -> list[object]:
    prompt, *texts = [
        text for turn in turns for text in (turn.get("observation_text", ""), turn.get("action_text", ""))
    ]
    versions = " ".join(str(version) for turn in turns for version, _ in turn["versions"])
    return [shown_step(group), group["why"], group["problem"], prompt, "".join(texts), reward, end, versions]
