"""The base of both training loops: the rooms that they call, an attempt around them, and the record of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from statistics import mean

from trireme.config import CommonConfig
from trireme.core.types import AdamParams, ForwardBackwardOutput, OptimStepResponse
from trireme.core.weights import PublishedWeights
from trireme.process.signals import Stop
from trireme.run.checkpoints import Checkpoints
from trireme.run.metrics import Clock, reduce_metrics
from trireme.run.rooms import Orchestrator, Trainer
from trireme.supervision.roster import Roster
from trireme.train.guards import RefusedSteps


@dataclass(frozen=True)
class Rooms:
    """The rooms that the loop of `rl` calls."""

    trainer: Trainer
    orchestrator: Orchestrator
    update: Callable[[PublishedWeights], None]
    """Begins to bring the replicas to a version, and wakes them if they sleep."""
    sleep: Callable[[Callable[[], None]], None]
    """Puts the replicas to sleep until the next update, and waits until all sleep. Calls its argument about once a
    second."""


@dataclass(frozen=True)
class Attempt:
    """The parts of one attempt that the training loops of `rl` and `sft` both use: first step, learning rate,
    checkpoints, guard and checks."""

    config: CommonConfig
    number: int
    start: int
    """The first step, and the version of the weights that it trains."""
    learning_rate: Callable[[int], float]
    """The learning rate of a step."""
    checkpoints: Checkpoints
    guard: RefusedSteps
    stop: Stop
    roster: Roster
    check_rooms: Callable[[], None]
    """Raises the failure of a room, if a room has failed. The driver calls it often while it waits."""

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the steps from `start` to `max_steps` - 1. Before each step, where the run can be
        saved, raises Stopped after a signal, and the failure of a room if a room has failed."""
        for step in range(self.start, self.config.max_steps):
            self.roster.at_step(step)
            self.check()
            yield step
        self.roster.at_step(self.config.max_steps)

    def check(self) -> None:
        """Raises Stopped after a signal, and the failure of a room if a room has failed."""
        self.stop.check()
        self.check_rooms()

    def adam_params(self, step: int) -> AdamParams:
        return self.config.adam_params(self.learning_rate(step))

    def position(self, step: int) -> dict[str, object]:
        """Returns the part of a row that says where the run stands after `step`."""
        fraction = (step + 1) / self.config.max_steps
        return {
            "step": step,
            "version": step + 1,
            "attempt": self.number,
            "progress": fraction,
            "progress/done_frac": fraction,
            "time/unix": time.time(),
        }

    def end_step(self, row: Mapping[str, object]) -> None:
        """Ends a step whose `row` is written. If the step has a draft, turns the draft into a checkpoint
        (`Checkpoints.seal`). Then checks `row`. Raises LimitReached if training goes wrong."""
        self.checkpoints.seal()
        self.guard.check(row)


class StepRecord:
    """Collects the trainer's outputs of a step, to compute the divisor of each substep's gradient and the metrics in
    the step's row."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.clock = Clock()
        self._suspects: list[str] = []  # names of the substep's datums whose loss is not finite
        self._grad_norms: list[float] = []  # of each update, NaN if it was refused
        self._outputs: list[Mapping[str, float]] = []
        self._peak_s = 0.0
        self._tokens = 0
        self._distinct = 0
        self._divisors = [0.0]  # of the summed gradient of each substep

    def add(self, output: ForwardBackwardOutput, divisor: float, names_D: Sequence[str]) -> None:
        """Adds the output for one minibatch. `divisor`: what the minibatch adds to the divisor of the substep's
        gradient. `names_D`: the name of each datum's problem or example, for messages about a loss that is not
        finite."""
        self._outputs.append(output.metrics)
        self._peak_s += output.peak_s
        self._tokens += output.tokens
        self._distinct += output.distinct
        self._suspects += [names_D[d] for d in output.suspects]
        self._divisors[-1] += divisor

    def update(self, guard: RefusedSteps, optim_step: Callable[[float], OptimStepResponse]) -> None:
        """Ends a substep: calls `optim_step` with the divisor of the substep's summed gradient. If the gradient is not
        finite, the trainer refuses the update: `guard` catches the error, and the weights do not change."""
        suspects = self._suspects
        self._suspects = []
        name = f"step {self.step + 1}, update {len(self._grad_norms) + 1}"
        normalizer = self._divisors[-1] or 1.0  # a gradient that is not divided, or zero for want of loss tokens
        self._grad_norms.append(guard.update(partial(optim_step, normalizer), name, suspects))
        self._divisors.append(0.0)

    def update_metrics(self) -> dict[str, float]:
        """Returns the mean and the largest norm, before clipping, of the gradients of the updates that were made (NaN
        if none was), and the share of the updates that were refused."""
        norms = [norm for norm in self._grad_norms if not isnan(norm)]
        return {
            "optim/grad_norm": mean(norms) if norms else nan,
            "optim/grad_norm_max": max(norms, default=nan),
            "optim/refused": 1 - len(norms) / len(self._grad_norms),
        }

    def optim_metrics(self) -> dict[str, float]:
        """Returns the metrics `optim/*` of the step. The loss is divided by the sum of the substeps' divisors, and
        other sums by the number of loss tokens. Other metrics are unchanged; for example `ratio:max` becomes
        `optim/ratio_max`."""
        sums = reduce_metrics(self._outputs)
        loss = sums.pop("loss:sum") / (sum(self._divisors) or 1.0)
        tokens = max(sums.pop("loss_tokens:sum"), 1.0)
        parts = [(*name.rpartition(":")[::2], value) for name, value in sums.items()]
        return {
            "optim/loss": loss,
            **{f"optim/{name}": value / tokens for name, how, value in parts if how == "sum"},
            **{f"optim/{name}_{how}": value for name, how, value in parts if how != "sum"},
        }

    def time_metrics(self) -> dict[str, float]:
        """Returns the metrics `time/*` of the step: the seconds that the driver spent in each phase."""
        return {f"time/{name}": seconds for name, seconds in self.clock.seconds.items()}

    def perf_metrics(self) -> dict[str, float]:
        """Returns two metrics of the step: `perf/prefix_saving`, the number of tokens of all datums divided by the
        number of tokens that were computed; and `perf/mfu`, the share of the GPUs' peak that training used
        (`trainer.mfu`), if the peak of the trainer's GPUs is known."""
        metrics = {}
        seconds = self.clock.seconds
        if self._distinct:
            metrics["perf/prefix_saving"] = self._tokens / self._distinct
        if self._peak_s:
            metrics["perf/mfu"] = self._peak_s / (seconds["forward_backward"] + seconds["optim"])
        return metrics
