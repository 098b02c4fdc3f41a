"""What stops a run whose training goes wrong, and warns before: gradients that are not finite, and a trainer and a
sampler that no longer agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

from trireme.config import CommonConfig, Config
from trireme.errors import LimitReached, NonFiniteGradient
from trireme.types import OptimStepResponse

NAMED = 8
KL = "optim/kl_sample_train_v2"


class RefusedSteps:
    """Counts the steps of one attempt whose gradient was not finite. `say` prints a line."""

    def __init__(self, config: CommonConfig, say: Callable[[str], None]) -> None:
        self._limit, self._say = config.trainer.max_refused_steps, say
        self._refused = 0

    def update(self, step: Callable[[], OptimStepResponse], suspects: Sequence[str]) -> Mapping[str, float]:
        """The metrics of an optimiser step; `refused` is 1 where the trainer refused it, because its gradient is not
        finite: the weights stay as they are, and the run goes on. `suspects`: problems of the datums that are to
        blame, which the trainer names by number."""
        try:
            metrics = {**step().metrics, "refused": 0.0}
        except NonFiniteGradient as error:
            culprits = ", ".join(suspects[:NAMED]) + (", .." if len(suspects) > NAMED else "")
            self._say(f"step refused, its weights stay: {error} Their problems: {culprits or 'unknown'}")
            return {"refused": 1.0, "grad_norm": nan}
        return metrics

    def check(self, row: Mapping[str, Any]) -> None:
        """Looks at the row of a step that is done. Raises LimitReached after too many refused steps in a row."""
        self._refused = self._refused + 1 if row["optim/refused"] else 0
        if self._refused >= self._limit:
            raise LimitReached(
                f"the gradient of {self._refused} steps in a row was not finite (trainer.max_refused_steps = "
                f"{self._limit}); the weights are those of before. Look at the data or the rewards, and at the "
                "learning rate; the messages above name the problems"
            )


class Guard(RefusedSteps):
    """And stops or warns when trainer and sampler are too far apart."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        super().__init__(config, say)
        self._limits, self._temperature = config.trainer.kl, config.inference.sampling.temperature
        self._alarmed = False

    def check(self, row: Mapping[str, Any]) -> None:
        """As RefusedSteps; raises LimitReached beyond `trainer.kl.stop` too."""
        super().check(row)
        kl, limits = row[KL], self._limits
        apart = (
            f"step {row['step']}: kl_sample_train_v2 = {kl:.3g} between sampler and trainer (mean age of the groups "
            f"{row['off_policy/mean']:.2f} steps, temperature {self._temperature:g})"
        )
        if limits.stop is not None and kl > limits.stop:
            raise LimitReached(f"{apart} is more than trainer.kl.stop = {limits.stop:g}")
        if kl > limits.alarm and not self._alarmed:
            self._say(
                f"{apart} is more than trainer.kl.alarm = {limits.alarm:g}: at age 0 it should be near 0, else the two "
                "do not compute the same distribution; with age it grows with the learning rate"
            )
        self._alarmed = kl > limits.alarm
