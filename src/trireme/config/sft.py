"""The options that only `sft` has: its data, and the loss on held-out data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import PositiveInt

from trireme.config.schema import CommonConfig, RendererConfig
from trireme.config.section import NonNegativeInt, Section
from trireme.renderers.conversation import TrainOn


class DataConfig(Section):
    train: str
    """Training data: a file of conversations or of tokens (JSONL), or several by a pattern (`data/*.jsonl`), in the
    order of their names."""
    test: str | None = None
    """Held-out data for `test/nll`: a file or a pattern."""
    test_examples: NonNegativeInt = 0
    """Hold out this many examples of the training data instead, chosen by the seed; 0 = none."""
    train_on: TrainOn = "all_assistant_messages"
    """Which messages of a conversation count in the loss."""
    batch_size: PositiveInt
    """Examples per step."""
    epochs: PositiveInt = 1
    """Passes over the data, where max_steps is 0."""
    shuffle: bool = True
    """Each epoch in a random order of its own, by the seed; else in the order of the files."""
    too_long: Literal["refuse", "truncate", "drop"] = "refuse"
    """Examples longer than model.max_seq_len: they stop the run before it starts, their end is cut off, or they are
    left out."""


class HeldOutLossConfig(Section):
    every: NonNegativeInt = 0
    """Steps between evaluations; there is one before the first step and one at the end too. 0 = off."""


class SftConfig(CommonConfig):
    """One run of `sft`."""

    command = "sft"

    max_steps: NonNegativeInt = 0
    """Training steps, counted from the first start of the run; 0 = as many as data.epochs take."""
    data: DataConfig
    renderer: RendererConfig = RendererConfig()
    eval: HeldOutLossConfig = HeldOutLossConfig()

    @property
    def label(self) -> str:
        return re.sub(r"[^\w.-]+", "-", Path(self.data.train).stem).strip("-.") or "data"

    def with_absolute_paths(self) -> Self:
        """Returns a copy in which the paths of models and of data are absolute, so that config.json is valid in any
        directory."""
        paths = {"train": self.data.train, "test": self.data.test}
        absolute = {key: str(Path(path).expanduser().absolute()) for key, path in paths.items() if path}
        return super().with_absolute_paths().model_copy(update={"data": self.data.model_copy(update=absolute)})
