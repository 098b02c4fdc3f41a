"""The orchestrator's part of a commit: its state at a boundary, as files.

    state.json          cursor, ledger, limits, metrics, evaluation
    groups.jsonl        how many groups follow, then a line of JSON for each, finished groups first: all of it that is
                        no array, turn by turn: where its tokens are in its trajectory, and the weights that sampled
                        them
    groups.safetensors  the trajectories of all groups one after the other, in the order of the lines: `tokens` int32,
                        `logprobs` float32, and where each trajectory ends, `ends` int64

Files are written and read in small pieces, since the event loop of the process has to wait while one is made. Commits
of before (`layout` 1: groups in state.json, each turn with its whole prompt) are read as well. Nothing is pickled. Logs
of environments are kept as JSON; values that JSON does not know become text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from orchestrator.advantages import ScoredGroup
from orchestrator.ledger import Group
from orchestrator.trajectory import Trajectory, Transition, Turn
from trireme.checkpoint.files import Chunk, FileRecord, write_bytes
from trireme.core.errors import CheckpointInvalid
from trireme.core.finite_json import to_json
from trireme.core.types import VersionSpan, WeightIdentity

STATE, LINES, ARRAYS = "state.json", "groups.jsonl", "groups.safetensors"
LAYOUT = 2
"""The layout that is written; a commit that does not name its layout has layout 1."""
GROUPS = ("finished", "filtered")
"""The fields that hold groups, in the order in which their trajectories are written."""


@dataclass(frozen=True)
class OrchestratorState:
    """The state of an orchestrator at a boundary."""

    cursor: Mapping[str, Any]
    """`state_dict` of the problem mix."""
    ledger: Mapping[str, Any]
    """`state_dict` of the ledger."""
    limits: Mapping[str, Any]
    """`state_dict` of the run limits."""
    finished: tuple[ScoredGroup, ...]
    """Groups that wait to be taken."""
    filtered: tuple[ScoredGroup, ...]
    """Groups for the next row of metrics."""
    errors: Mapping[str, int]
    """For the next row of metrics."""
    counts: Mapping[str, int]
    """The ledger's at the last row."""
    evaluation: Mapping[str, Any]
    """`state_dict` of the evaluator."""

    def write(self, directory: Path) -> list[FileRecord]:
        """Writes the files; they are on the disk when it returns. Raises StorageFailed."""
        rest = {name: value for name, value in vars(self).items() if name not in GROUPS}
        groups = [(name, scored) for name in GROUPS for scored in getattr(self, name)]
        return [
            write_bytes(directory, STATE, to_json(rest | {"layout": LAYOUT}).encode()),
            write_bytes(directory, LINES, b"%d\n" % len(groups), *(_line(name, scored) for name, scored in groups)),
            write_bytes(directory, ARRAYS, *_arrays([t for _, scored in groups for t in scored.trajectories_G])),
        ]

    @classmethod
    def read(cls, directory: Path) -> OrchestratorState:
        """Reads what `write` wrote; its contents must be verified. Raises OSError for a missing file, CheckpointInvalid
        for one that is no safetensors file, and for a layout that is not known."""
        state = json.loads((directory / STATE).read_text())
        layouts = {1: _groups_of_layout_1, LAYOUT: _groups}
        if (layout := state.pop("layout", 1)) not in layouts:
            raise CheckpointInvalid(f"{directory / STATE} has layout {layout}; this version reads 1 to {LAYOUT}")
        groups: dict[str, list[ScoredGroup]] = {name: [] for name in GROUPS}
        try:
            for name, scored in layouts[layout](directory, state):
                groups[name].append(scored)
        except SafetensorError as error:
            raise CheckpointInvalid(f"{directory / ARRAYS} is no safetensors file: {error}") from None
        return cls(**(state | {name: tuple(scored_P) for name, scored_P in groups.items()}))


NextRollout = Callable[[Mapping[str, Any]], Trajectory]
"""Takes what the JSON says of the next rollout, and returns the rollout."""
COLUMNS = {"tokens": "I32", "logprobs": "F32"}
"""The types of the columns, in safetensors' words."""


def _arrays(trajectories: Sequence[Trajectory]) -> Iterator[Chunk]:
    """Yields the contents of a safetensors file. The package's own `save` would copy all columns twice."""
    ends = np.cumsum([len(t.tokens) for t in trajectories], dtype=np.int64)
    header, end = {"ends": {"dtype": "I64", "shape": [len(ends)], "data_offsets": [0, ends.nbytes]}}, ends.nbytes
    total = sum(len(t.tokens) for t in trajectories)
    for name, dtype in COLUMNS.items():
        start, end = end, end + 4 * total
        header[name] = {"dtype": dtype, "shape": [total], "data_offsets": [start, end]}
    said = to_json(header).encode()
    said += b" " * (-len(said) % 8)
    yield len(said).to_bytes(8, "little") + said
    yield ends.tobytes()
    for name in COLUMNS:
        yield from (memoryview(getattr(t, name)).cast("B") for t in trajectories)


def _groups(directory: Path, state: Mapping[str, Any]) -> Iterator[tuple[str, ScoredGroup]]:
    """Yields each group, and the name of the field that holds it."""
    with safe_open(directory / ARRAYS, "np") as arrays, (directory / LINES).open() as lines:
        columns = [arrays.get_slice(name) for name in COLUMNS]
        bounds = pairwise([0, *arrays.get_tensor("ends").tolist()])

        def next_rollout(values: Mapping[str, Any]) -> Trajectory:
            start, end = next(bounds)
            tokens, logprobs = (column[start:end] for column in columns)
            return Trajectory(tokens, logprobs, tuple(map(_turn_from_json, values["turns"])), values["stop_reason"])

        for _ in range(int(next(lines))):
            values = json.loads(next(lines))
            yield values["field"], _group_from_json(values, next_rollout)


def _groups_of_layout_1(directory: Path, state: Mapping[str, Any]) -> Iterator[tuple[str, ScoredGroup]]:
    """Yields the same of a commit that has the arrays of each turn, its whole prompt among them."""
    columns = load_file(directory / ARRAYS)
    parts = {"observation": np.split(columns["observation"], columns["observation_ends"])}
    parts |= {
        name: np.split(columns[name], columns["action_ends"]) for name in ("action", "logprobs", "versions", "mixed")
    }
    arrays = ({name: part[turn] for name, part in parts.items()} for turn in range(len(columns["action_ends"])))

    def next_rollout(values: Mapping[str, Any]) -> Trajectory:
        return Trajectory.of([_whole_turn(turn, next(arrays)) for turn in values["turns"]], values["stop_reason"])

    for name in GROUPS:
        for values in state[name]:
            yield name, _group_from_json(values, next_rollout)


def _whole_turn(values: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Transition:
    identities = tuple(map(WeightIdentity.parse, values["identities"]))
    return Transition(**{**values, **arrays, "identities": identities, "metrics": _from_null(values["metrics"])})


def _line(field: str, scored: ScoredGroup) -> bytes:
    values = {
        "field": field,
        "group": vars(scored.group),
        "temperature": scored.temperature,
        "rewards": scored.rewards_G,
        "metrics": [_floats(metrics) for metrics in scored.metrics_G],
        "tags": scored.tags,
        "rollouts": [
            {"stop_reason": t.stop_reason, "turns": list(map(_turn_to_json, t.turns))} for t in scored.trajectories_G
        ],
    }
    return to_json(values).encode() + b"\n"


def _turn_to_json(turn: Turn) -> dict[str, Any]:
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


def _group_from_json(values: Mapping[str, Any], next_rollout: NextRollout) -> ScoredGroup:
    return ScoredGroup(
        group=Group(**values["group"]),
        trajectories_G=tuple(map(next_rollout, values["rollouts"])),
        rewards_G=tuple(values["rewards"]),
        metrics_G=tuple(map(_from_null, values["metrics"])),
        tags=tuple(values["tags"]),
        temperature=values["temperature"],
    )


def _turn_from_json(values: Mapping[str, Any]) -> Turn:
    spans = tuple(VersionSpan(WeightIdentity.parse(label), *place) for label, *place in values["spans"])
    return Turn(**(dict(values) | {"spans": spans, "metrics": _from_null(values["metrics"])}))


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _from_null(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Returns metrics as they were before `to_json` wrote null for what is no finite number."""
    return {name: nan if value is None else value for name, value in metrics.items()}


def readable(logged: Any) -> Any:
    """Returns logs of an environment as JSON values."""
    if isinstance(logged, Mapping):
        return {str(name): readable(value) for name, value in logged.items()}
    if isinstance(logged, list | tuple):
        return [readable(value) for value in logged]
    return logged if isinstance(logged, str | bool | int | float | None) else str(logged)
