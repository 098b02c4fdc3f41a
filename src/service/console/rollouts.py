"""Recorded rollouts of a run, for the console: one group, one page of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from service.console.tokens import TokenPiece, missing, tokens_page
from trireme.checkpoint.rows import ROLLOUTS, recorded_steps
from trireme.core.tokenizer import Decode
from trireme.run.rollout_records import GroupRecord, RolloutRecord, TurnRecord, records_in

NEWEST_STEPS = 500
LISTED_BYTES = 64 << 20
"""The most bytes of a file of rollouts that are read for a list of its groups; groups behind them are not listed."""


class RecordedRollouts:
    """Reads the recorded rollouts in the run directory `root`. `decode` returns the function that turns tokens into
    text, or None."""

    def __init__(self, root: Path, decode: Callable[[], Decode | None]) -> None:
        self._decode = decode
        self._directory = root / ROLLOUTS
        self._last: tuple[tuple[int, int, int], GroupRecord] | None = None

    def steps(self, limit: int | None = NEWEST_STEPS) -> dict[str, Any]:
        """Returns the newest `limit` steps that have recorded rollouts, the newest first, and the number of older
        ones."""
        steps = list(reversed(recorded_steps(self._directory)))
        newest = steps[:limit]
        return {"steps": newest, "older": len(steps) - len(newest)}

    def groups(self, step: int) -> dict[str, Any]:
        """Lists the groups of a step. Raises RequestRefused if the step has no recorded rollouts."""
        file = self._file(step)
        groups = [
            {**_about(group), "tokens": sum(map(_length, group["rollouts"]))}
            for group in records_in(file, LISTED_BYTES)
        ]
        return {"step": step, "groups": groups, "whole": file.stat().st_size <= LISTED_BYTES}

    def group(self, step: int, number: int) -> dict[str, Any]:
        """Describes group `number` of a step and its rollouts, without their tokens. Raises RequestRefused if there is
        no such group."""
        group = self._group(step, number)
        scored = zip(group["rollouts"], group["rewards"], group["advantages"], strict=True)
        rollouts = [
            {
                "reward": reward,
                "advantage": advantage,
                "stop_reason": rollout["stop_reason"],
                "turns": len(rollout["turns"]),
                "tokens": _length(rollout),
                "versions": _versions(rollout),
            }
            for rollout, reward, advantage in scored
        ]
        return {**_about(group), "rollouts": rollouts}

    def tokens(self, step: int, number: int, rollout: int, start: int) -> dict[str, Any]:
        """Returns a page of the tokens of one rollout of group `number`, from token `start` on. Raises RequestRefused
        if there is no such rollout."""
        group = self._group(step, number)
        if not 0 <= rollout < len(group["rollouts"]):
            raise missing(f"rollout {rollout} of a group with {len(group['rollouts'])}", "one that the group lists")
        pieces = [piece for turn in group["rollouts"][rollout]["turns"] for piece in _pieces(turn)]
        return tokens_page(pieces, start, self._decode()) | {"step": group["step"], "floor": group["floor"]}

    def _file(self, step: int) -> Path:
        files = recorded_steps(self._directory)
        if step not in files:
            if files:
                expected = f"steps {min(files)} to {max(files)}"
            else:
                expected = "there are none"
            raise missing(f"rollouts of step {step}", f"a step that has recorded some ({expected})")
        return files[step]

    def _group(self, step: int, number: int) -> GroupRecord:
        """Returns group `number` of a step. The group that was requested last is cached, because its tokens are
        requested page by page. Raises RequestRefused if there is no such group."""
        file = self._file(step)
        key = step, number, file.stat().st_mtime_ns
        if self._last is None or self._last[0] != key:
            group = next((group for n, group in enumerate(records_in(file)) if n == number), None)
            if group is None:
                raise missing(f"group {number} of step {step}", "one that the step lists")
            self._last = key, group
        return self._last[1]


def _about(group: GroupRecord) -> dict[str, object]:
    return {name: value for name, value in group.items() if name != "rollouts"}


def _length(rollout: RolloutRecord) -> int:
    return sum(len(turn["action"]) for turn in rollout["turns"])


def _versions(rollout: RolloutRecord) -> list[tuple[int, int]]:
    """Returns (version, number of tokens) for each version that sampled tokens of the rollout, the oldest version
    first."""
    counts: dict[int, int] = {}
    for turn in rollout["turns"]:
        for version, count in turn["versions"]:
            counts[version] = counts.get(version, 0) + count
    return sorted(counts.items())


def _pieces(turn: TurnRecord) -> Iterator[TokenPiece]:
    yield TokenPiece("observed", turn["observation"], text=turn.get("observation_text"))
    values = "".join(f"; {name} {value}" for name, value in {**turn["metrics"], **turn["logs"]}.items())
    if turn.get("in_loss", True):
        masked = ""
    else:
        masked = "; not in the loss"
    yield TokenPiece(
        "sampled",
        turn["action"],
        turn["logprobs"],
        [(version, count) for version, count in turn["versions"]],
        turn.get("action_text"),
        f"reward {turn['reward']:g}{masked}{values}",
    )
