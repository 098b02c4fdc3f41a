"""The rooms of `sft`: the trainer alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from trainer.handle import TrainerHandle
from trireme.config.model_facts import ModelFacts
from trireme.config.resume_compat import common_parts
from trireme.config.sft import SftConfig
from trireme.launch.run import Core, TrainingRun
from trireme.plan.whole import Plan
from trireme.run.metrics import Journal
from trireme.run.rundir import RunDir
from trireme.sft.data import SftData
from trireme.train.sft_loop import step_line, train
from trireme.train.steps import Attempt


class SftRun(TrainingRun):
    """The part of a run that is particular to `sft`: the trainer, and the training loop on `data`."""

    core = "the trainer"
    config: SftConfig

    def __init__(self, config: SftConfig, facts: ModelFacts, plan: Plan, data: SftData) -> None:
        loss = {"trainer.loss_normalization": config.normalization.kind}
        super().__init__(config, facts, plan, {**common_parts(config, facts), "loss": loss, "data": data.fixed()})
        self._data = data

    def enter(self, run: RunDir) -> None:
        """Sets the position in the data to the example at which the run starts. If the number of steps is not given,
        computes the step at which all epochs are over, and sets it in `config`."""
        self._data.load_state(run.start.checkpoint and run.start.checkpoint / "data")
        self.config = self._data.cursor.with_steps(self.config, run.start.step)

    def start(self, run: RunDir, ending: ExitStack) -> Core:
        config = self.plan.resolved(self.config)
        trainer = TrainerHandle.start(config, self.places["trainer"], run.logs, run.start.attempt)
        ending.callback(trainer.stop)
        self._data.load_state(None)  # an attempt without a checkpoint begins with the first example
        return Core(trainer, {"data": self._data}, [trainer])

    def train(self, core: Core, attempt: Attempt, journal: Journal) -> None:
        train(self.config, core.trainer, self._data, attempt, journal)

    def step_line(self, row: Mapping[str, object]) -> str:
        return step_line(row, self.config.max_steps)
