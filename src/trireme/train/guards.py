"""Stops a run when its training goes wrong, and warns before: gradients that are not finite, a trainer and a sampler
that disagree, problems that teach nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

from trireme.config import CommonConfig, Config
from trireme.core.errors import LimitReached, NonFiniteGradient
from trireme.core.types import OptimStepResponse

NAMED = 8
"""The most problems that a message names."""
ALIKE_STEPS = 5
"""Number of consecutive steps, with nearly all groups bad or nearly all groups good, after which a warning is printed.
Such a long series is no accident."""
NEARLY_ALL = 0.9
KL = "optim/kl_sample_train_v2"


class RefusedSteps:
    """Counts consecutive steps of one attempt in which the trainer refused to change its weights in a substep, because
    the gradient was not finite. `say` prints a line of text."""

    def __init__(self, config: CommonConfig, say: Callable[[str], None]) -> None:
        self._limit = config.trainer.max_refused_steps
        self._say = say
        self._refused = 0

    def update(self, update: Callable[[], OptimStepResponse], name: str, suspects: Sequence[str]) -> float:
        """Changes the weights by calling `update`, which runs one step of the optimiser. Returns the norm of the
        gradient. If the gradient is not finite, the trainer refuses to change the weights; this method then returns
        NaN, and the run continues. `name`: the name of the optimiser's step in messages. `suspects`: the problems of
        the datums whose loss was not finite."""
        try:
            return update().metrics["grad_norm"]
        except NonFiniteGradient as error:
            problems = list(dict.fromkeys(suspects))
            culprits = ", ".join(problems[:NAMED]) + (", .." if len(problems) > NAMED else "")
            self._say(f"{name} was refused, the weights stay: {error} Problems to look at: {culprits or 'unknown'}")
            return nan

    def check(self, row: Mapping[str, Any]) -> None:
        """Checks `row`, the metrics of a finished step. Raises LimitReached if, in each of the last
        `trainer.max_refused_steps` steps, the trainer refused at least once to change its weights."""
        if row["optim/refused"]:
            self._refused += 1
        else:
            self._refused = 0
        if self._refused >= self._limit:
            raise LimitReached(
                f"in {self._refused} steps in a row the gradient of an update was not finite "
                f"(trainer.max_refused_steps = {self._limit}), of the last step in {row['optim/refused']:.0%} of the "
                "updates; a refused update leaves the weights as they were. Look at the data or the rewards, and at "
                "the learning rate; the messages above name the problems"
            )


class Guard(RefusedSteps):
    """Guards a run of `rl`. Counts steps in which the trainer refused to change its weights, as RefusedSteps does.
    Warns, or stops the run, when the KL between sampler and trainer is too large. Warns when, for several steps, nearly
    all problems of an environment were too hard, or nearly all were too easy, to learn from."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        super().__init__(config, say)
        self._limits = config.trainer.kl
        self._temperature = config.inference.sampling.temperature
        self._envs = [env.label for env in config.env]
        self._alike_steps: Counter[tuple[str, str]] = Counter()
        self._alarmed = False

    def check(self, row: Mapping[str, Any]) -> None:
        """Checks `row`, the metrics of a finished step. Raises LimitReached if, in each of the last
        `trainer.max_refused_steps` steps, the trainer refused at least once to change its weights. Also raises
        LimitReached if the KL between sampler and trainer exceeds `trainer.kl.stop`."""
        super().check(row)
        self._check_difficulty(row)
        kl = row[KL]
        limits = self._limits
        apart = (
            f"step {row['version']}: kl_sample_train_v2 = {kl:.3g} between sampler and trainer (mean age of the groups "
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

    def _check_difficulty(self, row: Mapping[str, Any]) -> None:
        """Warns when an environment was too hard or too easy in ALIKE_STEPS consecutive steps. It is too hard in a step
        if nearly all of its groups are bad: all rewards of the group are equal and below 0.5. It is too easy if nearly
        all of its groups are good: all rewards of the group are equal and at least 0.5. Steps without groups of the
        environment are skipped."""
        for env in self._envs:
            for kind, instead in (("bad", "easier"), ("good", "harder")):
                share = row.get(f"env/{env}/by_group/frac_all_{kind}")
                if share is None:
                    continue
                self._alike_steps[env, kind] = self._alike_steps[env, kind] + 1 if share >= NEARLY_ALL else 0
                if self._alike_steps[env, kind] == ALIKE_STEPS:
                    self._say(
                        f"step {row['version']}: for {ALIKE_STEPS} steps the rollouts of at least {NEARLY_ALL:.0%} of "
                        f"the problems of {env} are all {kind}, and a problem whose rollouts are alike teaches nothing."
                        " As a rule of thumb, problems of which the start solves 0%, or more than 80%, have the wrong "
                        f"difficulty: choose {instead} ones"
                    )
