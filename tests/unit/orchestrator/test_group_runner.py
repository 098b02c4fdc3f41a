"""Environments that misbehave: each fault is counted by its type and tried again, the run goes on without it, and what
failed is never trained on; only when too much fails does the run stop, and shows the first traceback."""

import asyncio
import gc
import json
import math
import sys
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import virtual_time
from orchestrator_fakes import OneStep, Problem, Problems, Run, problems_of, quiesce, small_config, whole_run
from renderer_support import QWEN3, bpe

from orchestrator.env import Env, EnvGroupBuilder, StepResult, StopCondition, Trajectory
from orchestrator.message_env import MessageEnv, MessageStep, RenderedEnv
from orchestrator.watch import LAG_TICK_S
from trireme.core.errors import BadRequest, LimitReached, RoomFailed
from trireme.core.types import SampledSequence
from trireme.renderers import Message, make_renderer

BAD = 1
"""The number of the problem that misbehaves."""
Act = Callable[[], Awaitable[Any]]


@dataclass(frozen=True)
class Fault:
    observe: Act | None = None
    step: Act | None = None
    make: Act | None = None
    group: Act | None = None
    clean: Act | None = None
    tags: Any = ("odd",)


class FaultyEnv(OneStep):
    def __init__(self, problem: Problem, sample: int, fault: Fault) -> None:
        super().__init__(problem, sample)
        self.fault = fault

    async def initial_observation(self) -> tuple[Sequence[int], StopCondition]:
        return await (self.fault.observe() if self.fault.observe else super().initial_observation())

    async def step(self, action: Sequence[int]) -> StepResult:
        return await (self.fault.step() if self.fault.step else super().step(action))


class FaultyProblem(Problem):
    def __init__(self, dataset: Problems, number: int, fault: Fault) -> None:
        super().__init__(dataset, number)
        self.fault = fault

    async def make_envs(self) -> Sequence[Env]:
        if self.fault.make:
            return await self.fault.make()
        return [FaultyEnv(self, sample, self.fault) for sample in range(self.dataset.group_size)]

    async def compute_group_rewards(self, trajectories_G: Sequence[Trajectory]) -> list[tuple[float, dict[str, float]]]:
        return await (self.fault.group() if self.fault.group else super().compute_group_rewards(trajectories_G))

    async def cleanup(self) -> None:
        await super().cleanup()
        if self.fault.clean:
            await self.fault.clean()

    def logging_tags(self) -> Sequence[str]:
        return self.fault.tags


class FaultyOneByOne(FaultyProblem):
    async def make_env(self, sample: int) -> Env:
        envs: Sequence[Env] = await super().make_envs()
        return envs[sample]


class Faulty(Problems):
    def __init__(self, fault: Fault, everywhere: bool = False, one_by_one: bool = False) -> None:
        super().__init__()
        self.fault, self.everywhere = fault, everywhere
        self.builder = FaultyOneByOne if one_by_one else FaultyProblem

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return [
            self.builder(self, n, self.fault) if n == BAD or self.everywhere else Problem(self, n)
            for n in range(3 * index, 3 * index + 3)
        ]


def gives(value: Any) -> Act:
    async def act() -> Any:
        return value

    return act


def raises(error: BaseException) -> Act:
    async def act() -> Any:
        raise error

    return act


async def exits() -> Any:
    sys.exit("no")


async def hangs() -> Any:
    await asyncio.Event().wait()


async def cancels_itself() -> Any:
    task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    await task


def errors(run: Run, name: str) -> float:
    return sum(row.get(f"rollout_errors/{name}", 0.0) for row in run.rows)


def trained(run: Run) -> set[int]:
    return {problem for batch in run.batches for problem in problems_of(batch)}


def played(fault: Fault, one_by_one: bool = False, run: Any = virtual_time.run, **options: Any) -> Run:
    """Under a virtual clock, unless the time that code itself takes matters."""
    settings: dict[str, Any] = {
        "max_steps": 3,
        "retries": 1,
        "generation_timeout_s": 5,
        "stale_policy": "wait",
    } | options
    return run(whole_run(Run(small_config(**settings), Faulty(fault, one_by_one=one_by_one))))  # type: ignore[no-any-return]


TOO_FEW = gives([])
IN_A_ROLLOUT: dict[str, tuple[Fault, str]] = {
    "a step that raises": (Fault(step=raises(KeyError("x"))), "KeyError"),
    "a step that hangs": (Fault(step=hangs), "TimeoutError"),
    "a step that exits": (Fault(step=exits), "EnvExited"),
    "a step that cancels itself": (Fault(step=cancels_itself), "EnvCancelled"),
    "a step without a result": (Fault(step=gives(None)), "BadStep"),
    "a reward of NaN": (Fault(step=gives(StepResult(math.nan, True))), "NonFiniteReward"),
    "a reward of text": (Fault(step=gives(StepResult("1", True))), "BadReward"),  # type: ignore[arg-type]
    "a metric of text": (
        Fault(step=gives(StepResult(1.0, True, metrics={"a": "b"}))),  # type: ignore[dict-item]
        "BadStep",
    ),
    "no tokens": (Fault(observe=gives(([], ()))), "BadPrompt"),
    "tokens that are none": (Fault(observe=gives((["a"], ()))), "BadPrompt"),
    "a token beyond the vocabulary": (Fault(observe=gives(([1, 2000], ()))), "OutOfVocabulary"),
    "a next prompt beyond it": (Fault(step=gives(StepResult(0.0, False, [5000]))), "OutOfVocabulary"),
    "an observation that raises": (Fault(observe=raises(OSError("x"))), "OSError"),
    "environments that cannot be made": (Fault(make=raises(MemoryError())), "MemoryError"),
    "environments that exit": (Fault(make=exits), "EnvExited"),
    "environments that hang": (Fault(make=hangs), "TimeoutError"),
    "too few environments": (Fault(make=TOO_FEW), "RolloutError"),
    "no environments": (Fault(make=gives([None, None])), "RolloutError"),
}


class Chat(MessageEnv):
    """The sampler of these tests gives cut answers: no message can be read from them."""

    def __init__(self, begin: Act, hear: Act) -> None:
        self.begin, self.hear = begin, hear

    async def initial_messages(self) -> Sequence[Message]:
        return await self.begin()  # type: ignore[no-any-return]

    async def step(self, message: Message) -> MessageStep:
        raise AssertionError("nothing is whole")

    async def unreadable(self, message: Message, cut_off: bool) -> MessageStep:
        return await self.hear()  # type: ignore[no-any-return]


ASKS = gives([{"role": "user", "content": "q"}])


def chats(begin: Act = ASKS, hear: Act = ASKS) -> Fault:
    renderer = make_renderer("qwen3", bpe(QWEN3))
    return Fault(make=gives([RenderedEnv(Chat(begin, hear), renderer)] * 2))


IN_A_CHAT: dict[str, tuple[Fault, str]] = {
    "a chat that cannot begin": (chats(begin=raises(OSError("x"))), "OSError"),
    "a chat that never begins": (chats(begin=hangs), "TimeoutError"),
    "messages that are none": (chats(begin=gives([None])), "TypeError"),
    "a message without content": (chats(begin=gives([{"role": "user"}])), "KeyError"),
    "a content that is no text": (chats(begin=gives([{"role": "user", "content": 5}])), "AttributeError"),
    "an answer that nobody can read, and that raises": (chats(hear=raises(ZeroDivisionError())), "ZeroDivisionError"),
    "no result": (chats(hear=gives(None)), "AttributeError"),
    "a chat's reward of NaN": (chats(hear=gives(MessageStep(math.nan, True))), "NonFiniteReward"),
    "a chat's reward of text": (chats(hear=gives(MessageStep("1", True))), "BadReward"),  # type: ignore[arg-type]
    "next messages that are none": (chats(hear=gives(MessageStep(0.0, False, [{}]))), "KeyError"),  # type: ignore[list-item]
}
IN_A_ROLLOUT |= IN_A_CHAT


class Large:
    """Returns the objects that a rollout holds."""


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
        run = played(Fault(step=lambda: remembered(act, remembered_refs)))
        assert len(remembered_refs) == 2 if act is hangs else 4, (
            "two rollouts, each tried twice unless its time is over"
        )
        assert all(large() is None for large in remembered_refs[1:]), "the first failure is kept, as text"
        assert run.rows
    finally:
        gc.enable()


async def test_a_batch_that_environments_hold_for_too_long_is_said_to_be_theirs() -> None:
    async with Run(small_config(4, timeout_s=0.3, max_steps_off_policy=0), Faulty(Fault(step=hangs))) as run:
        with pytest.raises(RoomFailed, match="the cause is in the environments: no request waits for a replica"):
            await run.pipeline.next_minibatch(0, 0)


async def test_a_group_that_loses_its_replicas_raises_one_error_and_logs_no_other() -> None:
    """asyncio logs each exception that nobody has read, with a traceback, when its task is freed."""

    async def lost(_request: object) -> SampledSequence:
        raise RoomFailed("no inference replica is left")

    logged: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: logged.append(context["message"]))
    async with Run(small_config(4)) as run:
        run.sampler.sample = lost  # type: ignore[method-assign]
        with pytest.raises(RoomFailed, match="no inference replica is left"):
            await run.pipeline.next_minibatch(0, 0)
    del run
    await quiesce()
    gc.collect()
    assert logged == []


@pytest.mark.parametrize("one_by_one", [False, True], ids=["make_envs", "make_env"])
@pytest.mark.parametrize(("fault", "counted"), IN_A_ROLLOUT.values(), ids=IN_A_ROLLOUT.keys())
def test_a_fault_in_a_rollout_is_counted_tried_again_and_given_up(fault: Fault, counted: str, one_by_one: bool) -> None:
    if one_by_one and fault.make is TOO_FEW:
        counted = "IndexError"
    run = played(fault, one_by_one)
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
    """One environment hangs in each of five groups of the first batch."""

    class OneHangs(Problem):
        async def make_env(self, sample: int) -> Env:
            if sample == 0 and self.number < 5:
                await asyncio.Event().wait()
            return await super().make_env(sample)

    class Hanging(Problems):
        def get_batch(self, index: int) -> list[EnvGroupBuilder]:
            return [OneHangs(self, 3 * index + i) for i in range(3)]

    loop = asyncio.get_running_loop()
    config = small_config(5, 2, retries=2, generation_timeout_s=100, timeout_s=1000, max_steps_off_policy=2)
    started = loop.time()
    async with Run(config, Hanging()) as run:
        await run.step(0)
        await run.step(1)
        assert errors(run, "TimeoutError") == 5
    assert loop.time() - started < 110


IN_A_GROUP: dict[str, tuple[Fault, str]] = {
    "group rewards that raise": (Fault(group=raises(KeyError("x"))), "KeyError"),
    "group rewards that hang": (Fault(group=hangs), "TimeoutError"),
    "group rewards that exit": (Fault(group=exits), "EnvExited"),
    "too few group rewards": (Fault(group=gives([(1.0, {})])), "ValueError"),
    "group rewards of NaN": (Fault(group=gives([(math.nan, {}), (1.0, {})])), "NonFiniteReward"),
    "group rewards of None": (Fault(group=gives([(None, {}), (1.0, {})])), "BadReward"),
    "group metrics of text": (Fault(group=gives([(1.0, {"a": "b"}), (1.0, {})])), "BadStep"),
    "tags that are one text": (Fault(tags="odd"), "BadStep"),
}


@pytest.mark.parametrize(("fault", "counted"), IN_A_GROUP.values(), ids=IN_A_GROUP.keys())
def test_a_fault_of_the_whole_group_is_counted_and_fails_it(fault: Fault, counted: str) -> None:
    run = played(fault)
    assert errors(run, counted) == 1
    assert run.rows[-1]["ledger/failed"] == 1
    assert BAD not in trained(run)


@pytest.mark.parametrize(
    ("fault", "counted"),
    [
        (Fault(clean=raises(OSError())), "OSError"),
        (Fault(clean=hangs), "EnvNotClosed"),
        (Fault(clean=exits), "EnvExited"),
    ],
)
def test_a_fault_in_cleaning_up_is_counted_and_the_group_is_trained_on(fault: Fault, counted: str) -> None:
    run = played(fault)
    assert errors(run, counted) == 1
    assert BAD in trained(run)


REFUSED = Fault(step=raises(BadRequest("temperature must be in [0, 2], got 3")))
"""What the sampler raises in a rollout is raised in the same place."""


async def test_a_request_that_replicas_refuse_ends_its_rollout_alone_without_another_try() -> None:
    run = await whole_run(Run(small_config(max_steps=3, retries=2), Faulty(REFUSED)))
    assert errors(run, "BadRequest") == 2
    assert BAD not in trained(run)


async def test_a_run_whose_rollouts_are_all_refused_stops_with_the_reason() -> None:
    config = small_config(max_steps=1, max_filtered_batches=1000)
    with pytest.raises(LimitReached, match=r"100% of the last 32 rollouts .* temperature must be in \[0, 2\], got 3"):
        await whole_run(Run(config, Faulty(REFUSED, everywhere=True)))


def test_whatever_is_logged_can_be_recorded() -> None:
    logs = {("a", 1): {2.0}, "b": float("nan")}
    run = Run(small_config(max_steps=1), Faulty(Fault(step=gives(StepResult(1.0, True, logs=logs))), everywhere=True))  # type: ignore[dict-item]
    asyncio.run(whole_run(run))
    assert all(json.loads(line) for line in run.released[0].records)


async def holds_the_loop() -> StepResult:
    time.sleep(4 * LAG_TICK_S)  # noqa: ASYNC251  what it should not do
    return StepResult(1.0, True)


def test_an_environment_that_holds_the_event_loop_is_seen_in_the_row_of_its_step() -> None:
    run = played(Fault(step=holds_the_loop), run=asyncio.run)
    lag = [row["perf/event_loop_lag"] for row in run.rows]
    assert lag[0] > 2 * LAG_TICK_S
    assert BAD in trained(run), "it is slow, not wrong"
