"""The endless stream of problems, epoch after epoch. Each problem has an id, by which its builder is looked up later.

A `ProblemCursor` walks through one dataset; a `Mix` draws from several, by weight. The state of both is a few numbers.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypedDict

from orchestrator.env import EnvGroupBuilder, RLDataset
from trireme.core.errors import BadInput

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: steps of this size around a circle of 2^64 leave no large gap anywhere."""


class CursorState(TypedDict):
    """The place of a `ProblemCursor`, as a checkpoint holds it."""

    epoch: int
    batch: int
    position: int


class MixState(TypedDict):
    """The place of a `Mix`, as a checkpoint holds it: the number of drawn problems, and for each environment its name
    and its cursor's place."""

    drawn: int
    cursors: Sequence[tuple[str, CursorState]]


@dataclass
class ProblemCursor:
    """A place in `dataset`: the next problem is number `position` of the dataset's batch `batch`, in `epoch`."""

    dataset: RLDataset
    epoch: int = 0
    batch: int = 0
    position: int = 0
    _loaded: tuple[int, list[EnvGroupBuilder]] | None = field(default=None, repr=False)

    def next_problem(self) -> str:
        """Returns the id of the next problem, `epoch.batch.position`, and advances."""
        problem = f"{self.epoch}.{self.batch}.{self.position}"
        self.position += 1
        if self.position >= len(self._problems(self.batch)):
            self.batch += 1
            self.position = 0
        if self.batch >= len(self.dataset):
            self.epoch += 1
            self.batch = 0
        return problem

    def builder(self, problem: str) -> EnvGroupBuilder:
        """Returns the builder of the problem with the id `problem`. Raises BadInput when it is not in the dataset."""
        _, batch, position = map(int, problem.split("."))
        if batch >= len(self.dataset) or position >= len(self._problems(batch)):
            raise BadInput(
                f"problem {problem} (epoch.batch.position) is not in {type(self.dataset).__name__}, which has "
                f"{len(self.dataset)} batches; expected the data that the run was begun with"
            )
        return self._problems(batch)[position]

    def state_dict(self) -> CursorState:
        return {"epoch": self.epoch, "batch": self.batch, "position": self.position}

    def load_state_dict(self, state: CursorState) -> None:
        """Continues at the place in `state`, the result of another cursor's `state_dict`. Raises BadInput when the
        dataset has no such place."""
        self.epoch = state["epoch"]
        self.batch = state["batch"]
        self.position = state["position"]
        self.builder(f"{self.epoch}.{self.batch}.{self.position}")

    def _problems(self, batch: int) -> list[EnvGroupBuilder]:
        if self._loaded is None or self._loaded[0] != batch:
            builders = self.dataset.get_batch(batch)
            if not builders:
                raise BadInput(
                    f"batch {batch} of {type(self.dataset).__name__} is empty; expected at least one problem"
                )
            for builder in {type(builder): builder for builder in builders}.values():
                _ = builder.makes_one  # refuses a class that makes none
            self._loaded = (batch, builders)
        return self._loaded[1]


class Mix:
    """Mixes the problems of several environments into one stream. The problems of one environment come in the order of
    its dataset.

    Only `seed` and the number of problems drawn so far decide the next environment: each draw is a point on a circle,
    on which each environment has an arc in proportion to its weight. Among any n problems in a row, the number of
    problems from one environment differs from n times its share of the weights by at most a few (about log n).

    Ids come from the environment's cursor; with several environments they begin with its name: `guess/0.1.2`.
    """

    def __init__(self, datasets: Mapping[str, RLDataset], weights: Sequence[float], seed: int) -> None:
        self._cursors = {name: ProblemCursor(dataset) for name, dataset in datasets.items()}
        self._names = list(datasets)
        self._bounds = [end / sum(weights) for end in accumulate(weights)]
        self._start = int.from_bytes(hashlib.blake2b(f"mix:{seed}".encode(), digest_size=8).digest())
        self._drawn = 0

    def next_problem(self) -> str:
        """Returns the id of the next problem, and advances."""
        place = (self._start + self._drawn * GOLDEN) % 2**64 / 2**64
        name = self._names[min(bisect_right(self._bounds, place), len(self._names) - 1)]
        self._drawn += 1
        problem = self._cursors[name].next_problem()
        if len(self._names) == 1:
            return problem
        return f"{name}/{problem}"

    def env_of(self, problem: str) -> str:
        """Returns the name of the environment that the id `problem` belongs to. Raises BadInput if the mix has no such
        environment."""
        name = problem.rpartition("/")[0] or self._names[0]
        if name not in self._cursors:
            raise BadInput(
                f"problem {problem} is of environment {name}; expected one of {', '.join(self._names)}, the "
                "environments that the run began with. Name the environment as before, or start another run"
            )
        return name

    def builder(self, problem: str) -> EnvGroupBuilder:
        """Returns the builder of the problem with the id `problem`. Raises BadInput when no environment has such a
        problem."""
        return self._cursors[self.env_of(problem)].builder(problem.rpartition("/")[2])

    def state_dict(self) -> MixState:
        return {"drawn": self._drawn, "cursors": [(name, c.state_dict()) for name, c in self._cursors.items()]}

    def load_state_dict(self, state: MixState) -> None:
        """Continues from `state`, the result of another mix's `state_dict`. Raises BadInput if that mix had other
        environments, another order of them, or other data."""
        names = [name for name, _ in state["cursors"]]
        if len(names) != len(self._names) or (len(names) > 1 and names != self._names):
            raise BadInput(
                f"the checkpoint is of a run with the environments {', '.join(names)}, but this run has "
                f"{', '.join(self._names)}; expected those of the checkpoint, in the same order. Correct env, or start "
                "another run"
            )
        self._drawn = state["drawn"]
        for cursor, (_, values) in zip(self._cursors.values(), state["cursors"], strict=True):
            cursor.load_state_dict(values)
