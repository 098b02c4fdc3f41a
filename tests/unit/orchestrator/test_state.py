"""The orchestrator saves its state and continues from it, whatever it was doing."""

import asyncio
import dataclasses
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestrator_fakes import (
    Problem,
    Problems,
    Run,
    begin_version,
    published,
    quiesce,
    resumed,
    small_config,
    whole_run,
)
from whole_turns import trajectory_of

from orchestrator.advantages import ScoredGroup
from orchestrator.cursor import ProblemCursor
from orchestrator.ledger import Group
from orchestrator.state import LINES, STATE, OrchestratorState
from orchestrator.trajectory import Transition
from trireme.checkpoint.files import checksum_of
from trireme.checkpoint.manifest import Manifest
from trireme.core.errors import BadInput, CheckpointInvalid, LimitReached, StorageFailed
from trireme.core.types import WeightIdentity

ENDS = ("trained", "filtered", "dropped", "failed")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and np.array_equal(one, other))
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def turn(rng: np.random.Generator, logs: Mapping[str, Any]) -> Transition:
    length = int(rng.integers(1, 5))
    return Transition(
        observation=rng.integers(0, 9, int(rng.integers(1, 5))).astype(np.int32),
        action=rng.integers(0, 9, length).astype(np.int32),
        logprobs=rng.normal(size=length).astype(np.float32),
        versions=rng.integers(2, 4, length).astype(np.int32),
        mixed=rng.integers(0, 2, length).astype(np.bool_),
        identities=(WeightIdentity(1, 2, "ab"), WeightIdentity(2, 3, "cd")),
        stop_reason="length",
        reward=0.1 + 0.2,
        metrics={"asked": 1 / 3},
        logs=logs,
        in_loss=length != 2,
    )


def scored(seed: int, turns_G: list[int], finished: bool = True, logs: Mapping[str, Any] | None = None) -> ScoredGroup:
    rng = np.random.default_rng(seed)
    return ScoredGroup(
        group=Group(seed, f"0.{seed}.1", 5, finished),
        trajectories_G=tuple(trajectory_of([turn(rng, logs or {}) for _ in range(n)], "stop") for n in turns_G),
        rewards_G=tuple(float(r) for r in rng.normal(size=len(turns_G))),
        metrics_G=tuple({"shared": float(n)} for n in turns_G),
        tags=("fake", "even"),
        temperature=0.7,
    )


def snapshot_of(finished: tuple[ScoredGroup, ...], filtered: tuple[ScoredGroup, ...]) -> OrchestratorState:
    states: tuple[Any, ...] = ({"epoch": 1}, {"released": 3}, {"failures": [True]})
    return OrchestratorState(
        *states,
        finished,
        filtered,
        {"KeyError": 2},
        {"a": 1},
        {"done": 4, "rows": [[4, {"n": 0.5}]]},
        tokens={"wasted": {"failed": 3}, "sampled": 9, "rollouts": 2},
    )


@settings(deadline=None, max_examples=30)
@given(
    finished=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), max_size=3),
    filtered=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), max_size=2),
)
def test_files_hold_everything(
    tmp_path_factory: pytest.TempPathFactory, finished: list[list[int]], filtered: list[list[int]]
) -> None:
    directory = tmp_path_factory.mktemp("commit") / "orchestrator"
    snapshot = snapshot_of(
        tuple(scored(i, turns_G) for i, turns_G in enumerate(finished)),
        tuple(scored(10 + i, turns_G, finished=False) for i, turns_G in enumerate(filtered)),
    )
    records = snapshot.write(directory)
    assert same(OrchestratorState.read(directory), snapshot)
    assert {record.path for record in records} == {f"orchestrator/{file.name}" for file in directory.iterdir()}
    for record in records:
        file = directory.parent / record.path
        assert (record.size, record.checksum) == (file.stat().st_size, checksum_of(file))


def test_the_checkpoint_in_the_fixtures_has_the_formats_of_today() -> None:
    """If it has not, tests/e2e/checkpoint_fixture.py writes it anew."""
    checkpoint = Path(__file__).parents[2] / "fixtures" / "checkpoint" / "checkpoints" / "step_000002"
    assert Manifest.verified(checkpoint).step == 2
    assert OrchestratorState.read(checkpoint / "orchestrator").finished == ()


def test_a_layout_that_is_not_known_is_refused(tmp_path: Path) -> None:
    snapshot_of((), ()).write(tmp_path)
    state = json.loads((tmp_path / STATE).read_text())
    (tmp_path / STATE).write_text(json.dumps(state | {"layout": 2}))
    with pytest.raises(CheckpointInvalid, match="has layout 2; expected 3: resume with"):
        OrchestratorState.read(tmp_path)


def test_what_is_no_json_can_be_saved(tmp_path: Path) -> None:
    logs = {"text": "a", "path": Path("b"), "score": np.float32(1.5), 3: (1, None), "more": {("x", 1): {2.0}}}
    group = dataclasses.replace(scored(0, [1], logs=logs), metrics_G=({"a": float("nan"), "b": 1.0},))  # type: ignore[arg-type]
    snapshot_of((group,), ()).write(tmp_path)
    for line in (tmp_path / LINES).read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    (read,) = OrchestratorState.read(tmp_path).finished
    as_json = {"text": "a", "path": "b", "score": "1.5", "3": [1, None], "more": {"('x', 1)": "{2.0}"}}
    assert read.trajectories_G[0].transitions[0].logs == as_json
    (metrics,) = read.metrics_G
    assert (np.isnan(metrics["a"]), metrics["b"]) == (True, 1.0)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "o").write_text("in the way")
    with pytest.raises(StorageFailed, match=f"{tmp_path}/o/state.json.*MiB free"):
        snapshot_of((), ()).write(tmp_path / "o")


def trained(run: Run) -> list[list[str]]:
    return [[group["problem"] for group in released.trained] for released in run.released]


async def test_groups_that_were_taken_are_there_again_and_not_sampled_again(tmp_path: Path) -> None:
    async with Run(small_config(2, minibatches=2)) as run:
        await run.step(0)
        await quiesce()
        run.sampler.hold(5)
        first = await run.pipeline.next_minibatch(1, 0)
        before = run.pipeline.snapshot()
        second = await run.pipeline.next_minibatch(1, 0)
        assert second.last
        assert {s.group.problem for s in run.pipeline.snapshot().finished} >= {"0.0.2", "0.1.0"}, "cut, not trained"
        before.write(tmp_path / "o")
    again = Run(run.config, start=1)
    again.pipeline.load(OrchestratorState.read(tmp_path / "o"))
    async with again:
        for expected in (first, second):
            assert same(await again.pipeline.next_minibatch(1, 0), expected)
        assert not {2, 3} & {request.prompt[0] for request in again.sampler.requests}


async def test_what_was_running_is_sampled_again_with_its_identity_and_the_new_floor(tmp_path: Path) -> None:
    run = Run(small_config(1, 4, stale_policy="wait", max_steps_off_policy=2))
    run.sampler.hold(1)
    async with run:
        await run.step(0)
        await quiesce()
        again = resumed(run, tmp_path / "o")
        first_requests = [
            (request.request_id, request.params) for request in run.sampler.requests if request.prompt[0] == 1
        ]
    async with again:
        await again.step(1)
        await quiesce()
        asked_again = [request for request in again.sampler.requests if request.prompt[0] == 1]
        assert [(request.request_id, request.params) for request in asked_again] == first_requests
        assert again.released[0].trained == [{"problem": "0.0.2", "index": 2, "floor": 0}], "it had finished"
        assert again.rows[0]["ledger/dispatched"] == 4, "not counted twice"
        await again.step(2)
        assert again.released[1].trained == [{"problem": "0.0.1", "index": 1, "floor": 1}]


@pytest.mark.parametrize("policy", ["drop", "wait"])
@pytest.mark.parametrize("max_steps_off_policy", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_every_problem_ends_once_however_often_the_run_is_interrupted(
    policy: str, max_steps_off_policy: int, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)

    async def reward(problem: Problem, sample: int) -> float:
        for _ in range(rng.choice([0, 0, 3, 150])):
            await asyncio.sleep(0)
        return {0: float("nan"), 1: 4.0}.get(problem.number % 6, float(sample))

    config = small_config(
        2,
        12,
        minibatches=2,
        stale_policy=policy,
        max_steps_off_policy=max_steps_off_policy,
        retries=0,
        max_failure_rate=1.0,
        remove_constant_reward_groups=True,
    )

    async def interrupted(run: Run) -> Run:
        async with run:
            for step in range(run.start, run.start + rng.randint(0, 3)):
                await run.step(step)
            doing = asyncio.create_task(run.step(run.start + len(run.released)))
            for _ in range(rng.randint(0, 60)):
                await asyncio.sleep(0)
            doing.cancel()
            await asyncio.wait([doing])
            return resumed(run, tmp_path / str(run.start), Problems(reward))

    runs = [Run(config, Problems(reward))]
    for _ in range(3):
        runs.append(await interrupted(runs[-1]))
    await whole_run(runs[-1])
    row, ledger = runs[-1].rows[-1], runs[-1].pipeline.snapshot().ledger
    assert all(row["off_policy/max"] <= max_steps_off_policy for run in runs for row in run.rows)
    trained_on = [problem for run in runs for problems in trained(run) for problem in problems]
    assert len(trained_on) == len(set(trained_on)) == row["ledger/trained"] == 24
    waiting = {group["problem"] for group in ledger["groups"]} | set(ledger["resample"])
    assert not waiting & set(trained_on)
    cursor = ProblemCursor(Problems())
    begun = {cursor.next_problem() for _ in range(int(row["ledger/dispatched"] - row["ledger/resampled"]))}
    assert set(trained_on) | waiting <= begun | set(ledger["resample"])
    assert sum(row[f"ledger/{end}"] for end in ENDS) + len(ledger["groups"]) == len(begun)


async def test_the_order_of_the_data_is_that_of_a_run_that_was_never_interrupted(tmp_path: Path) -> None:
    run = Run(small_config(2, 3))
    await whole_run(run)
    longer = resumed(run, tmp_path / "o", config=small_config(2, 6))
    await whole_run(longer)
    assert trained(run) + trained(longer) == trained(await whole_run(Run(small_config(2, 6))))


def test_the_row_of_the_next_step_misses_nothing(tmp_path: Path) -> None:
    async def reward(problem: Problem, sample: int) -> float:
        if problem.number == 3 and problem.dataset.tries[3, sample] == 1:
            raise KeyError
        return 4.0 if problem.number == 2 else float(sample)

    async def scenario(interrupted: bool) -> dict[str, float]:
        run = Run(small_config(2, 2, remove_constant_reward_groups=True, max_steps_off_policy=0), Problems(reward))
        async with run:
            await run.step(0)
            await quiesce()
            if not interrupted:
                await run.step(1)
                return run.rows[1]
            again = resumed(run, tmp_path / "o")
            assert again.dataset.tries == {}
        async with again:
            await again.step(1)
            return again.rows[0]

    def exact(row: Mapping[str, float]) -> dict[str, float]:
        return {name: value for name, value in row.items() if not name.startswith(("perf/", "time/"))}

    row = asyncio.run(scenario(interrupted=True))
    assert exact(row) == exact(asyncio.run(scenario(interrupted=False)))
    assert row["off_policy/filtered"] == 1
    assert row["rollout_errors/KeyError"] == 2
    assert row["waste/failed"] == 2
    assert row["env/even/by_group/frac_all_good"] > 0


async def test_kept_groups_keep_the_temperature_they_were_sampled_at(tmp_path: Path) -> None:
    async with Run(small_config(2, 2)) as run:
        run.sampler.hold(1)
        await quiesce()
        again = await whole_run(resumed(run, tmp_path / "o", config=small_config(2, 2, temperature=0.5)))
    data_D = [m.batch.datum(d) for batch in again.batches for m in batch for d in range(len(m.batch))]
    assert {int(datum.model_input.tokens[0]): datum.temperature for datum in data_D} == {0: 1.0, 1: 0.5, 2: 1.0, 3: 1.0}


async def always_fails(problem: Problem, sample: int) -> float:
    raise ZeroDivisionError


async def never_differs(problem: Problem, sample: int) -> float:
    return 1.0


@pytest.mark.parametrize(("reward", "named"), [(always_fails, "100% of"), (never_differs, "last 20 groups")])
async def test_a_resume_counts_on_but_after_a_limit_anew(reward: Any, named: str, tmp_path: Path) -> None:
    config = small_config(2, 6, retries=0, remove_constant_reward_groups=True)
    async with Run(config, Problems(reward)) as stopped:
        with pytest.raises(LimitReached, match=named):
            await stopped.step(0)
        again = resumed(stopped, tmp_path / "stopped", Problems(batches=30))
    await whole_run(again)
    interrupted = Run(config, Problems(reward))
    for problem in range(8, 20):
        interrupted.sampler.hold(problem)
    async with interrupted:
        await quiesce()
        again = resumed(interrupted, tmp_path / "interrupted", Problems(reward))
    async with again:
        with pytest.raises(LimitReached, match=named):
            await again.step(0)
    assert len(again.sampler.requests) < len(stopped.sampler.requests)


async def test_data_that_lack_the_place_are_refused(tmp_path: Path) -> None:
    async with Run(small_config(4)) as run:
        await run.step(0)
        with pytest.raises(BadInput, match=r"problem 0\.\d\.\d .* not in Problems, which has 2 batches"):
            resumed(run, tmp_path / "o", Problems(batches=2))


async def test_no_snapshot_between_two_versions() -> None:
    async with Run(small_config()) as run:
        run.sampler.hold_update(1)
        await run.pipeline.next_minibatch(0, 0)
        await begin_version(run.pipeline, published(1))
        with pytest.raises(ValueError, match="make version 0, but the update of the replicas to version 1 has begun"):
            run.pipeline.snapshot()
        run.pipeline.release(0)
        assert run.pipeline.snapshot().ledger["released"] == 1, "not all replicas are there yet"


async def test_a_boundary_whose_update_has_not_ended_is_gone_on_from_like_any_other(tmp_path: Path) -> None:
    async with Run(small_config(2, 6, max_steps_off_policy=2)) as run:
        await run.step(0)
        run.sampler.hold(7)
        run.sampler.hold_update(2)
        await run.step(1)
        await run.pipeline.next_minibatch(2, 0)
        await quiesce()
        again = resumed(run, tmp_path / "o")
    run = await whole_run(again)
    assert trained(run) == [["0.1.1", "0.1.2"], ["0.2.0", "0.2.1"], ["0.2.2", "0.3.0"], ["0.3.1", "0.3.2"]]
    assert [row["off_policy/max"] for row in run.rows] == [2, 2, 2, 2]
