"""What environments hold is given back: each that was made is closed, once, however its rollout ends."""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import virtual_time
from orchestrator_fakes import Run, quiesce, small_config, whole_run
from watched_envs import Act, Watched, WatchedProblem, WatchedProblems, WatchedTogether, at, hangs, nothing, raises

from orchestrator.env import Env, EnvGroup
from orchestrator.lifetimes import contained, end_deadline_s
from orchestrator.rollout import EnvExited
from trireme.config import Config
from trireme.config.schema import EvalConfig
from trireme.core.errors import LimitReached

BUILDERS = [WatchedProblem, WatchedTogether]


def config_of(**options: Any) -> Config:
    defaults = {"max_steps": 1, "batch_size": 1, "max_steps_off_policy": 0, "stale_policy": "wait", "timeout_s": 1000}
    return small_config(**{**defaults, "close_s": 5.0, **options})


def played(
    act: Act = nothing, size: int = 2, builder: Any = WatchedProblem, **options: Any
) -> tuple[Run, WatchedProblems]:
    dataset = WatchedProblems(act, size, builder)
    return virtual_time.run(whole_run(Run(config_of(group_size=size, **options), dataset))), dataset


@pytest.mark.parametrize(
    ("builder", "failing", "expected"),
    [
        (WatchedProblem, {"sample": 7}, 16 + 2),
        (WatchedProblem, {}, 16 * 3),
        (WatchedTogether, {"sample": 7}, 16 * 3),
    ],
)
def test_a_retry_makes_an_environment_or_takes_a_spare(builder: Any, failing: dict[str, int], expected: int) -> None:
    act = at("initial_observation", raises, problem=0, **failing)
    _, dataset = played(act, 16, builder, retries=2, max_failure_rate=1.0)
    made_for_problem = sum(count for (problem, _), count in dataset.made_for.items() if problem == 0)
    assert made_for_problem == expected, "16 rollouts of problem 0; not 528"
    dataset.assert_each_closed_once()


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.virtual_time
async def test_an_environment_is_closed_when_its_rollout_ends_not_when_its_group_does(builder: Any) -> None:
    dataset = WatchedProblems(at("step", asyncio.Event().wait, sample=1), builder=builder)
    async with Run(config_of(), dataset):
        await quiesce()
        assert dict(dataset.closed) == {0: 1}
        assert not dataset.cleaned
    dataset.assert_each_closed_once()
    assert dataset.cleaned == {0: 1}


def test_before_a_retry_the_environment_of_the_failed_try_is_closed() -> None:
    open_now: Counter[int] = Counter()
    open_counts = []

    async def act(env: Watched, method: str) -> None:
        if method == "initial_observation":
            open_now[env.sample] += 1
            open_counts.append(open_now[env.sample])
            await (raises() if env.problem == 0 else nothing(env, method))
        if method == "close":
            await asyncio.sleep(2)
            open_now[env.sample] -= 1

    played(act, retries=2)
    assert (len(open_counts), max(open_counts)) == (3 * 2 + 2, 1)


@pytest.mark.parametrize(
    ("act", "counted", "message"),
    [
        (raises, "OSError", "the tool backend is down"),
        (hangs, "EnvNotClosed", "took longer than env.close_s = 5 s"),
    ],
)
def test_a_close_that_fails_is_counted_and_named(
    act: Any, counted: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "orchestrator"):
        run, dataset = played(at("close", act, problem=0, sample=1))
    assert run.rows[0][f"rollout_errors/{counted}"] == 1
    assert [group["problem"] for group in run.released[0].trained] == ["0.0.0"]
    (warning,) = [record.getMessage() for record in caplog.records if "close()" in record.getMessage()]
    assert "environment fake, problem 0.0.0, rollout 1" in warning
    assert message in warning
    dataset.assert_each_closed_once()


@pytest.mark.virtual_time
async def test_a_close_that_does_not_let_itself_be_cancelled_holds_nothing_up() -> None:
    async def stays() -> None:
        for _ in range(5):
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue

    async with Run(config_of(), WatchedProblems(at("close", stays, problem=0, sample=1))) as run:
        await run.step(0)
        assert asyncio.get_running_loop().time() < 10


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("method", ["initial_observation", "step", "close"])
@pytest.mark.virtual_time
async def test_a_stop_closes_all_and_waits_for_it(builder: Any, method: str) -> None:
    async def act(env: Watched, called: str) -> None:
        if called == "close":
            await asyncio.sleep(3)
        elif called == method:
            await hangs()

    dataset = WatchedProblems(act, builder=builder)
    async with Run(config_of(), dataset):
        await asyncio.sleep(1)
    assert dataset.whole_closes == dataset.created, "the stop waited until they were closed"
    dataset.assert_each_closed_once()


@pytest.mark.virtual_time
async def test_a_stop_is_over_in_time_though_nothing_can_be_closed_or_cleaned_up() -> None:
    class Hanging(WatchedProblem):
        async def cleanup(self) -> None:
            await hangs()

    run = Run(config_of(close_s=5), WatchedProblems(at("close", hangs), builder=Hanging))
    run.sampler.hold(0)
    async with run:
        await quiesce()
        before = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - before <= 10, "once for environments, once for cleanup()"


@pytest.mark.virtual_time
async def test_a_stop_ends_an_evaluation_without_training_too() -> None:
    held_out = WatchedProblems()
    config = config_of().model_copy(update={"eval": EvalConfig(every=1, samples=2)})
    run = Run(config, WatchedProblems(), held_out=[held_out])
    run.sampler.hold(0)
    run.sampler.version = 3
    evaluation = asyncio.create_task(run.pipeline.evaluate(3, []))
    await quiesce()
    assert held_out.created > len(held_out.closed), "some are being played"
    await run.pipeline.stop()
    held_out.assert_each_closed_once()
    with pytest.raises(asyncio.CancelledError):
        await evaluation


def test_the_driver_waits_for_as_long_as_the_slowest_environment_may_take_also_in_evaluations() -> None:
    config = config_of(close_s=5)
    slower = config.env[0].model_copy(update={"name": "slower", "close_s": 20.0})
    held_out = EvalConfig(every=1, env=({"name": "slower", "args": {"a": 1}},))
    config = config.model_copy(update={"env": (*config.env, slower), "eval": held_out})
    assert [env.close_s for env in config.eval_envs] == [20]
    assert end_deadline_s(config) == 60


def test_a_close_that_is_no_coroutine_is_called_too(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(Watched, "close", lambda env: closed.append(env.number))
    run, dataset = played()
    assert sorted(closed) == list(range(dataset.created))
    assert not [name for name in run.rows[0] if name.startswith("rollout_errors/")]


class Overrides(EnvGroup):
    """Made before there was `make_env`: what it overrides holds."""

    async def make_envs(self) -> Sequence[Env]:
        return [Watched(self.make.keywords["dataset"], 0, sample) for sample in range(self.size)]  # type: ignore[attr-defined]


def test_the_way_that_a_class_defines_itself_holds_not_one_that_it_inherits() -> None:
    def builder(dataset: WatchedProblems, number: int) -> EnvGroup:
        return Overrides(partial(Env, dataset=dataset), 2)  # type: ignore[call-arg]  # its make would raise

    _, dataset = played(builder=builder)
    dataset.assert_each_closed_once()


def test_what_is_no_environment_is_refused_by_name() -> None:
    class Odd(WatchedProblem):
        async def make_env(self, sample: int) -> Env:
            return await super().make_env(sample) if self.number else None  # type: ignore[return-value]

    run, dataset = played(builder=Odd)
    assert run.rows[0]["rollout_errors/RolloutError"] == 2 * 3
    assert "gave None; expected an Env" in run.pipeline._run_limits.first_failure
    dataset.assert_each_closed_once()


def at_once(*_: object) -> tuple[()]:
    """A method by `def`."""
    return ()


REFUSED = "at_once() returned a tuple that cannot be awaited; expected a coroutine. Define it by `async def`"


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (Watched, "initial_observation"),
        (Watched, "step"),
        (WatchedProblem, "make_env"),
        (WatchedTogether, "make_envs"),
        (WatchedProblem, "compute_group_rewards"),
    ],
)
def test_a_method_that_is_no_coroutine_is_refused(kind: type, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, method, at_once, raising=False)
    builder = WatchedProblem if kind is Watched else kind
    with pytest.raises(LimitReached, match=re.escape(REFUSED)):
        played(builder=builder, max_failure_rate=1.0, max_filtered_batches=1)


def test_a_cleanup_that_is_no_coroutine_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(WatchedProblem, "cleanup", at_once)
    played()
    assert REFUSED in caplog.text


def test_a_wrong_number_of_environments_is_refused_and_they_are_closed() -> None:
    class TooMany(WatchedTogether):
        async def make_envs(self) -> Sequence[Env]:
            extra = self.number == 0
            return [Watched(self.dataset, self.number, sample) for sample in range(2 + extra)]

    run, dataset = played(builder=TooMany)
    assert run.rows[0]["rollout_errors/RolloutError"] == 2 * 3
    dataset.assert_each_closed_once()


async def cancels_its_own_task() -> None:
    asyncio.current_task().cancel()  # type: ignore[union-attr]
    await asyncio.sleep(1)


def by(error: BaseException) -> Any:
    async def act() -> None:
        raise error

    return act


class Custom(BaseException):
    """Of a library that wants to pass all handlers."""


ENDS_LOOPS: dict[str, tuple[Any, str]] = {
    "KeyboardInterrupt": (by(KeyboardInterrupt()), "EnvExited"),
    "SystemExit": (by(SystemExit("no")), "EnvExited"),
    "GeneratorExit": (by(GeneratorExit()), "EnvExited"),
    "one of its own": (by(Custom()), "EnvExited"),
    "CancelledError": (by(asyncio.CancelledError()), "EnvCancelled"),
    "its own task is cancelled": (cancels_its_own_task, "EnvCancelled"),
}


@pytest.mark.parametrize("method", ["initial_observation", "step", "close"])
@pytest.mark.parametrize(("act", "counted"), ENDS_LOOPS.values(), ids=ENDS_LOOPS.keys())
def test_what_is_no_exception_fails_a_rollout_not_the_loop(act: Any, counted: str, method: str) -> None:
    run, dataset = played(at(method, act, problem=0), retries=1)
    tries = 1 if method == "close" else 2
    assert run.rows[0][f"rollout_errors/{counted}"] == 2 * tries
    assert [group["problem"] for group in run.released[0].trained] == ["0.0.0" if method == "close" else "0.0.1"]
    dataset.assert_each_closed_once()


@pytest.mark.parametrize("name", ["make_env", "compute_group_rewards", "cleanup"])
@pytest.mark.parametrize(("act", "counted"), ENDS_LOOPS.values(), ids=ENDS_LOOPS.keys())
def test_nor_does_it_in_a_builder(act: Any, counted: str, name: str) -> None:
    class Ending(WatchedProblem):
        pass

    async def method(self: WatchedProblem, *args: Any) -> Any:
        return await (act() if self.number == 0 else getattr(WatchedProblem, name)(self, *args))

    setattr(Ending, name, method)
    run, dataset = played(builder=Ending, retries=0)
    assert run.rows[0][f"rollout_errors/{counted}"] == (2 if name == "make_env" else 1)
    dataset.assert_each_closed_once()


@pytest.mark.virtual_time
async def test_a_dataset_that_interrupts_ends_the_run_with_an_error_not_the_loop() -> None:
    class Interrupting(WatchedProblems):
        def get_batch(self, index: int) -> Any:
            raise KeyboardInterrupt

    run = Run(config_of(), Interrupting())
    async with run:
        with pytest.raises(EnvExited, match="KeyboardInterrupt"):
            await run.pipeline.next_minibatch(0, 0)


async def test_work_that_is_thrown_away_is_no_exit() -> None:
    work = contained(hangs())
    task = asyncio.ensure_future(work)
    await quiesce()
    work.close()  # raises GeneratorExit in it
    assert work.cr_frame is None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
