"""The pipeline with a sampler in the same process: batches, back-pressure, failures, limits, metrics."""

import asyncio
import math
import threading
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest
import virtual_time
from orchestrator_fakes import (
    FakeSampler,
    OneStep,
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

from orchestrator.advantages import keep_whole
from orchestrator.env import StepResult
from orchestrator.limits import MIN_WINDOW
from orchestrator.rollout import RolloutLimits
from trireme.core.batch import LayOut, TokenBatch
from trireme.core.errors import LimitReached, ProvenanceError, RoomFailed, WeightsRefused
from trireme.core.prefixes import Forest, Numbers
from trireme.core.sampler import ReplicaStats
from trireme.core.types import SampledSequence, SampleRequest


def test_a_run_consumes_each_problem_once_in_order() -> None:
    run = asyncio.run(whole_run(Run(small_config())))
    consumed = [problems_of(batch) for batch in run.batches]
    assert consumed == [[2 * s, 2 * s, 2 * s + 1, 2 * s + 1] for s in range(5)]
    assert run.rows[-1]["ledger/trained"] == run.rows[-1]["ledger/dispatched"] == 10, "nothing is sampled in vain"
    assert all(count == 1 for count in run.dataset.cleaned.values())


def test_group_rewards_are_centred_into_advantages() -> None:
    run = asyncio.run(whole_run(Run(small_config(max_steps=1))))
    batch = run.batches[0][0].batch
    assert batch.columns["advantages"][batch.columns["mask"] == 1].tolist() == [-0.5, 0.5, -0.5, 0.5]


async def test_the_loop_turns_while_a_minibatch_is_laid_out() -> None:
    """The thread waits for what only the loop can give it: laid out on the loop, it would wait for ever."""
    turned = threading.Event()

    def keep(forest: Forest, sequences: Numbers, lay_out: LayOut) -> TokenBatch:
        assert turned.wait(30), "the loop stood still"
        return keep_whole(forest, sequences, lay_out)

    async with Run(small_config()) as run:
        run.pipeline._keep = keep
        await quiesce()
        minibatch = asyncio.create_task(run.pipeline.next_minibatch(0, 0))
        for _ in range(10):
            await asyncio.sleep(0)
        turned.set()
        assert len((await minibatch).batch) == 4


@pytest.mark.parametrize(("substeps", "minibatches"), [(1, 4), (2, 1), (2, 2), (4, 1)])
def test_streamed_minibatches_hold_the_same_groups(substeps: int, minibatches: int) -> None:
    whole = asyncio.run(whole_run(Run(small_config(4, 3, max_steps_off_policy=0))))
    parts = asyncio.run(whole_run(Run(small_config(4, 3, substeps, minibatches, max_steps_off_policy=0))))
    for (one,), many in zip(whole.batches, parts.batches, strict=True):
        assert len(many) == substeps * minibatches
        assert [m.last for m in many] == ([False] * (minibatches - 1) + [True]) * substeps
        np.testing.assert_array_equal(np.concatenate([m.batch.tokens for m in many]), one.batch.tokens)
        advantages = np.concatenate([m.batch.columns["advantages"] for m in many])
        np.testing.assert_array_equal(advantages, one.batch.columns["advantages"])
        assert sum(m.divisor for m in many) == one.divisor


async def test_a_streamed_minibatch_does_not_wait_for_the_batch() -> None:
    run = Run(small_config(2, minibatches=2, max_steps_off_policy=0))
    straggler = run.sampler.hold(0)
    async with run:
        first = await run.pipeline.next_minibatch(0, 0)
        assert (problems_of([first]), first.last) == ([1, 1], False)
        straggler.set()
        second = await run.pipeline.next_minibatch(0, 0)
        assert (problems_of([second]), second.last) == ([0, 0], True)


async def test_a_trainer_that_is_free_gets_all_groups_that_have_finished() -> None:
    """Of 32 groups of 2 rollouts a part has at least 8, so that a shard has 16 rollouts."""
    run = Run(small_config(32, minibatches="auto", max_steps_off_policy=0))
    gates = [run.sampler.hold(problem) for problem in range(25)]
    async with run:
        first = asyncio.create_task(run.pipeline.next_minibatch(0, 0))
        await quiesce()
        assert not first.done(), "seven have finished"
        gates[24].set()
        assert problems_of([await first]) == [n for n in range(24, 32) for _ in range(2)]
        for straggler in gates[1:24]:
            straggler.set()
        await quiesce()
        second = await run.pipeline.next_minibatch(0, 0)
        assert problems_of([second]) == [n for n in range(1, 24) for _ in range(2)]
        last = asyncio.create_task(run.pipeline.next_minibatch(0, 0))
        await quiesce()
        assert not last.done()
        gates[0].set()
        assert problems_of([await last]) == [0, 0], "the last part is what lacks"
        assert [batch.last for batch in (await first, second, await last)] == [False, False, True]


@pytest.mark.parametrize("substeps", [1, 2])
@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_batch_that_is_there_or_deterministic_comes_whole(substeps: int, deterministic: bool) -> None:
    options = {"minibatches": "auto", "deterministic": deterministic, "max_steps_off_policy": 0}
    run = Run(small_config(16, 2, substeps, **options))
    async with run:
        for step in range(2):
            if not deterministic:
                await quiesce()
            await run.step(step)
    assert [len(minibatches) for minibatches in run.batches] == [substeps, substeps]


async def test_no_more_rollouts_are_in_flight_than_may_be_and_each_that_ends_makes_room() -> None:
    second_may_end = asyncio.Event()

    async def waits(problem: Problem, sample: int) -> float:
        if sample == 1:
            await second_may_end.wait()
        return float(sample)

    async with Run(small_config(4, max_concurrent=3), Problems(waits)) as run:
        prompts_at_step: list[list[int]] = []
        for _ in range(2):
            await quiesce()
            prompts_at_step.append([request.prompt[0] for request in run.sampler.requests])
            second_may_end.set()
        assert prompts_at_step[0] == [0, 0, 1, 1], "one of the first two has ended, and two fit again"
        assert set(prompts_at_step[1]) == set(range(8))


async def test_a_group_that_waits_for_room_gets_the_floor_of_its_start() -> None:
    run = Run(small_config(2, 3, max_concurrent=2, stale_policy="wait"))
    second = run.sampler.hold(2)
    async with run:
        await run.step(0)
        await quiesce()
        second.set()
        await run.step(1)
    assert [group["floor"] for released in run.released for group in released.trained] == [0, 0, 0, 1]


def test_waiting_for_room_does_not_count_as_time_of_a_rollout_but_all_its_turns_do() -> None:
    class TwoTurns(OneStep):
        turns = 0

        async def step(self, action: Sequence[int]) -> StepResult:
            self.turns += 1
            await asyncio.sleep(4 if self.problem.number else 6)
            return await super().step(action) if self.turns == 2 else StepResult(0.0, False, [*action, 0, 0])

    config = small_config(2, 1, max_concurrent=2, generation_timeout_s=10, retries=0, timeout_s=1000)
    run = virtual_time.run(whole_run(Run(config, Problems(env=TwoTurns))))
    assert [group["problem"] for group in run.released[0].trained] == ["0.0.1", "0.0.2"], "8 s each, one by one"
    assert run.rows[0]["rollout_errors/TimeoutError"] == 2, "the first problem took twice 6 s"


async def test_a_source_of_load_that_fails_ends_the_run() -> None:
    async def stats() -> dict[int, ReplicaStats]:
        raise RoomFailed("inference replica 0 does not say what it has to do")

    run = Run(small_config())
    run.sampler.stats = stats
    run.sampler.hold(0)
    async with run:
        with pytest.raises(RoomFailed, match="does not say"):
            await run.step(0)


def test_the_limit_follows_the_load_and_stands_in_the_row() -> None:
    class Busy(FakeSampler):
        looks = 0

        async def stats(self) -> dict[int, ReplicaStats]:
            self.looks += 1
            return {0: ReplicaStats(8, 1, 0.75, preemptions=3 * self.looks)}

        async def sample(self, request: SampleRequest) -> SampledSequence:
            await asyncio.sleep(5)
            return await super().sample(request)

    config = small_config(50, 2, timeout_s=1000)
    inference = config.inference.model_copy(update={"max_num_seqs": 64})  # fewer than there are rollouts
    run = virtual_time.run(whole_run(Run(config.model_copy(update={"inference": inference}), sampler=Busy())))
    assert run.rows[0]["perf/kv_used"] == 0.75
    assert run.rows[0]["perf/preemptions"] % 3 == 0 < run.rows[0]["perf/preemptions"]
    assert 2 <= run.rows[0]["perf/max_concurrent"] <= 64
    assert run.rows[1]["perf/max_concurrent"] < run.rows[0]["perf/max_concurrent"]


@pytest.mark.parametrize("mixes", [False, True])
async def test_tokens_know_their_versions_over_an_update_and_the_row_says_how_many_are_mixed(mixes: bool) -> None:
    run = Run(small_config(2, 2, stale_policy="wait"))
    run.sampler.mixes = mixes
    straggler = run.sampler.hold(2)
    async with run:
        await run.step(0)
        straggler.set()
        await run.step(1)
    (minibatch,) = run.batches[1]
    assert minibatch.batch.datum(0).loss_fn_inputs["versions"].tolist() == [-1, 0, 1]
    assert [i.version for i in minibatch.provenance.identities] == [0, 1]
    assert run.rows[1]["off_policy/versions_spanned"] == 2
    sampled = (minibatch.batch.columns["versions"] >= 0).sum()
    shares = [0.0, (sampled - len(minibatch.batch)) / sampled if mixes else 0.0]
    assert [row["off_policy/mixed_frac"] for row in run.rows] == shares


async def test_an_update_does_not_hold_up_the_driver() -> None:
    async with Run(small_config(2, 5)) as run:
        update = run.sampler.hold_update(1)
        await run.step(0)
        await quiesce()
        assert (run.sampler.version, len(run.sampler.requests)) == (0, 8), "two batches' worth, no slot is free"
        await run.pipeline.next_minibatch(1, 0)
        update.set()
        await quiesce()
        assert (run.sampler.version, len(run.sampler.requests)) == (1, 12)


async def test_an_update_that_does_not_end_names_the_replicas_that_lack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme.config.schema.ANSWER_S", 0.0)
    monkeypatch.setattr("trireme.config.Config.patience_s", 0.0)
    async with Run(small_config(2, 5, update_s=0.05)) as run:
        run.sampler.hold_update(1)
        await run.step(0)
        with pytest.raises(RoomFailed, match=r"update to version 1 \(timeouts.update_s .*acknowledged: \{0: 0\}"):
            await run.step(1)


@pytest.mark.parametrize(
    ("version", "max_steps", "bound"), [(0, 5, 1), (1, 1, 1), (1, 5, 0)], ids=["first", "last", "synchronous"]
)
async def test_an_update_ends_first_where_nothing_goes_on(version: int, max_steps: int, bound: int) -> None:
    run = Run(small_config(2, max_steps, max_steps_off_policy=bound))
    update = run.sampler.hold_update(version)
    async with run if version else nullcontext():
        verb = asyncio.create_task(run.step(0) if version else begin_version(run.pipeline, published(0)))
        await quiesce()
        assert (run.sampler.version, verb.done()) == (version - 1, False)
        update.set()
        await verb
        assert run.sampler.version == version
    await run.pipeline.stop()


@pytest.mark.parametrize(("verb", "args"), [("release", [0]), ("next_minibatch", [1, 0]), ("end_version", [])])
async def test_a_failed_update_is_raised_by_the_next_verb(verb: str, args: list[int]) -> None:
    async with Run(small_config(2, 5)) as run:
        await run.pipeline.next_minibatch(0, 0)
        run.sampler.update_error = WeightsRefused("canary of version 1")
        await begin_version(run.pipeline, published(1))
        await quiesce()
        with pytest.raises(WeightsRefused, match="canary of version 1"):
            await getattr(run.pipeline, verb)(*args)


async def test_cleaning_up_is_not_interrupted_by_a_drop() -> None:
    class FirstIsSlow(Problem):
        async def cleanup(self) -> None:
            if self.number == 0:
                await cleaning_may_end.wait()
            await super().cleanup()

    cleaning_may_end = asyncio.Event()
    run = Run(small_config(1, 4, stale_policy="drop"), Problems(kind=FirstIsSlow))
    async with run:
        await run.step(0)
        await run.step(1)
        assert run.rows[1]["off_policy/expired_running"] == 1
        await quiesce()
        assert run.dataset.cleaned[0] == 0
        cleaning_may_end.set()
        await quiesce()
        assert run.dataset.cleaned[0] == 1, "it has ended"
        await run.step(2)
        await run.step(3)


def test_a_group_goes_on_without_rollouts_it_can_spare() -> None:
    async def last_fails(problem: Problem, sample: int) -> float:
        return math.nan if sample == 3 and problem.number == 1 else float(sample)

    config = small_config(max_steps=1, retries=0, group_size=4)
    run = asyncio.run(whole_run(Run(config, Problems(last_fails, group_size=4))))
    assert problems_of(run.batches[0]) == [0, 0, 0, 0, 1, 1, 1]
    assert run.rows[0]["rollout_errors/NonFiniteReward"] == 1


def test_failed_groups_are_replaced() -> None:
    async def nan_for_one(problem: Problem, sample: int) -> float:
        return math.nan if problem.number == 1 else float(sample)

    run = asyncio.run(whole_run(Run(small_config(max_steps=2, retries=1), Problems(nan_for_one))))
    assert sorted(set(problems_of(run.batches[0] + run.batches[1]))) == [0, 2, 3, 4]
    assert run.rows[-1]["ledger/failed"] == 1
    assert sum(row.get("rollout_errors/NonFiniteReward", 0) for row in run.rows) == 4


def test_too_many_failures_stop_the_run_with_the_first() -> None:
    async def fails(problem: Problem, sample: int) -> float:
        raise ZeroDivisionError(f"problem {problem.number}")

    run = Run(small_config(max_steps=1, retries=1, max_filtered_batches=1000), Problems(fails))
    with pytest.raises(LimitReached, match=r"(?s)100% .* environment fake .*in fails\n.*ZeroDivisionError: problem 0"):
        asyncio.run(whole_run(run))
    assert MIN_WINDOW <= len(run.sampler.requests) // 2 <= MIN_WINDOW + 8


def test_a_refused_prompt_is_counted_once_and_not_held_against_the_environment() -> None:
    def wordy(dataset: Problems, number: int) -> Problem:
        return Problem(dataset, number, padding=9 * (number % 3 == 1))

    config = small_config(2, 10, max_failure_rate=0.0)
    run = asyncio.run(whole_run(Run(config, Problems(kind=wordy), limits=RolloutLimits(1000, 10))))
    failed = run.rows[-1]["ledger/failed"]
    assert failed >= 5
    assert sum(row.get("rollout_errors/PromptTooLong", 0) for row in run.rows) == 2 * failed


def test_groups_of_equal_rewards_are_replaced_and_counted() -> None:
    async def equal_for_odd(problem: Problem, sample: int) -> float:
        return 4.0 if problem.number % 2 else float(sample)

    config = small_config(2, 2, remove_constant_reward_groups=True, max_steps_off_policy=0, max_filtered_batches=1)
    run = asyncio.run(whole_run(Run(config, Problems(equal_for_odd))))  # never two in a row: the limit is not reached
    assert [sorted(set(problems_of(batch))) for batch in run.batches] == [[0, 2], [4, 6]]
    assert run.rows[0]["off_policy/filtered"] == 1
    assert run.rows[0]["env/even/reward/total"] == 10.5
    assert run.rows[0]["env/odd/reward/total"] == 14.0, "rewards are taken before filtering"
    assert run.rows[0]["env/all/by_group/frac_all_good"] == pytest.approx(1 / 3)


async def test_a_limit_reached_while_training_waits_for_the_end_of_the_step() -> None:
    async def train() -> None:
        for _ in range(1000):  # turns of the event loop: enough for all that can happen to happen
            await asyncio.sleep(0)

    async def equal_from_two_on(problem: Problem, sample: int) -> float:
        return float(sample) if problem.number < 2 else 1.0

    config = small_config(remove_constant_reward_groups=True, max_filtered_batches=1)
    async with Run(config, Problems(equal_from_two_on)) as run:
        run.train = train  # type: ignore[method-assign]
        await run.step(0)
        with pytest.raises(LimitReached, match="last 2 groups"):
            await run.step(1)
    assert len(run.rows) == 1
    assert run.pipeline.snapshot().ledger["released"] == 1


async def test_a_token_older_than_the_floor_is_an_error() -> None:
    async with Run(small_config(max_steps_off_policy=0)) as run:
        await run.step(0)
        run.sampler.label_with = 0
        with pytest.raises(ProvenanceError, match=r"had version 1 or a later one, but .* was sampled by version 0"):
            await run.step(1)


async def test_the_deadline_says_what_is_missing() -> None:
    run = Run(small_config(2, timeout_s=1.0))
    for problem in range(1, 5):
        run.sampler.hold(problem)
    reason = (
        r"for 2 finished groups of batch 0; the cause is in the inference replicas, which have 6 unanswered "
        r"requests.*'running': 3.*'finished': 1.*problem .*0\.0\.1 .*\{0: 0\}"
    )
    async with run:
        with pytest.raises(RoomFailed, match=reason):
            await run.pipeline.next_minibatch(0, 0)


async def test_a_batch_that_comes_late_while_no_replica_serves_is_said_to_wait_for_one() -> None:
    run = Run(small_config(4, timeout_s=0.5))
    for problem in range(8):
        run.sampler.hold(problem)
    async with run:
        await quiesce()
        run.sampler.changed({})
        with pytest.raises(RoomFailed, match="no inference replica serves, and 16 requests wait for one"):
            await run.pipeline.next_minibatch(0, 0)


async def test_minibatches_are_asked_for_in_order() -> None:
    async with Run(small_config(4, substeps=2)) as run:
        for step, substep in ((1, 0), (0, 1)):
            with pytest.raises(ValueError, match="expected step 0, substep 0"):
                await run.pipeline.next_minibatch(step, substep)


def test_the_row_of_a_step() -> None:
    run = asyncio.run(whole_run(Run(small_config(max_steps=1))))
    row = run.rows[0]
    expected = {
        "reward/total": 10.5,
        "env/all/reward/total": 10.5,
        "env/fake/reward/total": 10.5,
        "env/fake/turns_per_episode": 1.0,
        "env/fake/ac_tokens_per_turn": 1.0,
        "env/fake/ob_tokens_per_turn": 2.0,
        "env/fake/length_cut": 0.0,
        "env/fake/by_group/frac_mixed": 1.0,
        "env/fake/asked": 1.0,
        "env/fake/shared": 2.0,
        "stop/stop": 1.0,
        "stop/length": 0.0,
        "off_policy/mean": 0.0,
        "off_policy/in_flight": 0.0,
        "ledger/trained": 2.0,
        "perf/rollouts": 4.0,
        "perf/tokens": 4.0,
    }
    assert {name: row[name] for name in expected} == expected
    assert row["perf/inference_idle_s"] >= 0
    assert {"perf/event_loop_lag", "off_policy/resampled", "ledger/active"} <= row.keys()
