"""Evaluation within a run: the same held-out problems again and again, each time under the weights of one version.

    update to v delivered --due--> all problems of the split, group by group --all ended--> row of step v
             ^                                                                    |
             +---------------- the next update waits, and so the trainer ---------+

When. Before the first step, every `eval.every` steps, and at the end. The evaluation of version v stands in the row of
step v, which begins with these weights; that of the last version in the last row, as there is no later one. A row holds
one evaluation: the one that would share the last row is left out.

Never two versions. The next update waits until the evaluation has ended. Until then training goes on, with what has
been and is being sampled by the same version. Each token is checked: another version is a ProvenanceError.

Beside training. Both ask the gate for room, a group at a time; there neither keeps the other out. In deterministic mode
all of an evaluation is sampled in lockstep, and nothing else meanwhile.

Replicas of its own (`eval.replicas`). They take weights only when these are to be evaluated, and nothing waits for
them, but the next evaluation. One stands in the row of the step during which it ended; `version` says what it was of.

Failed rollouts are tried again as in training. Those that fail for good are counted (`failed`) and left out of every
mean: they are no zeros. A refused prompt fails at once.

Several environments are evaluated at the same time, each by its own problems.

Metrics, all under `eval/<environment>/`
  version, problems   which weights; how many problems have at least one rollout
  n, failed           rollouts that count, and rollouts that failed for good
  errors/<type>       failed tries
  avg@k               mean over problems of the mean reward of their rollouts; k = `eval.samples`
  pass@k              mean over problems of the chance that one of k rollouts passes (its reward is at least 1), for
                      k = 1, 2, 4 .. and `eval.samples`: unbiased (arXiv:2107.03374). A problem with fewer than k
                      rollouts that count is left out.
  .../ci95            half the width of the 95 % interval of such a mean, problems being the sample
  reward/total, ...   what `env/all/*` and `stop/*` are in training

State. A snapshot says which version was evaluated last, what is not in a row yet, and whether an evaluation was due or
under way: that one is done again, with the weights of the commit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import comb, sqrt
from typing import Any

import numpy as np

from orchestrator.admission import Gate
from orchestrator.advantages import ScoredGroup
from orchestrator.cursor import ProblemCursor
from orchestrator.env import EnvGroupBuilder, RLDataset, Trajectory
from orchestrator.group_runner import GroupOutcome, GroupRunner, GroupSettings
from orchestrator.ledger import Group
from orchestrator.lockstep import Lockstep, OwnPace
from orchestrator.metrics import env_metrics
from orchestrator.rollout import RolloutLimits, Sample
from trireme.config import Config
from trireme.core.errors import ProvenanceError, RoomFailed
from trireme.core.sampler import Sampler
from trireme.core.weights import PublishedWeights
from trireme.process import trace
from trireme.process.faults import fault_point

PASSED_REWARD = 1.0
"""A rollout passes with this reward or more: full marks."""
CI95 = 1.96
"""Half the width of a 95 % interval, in standard errors."""

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


@dataclass(frozen=True)
class Schedule:
    """When evaluations are due. `every` = 0: never. `last` is the version that the run ends with."""

    every: int
    last: int

    def due(self, version: int, done: int | None, owed: bool) -> bool:
        """Whether `version` is to be evaluated. `done` was evaluated last; `owed`: one was begun and has not ended."""
        if not self.every or version == done or version == self.last - 1:  # it would share the last row
            return False
        return done is None or owed or version % self.every == 0 or version == self.last

    def row(self, version: int) -> int:
        """The step whose row holds the evaluation of `version`."""
        return min(version, self.last - 1)


class Evaluator:
    """Evaluates weights when that is due, one version at a time. `datasets` are those of `config.eval_envs`; none are
    needed where `eval.every` is 0."""

    def __init__(
        self,
        config: Config,
        datasets: Sequence[RLDataset],
        sample: Sample,
        limits: RolloutLimits,
        gate: Gate,
        reserved: Sampler | None = None,
    ) -> None:
        """`reserved`: the replicas that do nothing else; then `sample` and `gate` are not used."""
        self._config, self._reserved = config, reserved
        self._sample, self._gate = sample, gate
        if reserved:
            room = config.enough_rollouts(config.eval.replicas, on_gpus=config.cluster.device == "gpu")
            self._sample, self._gate = reserved.sample, Gate(room)
        self._datasets = {env.label: dataset for env, dataset in zip(config.eval_envs, datasets, strict=False)}
        self._schedule = Schedule(config.eval.every, config.max_steps)
        self._rules = {env.label: self._rules_of(env.label, limits) for env in config.eval_envs}
        self._task: asyncio.Task[None] | None = None
        self._begun: int | None = None
        self._done: int | None = None
        self._owed = False
        self._rows: dict[int, dict[str, float]] = {}
        self._waited_s = 0.0

    def _rules_of(self, env: str, limits: RolloutLimits) -> GroupSettings:
        options = self._config.orchestrator
        return GroupSettings(
            env=env,
            size=self._config.eval.samples,
            needed=1,
            sampling=self._config.eval_sampling,
            limits=limits,
            seed=self._config.seed,
            retries=options.retries,
            timeout_s=options.generation_timeout_s,
        )

    def begin(self, weights: PublishedWeights, spawn: Spawn) -> None:
        """All replicas but the reserved ones hold `weights`: begins the evaluation of that version if it is due."""
        version = weights.identity.version
        if self._due(version):
            self._owed, self._begun = True, version
            self._task = spawn(self._evaluate(weights), f"evaluation of version {version}")

    async def before_update(self, version: int) -> None:
        """Returns when replicas may take `version`: not while they evaluate, nor, where others do that, while these are
        busy and `version` is due too (or the last row is near, which holds one evaluation). Raises what an evaluation
        failed with."""
        near_end = version >= self._schedule.last - 1
        if not self._reserved or (self._under_way and (near_end or self._due(version))):
            await self.ended()

    @property
    def _under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def _due(self, version: int) -> bool:
        if self._under_way:
            return self._schedule.due(version, self._begun, owed=False)
        return self._schedule.due(version, self._done, self._owed)

    async def ended(self) -> None:
        """Returns when no evaluation is under way. Raises what it failed with."""
        if self._task is None:
            return
        now = asyncio.get_running_loop().time
        started = now()
        await asyncio.wait([self._task])  # it has a deadline of its own
        self._waited_s += now() - started
        if not self._task.cancelled():
            self._task.result()

    def give_up(self) -> None:
        """Ends the evaluation under way, if there is one; it stays due."""
        if self._task:
            self._task.cancel()

    def take(self, step: int) -> dict[str, float]:
        """What the row of `step` is to hold; nothing when no evaluation belongs there."""
        row: dict[str, float] = {}
        for due in [due for due in self._rows if due <= step]:
            row |= self._rows.pop(due)
        if row:
            row["time/wait_for_evaluation"], self._waited_s = self._waited_s, 0.0
        return row

    def state_dict(self) -> dict[str, Any]:
        """As JSON values; rows as pairs, because their keys are numbers."""
        return {"done": self._done, "owed": self._owed, "rows": [[step, dict(row)] for step, row in self._rows.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._done, self._owed = state["done"], state["owed"]
        self._rows = {step: dict(row) for step, row in state["rows"]}

    # ---- one evaluation

    async def _evaluate(self, weights: PublishedWeights) -> None:
        version = weights.identity.version
        if self._reserved:
            await self._reserved.update_weights(weights)
        self._rows[self._schedule.row(version)] = await self.evaluate(version)
        self._done, self._owed = version, False

    async def evaluate(self, version: int) -> dict[str, float]:
        """The metrics of `version`, which all replicas hold. Raises RoomFailed after `timeouts.step_s`, saying how much
        is missing; and ProvenanceError."""
        fault_point("orchestrator.evaluation")
        now, limit_s = asyncio.get_running_loop().time, self._config.timeouts.step_s
        started, evaluations = now(), self._evaluations(version)
        try:
            async with asyncio.timeout(limit_s):
                with trace.span("evaluation", "evaluation", version=version):
                    await self._play(evaluations)
        except TimeoutError:
            missing = [f"{e.missing} of {len(e.problems_P)} problems of environment {e.env}" for e in evaluations]
            errors = sum((e.errors for e in evaluations), Counter[str]())
            raise RoomFailed(
                f"waited {limit_s:g} s (timeouts.step_s) for the evaluation of version {version}: "
                f"{', '.join(missing)}, with {self._config.eval.samples} rollouts each, are not done. "
                f"Failed tries so far: {dict(errors)}. Lower eval.problems or eval.samples, or raise the deadline"
            ) from None
        row = {"perf/evaluation_s": now() - started}
        for e in evaluations:
            values = evaluation_metrics(version, e.in_order(), self._config.eval.samples, e.errors)
            row |= {f"eval/{e.env}/{name}": value for name, value in values.items()}
        return row

    def _evaluations(self, version: int) -> list[Evaluation]:
        """Of each environment the first `eval.problems` of its dataset. Groups are numbered throughout, and their
        problems have ids that no training rollout has: ids lead to seeds."""
        numbers = count()
        evaluations = []
        for env, dataset in self._datasets.items():
            problems_P = [
                (Group(next(numbers), f"eval/{env}/{version}/{problem}", requeues=0, floor=version), builder)
                for problem, builder in self._problems(dataset)
            ]
            evaluations.append(Evaluation(env, version, problems_P))
        return evaluations

    def _problems(self, dataset: RLDataset) -> list[tuple[str, EnvGroupBuilder]]:
        cursor = ProblemCursor(dataset)
        found: list[tuple[str, EnvGroupBuilder]] = []
        while cursor.epoch == 0 and len(found) != self._config.eval.problems:
            problem = cursor.next_problem()
            found.append((problem, cursor.builder(problem)))
        return found

    async def _play(self, evaluations: Sequence[Evaluation]) -> None:
        pace = Lockstep(lambda: False) if self._config.deterministic else OwnPace()
        groups = [(e, group, builder) for e in evaluations for group, builder in e.problems_P]
        for _, group, _ in groups:
            pace.enter(group.index, self._config.eval.samples)
        try:
            async with asyncio.TaskGroup() as tasks:
                for evaluation, group, builder in groups:
                    tasks.create_task(self._play_group(evaluation, pace, group, builder))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _play_group(self, evaluation: Evaluation, pace: OwnPace, group: Group, builder: EnvGroupBuilder) -> None:
        player = GroupRunner(self._rules[evaluation.env], self._sample, pace, evaluation.note, evaluation.check)
        permit = await self._gate.enter("eval", player.rules.size)
        try:
            evaluation.played[group.index] = await player.play(group, builder, permit, over=lambda: None)
        finally:
            permit.close()
        pace.leave(group.index)


@dataclass
class Evaluation:
    """One environment's evaluation under way: what has been played so far, and the failed tries by type."""

    env: str
    version: int
    problems_P: Sequence[tuple[Group, EnvGroupBuilder]]
    played: dict[int, GroupOutcome] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def missing(self) -> int:
        return len(self.problems_P) - len(self.played)

    def in_order(self) -> list[GroupOutcome]:
        return [self.played[index] for index in sorted(self.played)]

    def note(self, error: Exception) -> None:
        self.errors[type(error).__name__] += 1

    def check(self, group: Group, trajectories_G: Sequence[Trajectory]) -> None:
        """Raises ProvenanceError when a token is not of the version that is evaluated."""
        sampled_by = {i.version for t in trajectories_G for turn in t.transitions for i in turn.identities}
        if sampled_by != {self.version}:
            raise ProvenanceError(
                f"problem {group.problem} was to be evaluated under version {self.version} alone, but its tokens were "
                f"sampled by versions {sorted(sampled_by)}: the replicas took other weights before the end"
            )


def evaluation_metrics(
    version: int, played_P: Sequence[GroupOutcome], samples: int, errors: Mapping[str, int]
) -> dict[str, float]:
    """The metrics that the module's docstring lists, without their prefix."""
    scored_P = [played.scored for played in played_P if played.scored]
    n = sum(len(scored.rewards_G) for scored in scored_P)
    counted = {
        "version": version,
        "problems": len(scored_P),
        "n": n,
        "failed": samples * len(played_P) - n,
        **{f"errors/{name}": count for name, count in sorted(errors.items())},
    }
    row = {name: float(count) for name, count in counted.items()}
    return row | _scores(scored_P, samples) if scored_P else row


def _scores(scored_P: Sequence[ScoredGroup], samples: int) -> dict[str, float]:
    as_in_training = env_metrics(scored_P)
    row = {
        name.removeprefix("env/all/"): value
        for name, value in as_in_training.items()
        if name.startswith(("env/all/", "stop/"))
    }
    row |= _with_interval(f"avg@{samples}", [float(np.mean(scored.rewards_G)) for scored in scored_P])
    for k in sorted({samples, *(2**i for i in range(samples.bit_length()) if 2**i <= samples)}):
        enough_P = [scored.rewards_G for scored in scored_P if len(scored.rewards_G) >= k]
        row |= _with_interval(f"pass@{k}", [pass_at_k(len(r), sum(x >= PASSED_REWARD for x in r), k) for r in enough_P])
    return row


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The chance that at least one of k rollouts passes, drawn without replacement from n of which `passed` did.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1 - comb(n - passed, k) / comb(n, k)


def _with_interval(name: str, values_P: Sequence[float]) -> dict[str, float]:
    """The mean over problems and its interval; only what can be computed from as many as there are."""
    row = {name: float(np.mean(values_P))} if values_P else {}
    if len(values_P) > 1:
        row[f"{name}/ci95"] = float(CI95 * np.std(values_P, ddof=1) / sqrt(len(values_P)))
    return row
