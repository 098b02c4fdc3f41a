"""Several environments in one run: whose turn it is, ids, group sizes, metrics, and that nothing is lost on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestrator_fakes import Problem, Problems, Reward, Run, whole_run
from orchestrator_fakes import small_config as one_env

from orchestrator.cursor import Mix
from trireme.config import Config
from trireme.core.errors import BadInput, LimitReached

Weights = Sequence[float]


def small_config(sizes: Sequence[int | None] = (2, 4), weights: Weights = (1, 3), **options: Any) -> Config:
    sections = one_env(**options).model_dump()
    sections["env"] = [
        {"id": "tests:Problems", "name": name, "weight": weight, "group_size": size}
        for name, weight, size in zip("abc", weights, sizes, strict=False)
    ]
    return Config.model_validate(sections)


def mix(weights: Weights, seed: int = 0, batches: int = 5) -> Mix:
    return Mix({name: Problems(batches=batches) for name, _ in zip("abc", weights, strict=False)}, weights, seed)


def drawn(of: Mix, count: int) -> list[str]:
    return [of.next_problem() for _ in range(count)]


@settings(deadline=None, max_examples=50)
@given(weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=3), seed=st.integers(0, 2**40), n=st.integers(1, 3000))
def test_any_stretch_has_about_its_share_of_each(weights: list[float], seed: int, n: int) -> None:
    of = mix(weights, seed)
    drawn(of, seed % 97)
    counts = Counter(problem[0] for problem in drawn(of, n))
    for name, weight in zip("abc", weights, strict=False):
        assert abs(counts[name] - n * weight / sum(weights)) <= 8


def test_the_order_follows_from_the_seed() -> None:
    assert drawn(mix([1, 3]), 8) == drawn(mix([1, 3]), 8)
    orders = {"".join(problem[0] for problem in drawn(mix([1, 1], seed), 12)) for seed in range(8)}
    assert len(orders) > 4


def test_each_environment_keeps_its_own_order_and_epochs() -> None:
    of = mix([1, 3], batches=2)
    problems = drawn(of, 60)
    for name in "ab":
        alone = drawn(mix([1], batches=2), 60)
        of_env = [problem.removeprefix(f"{name}/") for problem in problems if problem.startswith(f"{name}/")]
        assert of_env == alone[: len(of_env)]
    assert {problem.split("/")[1].split(".")[0] for problem in problems if problem[0] == "b"} > {"0", "1"}


@settings(deadline=None, max_examples=50)
@given(before=st.integers(0, 100), weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=3))
def test_a_mix_goes_on_where_another_stood(before: int, weights: list[float]) -> None:
    first, second = mix(weights), mix(weights)
    drawn(first, before)
    second.load_state_dict(first.state_dict())
    assert drawn(second, 30) == drawn(first, 30)


def test_other_environments_are_refused() -> None:
    state = mix([1, 1]).state_dict()
    for other in (mix([1]), mix([1, 1, 1]), Mix({"b": Problems(), "a": Problems()}, [1, 1], 0)):
        with pytest.raises(BadInput, match="the checkpoint is of a run with the environments a, b, but this run has"):
            other.load_state_dict(state)
    with pytest.raises(BadInput, match=r"problem c/0\.0\.0 is of environment c; expected one of a, b"):
        mix([1, 1]).builder("c/0.0.0")


def mixed_run(config: Config, reward: Reward) -> Run:
    return Run(config, *(Problems(reward, config.group_size(env)) for env in config.env))


def test_each_environment_has_its_group_size_and_its_metrics() -> None:
    async def reward(problem: Problem, sample: int) -> float:
        return float(sample) / problem.dataset.group_size

    config = small_config(batch_size=8, max_steps=3)
    run = asyncio.run(whole_run(mixed_run(config, reward)))
    sizes = Counter(problem for (minibatch,) in run.batches for problem in minibatch.problems_D)
    assert {(problem[0], size) for problem, size in sizes.items()} == {("a", 2), ("b", 4)}
    row = run.rows[-1]
    groups = Counter(group["problem"][0] for group in run.released[-1].trained)
    assert groups["a"] + groups["b"] == 8
    assert groups["a"] in (1, 2, 3)
    assert row["env/a/reward/total"] == pytest.approx(10 + 0.25)
    assert row["env/b/reward/total"] == pytest.approx(10 + 0.375)
    rollouts = 2 * groups["a"] + 4 * groups["b"]
    assert row["perf/rollouts"] == rollouts
    assert row["env/all/reward/total"] == pytest.approx((2 * groups["a"] * 10.25 + 4 * groups["b"] * 10.375) / rollouts)


def test_the_first_failure_is_shown_with_its_environment() -> None:
    async def reward(problem: Problem, sample: int) -> float:
        if problem.dataset.group_size == 4:
            raise KeyError("no such thing")
        return float(sample)

    config = small_config(batch_size=2, retries=0, max_filtered_batches=1000)
    with pytest.raises(LimitReached, match=r"(?s)environment a\+b failed.*in environment b\nTraceback.*KeyError"):
        asyncio.run(whole_run(mixed_run(config, reward)))
