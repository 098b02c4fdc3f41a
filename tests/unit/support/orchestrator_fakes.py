"""A sampler, problems and a driver for the pipeline, all in one process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from config_support import small

from orchestrator.advantages import WeightedTrajectory, lay_out
from orchestrator.env import Env, EnvGroupBuilder, RLDataset, StepResult, StopCondition, Trajectory
from orchestrator.pipeline import Pipeline
from orchestrator.rollout import RolloutLimits
from orchestrator.state import OrchestratorState
from trireme.config import Config
from trireme.core.sampler import OnVersions, ReplicaStats
from trireme.core.types import (
    Datum,
    Minibatch,
    SampledSequence,
    SampleRequest,
    StepSummary,
    VersionSpan,
    WeightIdentity,
)
from trireme.core.weights import EXACT, Canary, Drift, PublishedWeights, UpdateReport, WeightsManifest

Reward = Callable[["Problem", int], Awaitable[float]]


def published(version: int, attempt: int = 0) -> PublishedWeights:
    identity = WeightIdentity(attempt, version, f"d{version}")
    canary = Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), EXACT)
    return PublishedWeights(WeightsManifest(identity, (), canary), ())


def trajectory_to_data(trajectory: Trajectory, advantage: float, temperature: float) -> list[Datum]:
    """The trajectory as the trainer gets it, with the temperature as it was given (a batch rounds it to float32)."""
    batch = lay_out([WeightedTrajectory(trajectory, advantage, temperature)])
    data_D = map(batch.datum, range(len(batch)))
    return [Datum(datum.model_input, datum.loss_fn_inputs, temperature) for datum in data_D]


class FakeSampler:
    """Answers at once with one token, the last of the prompt, unless the problem is held."""

    def __init__(self) -> None:
        self.version = -1
        self.requests: list[SampleRequest] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.held_updates: dict[int, asyncio.Event] = {}
        self.update_error: Exception | None = None
        self.label_with: int | None = None
        self.mixes = False

    def hold(self, problem: int) -> asyncio.Event:
        return self.gates.setdefault(problem, asyncio.Event())

    def hold_update(self, version: int) -> asyncio.Event:
        return self.held_updates.setdefault(version, asyncio.Event())

    async def sample(self, request: SampleRequest) -> SampledSequence:
        self.requests.append(request)
        started = self.version
        if event := self.gates.get(request.prompt[0]):
            await event.wait()
        versions = sorted({started if self.label_with is None else self.label_with, self.version})
        spans = tuple(
            VersionSpan(WeightIdentity(0, v, f"d{v}"), i, i + 1, self.mixes and i > 0) for i, v in enumerate(versions)
        )
        n = len(versions)
        return SampledSequence(np.full(n, request.prompt[-1], np.int32), np.full(n, -1.0, np.float32), "stop", spans)

    @property
    def source(self) -> FakeSampler:
        """Its own replica set."""
        return self

    async def update(self, weights: PublishedWeights) -> list[UpdateReport]:
        version = weights.identity.version
        if event := self.held_updates.get(version):
            await event.wait()
        if self.update_error:
            raise self.update_error
        self.version = version
        self.changed({0: version})
        return [UpdateReport(0, weights.identity, Drift(version / 200, version / 100), 10 * version, 0.0)]

    def connect(self, on_versions: OnVersions) -> FakeSampler:
        """Makes the sampler of a pipeline: itself, with the pipeline's callback."""
        self.changed = on_versions
        return self

    async def stats(self) -> dict[int, ReplicaStats]:
        return {0: ReplicaStats(0, 0, 0.0, 0)}


class OneStep(Env):
    def __init__(self, problem: Problem, sample: int) -> None:
        self.problem, self.sample = problem, sample

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return [self.problem.number, *[0] * self.problem.padding, self.sample], ()

    async def step(self, action: Sequence[int]) -> StepResult:
        self.problem.dataset.tries[self.problem.number, self.sample] += 1
        reward = await self.problem.dataset.reward(self.problem, self.sample)
        return StepResult(reward, True, metrics={"asked": 1.0})


class Problem(EnvGroupBuilder):
    def __init__(self, dataset: Problems, number: int, padding: int = 0, shared: float = 10.0) -> None:
        self.dataset, self.number, self.padding, self.shared = dataset, number, padding, shared

    async def make_env(self, sample: int) -> Env:
        return self.dataset.env(self, sample)

    async def compute_group_rewards(self, trajectories_G: Sequence[Trajectory]) -> list[tuple[float, dict[str, float]]]:
        return [(np.float32(self.shared), {"shared": np.float32(2)}) for _ in trajectories_G]  # type: ignore[misc]

    async def cleanup(self) -> None:
        self.dataset.cleaned[self.number] += 1

    def logging_tags(self) -> Sequence[str]:
        return ["even" if self.number % 2 == 0 else "odd"]


async def by_sample(problem: Problem, sample: int) -> float:
    return float(sample)


class Problems(RLDataset):
    """Problem `n` shows its number and the sample's as tokens; 3 problems a batch, whatever the training batch."""

    def __init__(
        self,
        reward: Reward = by_sample,
        group_size: int = 2,
        batches: int = 30,
        kind: Any = Problem,
        env: Callable[[Problem, int], Env] = OneStep,
    ) -> None:
        self.reward, self.group_size, self.batches, self.kind, self.env = reward, group_size, batches, kind, env
        self.tries: Counter[tuple[int, int]] = Counter()
        self.cleaned: Counter[int] = Counter()

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return [self.kind(self, 3 * index + i) for i in range(3)]

    def __len__(self) -> int:
        return self.batches


def small_config(
    batch_size: int = 2,
    max_steps: int = 5,
    substeps: int = 1,
    minibatches: int | str = 1,
    timeout_s: float = 60,
    update_s: float = 60,
    deterministic: bool = False,
    temperature: float = 1.0,
    close_s: float = 30.0,
    **options: Any,
) -> Config:
    return small(
        max_steps=max_steps,
        deterministic=deterministic,
        trainer={"num_substeps": substeps, "num_minibatches": minibatches},
        orchestrator={"batch_size": batch_size, "group_size": 2, **options},
        env={"id": "tests:Problems", "name": "fake", "close_s": close_s},
        inference={"sampling": {"max_tokens": 4, "temperature": temperature}},
        timeouts={"batch_s": timeout_s, "update_s": update_s},
    )


class Run:
    """A pipeline and what its driver does with it, from step `start` on."""

    share = ""
    """What a resume said of unfinished rollouts."""

    def __init__(
        self,
        config: Config,
        *datasets: RLDataset,
        limits: RolloutLimits | None = None,
        sampler: FakeSampler | None = None,
        start: int = 0,
        held_out: Sequence[RLDataset] = (),
    ) -> None:
        self.config, self.start = config, start
        self.sampler: Any = sampler or FakeSampler()
        datasets = datasets or (Problems(),)
        self.dataset: Any = datasets[0]
        self.pipeline = Pipeline(
            config, datasets, self.sampler.connect, limits or RolloutLimits(1000, 100), list(held_out)
        )
        self.rows: list[dict[str, float]] = []
        self.released: list[StepSummary] = []
        self.batches: list[list[Minibatch]] = []

    async def train(self) -> None:
        """Does what a driver does between two minibatches; no time passes."""

    async def step(self, step: int) -> None:
        self.batches.append([])
        for substep in range(self.config.trainer.num_substeps):
            last = False
            while not last:
                minibatch = await self.pipeline.next_minibatch(step, substep)
                self.batches[-1].append(minibatch)
                await self.train()
                last = minibatch.last
        await begin_version(self.pipeline, published(step + 1))
        self.released.append(self.pipeline.release(step))
        self.rows.append(self.released[-1].metrics)

    async def __aenter__(self) -> Run:
        await begin_version(self.pipeline, published(self.start))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.pipeline.stop()


async def begin_version(pipeline: Pipeline, weights: PublishedWeights) -> None:
    """Begins a version as a driver does."""
    await pipeline.end_version()
    sampler: Any = pipeline.sampler
    await pipeline.begin_version(weights.identity.version, sampler.source.update(weights))


async def quiesce() -> None:
    """Lets everything run that can: no timer and nothing outside this loop is involved."""
    for _ in range(100):
        await asyncio.sleep(0)


def problems_of(minibatches: Sequence[Minibatch]) -> list[int]:
    return [int(m.batch.datum(d).model_input.tokens[0]) for m in minibatches for d in range(len(m.batch))]


async def whole_run(run: Run) -> Run:
    async with run:
        for step in range(run.start, run.config.max_steps):
            await run.step(step)
    return run


def resumed(run: Run, directory: Path, *datasets: RLDataset, config: Config | None = None, **options: Any) -> Run:
    """Returns a run in a new process, as it were, that continues from the last boundary of `run`."""
    snapshot = run.pipeline.snapshot()
    snapshot.write(directory)
    fresh = Run(config or run.config, *datasets, start=snapshot.ledger["released"], **options)
    fresh.share = fresh.pipeline.load(OrchestratorState.read(directory))
    return fresh
