"""Protocols of the rooms of a run: the methods that the driver and the checkpoints call. Only `trireme.launch` and
`trireme.api` see the handles that implement them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trireme.checkpoint.files import FileRecord
from trireme.checkpoint.parts import CheckpointSource
from trireme.core.batch import Batch, Data, Summary
from trireme.core.types import (
    AdamParams,
    ForwardBackwardOutput,
    Minibatch,
    OptimStepResponse,
    Provenance,
    StepSummary,
    WeightIdentity,
    Which,
)
from trireme.core.weights import AdapterSpec, PublishedWeights


class PendingFiles(Protocol):
    """The files of one part of a checkpoint, while they are written."""

    def wait(self, timeout_s: float) -> list[FileRecord]:
        """Waits up to `timeout_s` seconds until all files are written. Returns their records. Raises StorageFailed,
        RoomFailed."""


class StatefulRoom(Protocol):
    """A room, other than the trainer, that saves a part of each checkpoint."""

    def save_state(self, path: Path) -> PendingFiles:
        """Saves the room's present state to the directory `path`. Returns when training may continue; the files may be
        written after that."""

    def load_state(self, path: Path, source: CheckpointSource | None, /) -> str | None:
        """Loads the room's part of a checkpoint from the directory `path`. A node that does not see `path` reads the
        part from `source`. Returns a message for the log, or None."""


class Trainer(Protocol):
    """The interface of the trainer's handle (`trainer.handle`). Each method returns when all shards have answered,
    except `save_state` and `save_weights`, which return at once. All methods raise TriremeError."""

    def forward_backward(
        self,
        data: Data,
        loss_fn: str,
        loss_fn_config: Mapping[str, float] | None = None,
        provenance: Provenance | None = None,
    ) -> ForwardBackwardOutput: ...

    def forward(self, data: Data, which: Which = "policy") -> ForwardBackwardOutput: ...

    def forward_summarized(
        self, data: Batch, which: Which, name: str, summarize: Summary
    ) -> tuple[Batch, npt.NDArray[np.float64]]: ...

    def optim_step(self, adam_params: AdamParams, normalizer: float = 1.0) -> OptimStepResponse: ...

    def update_reference(self) -> None: ...

    def drop_gradients(self) -> None: ...

    def reset_optimizer(self) -> None: ...

    def publish_weights(self, version: int) -> PublishedWeights: ...

    def begin_free_memory(self) -> None: ...

    def free_memory(self) -> None: ...

    def save_weights(self, path: Path, published: PublishedWeights) -> PendingFiles: ...

    def save_state(self, path: Path) -> PendingFiles: ...

    def load_state(self, path: Path, identities: Sequence[WeightIdentity]) -> str: ...

    def add_adapter(self, name: str, spec: AdapterSpec, start: Path | None = None) -> None: ...

    def use_adapter(self, name: str) -> None: ...

    def drop_adapter(self, name: str) -> None: ...


class Orchestrator(Protocol):
    """The interface of the orchestrator's handle (`orchestrator.handle`)."""

    def finish_sampling(self, on_tick: Callable[[], None]) -> None: ...

    def minibatches(self, step: int, substep: int, on_tick: Callable[[], None]) -> Iterator[Minibatch]: ...

    def end_version(self, on_tick: Callable[[], None]) -> None: ...

    def begin_version(self, identity: WeightIdentity, on_tick: Callable[[], None]) -> None: ...

    def give_up_evaluation(self) -> None: ...

    def release(self, step: int) -> StepSummary: ...
