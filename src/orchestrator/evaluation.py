"""Evaluation within a run: the same held-out problems each time, under the weights of one version.

    update to v delivered --due--> all problems of the split, group by group --all ended--> row of step v
             ^                                                                    |
             +---------------- the next update waits, and so the trainer ---------+

Schedule. Before the first step, every `eval.every` steps, and at the end. Step v begins with version v, and its row of
metrics holds the evaluation of version v. The last row holds the evaluation of the last version, because there is no
later row. A row holds only one evaluation: so the last version but one, with the same row, is not evaluated.

One version. The next update waits until the evaluation has ended. Meanwhile training continues, with samples of the
same version. Each token is checked: a token of another version is a ProvenanceError.

Alongside training. Evaluation and training get permits for their rollouts at one gate (`admission.py`), a group at a
time, where neither starves the other. In deterministic mode an evaluation is sampled in lockstep (`lockstep.py`), and
nothing else is sampled meanwhile.

Failed rollouts are tried again as in training. Rollouts that fail after all tries are counted (`failed`) and left out
of every mean; they do not count as reward 0. A refused prompt fails without another try.

Several environments are evaluated at the same time, each by its own problems.

Metrics, all under `eval/<environment>/`
  version, problems   the version of the weights; the number of problems with at least one rollout that counts
  n, failed           the number of rollouts that count, and of rollouts that failed after all tries
  errors/<type>       failed tries
  avg@k               mean over problems of the mean reward of their rollouts; k = `eval.samples`
  pass@k              mean over problems of the chance that one of k rollouts passes (its reward is at least 1), for
                      k = 1, 2, 4 .. and `eval.samples`: unbiased (arXiv:2107.03374). A problem with fewer than k
                      rollouts that count is left out.
  .../ci95            half the width of the 95 % interval of such a mean, problems being the sample
  reward/total, ...   the metrics `env/all/*` and `stop/*` of training

State. A checkpoint holds the version evaluated last, the metrics that are not in a step's row of metrics yet, and
whether an evaluation was begun and has not ended: after a resume that evaluation is repeated, with the weights of the
checkpoint.

`trireme eval` stores each group that has ended while others are sampled. When it resumes an evaluation of the same
weights with the same options, these groups are not sampled again. So a resumed evaluation gives the same metrics as one
without an interruption.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import comb, sqrt
from typing import Any, TypedDict

import numpy as np

from orchestrator.admission import Gate
from orchestrator.advantages import ScoredGroup
from orchestrator.cursor import ProblemCursor
from orchestrator.env import EnvGroupBuilder, RLDataset
from orchestrator.group_json import scored_from_json, scored_to_json, turns_from_json
from orchestrator.group_runner import GroupRunner
from orchestrator.ledger import Group
from orchestrator.lockstep import Lockstep, OwnPace
from orchestrator.metrics import env_metrics
from orchestrator.rollout import RolloutLimits
from orchestrator.trajectory import Trajectory
from orchestrator.waste import GroupTokens
from trireme.config import Config
from trireme.config.schema import EnvConfig
from trireme.core.errors import RoomFailed
from trireme.core.finite_json import to_json
from trireme.core.sampler import Sample
from trireme.process import trace
from trireme.process.faults import fault_point

PASSED_REWARD = 1.0
"""A rollout passes with this reward or more."""
CI95 = 1.96
"""Half the width of a 95 % interval, in standard errors."""

Spawn = Callable[[Coroutine[object, object, None], str], "asyncio.Task[None]"]
log = logging.getLogger(__name__)


class EvaluationState(TypedDict):
    """The state of the evaluator in a checkpoint."""

    done: int | None
    """The version evaluated last; None: none yet."""
    owed: bool
    """True: an evaluation was begun and has not ended."""
    rows: Sequence[tuple[int, dict[str, float]]]
    """Pairs (step, metrics): the metrics belong in the step's row of metrics, and are not in the row yet."""


@dataclass(frozen=True)
class Schedule:
    """Says when evaluations are due."""

    every: int
    """The number of steps between two evaluations; 0: never."""
    last: int
    """The version that the run ends with."""

    def due(self, version: int, evaluated: int | None, owed: bool) -> bool:
        """Returns True if `version` has to be evaluated. `evaluated`: the version evaluated last (None: none yet).
        `owed`: True if an evaluation was begun and has not ended."""
        if not self.every or version == evaluated or version == self.last - 1:  # it would share the last row
            return False
        return evaluated is None or owed or version % self.every == 0 or version == self.last

    def row(self, version: int) -> int:
        """Returns the step whose row of metrics holds the evaluation of `version`."""
        return min(version, self.last - 1)


class Evaluator:
    """Runs the evaluations that are due, one version at a time. `datasets`: the dataset of each environment in
    `config.eval_envs`, in order; may be empty where `eval.every` is 0."""

    def __init__(
        self,
        config: Config,
        datasets: Sequence[RLDataset],
        sample: Sample,
        limits: RolloutLimits,
        gate: Gate,
    ) -> None:
        self._config = config
        self._sample = sample
        self._gate = gate
        self._datasets = list(zip(config.eval_envs, datasets, strict=False))
        self._schedule = Schedule(config.eval.every, config.max_steps)
        self._limits = limits
        self._task: asyncio.Task[None] | None = None
        self._evaluated: int | None = None
        self._owed = False
        self._rows: dict[int, dict[str, float]] = {}
        self._waited_s = 0.0
        self._running: Sequence[Evaluation] = ()

    @property
    def progress(self) -> str:
        """Returns a text that says how far the running evaluation is; "" if no evaluation is running."""
        return ", ".join(
            f"{len(e.problems_P) - e.missing} of {len(e.problems_P)} problems of {e.env.label} are evaluated"
            for e in self._running
        )

    def begin(self, version: int, spawn: Spawn) -> None:
        """If the evaluation of `version` is due, begins it. All replicas must hold `version`. `spawn` starts a
        coroutine as a background task with a name."""
        if self._schedule.due(version, self._evaluated, self._owed):
            self._owed = True
            self._task = spawn(self._evaluate(version), f"evaluation of version {version}")

    async def wait_idle(self) -> None:
        """Waits until no evaluation is running. Raises the error of an evaluation that failed."""
        if self._task is None:
            return
        now = asyncio.get_running_loop().time
        started = now()
        await asyncio.wait([self._task])  # has a deadline of its own
        self._waited_s += now() - started
        if not self._task.cancelled():
            self._task.result()

    def give_up(self) -> None:
        """Cancels the running evaluation, if there is one. The evaluation stays due."""
        if self._task:
            self._task.cancel()

    def take(self, step: int) -> dict[str, float]:
        """Returns the metrics of the evaluation that belongs in the row of `step`; {} if no evaluation does."""
        row: dict[str, float] = {}
        for due in [due for due in self._rows if due <= step]:
            row |= self._rows.pop(due)
        if row:
            row["time/wait_for_evaluation"] = self._waited_s
            self._waited_s = 0.0
        return row

    def state_dict(self) -> EvaluationState:
        """Returns the state as JSON values: the version evaluated last, whether an evaluation is owed, and the metrics
        that are not in a step's row of metrics yet. These metrics are [step, metrics] pairs, because JSON keys are
        text."""
        return {
            "done": self._evaluated,
            "owed": self._owed,
            "rows": [(step, dict(row)) for step, row in self._rows.items()],
        }

    def load_state_dict(self, state: EvaluationState) -> None:
        self._evaluated = state["done"]
        self._owed = state["owed"]
        self._rows = {step: dict(row) for step, row in state["rows"]}

    # ---- one evaluation

    async def _evaluate(self, version: int) -> None:
        self._rows[self._schedule.row(version)] = await self.evaluate(version)
        self._evaluated = version
        self._owed = False

    def take_lines(self) -> list[str]:
        """Returns the results of the groups of the present evaluation that have ended since the last call: a line of
        JSON for each group. With these lines, `evaluate` can continue the evaluation after an interruption."""
        return [line for e in self._running for line in e.take_lines()]

    async def evaluate(self, version: int, lines: Sequence[str] = ()) -> dict[str, float]:
        """Evaluates `version`, which all replicas hold, and returns the metrics. `lines`: lines that `take_lines`
        returned during an earlier evaluation of the same weights with the same options; their groups are not sampled
        again. Raises RoomFailed, which says how much is missing, after `timeouts.batch_s`, and ProvenanceError for a
        token of another version."""
        fault_point("orchestrator.evaluation")
        now = asyncio.get_running_loop().time
        limit_s = self._config.batch_deadline_s
        started = now()
        evaluations = self._evaluations(version)
        for line in lines:
            values = json.loads(line)
            for e in evaluations:
                if e.env.label == values["env"]:
                    e.restore(values)
        self._running = evaluations
        try:
            async with asyncio.timeout(limit_s):
                with trace.span("evaluation", "evaluation", version=version):
                    await self._play(evaluations)
        except TimeoutError:
            missing = [f"{e.missing} of {len(e.problems_P)} problems of environment {e.env.label}" for e in evaluations]
            errors = sum((errors for e in evaluations for errors in e.errors.values()), Counter[str]())
            failed = ", ".join(f"{number} {name}" for name, number in errors.items())
            raise RoomFailed(
                f"waited {limit_s:g} s (timeouts.batch_s) for the evaluation of version {version}; not finished: "
                f"{', '.join(missing)}, with {self._config.eval.samples} rollouts for each problem. "
                f"Failed tries so far: {failed or 'none'}. Lower eval.problems or eval.samples, or raise "
                "timeouts.batch_s"
            ) from None
        finally:
            self._running = ()
        row = {"perf/evaluation_s": now() - started}
        for e in evaluations:
            row |= e.metrics(self._config.eval.samples)
        return row

    def _evaluations(self, version: int) -> list[Evaluation]:
        """Returns an Evaluation of each environment, with the first `eval.problems` problems of its dataset. Groups are
        numbered across all environments. Ids of problems begin with `eval/`, so that the seeds of requests, which
        follow from the ids, differ from all seeds in training."""
        numbers = count()
        evaluations = []
        for env, dataset in self._datasets:
            cursor = ProblemCursor(dataset)
            problems_P: list[tuple[Group, EnvGroupBuilder]] = []
            while cursor.epoch == 0 and len(problems_P) != self._config.eval.problems:
                problem = cursor.next_problem()
                group = Group(next(numbers), f"eval/{env.label}/{version}/{problem}", floor=version)
                problems_P.append((group, cursor.builder(problem)))
            evaluations.append(Evaluation(env, version, problems_P))
        return evaluations

    async def _play(self, evaluations: Sequence[Evaluation]) -> None:
        if self._config.deterministic:
            pace: OwnPace = Lockstep(lambda: False)
        else:
            pace = OwnPace()
        groups = [
            (e, group, builder) for e in evaluations for group, builder in e.problems_P if group.index not in e.ended
        ]
        for _, group, _ in groups:
            pace.enter(group.index, self._config.eval.samples)
        try:
            async with asyncio.TaskGroup() as tasks:
                for evaluation, group, builder in groups:
                    tasks.create_task(self._play_group(evaluation, pace, group, builder))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _play_group(self, evaluation: Evaluation, pace: OwnPace, group: Group, builder: EnvGroupBuilder) -> None:
        errors = evaluation.errors.setdefault(group.index, Counter())

        def note(error: Exception) -> None:
            errors[type(error).__name__] += 1

        runner = GroupRunner(self._config, evaluation.env, self._limits, self._sample, pace, note, evaluates=True)
        permit = await self._gate.enter("eval", runner.size)
        try:
            tokens = GroupTokens([0] * runner.size)
            outcome = await runner.run(group, builder, permit, tokens, over=lambda: None)
            evaluation.end(group, outcome.scored)
        finally:
            permit.close()
        pace.leave(group.index)


@dataclass
class Evaluation:
    """The evaluation of one environment while it is running: its groups, and the results so far."""

    env: EnvConfig
    version: int
    problems_P: Sequence[tuple[Group, EnvGroupBuilder]]
    ended: dict[int, ScoredGroup | None] = field(default_factory=dict)
    """The groups that have ended, by index; None: all rollouts failed, or the rewards could not be computed."""
    errors: dict[int, Counter[str]] = field(default_factory=dict)
    """Failed tries of each group, by the type of their error."""
    _new: list[Group] = field(default_factory=list)
    """Groups that have ended since the last `take_lines`."""

    @property
    def missing(self) -> int:
        return len(self.problems_P) - len(self.ended)

    def end(self, group: Group, scored: ScoredGroup | None) -> None:
        """Records that `group` has ended with the result `scored` (see `ended`)."""
        self.ended[group.index] = scored
        self._new.append(group)

    def take_lines(self) -> list[str]:
        """Returns the results of the groups that have ended since the last call: a line of JSON for each group."""
        lines = []
        for group in self._new:
            scored = self.ended[group.index]
            values = {
                "env": self.env.label,
                "index": group.index,
                "errors": self.errors[group.index],
                "group": None if scored is None else scored_to_json(scored),
            }
            lines.append(to_json(values))
        self._new.clear()
        return lines

    def restore(self, values: Mapping[str, Any]) -> None:
        """Records the result of a group from `values`, the decoded JSON of a line that `take_lines` returned."""
        scored = None
        if values["group"] is not None:
            scored = scored_from_json(values["group"], _without_tokens)
        self.ended[values["index"]] = scored
        self.errors[values["index"]] = Counter(values["errors"])

    def metrics(self, samples: int) -> dict[str, float]:
        """Returns the metrics that the module's docstring lists, by name. `samples`: the number of rollouts for each
        problem."""
        scored_P = [scored for _, scored in sorted(self.ended.items()) if scored]
        errors = sum(self.errors.values(), Counter[str]())
        n = sum(len(scored.rewards_G) for scored in scored_P)
        row = {
            "version": self.version,
            "problems": len(scored_P),
            "n": n,
            "failed": samples * len(self.ended) - n,
            **{f"errors/{name}": count for name, count in sorted(errors.items())},
            **(_scores(scored_P, samples) if scored_P else {}),
        }
        return {f"eval/{self.env.label}/{name}": float(value) for name, value in row.items()}


def _without_tokens(values: Mapping[str, Any]) -> Trajectory:
    """Returns a trajectory with the turns in `values` but without tokens, because no metric reads tokens."""
    return Trajectory(np.empty(0, np.int32), np.empty(0, np.float32), turns_from_json(values), values["stop_reason"])


def _scores(scored_P: Sequence[ScoredGroup], samples: int) -> dict[str, float]:
    row = {
        name.removeprefix("env/all/"): value
        for name, value in env_metrics(scored_P).items()
        if name.startswith(("env/all/", "stop/"))
    }
    row |= _with_interval(f"avg@{samples}", [float(np.mean(scored.rewards_G)) for scored in scored_P])
    for k in sorted({samples, *(2**i for i in range(samples.bit_length()) if 2**i <= samples)}):
        enough_P = [scored.rewards_G for scored in scored_P if len(scored.rewards_G) >= k]
        row |= _with_interval(f"pass@{k}", [pass_at_k(len(r), sum(x >= PASSED_REWARD for x in r), k) for r in enough_P])
    return row


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Returns the chance that at least one of k rollouts passes, if the k rollouts are drawn without replacement from n
    rollouts and `passed` of the n rollouts pass.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1 - comb(n - passed, k) / comb(n, k)


def _with_interval(name: str, values_P: Sequence[float]) -> dict[str, float]:
    """Returns {`name`: the mean of `values_P`, `name`/ci95: half the width of the mean's 95 % interval}, from one value
    for each problem. Leaves the mean out if there are no values, and the interval if there are fewer than two."""
    row = {name: float(np.mean(values_P))} if values_P else {}
    if len(values_P) > 1:
        row[f"{name}/ci95"] = float(CI95 * np.std(values_P, ddof=1) / sqrt(len(values_P)))
    return row
