"""Groups as JSON values, without the arrays of their trajectories: for checkpoints, and for results of evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import nan
from typing import Any

from orchestrator.advantages import ScoredGroup
from orchestrator.ledger import Group
from orchestrator.trajectory import Trajectory, Turn
from trireme.core.finite_json import JsonObject
from trireme.core.types import VersionSpan, WeightIdentity

TrajectoryFromJson = Callable[[Mapping[str, Any]], Trajectory]
"""Takes the JSON of a trajectory, and returns the trajectory with its arrays."""


def scored_to_json(scored: ScoredGroup) -> JsonObject:
    """Returns `scored` as JSON values, without the arrays of its trajectories."""
    return {
        "group": vars(scored.group),
        "temperature": scored.temperature,
        "rewards": scored.rewards_G,
        "metrics": [_floats(metrics) for metrics in scored.metrics_G],
        "tags": scored.tags,
        "rollouts": list(map(trajectory_to_json, scored.trajectories_G)),
    }


def scored_from_json(values: Mapping[str, Any], trajectory_from_json: TrajectoryFromJson) -> ScoredGroup:
    """Converts `values`, the result of `scored_to_json`, back to a ScoredGroup. `values` has no arrays, so
    `trajectory_from_json` gets the values of each trajectory and must return the trajectory with its arrays."""
    return ScoredGroup(
        group=Group(**values["group"]),
        trajectories_G=tuple(map(trajectory_from_json, values["rollouts"])),
        rewards_G=tuple(values["rewards"]),
        metrics_G=tuple(map(_from_null, values["metrics"])),
        tags=tuple(values["tags"]),
        temperature=values["temperature"],
    )


def trajectory_to_json(trajectory: Trajectory) -> JsonObject:
    return {"stop_reason": trajectory.stop_reason, "turns": list(map(_turn_to_json, trajectory.turns))}


def turns_from_json(values: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Returns the turns of a trajectory from `values`, the result of `trajectory_to_json`."""
    return tuple(map(_turn_from_json, values["turns"]))


def _turn_to_json(turn: Turn) -> JsonObject:
    return {
        "start": turn.start,
        "prompt_end": turn.prompt_end,
        "end": turn.end,
        "spans": [[str(span.identity), span.start, span.end, span.mixed] for span in turn.spans],
        "stop_reason": turn.stop_reason,
        "reward": turn.reward,
        "in_loss": turn.in_loss,
        "metrics": _floats(turn.metrics),
        "logs": readable(turn.logs),
    }


def _turn_from_json(values: Mapping[str, Any]) -> Turn:
    spans = tuple(VersionSpan(WeightIdentity.parse(label), *place) for label, *place in values["spans"])
    return Turn(**(dict(values) | {"spans": spans, "metrics": _from_null(values["metrics"])}))


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _from_null(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Returns metrics with NaN for each None, since `to_json` writes non-finite numbers as null."""
    return {name: nan if value is None else value for name, value in metrics.items()}


def readable(logged: object) -> object:
    """Returns `logged`, a value in an environment's logs, as JSON values. A value of a type that JSON does not have
    becomes text."""
    if isinstance(logged, Mapping):
        return {str(name): readable(value) for name, value in logged.items()}
    if isinstance(logged, list | tuple):
        return [readable(value) for value in logged]
    if isinstance(logged, str | bool | int | float | None):
        return logged
    return str(logged)
