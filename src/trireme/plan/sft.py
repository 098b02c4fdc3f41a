"""The plan of a run of `sft`: the trainer, and the data that it learns from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from trireme.config.model_facts import ModelFacts
from trireme.config.sft import SftConfig
from trireme.plan.part import Part
from trireme.plan.trainer import TrainerPart
from trireme.plan.whole import Plan, count
from trireme.process.environ import Resources
from trireme.sft.data import Examples, SftData


@dataclass(frozen=True)
class DataPart(Part):
    """The data's part of a plan of `sft`: rows on examples, steps and epochs, and warnings. It has no actors."""

    config: SftConfig
    """The configuration, with the number of its steps."""
    data: SftData | None
    """None: it could not be read, in a dry run without a hub."""
    room = "data"

    @property
    def warnings(self) -> list[str]:
        if self.data:
            return list(self.data.notes)
        return []

    def rows(self, device_text: str) -> list[tuple[str, str]]:
        train = self.config.data.train
        size = self.config.data.batch_size
        data = self.data
        if data is None:
            return [("data", f"{train}: unknown, as the model is"), ("steps", f"{size} examples each")]
        steps = self.config.max_steps
        epoch = data.cursor.size
        if self.config.data.shuffle:
            order = "a random order of its own each"
        else:
            order = "as they stand"
        epochs = min(steps * size, data.cursor.end or steps * size) / epoch
        rows = [
            ("data", f"{train}: {_examples_text(data.train)}"),
            ("steps", f"{steps} of {size} examples: {epochs:.4g} epochs, {order}"),
        ]
        if data.test is not None:
            every = count(self.config.eval.every, "step")
            rows += [("evaluation", f"{_examples_text(data.test)}: first of all, every {every}, and at the end")]
        return rows


def sft_plan(config: SftConfig, facts: ModelFacts | None, resources: Resources, data: SftData | None = None) -> Plan:
    """Returns the plan of a run of `sft`. `facts`, `data` None: they could not be read, in a dry run without a hub."""
    return Plan(config, facts, resources, (TrainerPart, partial(DataPart, data=data)))


def _examples_text(examples: Examples) -> str:
    longest = max(end - start for start, end in zip(examples.offsets[:-1], examples.offsets[1:], strict=True))
    return (
        f"{len(examples):,} examples of {len(examples.tokens):,} tokens (the longest {longest}), "
        f"{examples.num_loss_tokens:,} of which are trained on"
    )
