"""The orchestrator's part of a commit: what it holds at a boundary, and its files.

    state.json          cursor, ledger, limits, metrics, evaluation; of each group all that is no array, turn by turn
    groups.safetensors  all turns of all groups one after the other, finished groups first: `observation`, `action`,
                        `versions` int32, `logprobs` float32, `mixed` bool (these are as long as `action`), and where
                        each turn ends, `observation_ends`, `action_ends` int64

Nothing is pickled. What an environment logged is kept as JSON, with the text of whatever JSON does not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save

from orchestrator.advantages import ScoredGroup
from orchestrator.env import Trajectory, Transition
from orchestrator.ledger import Group
from trireme.checkpoint.files import FileRecord, write_bytes
from trireme.core.types import WeightIdentity

STATE, ARRAYS = "state.json", "groups.safetensors"
OBSERVED = {"observation": np.int32}
SAMPLED = {"action": np.int32, "logprobs": np.float32, "versions": np.int32, "mixed": np.bool_}


@dataclass(frozen=True)
class OrchestratorState:
    """`cursor`, `ledger`, `limits` and `evaluation` are `state_dict`s. `finished` groups wait to be taken; `filtered`
    ones and `errors` are for the next row of metrics, `counts` those of the ledger at the last row."""

    cursor: Mapping[str, int]
    ledger: Mapping[str, Any]
    limits: Mapping[str, Any]
    finished: tuple[ScoredGroup, ...]
    filtered: tuple[ScoredGroup, ...]
    errors: Mapping[str, int]
    counts: Mapping[str, int]
    evaluation: Mapping[str, Any]


def write_snapshot(snapshot: OrchestratorState, directory: Path) -> list[FileRecord]:
    """Writes both files; they are on the disk when it returns. Raises StorageFailed."""
    groups = [*snapshot.finished, *snapshot.filtered]
    state = {
        "cursor": snapshot.cursor,
        "ledger": snapshot.ledger,
        "limits": snapshot.limits,
        "finished": [_group_to_json(scored) for scored in snapshot.finished],
        "filtered": [_group_to_json(scored) for scored in snapshot.filtered],
        "errors": snapshot.errors,
        "counts": snapshot.counts,
        "evaluation": snapshot.evaluation,
    }
    turns = [turn for scored in groups for trajectory in scored.trajectories_G for turn in trajectory.transitions]
    return [
        write_bytes(directory, STATE, json.dumps(state).encode()),
        write_bytes(directory, ARRAYS, save(_columns(turns))),
    ]


def read_snapshot(directory: Path) -> OrchestratorState:
    """What `write_snapshot` wrote. Its contents are taken to be verified; raises OSError for a missing file."""
    state = json.loads((directory / STATE).read_text())
    turns = _turns(load_file(directory / ARRAYS))
    parts = {
        name: tuple(_group_from_json(values, turns) for values in state[name]) for name in ("finished", "filtered")
    }
    return OrchestratorState(**(state | parts))


def _columns(turns: Sequence[Transition]) -> dict[str, npt.NDArray[Any]]:
    columns = {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(turn, name) for turn in turns)]).astype(dtype)
        for name, dtype in (OBSERVED | SAMPLED).items()
    }
    for name in ("observation", "action"):
        columns[f"{name}_ends"] = np.cumsum([len(getattr(turn, name)) for turn in turns], dtype=np.int64)
    return columns


def _turns(columns: Mapping[str, npt.NDArray[Any]]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """The arrays of one turn after the other."""
    parts = {name: np.split(columns[name], columns["observation_ends"]) for name in OBSERVED}
    parts |= {name: np.split(columns[name], columns["action_ends"]) for name in SAMPLED}
    for turn in range(len(columns["action_ends"])):
        yield {name: part[turn] for name, part in parts.items()}


def _group_to_json(scored: ScoredGroup) -> dict[str, Any]:
    return {
        "group": vars(scored.group),
        "temperature": scored.temperature,
        "rewards": scored.rewards_G,
        "metrics": [_floats(metrics) for metrics in scored.metrics_G],
        "tags": scored.tags,
        "rollouts": [
            {"stop_reason": t.stop_reason, "turns": [_turn_to_json(turn) for turn in t.transitions]}
            for t in scored.trajectories_G
        ],
    }


def _turn_to_json(turn: Transition) -> dict[str, Any]:
    return {
        "identities": [str(identity) for identity in turn.identities],
        "stop_reason": turn.stop_reason,
        "reward": turn.reward,
        "metrics": _floats(turn.metrics),
        "logs": readable(turn.logs),
    }


def _group_from_json(values: Mapping[str, Any], turns: Iterator[dict[str, npt.NDArray[Any]]]) -> ScoredGroup:
    return ScoredGroup(
        group=Group(**values["group"]),
        trajectories_G=tuple(
            Trajectory(tuple(_turn_from_json(turn, next(turns)) for turn in rollout["turns"]), rollout["stop_reason"])
            for rollout in values["rollouts"]
        ),
        rewards_G=tuple(values["rewards"]),
        metrics_G=tuple(values["metrics"]),
        tags=tuple(values["tags"]),
        temperature=values["temperature"],
    )


def _turn_from_json(values: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Transition:
    identities = tuple(WeightIdentity.parse(label) for label in values["identities"])
    return Transition(**(dict(values) | dict(arrays) | {"identities": identities}))


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def readable(logged: Any) -> Any:
    """What an environment logged, as JSON values."""
    if isinstance(logged, Mapping):
        return {str(name): readable(value) for name, value in logged.items()}
    if isinstance(logged, list | tuple):
        return [readable(value) for value in logged]
    return logged if isinstance(logged, str | bool | int | float | None) else str(logged)
