"""The orchestrator's part of a checkpoint: its state at a boundary between two steps, as files.

    state.json          cursor, ledger, limits, metrics, evaluation, counts of wasted tokens
    groups.jsonl        the number of groups, then a line of JSON for each group, finished groups first and running
                        groups last. A line holds everything of the group except arrays, turn by turn: also the place of
                        the turn's tokens in its trajectory, and the weights that sampled them
    groups.safetensors  the trajectories of all groups one after the other, in the order of the lines: `tokens` int32,
                        `logprobs` float32, and where each trajectory ends, `ends` int64
    running.safetensors the other arrays of running groups, by number: the next prompts, and the arrays in the states of
                        environments; the file exists only if there are such arrays

Files are written and read in small pieces, because the event loop of the process waits while a piece is made. Nothing
is pickled. Logs of environments are kept as JSON; values that JSON does not know become text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from orchestrator.advantages import ScoredGroup
from orchestrator.cursor import MixState
from orchestrator.evaluation import EvaluationState
from orchestrator.group_json import (
    TrajectoryFromJson,
    scored_from_json,
    scored_to_json,
    trajectory_to_json,
    turns_from_json,
)
from orchestrator.ledger import Group, LedgerState
from orchestrator.limits import LimitsState
from orchestrator.trajectory import Trajectory
from orchestrator.unfinished import UnfinishedGroup, UnfinishedRollout, from_json
from orchestrator.unfinished import to_json as state_to_json
from orchestrator.waste import WasteState
from trireme.checkpoint.files import Chunk, FileRecord, write_bytes
from trireme.core.errors import CheckpointInvalid
from trireme.core.finite_json import JsonObject, to_json

STATE = "state.json"
LINES = "groups.jsonl"
ARRAYS = "groups.safetensors"
RUNNING = "running.safetensors"
LAYOUT = 3
"""The layout of these files. A change needs a new number, and a new fixture (tests/e2e/checkpoint_fixture.py)."""
GROUPS = ("finished", "filtered", "running")
"""The fields of OrchestratorState that hold groups, in the order in which their trajectories are written."""
AnyGroup = ScoredGroup | UnfinishedGroup


@dataclass(frozen=True)
class OrchestratorState:
    """The state of an orchestrator at a boundary between two steps."""

    cursor: MixState
    """`state_dict` of the problem mix."""
    ledger: LedgerState
    """`state_dict` of the ledger."""
    limits: LimitsState
    """`state_dict` of the run limits."""
    finished: tuple[ScoredGroup, ...]
    """Finished groups that no completed step has trained on: taken groups first, then groups that wait to be taken."""
    filtered: tuple[ScoredGroup, ...]
    """Filtered groups that are not in a row of metrics yet."""
    errors: Mapping[str, int]
    """Failed tries that are not in a row of metrics yet, counted by the type of their error."""
    counts: Mapping[str, int]
    """The result of `Ledger.counts` when the last row of metrics was made."""
    evaluation: EvaluationState
    """`state_dict` of the evaluator."""
    tokens: WasteState
    """`state_dict` of the counts of wasted tokens."""
    running: tuple[UnfinishedGroup, ...] = ()
    """Running groups with at least one rollout that continues after a resume."""

    def write(self, directory: Path) -> list[FileRecord]:
        """Writes the state's files to `directory`, and returns their records when the files are on the disk. Raises
        StorageFailed."""
        rest = {name: value for name, value in vars(self).items() if name not in GROUPS}
        groups: list[tuple[str, AnyGroup]] = [(name, group) for name in GROUPS for group in getattr(self, name)]
        arrays: list[npt.NDArray[np.generic]] = []
        records = [
            write_bytes(directory, STATE, to_json(rest | {"layout": LAYOUT}).encode()),
            write_bytes(directory, LINES, b"%d\n" % len(groups), *(_line(name, g, arrays) for name, g in groups)),
            write_bytes(directory, ARRAYS, *_arrays([t for _, group in groups for t in group.trajectories_G])),
        ]
        if arrays:
            named = {str(number): array for number, array in enumerate(arrays)}
            records.append(write_bytes(directory, RUNNING, save(named)))
        return records

    @classmethod
    def read(cls, directory: Path) -> OrchestratorState:
        """Reads the files that `write` wrote to `directory`; the caller has verified their contents. Raises OSError for
        a missing file, and CheckpointInvalid for a file that is not a safetensors file or has an unknown layout."""
        state = json.loads((directory / STATE).read_text())
        layout = state.pop("layout", None)
        if layout != LAYOUT:
            raise CheckpointInvalid(
                f"{directory / STATE} has layout {layout}; expected {LAYOUT}: resume with the version of Trireme that "
                "wrote the checkpoint, or begin a new run"
            )
        groups: dict[str, list[AnyGroup]] = {name: [] for name in GROUPS}
        try:
            for name, group in _groups(directory):
                groups[name].append(group)
        except SafetensorError as error:
            raise CheckpointInvalid(f"{directory / ARRAYS} is no safetensors file: {error}") from None
        return cls(**(state | {name: tuple(part) for name, part in groups.items()}))


COLUMNS = {"tokens": "I32", "logprobs": "F32"}
"""The columns of `groups.safetensors`, with the names that safetensors has for their types."""


def _arrays(trajectories: Sequence[Trajectory]) -> Iterator[Chunk]:
    """Yields, chunk by chunk, the bytes of one safetensors file with all trajectories. `safetensors.numpy.save` would
    copy all columns twice."""
    ends = np.cumsum([len(t.tokens) for t in trajectories], dtype=np.int64)
    header = {"ends": {"dtype": "I64", "shape": [len(ends)], "data_offsets": [0, ends.nbytes]}}
    end = ends.nbytes
    total = sum(len(t.tokens) for t in trajectories)
    for name, dtype in COLUMNS.items():
        start = end
        end = end + 4 * total
        header[name] = {"dtype": dtype, "shape": [total], "data_offsets": [start, end]}
    encoded = to_json(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    yield ends.tobytes()
    for name in COLUMNS:
        yield from (memoryview(getattr(t, name)).cast("B") for t in trajectories)


def _groups(directory: Path) -> Iterator[tuple[str, AnyGroup]]:
    """Yields pairs of a field of OrchestratorState (`finished`, `filtered` or `running`) and a group that belongs to
    it, from the files of `directory`."""
    if (directory / RUNNING).exists():
        tensors = load_file(directory / RUNNING)
    else:
        tensors = {}
    with safe_open(directory / ARRAYS, "np") as arrays, (directory / LINES).open() as lines:
        columns = [arrays.get_slice(name) for name in COLUMNS]
        bounds = pairwise([0, *arrays.get_tensor("ends").tolist()])

        def next_rollout(values: Mapping[str, Any]) -> Trajectory:
            start, end = next(bounds)
            tokens, logprobs = (column[start:end] for column in columns)
            return Trajectory(tokens, logprobs, turns_from_json(values), values["stop_reason"])

        for _ in range(int(next(lines))):
            values = json.loads(next(lines))
            if values["field"] == "running":
                yield "running", _unfinished_from_json(values, next_rollout, tensors)
            else:
                yield values["field"], scored_from_json(values, next_rollout)


def _line(field: str, group: AnyGroup, arrays: list[npt.NDArray[np.generic]]) -> bytes:
    """Returns the line of JSON for a group that belongs to the field `field` of OrchestratorState. Appends to `arrays`
    the group's arrays that belong in running.safetensors."""
    if isinstance(group, UnfinishedGroup):
        rollouts = [_unfinished_to_json(rollout, arrays) for rollout in group.rollouts_G]
        values = {"group": vars(group.group), "temperature": group.temperature, "rollouts": rollouts}
    else:
        values = scored_to_json(group)
    return to_json({"field": field, **values}).encode() + b"\n"


def _unfinished_to_json(
    rollout: Trajectory | UnfinishedRollout | None, arrays: list[npt.NDArray[np.generic]]
) -> JsonObject | None:
    if rollout is None:
        return None
    if isinstance(rollout, Trajectory):
        return trajectory_to_json(rollout)
    later = {
        "prompt": rollout.prompt,
        "follows": rollout.follows,
        "stop": list(rollout.stop),
        "env_state": rollout.env_state,
        "retry": rollout.retry,
    }
    return trajectory_to_json(rollout.trajectory) | {"continues": state_to_json(later, arrays)}


def _unfinished_from_json(
    values: Mapping[str, Any], next_rollout: TrajectoryFromJson, arrays: Mapping[str, npt.NDArray[np.generic]]
) -> UnfinishedGroup:
    def rollout_of(rollout: Mapping[str, Any] | None) -> Trajectory | UnfinishedRollout | None:
        if rollout is None:
            return None
        trajectory = next_rollout(rollout)
        if "continues" not in rollout:
            return trajectory
        later = from_json(rollout["continues"], arrays)
        return UnfinishedRollout(trajectory, **(later | {"stop": tuple(later["stop"])}))

    rollouts_G = tuple(map(rollout_of, values["rollouts"]))
    return UnfinishedGroup(Group(**values["group"]), rollouts_G, values["temperature"])
