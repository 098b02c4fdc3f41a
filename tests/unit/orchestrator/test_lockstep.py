"""Deterministic mode: whoever is faster, rows and batches are the same, also after a resume."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import virtual_time
from games_support import Game, GameRun, Jitter, game_config, outcome, waves
from orchestrator_fakes import Problems, Run, small_config, whole_run

from orchestrator.env import StepResult
from orchestrator.lockstep import Lockstep
from orchestrator.state import OrchestratorState
from trireme.core.errors import LimitReached


@pytest.mark.parametrize("minibatches", [1, 4])
def test_nothing_depends_on_who_is_faster(minibatches: int) -> None:
    config = game_config(minibatches=minibatches)
    first, *rest = [asyncio.run(whole_run(GameRun(config, seed))) for seed in range(8)]
    for other in rest:
        assert outcome(other) == outcome(first)
        assert waves(other) == waves(first)
    row = first.rows[-1]
    assert row["ledger/filtered"] > 1
    assert row["ledger/failed"] > 1
    errors = {name for row in first.rows for name in row if name.startswith("rollout_errors/")}
    assert errors == {f"rollout_errors/{name}" for name in ("KeyError", "ZeroDivisionError", "OSError")}


def test_all_of_a_step_is_submitted_together_and_in_order() -> None:
    run = asyncio.run(whole_run(GameRun(game_config(), 0)))
    assert waves(run)[0] == [f"0.{p // 3}.{p % 3}/{s}/0/0" for p in range(4) for s in range(2)]
    assert waves(run)[1] == ["0.0.0/1/0/1", "0.0.1/0/0/1", "0.0.1/1/0/1", "0.0.2/0/0/1", "0.1.0/1/0/1"]
    assert waves(run)[2] == ["0.0.1/1/0/2", "0.0.2/0/0/2", "0.1.0/1/1/0"], "the last one is tried again"
    assert waves(run)[3] == ["0.1.0/1/1/1", "0.1.1/0/0/0", "0.1.1/1/0/0"], "problem 1 is filtered and replaced first"


def test_a_limit_is_reached_at_the_same_place() -> None:
    async def until_limit(run: Run) -> tuple[str, int, int]:
        with pytest.raises(LimitReached, match=r"OSError: in use, in environment|ZeroDivisionError") as stopped:
            await whole_run(run)
        return str(stopped.value).partition(", the first by")[0], len(run.rows), len(waves(run))

    config = game_config(max_failure_rate=0.08)
    first, *rest = [asyncio.run(until_limit(GameRun(config, seed))) for seed in range(8)]
    assert first[1] > 1
    assert all(other == first for other in rest)


async def test_a_rollout_that_was_cancelled_is_not_waited_for() -> None:
    lockstep = Lockstep(lambda: False)
    lockstep.enter(0, rollouts=1)
    lockstep.enter(1, rollouts=1)
    async with asyncio.timeout(60) as deadline:
        waiting = asyncio.create_task(lockstep.before_sample(0, 0, deadline))
        await asyncio.sleep(0)
        waiting.cancel()
        lockstep.leave(1)
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_request_that_ends_alone_leaves_its_rollout_its_deadline() -> None:
    lockstep = Lockstep(lambda: False)
    lockstep.enter(0, rollouts=2)
    async with asyncio.timeout(60) as deadline, asyncio.timeout(60) as other:
        waiting = asyncio.create_task(lockstep.before_sample(0, 0, deadline))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert deadline.when() == pytest.approx(asyncio.get_running_loop().time() + 60, abs=5)
        both = enumerate((deadline, other))
        again = [asyncio.create_task(lockstep.before_sample(0, sample, request_id)) for sample, request_id in both]
        await asyncio.wait(again, timeout=5)
        assert all(task.done() and not task.exception() for task in again)


async def test_a_request_after_the_end_of_its_rollout_changes_no_deadline() -> None:
    lockstep = Lockstep(lambda: False)
    lockstep.enter(0, rollouts=1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0) as deadline:
            await asyncio.Event().wait()
    due = deadline.when()
    await asyncio.wait_for(lockstep.before_sample(0, 0, deadline), timeout=5)
    assert deadline.when() == due
    assert deadline.expired()


@pytest.mark.parametrize("boundary", [0, 1, 3])
@pytest.mark.parametrize("turns", [0, 30, 300])
async def test_a_resume_repeats_the_step_that_was_under_way(boundary: int, turns: int, tmp_path: Path) -> None:
    config = game_config(minibatches=2)
    interrupted = GameRun(config, 1)
    async with interrupted:
        for step in range(boundary):
            await interrupted.step(step)
        doing = asyncio.create_task(interrupted.pipeline.next_minibatch(boundary, 0))
        for _ in range(turns):
            await asyncio.sleep(0)
        interrupted.pipeline.snapshot().write(tmp_path / "o")
        doing.cancel()
    resumed = GameRun(config, 2, start=boundary)
    resumed.pipeline.load(OrchestratorState.read(tmp_path / "o"))
    await whole_run(resumed)
    reference = await whole_run(GameRun(config, 3))
    assert outcome(interrupted) + outcome(resumed) == outcome(reference)
    assert waves(resumed) == waves(reference)[-len(waves(resumed)) :]


def test_waiting_for_others_does_not_count_as_time_of_a_rollout() -> None:
    class HangingGame(Game):
        async def step(self, action: Sequence[int]) -> StepResult:
            if (self.problem.number, self.sample) == (0, 0):
                await asyncio.Event().wait()
            return await super().step(action)

    config = small_config(
        2, 1, timeout_s=1000, deterministic=True, max_steps_off_policy=0, retries=2, generation_timeout_s=100
    )
    problems = Problems(env=lambda problem, sample: HangingGame(problem, sample, Jitter(0)))
    run = virtual_time.run(whole_run(Run(config, problems)))
    assert run.rows[0]["rollout_errors/TimeoutError"] == 1, "all tries share one limit"
    assert [group["problem"] for group in run.released[0].trained] == ["0.0.1", "0.0.2"]
