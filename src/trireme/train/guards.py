"""What stops a run whose training goes wrong, and warns before: gradients that are not finite, and a trainer and a
sampler that no longer agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

from trireme.config import CommonConfig, Config
from trireme.core.errors import LimitReached, NonFiniteGradient
from trireme.core.types import OptimStepResponse

NAMED = 8
ALIKE_STEPS = 5
"""So many steps in a row of groups whose rewards are all alike are no accident."""
NEARLY_ALL = 0.9
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
            problems = list(dict.fromkeys(suspects))
            culprits = ", ".join(problems[:NAMED]) + (", .." if len(problems) > NAMED else "")
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


class Difficulty:
    """Warns, once per stretch, when nearly all problems of an environment are too hard or too easy to learn from."""

    def __init__(self, envs: Sequence[str], say: Callable[[str], None]) -> None:
        self._envs, self._say = envs, say
        self._steps: Counter[tuple[str, str]] = Counter()

    def check(self, row: Mapping[str, Any]) -> None:
        """Looks at the row of a step; one without problems of an environment says nothing about it."""
        for env in self._envs:
            for kind, how, instead in (("bad", "are all bad", "easier"), ("good", "are all good", "harder")):
                share = row.get(f"env/{env}/by_group/frac_all_{kind}")
                if share is not None:
                    self._steps[env, kind] = self._steps[env, kind] + 1 if share >= NEARLY_ALL else 0
                    if self._steps[env, kind] == ALIKE_STEPS:
                        self._warn(row["step"], env, how, instead)

    def _warn(self, step: int, env: str, how: str, instead: str) -> None:
        self._say(
            f"step {step}: for {ALIKE_STEPS} steps the rollouts of at least {NEARLY_ALL:.0%} of the problems of {env} "
            f"{how}, and a problem whose rollouts are alike teaches nothing. As a rule of thumb, problems of which the "
            f"start solves 0%, or more than 80%, have the wrong difficulty: choose {instead} ones"
        )


class Guard(RefusedSteps):
    """And stops or warns when trainer and sampler are too far apart, and warns of problems of the wrong difficulty."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        super().__init__(config, say)
        self._limits, self._temperature = config.trainer.kl, config.inference.sampling.temperature
        self._alarmed = False
        self._difficulty = Difficulty([env.label for env in config.env], say)

    def check(self, row: Mapping[str, Any]) -> None:
        """As RefusedSteps; raises LimitReached beyond `trainer.kl.stop` too."""
        super().check(row)
        self._difficulty.check(row)
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
