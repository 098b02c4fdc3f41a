"""The data cursor: the endless stream of problems, epoch after epoch, each with an id by which it is found again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.env import EnvGroupBuilder, RLDataset
from trireme.errors import BadInput


@dataclass
class Cursor:
    """The next problem is number `position` of batch `batch` of the dataset, in `epoch`: three numbers, its state."""

    dataset: RLDataset
    epoch: int = 0
    batch: int = 0
    position: int = 0
    _loaded: tuple[int, list[EnvGroupBuilder]] | None = field(default=None, repr=False)

    def next_problem(self) -> str:
        """Id of the next problem, `epoch.batch.position`; moves on."""
        problem = f"{self.epoch}.{self.batch}.{self.position}"
        self.position += 1
        if self.position >= len(self._problems(self.batch)):
            self.batch, self.position = self.batch + 1, 0
        if self.batch >= len(self.dataset):
            self.epoch, self.batch = self.epoch + 1, 0
        return problem

    def builder(self, problem: str) -> EnvGroupBuilder:
        """The problem that `next_problem` named. Raises BadInput when it is not in the dataset (any more)."""
        _, batch, position = map(int, problem.split("."))
        if batch >= len(self.dataset) or position >= len(self._problems(batch)):
            raise BadInput(
                f"problem {problem} (epoch.batch.position) is not in {type(self.dataset).__name__}, which has "
                f"{len(self.dataset)} batches; expected the data that the run was begun with"
            )
        return self._problems(batch)[position]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where another cursor stood. Raises BadInput when the dataset has no such place."""
        self.epoch, self.batch, self.position = state["epoch"], state["batch"], state["position"]
        self.builder(f"{self.epoch}.{self.batch}.{self.position}")

    def _problems(self, batch: int) -> list[EnvGroupBuilder]:
        if self._loaded is None or self._loaded[0] != batch:
            builders = self.dataset.get_batch(batch)
            if not builders:
                raise BadInput(
                    f"batch {batch} of {type(self.dataset).__name__} is empty; expected at least one problem"
                )
            self._loaded = (batch, builders)
        return self._loaded[1]
