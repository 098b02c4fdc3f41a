"""Environments that misbehave: each fault is counted by its type and tried again, the run goes on without it, and what
failed is never trained on; only when too much fails does the run stop, and shows the first traceback."""

import asyncio
import gc
import math
import sys
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import virtual_time
from orchestrator_fakes import (
    Problem,
    Problems,
    Run,
    begin_version,
    problems_of,
    published,
    quiesce,
    small_config,
    whole_run,
)

from orchestrator.env import Env, StepResult
from orchestrator.watch import LAG_TICK_S
from trireme.core.errors import BadRequest, LimitReached, RoomFailed
from trireme.core.types import SampledSequence

BAD = 1
"""The number of the problem that misbehaves."""
Act = Callable[..., Awaitable[Any]]
Fault = dict[str, Callable[..., Any]]
"""What happens instead of methods, by their names."""


def faulty(fault: Fault, everywhere: bool = False) -> type[Problem]:
    """Returns a kind of problem: number BAD, or each, has a fault in its methods or in its environments' methods."""

    class Faulty(Problem):
        def __init__(self, dataset: Problems, number: int) -> None:
            super().__init__(dataset, number)
            self.spoil(self)

        async def make_env(self, sample: int) -> Env:
            env = await super().make_env(sample)
            self.spoil(env)
            return env

        def spoil(self, owner: object) -> None:
            if self.number == BAD or everywhere:
                vars(owner).update({name: act for name, act in fault.items() if hasattr(owner, name)})

    return Faulty


def gives(value: Any) -> Act:
    async def act(*_: object) -> Any:
        return value

    return act


def raises(error: BaseException) -> Act:
    async def act(*_: object) -> Any:
        raise error

    return act


async def exits(*_: object) -> Any:
    sys.exit("no")


async def hangs(*_: object) -> Any:
    await asyncio.Event().wait()


async def cancels_itself(*_: object) -> Any:
    task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    await task


def errors(run: Run, name: str) -> float:
    return sum(row.get(f"rollout_errors/{name}", 0.0) for row in run.rows)


def trained(run: Run) -> set[int]:
    return {problem for batch in run.batches for problem in problems_of(batch)}


def played(fault: Fault, run: Any = virtual_time.run, **options: Any) -> Run:
    """Under a virtual clock, unless the time that code itself takes matters."""
    settings: dict[str, Any] = {
        "max_steps": 3,
        "retries": 1,
        "generation_timeout_s": 5,
        "stale_policy": "wait",
    } | options
    return run(whole_run(Run(small_config(**settings), Problems(kind=faulty(fault)))))  # type: ignore[no-any-return]


IN_A_ROLLOUT: dict[str, tuple[Fault, str]] = {
    "a step that raises": ({"step": raises(KeyError("x"))}, "KeyError"),
    "a step that hangs": ({"step": hangs}, "TimeoutError"),
    "a next prompt beyond it": ({"step": gives(StepResult(0.0, False, [5000]))}, "OutOfVocabulary"),
    "an observation that raises": ({"initial_observation": raises(OSError("x"))}, "OSError"),
    "environments that cannot be made": ({"make_env": raises(MemoryError())}, "MemoryError"),
    "environments that hang": ({"make_env": hangs}, "TimeoutError"),
}


class Large:
    """An object that a rollout holds."""


async def remembered(then: Act, into: list[weakref.ref[Large]]) -> Any:
    large = Large()
    into.append(weakref.ref(large))
    return await then()


@pytest.mark.parametrize("act", [raises(KeyError("x")), hangs, exits, cancels_itself])
def test_what_a_failed_rollout_had_is_gone_at_once_not_when_the_cycle_collector_comes(act: Act) -> None:
    remembered_refs: list[weakref.ref[Large]] = []
    gc.collect()
    gc.disable()
    try:
        run = played({"step": lambda _action: remembered(act, remembered_refs)})
        assert len(remembered_refs) == 2 if act is hangs else 4, (
            "two rollouts, each tried twice unless its time is over"
        )
        assert all(large() is None for large in remembered_refs[1:]), "the first failure is kept, as text"
        assert run.rows
    finally:
        gc.enable()


async def test_a_batch_that_environments_hold_for_too_long_is_said_to_be_theirs() -> None:
    async with Run(
        small_config(4, timeout_s=0.3, max_steps_off_policy=0), Problems(kind=faulty({"step": hangs}))
    ) as run:
        with pytest.raises(RoomFailed, match="the cause is in the environments: no request waits for a replica"):
            await run.pipeline.next_minibatch(0, 0)


async def test_a_group_that_loses_its_replicas_raises_one_error_in_each_verb_and_logs_no_other() -> None:
    """asyncio logs each exception that nobody has read, with a traceback, when its task is freed."""

    async def lost(_request: object) -> SampledSequence:
        raise RoomFailed("no inference replica is left")

    logged: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: logged.append(context["message"]))
    async with Run(small_config(4)) as run:
        run.sampler.sample = lost  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(RoomFailed, match="no inference replica is left"):
                await run.pipeline.next_minibatch(0, 0)
        with pytest.raises(RoomFailed, match="no inference replica is left"):
            await begin_version(run.pipeline, published(1))
    del run
    await quiesce()
    gc.collect()
    assert logged == []


@pytest.mark.parametrize(("fault", "counted"), IN_A_ROLLOUT.values(), ids=IN_A_ROLLOUT.keys())
def test_a_fault_in_a_rollout_is_counted_tried_again_and_given_up(fault: Fault, counted: str) -> None:
    run = played(fault)
    tries = 1 if counted == "TimeoutError" else 2
    assert errors(run, counted) == 2 * tries, "two rollouts; the tries of each share one time limit"
    assert run.rows[-1]["ledger/failed"] == 1
    assert trained(run) == {0, 2, 3, 4, 5, 6}, "another problem in its place"
    assert run.dataset.cleaned[BAD] == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("bound", [0, 1])
def test_an_answer_that_takes_too_long_fails_its_rollout_long_before_its_limit(bound: int) -> None:
    config = small_config(max_steps=3, retries=1, generation_timeout_s=7200, timeout_s=100, max_steps_off_policy=bound)
    inference = config.inference.model_copy(update={"answer_s": 5.0})
    run = Run(config.model_copy(update={"inference": inference}))
    run.sampler.hold(BAD)
    virtual_time.run(whole_run(run))
    assert errors(run, "AnswerTimeout") == 2 * 2, "tries of two rollouts"
    assert errors(run, "TimeoutError") == 0
    assert run.rows[-1]["ledger/failed"] == 1


@pytest.mark.virtual_time
async def test_environments_that_hang_stop_a_run_for_one_time_limit() -> None:
    class OneHangs(Problem):
        async def make_env(self, sample: int) -> Env:
            if sample == 0 and self.number < 5:
                await asyncio.Event().wait()
            return await super().make_env(sample)

    loop = asyncio.get_running_loop()
    config = small_config(5, 2, retries=2, generation_timeout_s=100, timeout_s=1000, max_steps_off_policy=2)
    started = loop.time()
    async with Run(config, Problems(kind=OneHangs)) as run:
        await run.step(0)
        await run.step(1)
        assert errors(run, "TimeoutError") == 5
    assert loop.time() - started < 110


IN_A_GROUP: dict[str, tuple[Fault, str]] = {
    "group rewards that raise": ({"compute_group_rewards": raises(KeyError("x"))}, "KeyError"),
    "group rewards that hang": ({"compute_group_rewards": hangs}, "TimeoutError"),
    "too few group rewards": ({"compute_group_rewards": gives([(1.0, {})])}, "ValueError"),
    "group rewards of NaN": ({"compute_group_rewards": gives([(math.nan, {}), (1.0, {})])}, "NonFiniteReward"),
    "group rewards of None": ({"compute_group_rewards": gives([(None, {}), (1.0, {})])}, "BadReward"),
    "group metrics of text": ({"compute_group_rewards": gives([(1.0, {"a": "b"}), (1.0, {})])}, "BadStep"),
    "tags that are one text": ({"logging_tags": lambda: "odd"}, "BadStep"),
}


@pytest.mark.parametrize(("fault", "counted"), IN_A_GROUP.values(), ids=IN_A_GROUP.keys())
def test_a_fault_of_the_whole_group_is_counted_and_fails_it(fault: Fault, counted: str) -> None:
    run = played(fault)
    assert errors(run, counted) == 1
    assert run.rows[-1]["ledger/failed"] == 1
    assert BAD not in trained(run)


@pytest.mark.parametrize(
    ("fault", "counted"), [({"cleanup": raises(OSError())}, "OSError"), ({"cleanup": hangs}, "EnvNotClosed")]
)
def test_a_fault_in_cleaning_up_is_counted_and_the_group_is_trained_on(fault: Fault, counted: str) -> None:
    run = played(fault)
    assert errors(run, counted) == 1
    assert BAD in trained(run)


REFUSED = {"step": raises(BadRequest("temperature must be in [0, 2], got 3"))}
"""What the sampler raises in a rollout is raised in the same place."""


def test_a_request_that_replicas_refuse_ends_its_rollout_alone_without_another_try() -> None:
    run = played(REFUSED, retries=2)
    assert errors(run, "BadRequest") == 2
    assert BAD not in trained(run)


async def test_a_run_whose_rollouts_are_all_refused_stops_with_the_reason() -> None:
    config = small_config(max_steps=1, max_filtered_batches=1000)
    with pytest.raises(LimitReached, match=r"100% of the last 32 rollouts .* temperature must be in \[0, 2\], got 3"):
        await whole_run(Run(config, Problems(kind=faulty(REFUSED, everywhere=True))))


async def holds_the_loop(_action: object) -> StepResult:
    time.sleep(4 * LAG_TICK_S)  # noqa: ASYNC251  what it should not do
    return StepResult(1.0, True)


def test_an_environment_that_holds_the_event_loop_is_seen_in_the_row_of_its_step() -> None:
    run = played({"step": holds_the_loop}, run=asyncio.run)
    lag = [row["perf/event_loop_lag"] for row in run.rows]
    assert lag[0] > 2 * LAG_TICK_S
    assert BAD in trained(run), "it is slow, not wrong"
