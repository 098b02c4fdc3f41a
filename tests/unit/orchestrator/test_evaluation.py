"""Evaluation within a run: when, under which weights, what it says, and what a resume does again."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from games_support import GameProblem, GameRun, Games, game_config, outcome, waves
from orchestrator_fakes import (
    FakeSampler,
    Problem,
    Problems,
    Reward,
    Run,
    begin_version,
    by_sample,
    published,
    quiesce,
    resumed,
    small_config,
    whole_run,
)

from orchestrator.env import EnvGroupBuilder
from orchestrator.evaluation import Schedule, pass_at_k
from orchestrator.state import OrchestratorState
from trireme.config import Config
from trireme.config.schema import EvalConfig
from trireme.core.errors import ProvenanceError, RoomFailed
from trireme.core.types import SampledSequence, SampleRequest

FIRST = 500
"""Number of the first held-out problem: no training problem comes so far."""


class HeldOut(Problems):
    """Six problems, whose rewards are those of their environments alone."""

    def __init__(self, reward: Reward = by_sample, samples: int = 1) -> None:
        super().__init__(reward, samples, batches=2)

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return [Problem(self, FIRST + 3 * index + i, shared=0) for i in range(3)]


def with_evaluation(config: Config, every: int = 2, **options: Any) -> Config:
    return config.model_copy(update={"eval": EvalConfig(every=every, **options)})


def eval_run(config: Config, held_out: Problems | None = None, sampler: FakeSampler | None = None) -> Run:
    return Run(config, sampler=sampler, held_out=[held_out or HeldOut(samples=config.eval.samples)])


def evaluated(run: Run) -> dict[int, float]:
    """Returns the version of the evaluation in each row that has one, by steps."""
    return {run.start + i: r["eval/fake/version"] for i, r in enumerate(run.rows) if "eval/fake/version" in r}


def requests(run: Run) -> list[SampleRequest]:
    return [r for r in run.sampler.requests if r.request_id.startswith("eval/")]


@pytest.mark.parametrize(
    ("every", "last", "previous", "due"),
    [
        (0, 6, None, []),
        (2, 6, None, [0, 2, 4, 6]),
        (1, 4, None, [0, 1, 2, 4]),  # 3 would share the last row
        (4, 6, None, [0, 4, 6]),
        (5, 6, None, [0, 6]),
        (1, 1, None, [1]),
        (2, 6, 0, [2, 4, 6]),  # a resume: the baseline is not repeated
    ],
)
def test_when_evaluations_are_due(every: int, last: int, previous: int | None, due: list[int]) -> None:
    schedule, versions = Schedule(every, last), []
    for version in range(last + 1):
        if schedule.due(version, previous, owed=False):
            versions.append(version)
            previous = max(previous or 0, version)
    assert versions == due
    assert len({schedule.row(version) for version in versions}) == len(versions), "one evaluation a row"


def test_one_that_was_interrupted_is_due_at_once() -> None:
    assert Schedule(4, 9).due(3, evaluated=0, owed=True)
    assert not Schedule(4, 9).due(3, evaluated=0, owed=False)
    assert not Schedule(4, 9).due(8, evaluated=0, owed=True), "the one of the last version is near"


@pytest.mark.parametrize(("max_steps_off_policy", "deterministic"), [(0, False), (1, False), (3, False), (0, True)])
def test_each_evaluation_stands_in_the_row_of_its_version(max_steps_off_policy: int, deterministic: bool) -> None:
    config = small_config(2, 6, max_steps_off_policy=max_steps_off_policy, deterministic=deterministic)
    run = eval_run(with_evaluation(config))
    asyncio.run(whole_run(run))
    assert evaluated(run) == {0: 0, 2: 2, 4: 4, 5: 6}
    assert len(requests(run)) == 4 * 6


def test_only_so_many_problems_are_taken_always_the_same_and_sampled_with_its_own_options() -> None:
    options = {"problems": 4, "samples": 2, "max_tokens": 3, "temperature": 0.25}
    run = eval_run(with_evaluation(small_config(2, 6, temperature=0.9), **options))
    asyncio.run(whole_run(run))
    assert {(r.params.max_tokens, r.params.temperature) for r in requests(run)} == {(3, 0.25)}
    training = [r for r in run.sampler.requests if r not in requests(run)]
    assert {(r.params.max_tokens, r.params.temperature) for r in training} == {(4, 0.9)}
    assert run.rows[0]["eval/fake/problems"] == 4
    assert run.rows[0]["eval/fake/n"] == 8
    by_version = [
        sorted(r.prompt.tolist() for r in requests(run) if r.request_id.startswith(f"eval/fake/{v}/")) for v in (0, 4)
    ]
    assert by_version[0] == by_version[1] == [[FIRST + p, s] for p in range(4) for s in range(2)]


async def test_training_goes_on_but_the_next_version_waits() -> None:
    run = eval_run(with_evaluation(small_config(2, 6)))
    last = run.sampler.hold(FIRST + 5)
    async with run:
        await run.pipeline.next_minibatch(0, 0)
        await quiesce()
        assert len(run.sampler.requests) == 6 + 8, "all slots of training are sampled beside it"
        update = asyncio.create_task(begin_version(run.pipeline, published(1)))
        await quiesce()
        assert not update.done()
        assert run.sampler.version == 0
        last.set()
        await update
        await quiesce()
        assert run.sampler.version == 1
        row = run.pipeline.release(0).metrics
        assert row["eval/fake/version"] == 0
        assert row["eval/fake/n"] == 6
        assert row["time/wait_for_evaluation"] >= 0


def test_training_is_what_it_is_without() -> None:
    def training(run: Run) -> Any:
        sampled = [(r.request_id, r.prompt.tolist(), r.params) for r in run.sampler.requests if r not in requests(run)]
        prefixes = ("reward/", "env/", "stop/", "off_policy/", "ledger/", "rollout_errors/", "weights/")
        rows = [{name: value for name, value in row.items() if name.startswith(prefixes)} for row in run.rows]
        return sampled, rows, [released.trained for released in run.released]

    config = small_config(2, 6, deterministic=True, max_steps_off_policy=0)
    plain = asyncio.run(whole_run(eval_run(config)))
    assert training(asyncio.run(whole_run(eval_run(with_evaluation(config, 1, samples=2))))) == training(plain)


@pytest.mark.parametrize("deterministic", [False, True])
def test_seeds_are_those_of_no_other_rollout(deterministic: bool) -> None:
    config = small_config(2, 6, deterministic=deterministic, max_steps_off_policy=0)
    run = eval_run(with_evaluation(config, 1, samples=3))
    asyncio.run(whole_run(run))
    sampled = run.sampler.requests
    assert len({r.request_id for r in sampled}) == len(sampled)
    seeded = [r for r in sampled if deterministic or r in requests(run)]
    assert None not in {r.params.seed for r in seeded}
    assert len({r.params.seed for r in seeded}) == len(seeded)
    assert {r.params.seed for r in sampled if r not in seeded} <= {None}


@pytest.mark.parametrize(
    ("held_out_env", "expected"),
    [
        ({}, {"id": "e:D", "args": {"a": 1, "b": 2}, "name": "mine"}),
        ({"args": {"b": 3}}, {"id": "e:D", "args": {"a": 1, "b": 3}, "name": "mine"}),
        ({"name": "long"}, {"id": "e:D", "args": {"a": 1, "b": 2}, "name": "long"}),
        ({"id": "sort", "args": {"c": 4}}, {"id": "sort", "args": {"c": 4}, "name": None}),
    ],
)
def test_the_environment_is_the_runs_own_or_another(held_out_env: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = small_config().model_dump() | {
        "env": {"id": "e:D", "args": {"a": 1, "b": 2}, "name": "mine"},
        "eval": {"env": held_out_env},
    }
    (held_out,) = Config.model_validate(settings).eval_envs
    assert {name: getattr(held_out, name) for name in expected} == expected


@pytest.mark.parametrize(("n", "passed", "k"), [(1, 0, 1), (1, 1, 1), (4, 1, 2), (5, 2, 3), (6, 5, 2), (6, 0, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_success(n: int, passed: int, k: int) -> None:
    draws = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_means_and_intervals_are_over_problems() -> None:
    async def reward(problem: Problem, sample: int) -> float:
        return float(sample < problem.number - FIRST)  # 0, 1, 2, 3, 3, 3 of 3 rollouts pass

    config = with_evaluation(small_config(2, 2), samples=3)
    row = asyncio.run(whole_run(eval_run(config, HeldOut(reward, 3)))).rows[0]
    rates = [0, 1 / 3, 2 / 3, 1, 1, 1]
    mean = sum(rates) / 6
    deviation = (sum((rate - mean) ** 2 for rate in rates) / 5) ** 0.5
    for name in ("avg@3", "pass@1", "reward/total"):
        assert row[f"eval/fake/{name}"] == pytest.approx(mean)
    for name in ("avg@3", "pass@1"):
        assert row[f"eval/fake/{name}/ci95"] == pytest.approx(1.96 * deviation / 6**0.5)
    assert row["eval/fake/pass@2"] == pytest.approx((0 + 2 / 3 + 1 + 3) / 6)
    assert row["eval/fake/pass@3"] == pytest.approx(5 / 6)
    assert row["eval/fake/asked"] == 1, "what the environment reports"
    assert row["eval/fake/by_group/frac_mixed"] == pytest.approx(2 / 6)
    assert row["eval/fake/stop/stop"] == 1


def test_failed_rollouts_are_tried_again_counted_apart_and_are_no_zeros() -> None:
    async def reward(problem: Problem, sample: int) -> float:
        if problem.number == FIRST:
            raise ZeroDivisionError
        if problem.number == FIRST + 1 and problem.dataset.tries[problem.number, sample] == 1:
            raise KeyError
        return 1.0

    config = with_evaluation(small_config(2, 2, retries=1), samples=2)
    row = asyncio.run(whole_run(eval_run(config, HeldOut(reward, 2)))).rows[0]
    assert (row["eval/fake/n"], row["eval/fake/failed"], row["eval/fake/problems"]) == (10, 2, 5)
    assert row["eval/fake/errors/ZeroDivisionError"] == 4
    assert row["eval/fake/errors/KeyError"] == 2
    assert row["eval/fake/reward/total"] == row["eval/fake/pass@2"] == 1
    assert not [name for name in row if name.startswith("rollout_errors/")]


def test_a_token_of_another_version_is_an_error() -> None:
    class Impatient(FakeSampler):
        async def sample(self, request: SampleRequest) -> SampledSequence:
            self.label_with = 1 if request.request_id.startswith("eval/fake/2/") else None
            return await super().sample(request)

    run = eval_run(with_evaluation(small_config(2, 6)), sampler=Impatient())
    with pytest.raises(ProvenanceError, match=r"eval/fake/2/0\.0\.0 .* under version 2 alone.* versions \[1, 2\]"):
        asyncio.run(whole_run(run))


async def test_one_that_does_not_end_is_named() -> None:
    run = eval_run(with_evaluation(small_config(2, 6, timeout_s=2.0)))  # also for the batch, on a busy machine
    run.sampler.hold(FIRST + 1)
    run.sampler.hold(FIRST + 4)
    async with run:
        await run.pipeline.next_minibatch(0, 0)
        with pytest.raises(RoomFailed, match=r"of version 0; not finished: 2 of 6 problems of environment fake"):
            await begin_version(run.pipeline, published(1))


async def test_a_killed_one_is_done_again_and_a_finished_one_is_not(tmp_path: Path) -> None:
    run = eval_run(with_evaluation(small_config(2, 6)))
    async with run:
        await run.step(0)
        gate = run.sampler.hold(FIRST + 3)
        await run.step(1)
        await quiesce()
        again = resumed(run, tmp_path / "during", held_out=[HeldOut()])
        gate.set()
        await quiesce()
        late = resumed(run, tmp_path / "after", held_out=[HeldOut()])
    (during, after) = await whole_run(again), await whole_run(late)
    assert evaluated(during) == evaluated(after) == {2: 2, 4: 4, 5: 6}
    assert len(requests(during)) == 3 * 6
    assert len(requests(after)) == 2 * 6, "its metrics were kept until there was a row for them"
    rows = [{n: v for n, v in run.rows[0].items() if n.startswith("eval/")} for run in (during, after)]
    assert rows[0] == rows[1]


async def test_one_given_up_lets_the_update_go_and_is_due_after_the_resume(tmp_path: Path) -> None:
    cleaned = HeldOut()
    run = eval_run(with_evaluation(small_config(2, 6), 4), cleaned)
    run.sampler.hold(FIRST + 3)
    async with run:
        waiting = asyncio.create_task(run.step(0))
        await quiesce()
        assert not waiting.done()
        run.pipeline.evaluator.give_up()
        await waiting
        assert evaluated(run) == {}
        assert cleaned.cleaned[FIRST + 3] == 1
        again = resumed(run, tmp_path / "o", held_out=[HeldOut()])
    assert evaluated(await whole_run(again)) == {1: 1, 4: 4, 5: 6}


class HeldOutGames(Games):
    """Some fail every time. (None fails only once: the same problems come again in each evaluation.)"""

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return [GameProblem(self, 20 + 3 * index + i) for i in range(3)]


def eval_games(seed: int, start: int = 0) -> GameRun:
    return GameRun(with_evaluation(game_config(), samples=2, problems=6), seed, start, [HeldOutGames])


def test_nothing_depends_on_who_is_faster() -> None:
    first, *rest = [asyncio.run(whole_run(eval_games(seed))) for seed in range(5)]
    for other in rest:
        assert outcome(other) == outcome(first)
        assert waves(other) == waves(first)
    mixed = [wave for wave in waves(first) if 0 < sum(r.startswith("eval/") for r in wave) < len(wave)]
    assert mixed == [], "no training beside it"


@pytest.mark.parametrize("turns", [0, 60, 120, 180, 240, 400])
async def test_a_resume_repeats_what_was_under_way(turns: int, tmp_path: Path) -> None:
    interrupted = eval_games(1)
    async with interrupted:
        await interrupted.step(0)
        doing = asyncio.create_task(interrupted.step(1))
        for _ in range(turns):
            await asyncio.sleep(0)
        doing.cancel()
        interrupted.pipeline.snapshot().write(tmp_path / "o")
    del interrupted.batches[len(interrupted.rows) :]
    again = eval_games(2, start=len(interrupted.rows))
    again.pipeline.load(OrchestratorState.read(tmp_path / "o"))
    await whole_run(again)
    assert outcome(interrupted) + outcome(again) == outcome(await whole_run(eval_games(3)))


@pytest.mark.parametrize("ended", range(7))
async def test_an_interrupted_evaluation_continues_problem_by_problem(ended: int) -> None:
    async def reward(problem: Problem, sample: int) -> float:
        if problem.number == FIRST:
            raise ZeroDivisionError
        if problem.number == FIRST + 1 and sample == 0:
            raise KeyError
        return (problem.number + sample) % 3 / 2

    def evaluation() -> Run:
        run = eval_run(with_evaluation(small_config(2, 2, retries=1), samples=3), HeldOut(reward, 3))
        run.sampler.version = 40
        return run

    whole = await evaluation().pipeline.evaluate(40, [])
    interrupted = evaluation()
    for problem in range(ended, 6):
        interrupted.sampler.hold(FIRST + problem)
    task = asyncio.create_task(interrupted.pipeline.evaluate(40, []))
    lines: list[str] = []
    async with asyncio.timeout(20):
        while len(lines) < ended:
            await asyncio.sleep(0)
            lines += interrupted.pipeline.evaluator.take_lines()
    task.cancel()
    await asyncio.wait([task])
    await interrupted.pipeline.stop()
    again = evaluation()
    row = await again.pipeline.evaluate(40, lines)
    assert {**row, "perf/evaluation_s": 0} == {**whole, "perf/evaluation_s": 0}
    assert len({request.request_id.rsplit("/", 3)[0] for request in requests(again)}) == 6 - ended
    assert not again.pipeline.evaluator.take_lines(), "all is in the row"
    assert requests(again) == again.sampler.requests, "no problem of training was sampled"


async def test_a_long_evaluation_says_how_far_it_is() -> None:
    class Asks(FakeSampler):
        async def sample(self, request: SampleRequest) -> SampledSequence:
            lines.append(run.pipeline.progress())
            return await super().sample(request)

    lines: list[str] = []
    run = eval_run(with_evaluation(small_config(2, 6)), sampler=Asks())
    run.sampler.version = 40
    await run.pipeline.evaluate(40, [])
    assert lines[0] == "0 of 6 problems of fake are evaluated"
    assert run.pipeline.progress().startswith("0 groups are finished, and 0 are being sampled: no group is running")
