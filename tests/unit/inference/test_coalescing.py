"""A scheduler that keeps tokens back: nothing is lost, nothing waits for long, and no message crosses a pause."""

import math
from collections.abc import Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import ManualClock
from vllm.config import SchedulerConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists

import inference.coalescing
from inference.coalescing import (
    END_SHARE,
    FEW,
    HOLD_S,
    CoalescingAsyncScheduler,
    CoalescingScheduler,
    HeldOutputs,
    can_wait,
)
from inference.engine import coalesce_outputs

FINAL = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)


def logprobs_of(tokens: Sequence[int], columns: int = 1) -> LogprobsLists:
    ids = np.array([[token, *range(columns - 1)] for token in tokens])
    return LogprobsLists(ids, -ids.astype(np.float32), np.array(tokens) + 1)


def output(name: str, tokens: Sequence[int], *, columns: int = 1, **options: Any) -> EngineCoreOutput:
    return EngineCoreOutput(name, list(tokens), new_logprobs=logprobs_of(tokens, columns), **options)


def contents(combined: EngineCoreOutput) -> tuple[list[int], list[int], list[float]]:
    return (
        combined.new_token_ids,
        combined.new_logprobs.logprob_token_ids[:, 0].tolist(),
        combined.new_logprobs.logprobs[:, 0].tolist(),
    )


class TestHeldOutputs:
    @given(
        steps=st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 3)), max_size=4)),
        takes=st.lists(st.sampled_from(["nothing", "ended", "all"])),
    )
    def test_all_tokens_come_in_order_each_once(
        self, steps: list[list[tuple[int, bool, int]]], takes: list[str]
    ) -> None:
        """Of four places, in each of which one request follows the other; those of place 3 may not wait. A step takes
        .01 s."""
        withheld, number = HeldOutputs(), 0
        sent: dict[str, list[int]] = {}
        tokens_by_name: dict[str, list[int]] = {}
        finished: set[str] = set()
        reported: set[str] = set()
        generations = [0] * 4

        def note(outputs: Sequence[EngineCoreOutput]) -> None:
            for item in outputs:
                tokens, named, logprobs = contents(item)
                assert named == tokens
                assert logprobs == [-token for token in tokens]
                assert item.request_id not in reported, "nothing follows an end"
                tokens_by_name.setdefault(item.request_id, []).extend(tokens)
                reported.update([item.request_id] if item.finished else [])

        held_ends: set[str] = set()
        started: set[str] = set()
        for second, (step, taking) in enumerate(zip_longest(steps, takes[: len(steps)], fillvalue="nothing")):
            outputs = []
            for place, ends, columns in {place: (place, ends, columns) for place, ends, columns in step}.values():
                number += 1
                name = f"{place}/{generations[place]}"
                generations[place] += ends
                finished.update([name] if ends else [])
                sent.setdefault(name, []).append(number)
                reason = FinishReason.STOP if ends else None
                outputs.append(output(name, [number], columns=columns, finish_reason=reason))
            going = withheld.pass_on(outputs, lambda name: name[0] != "3", second * 0.01)
            lone_ends = {item.request_id for item in outputs if item.finished and item.request_id not in started}
            at_once = {item.request_id for item in outputs if item.request_id[0] == "3"} | lone_ends
            assert {item.request_id for item in going} == at_once
            held_ends |= {item.request_id for item in outputs if item.finished} - at_once
            started |= {item.request_id for item in outputs}
            assert withheld.has_ended == bool(held_ends)
            note(going)
            if taking == "ended":
                ended = withheld.take_ended(math.inf)
                assert {item.request_id for item in ended} == held_ends
                note(ended)
            elif taking == "all":
                note(withheld.take(sent))
            if taking != "nothing":
                held_ends = set()
        note(withheld.take(()))
        assert reported == finished
        assert tokens_by_name == sent
        assert not withheld
        assert not withheld.has_ended

    def test_ends_wait_for_each_other_for_a_share_of_their_time(self) -> None:
        withheld = HeldOutputs()
        for name, first_at in (("slow", 0.0), ("quick", 9.0)):
            assert withheld.pass_on([output(name, [1])], lambda _: True, first_at) == []
        stop = FinishReason.STOP
        assert withheld.pass_on([output("slow", [2], finish_reason=stop)], lambda _: True, 10.0) == []
        assert withheld.take_ended(10.0 + 0.99 * HOLD_S) == []
        assert withheld.pass_on([output("quick", [3], finish_reason=stop)], lambda _: True, 10.01) == []
        assert withheld.take_ended(10.01 + 0.99 * END_SHARE * 1.01) == []
        ended = withheld.take_ended(10.01 + END_SHARE * 1.01)
        assert [(item.request_id, item.new_token_ids) for item in ended] == [("slow", [1, 2]), ("quick", [1, 3])]
        assert not withheld

    def test_what_came_with_a_first_token_is_kept(self) -> None:
        withheld, prompt = HeldOutputs(), cast(Any, object())
        events = [EngineCoreEvent.new_event(EngineCoreEventType.SCHEDULED, 1.0)]
        first = output("a", [1], events=events, prefill_stats=PrefillStats(7), new_prompt_logprobs_tensors=prompt)
        preempted = [EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED, 2.0)]
        last = output("a", [2], finish_reason=FinishReason.STOP, stop_reason=5, events=preempted)
        assert withheld.pass_on([first], lambda _: True, 1.0) == []
        assert withheld.pass_on([last], lambda _: True, 2.0) == []
        (combined,) = withheld.take(())
        assert contents(combined) == ([1, 2], [1, 2], [-1, -2])
        assert (combined.prefill_stats, combined.new_prompt_logprobs_tensors) == (PrefillStats(7), prompt)
        assert (combined.events, combined.finish_reason, combined.stop_reason) == (
            [*events, *preempted],
            FinishReason.STOP,
            5,
        )

    def test_each_field_of_vllm_is_joined_or_does_not_wait(self) -> None:
        joined_fields = {"new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors", "events", "prefill_stats"}
        of_the_last = {"request_id", "finish_reason", "stop_reason", "trace_headers", "num_nans_in_logits"}
        ends = {"mm_cache_miss_hashes", "spec_decode_metrics"}  # vLLM gives them with a finish_reason alone
        rest = set(EngineCoreOutput.__struct_fields__) - joined_fields - of_the_last - ends
        assert {name for name in rest if can_wait(output("a", [1], **{name: object()}))} == set()
        assert can_wait(output("a", [1]))


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> CoalescingScheduler:
    """vLLM's scheduler, whose steps return what they are given: a list of outputs."""

    def step(self: Scheduler, _scheduled: object, outputs: list[EngineCoreOutput]) -> dict[int, EngineCoreOutputs]:
        return {0: EngineCoreOutputs(outputs=outputs, scheduler_stats=SchedulerStats())}

    monkeypatch.setattr(inference.coalescing, "time", clock)
    monkeypatch.setattr(Scheduler, "__init__", lambda self: None)
    monkeypatch.setattr(Scheduler, "update_from_output", step)
    monkeypatch.setattr(Scheduler, "has_requests", lambda self: False)
    monkeypatch.setattr(Scheduler, "get_request_counts", lambda self: (len(self.requests), 0))
    created = CoalescingScheduler()
    created._pause_state, created._all_sent = PauseState.UNPAUSED, clock.now
    stops = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, stop=["."])
    params = {"a": FINAL, "b": FINAL, "stops": stops, "streams": SamplingParams()}
    created.requests = cast(
        Any, {name: SimpleNamespace(sampling_params=sampling_params) for name, sampling_params in params.items()}
    )
    return created


def step(scheduler: CoalescingScheduler, *outputs: EngineCoreOutput) -> dict[str, list[int]] | None:
    """Returns the tokens of a step's message; None if it sends none."""
    planned = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    results = scheduler.update_from_output(cast(Any, planned), cast(Any, list(outputs)))
    return {item.request_id: item.new_token_ids for item in results[0].outputs} if results else None


class TestCoalescing:
    def test_tokens_wait_but_not_for_long(self, scheduler: CoalescingScheduler, clock: ManualClock) -> None:
        assert step(scheduler, output("a", [1]), output("b", [11])) is None
        clock.now += HOLD_S / 2
        assert step(scheduler, output("a", [2]), output("b", [12])) is None
        clock.now += HOLD_S
        assert step(scheduler, output("a", [3])) == {"a": [1, 2, 3], "b": [11, 12]}
        assert step(scheduler, output("a", [4])) is None
        step(scheduler, output("b", [13]))
        del scheduler.requests["a"]
        clock.now += 2 * HOLD_S
        assert step(scheduler) == {"a": [4], "b": [13]}, "also what an aborted request held"

    def test_an_end_waits_only_among_many_requests(self, scheduler: CoalescingScheduler, clock: ManualClock) -> None:
        others = {f"other {number}": scheduler.requests["b"] for number in range(FEW)}
        scheduler.requests |= others
        step(scheduler, output("a", [1]))
        clock.now += HOLD_S / 2
        assert step(scheduler, output("a", [2], finish_reason=FinishReason.STOP)) is None
        assert scheduler.has_requests()
        clock.now += END_SHARE * HOLD_S / 2
        assert step(scheduler) == {"a": [1, 2]}
        assert not scheduler.has_requests()
        for name in others:
            del scheduler.requests[name]
        step(scheduler, output("a", [1]))
        assert step(scheduler, output("a", [2], finish_reason=FinishReason.STOP)) == {"a": [1, 2]}

    @pytest.mark.parametrize("name", ["stops", "streams"])
    def test_what_is_read_token_by_token_does_not_wait(self, scheduler: CoalescingScheduler, name: str) -> None:
        assert step(scheduler, output("a", [1]), output(name, [11])) == {name: [11]}

    def test_a_pause_waits_for_what_is_held(self, scheduler: CoalescingScheduler) -> None:
        step(scheduler, output("a", [1]))
        assert not scheduler.has_requests()  # of itself, the engine has work as long as vLLM says so
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        assert scheduler.has_requests()
        assert step(scheduler) == {"a": [1]}
        assert not scheduler.has_requests()
        scheduler.set_pause_state(PauseState.UNPAUSED)
        step(scheduler, output("a", [1]))
        scheduler.set_pause_state(PauseState.PAUSED_ALL)  # while a step runs
        assert step(scheduler, output("a", [2])) == {"a": [1, 2]}
        assert not scheduler.has_requests()


@pytest.mark.parametrize(("is_async", "ours"), [(False, CoalescingScheduler), (True, CoalescingAsyncScheduler)])
def test_the_scheduler_is_vllms_choice_or_the_users(is_async: bool, ours: type[CoalescingScheduler]) -> None:
    config = SchedulerConfig.default_factory(async_scheduling=is_async)
    theirs = config.get_scheduler_cls()
    coalesce_outputs(config)
    assert config.get_scheduler_cls() is ours
    assert issubclass(ours, theirs)
    config = SchedulerConfig.default_factory(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    coalesce_outputs(config)
    assert config.get_scheduler_cls() is Scheduler, "of the user's"
