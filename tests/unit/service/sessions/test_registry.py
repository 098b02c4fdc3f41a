"""The verbs of sessions, over a scripted sampler: what agents do to them, and what is exported of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from session_support import (
    END,
    LIMITS,
    LOOK,
    Hand,
    Letters,
    ScriptedSampler,
    asked,
    registry,
    rendered,
    said,
    spoken,
)

from orchestrator.advantages import WeightedTrajectory, lay_out
from orchestrator.trajectory import Trajectory, TrajectoryBuilder
from service.sessions.ages import TrainingStanding
from service.sessions.registry import SessionRegistry
from service.sessions.session import SessionExport, SessionLimits
from service.sessions.turns import BadTurn, ServedTurn, SessionClosed, TurnRequest
from trireme.core.errors import BadInput, ProvenanceError, RoomFailed
from trireme.core.types import SampledSequence
from trireme.renderers import Message

SYSTEM, FIRST = said("system", "s"), said("user", "q0")


def runs(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test in an event loop."""

    def run(self: Any, tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(self, tmp_path), 30))  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def ask(service: SessionRegistry, request: TurnRequest, name: str = "s") -> ServedTurn:
    """Asks, and takes the answers."""
    served = await service.turn(name, request)
    service.delivered(name, served)
    return served


def trajectory_of(export: SessionExport) -> Trajectory:
    """Makes the orchestrator's trajectory of an export."""
    builder = TrajectoryBuilder()
    for turn in export.turns:
        builder.ask(turn.prompt, follows=turn.follows)
        columns = turn.tokens, turn.logprobs, turn.spans, turn.stop_reason
        builder.answer(*columns, turn.reward, {}, {}, turn.delivered)
    return builder.finish(export.turns[-1].stop_reason)


def trained(export: SessionExport) -> list[float]:
    """Returns the log-probabilities of the tokens that count in the loss, in order: each of them names a token."""
    batch = lay_out([WeightedTrajectory(trajectory_of(export), 1.0, export.temperature)])
    return sorted(batch.columns["logprobs"][batch.columns["mask"] > 0].tolist())


def sampled(answers: Sequence[SampledSequence]) -> list[float]:
    return sorted(value for answer in answers for value in answer.logprobs.tolist())


async def ended(service: SessionRegistry, name: str = "s") -> SessionExport:
    await service.end(name, "done")
    return service.export(name)


def answer_of(served: ServedTurn, number: int = 0) -> Message:
    return served.answers[number].message


class TestAgents:
    @runs
    async def test_a_conversation_is_one_growing_sequence(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        conversation = [SYSTEM, FIRST]
        for turn in range(4):
            served = await ask(service, asked(*conversation))
            conversation += [answer_of(served), said("user", f"q{turn + 1}")]
        assert sampler.requests[1].prompt.tolist() == [
            *sampler.requests[0].prompt.tolist(),
            *spoken("a0"),
            *rendered("<user>q1\x01<assistant>"),
        ]
        assert service.book.sessions["s"].tree.counts.roots == 1
        export = await ended(service)
        assert trajectory_of(export).num_segments == 1
        assert trained(export) == sampled([answer for _, answer in sampler.record])

    @runs
    async def test_thinking_that_a_client_leaves_out_stays_in_the_prompt(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler(lambda request: "(hm)yes")
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        served = await ask(service, asked(FIRST))
        assert answer_of(served) == said("assistant", "yes", thinking="hm")
        served = await ask(service, asked(FIRST, said("assistant", "yes"), said("user", "q1")))
        assert spoken("(hm)yes") == served.prompt.tolist()[len(sampler.requests[0].prompt) :][: len(spoken("(hm)yes"))]

    @runs
    async def test_thinking_that_the_format_strips_begins_the_tokens_anew(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler(lambda request: "(hm)yes")
        service = registry(tmp_path, sampler, renderer=Letters(strips=True))
        service.open("s", floor=3)
        await ask(service, asked(FIRST))
        served = await ask(service, asked(FIRST, said("assistant", "yes"), said("user", "q1")))
        assert served.prompt.tolist() == [
            *rendered("<user>q0\x01<assistant>"),
            *spoken("yes"),
            *rendered("<user>q1\x01<assistant>"),
        ]
        counts = service.book.sessions["s"].tree.counts
        assert (counts.roots, counts.retokenised, counts.forks) == (1, 1, 0)
        export = await ended(service)
        assert trajectory_of(export).num_segments == 2
        assert trained(export) == sampled([answer for _, answer in sampler.record])

    @runs
    async def test_a_sub_agent_and_a_compacted_history_begin_anew(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        main = await ask(service, asked(SYSTEM, FIRST))
        helper = await ask(service, asked(said("system", "help"), FIRST))
        told = said("user", answer_of(helper)["content"])
        await ask(service, asked(said("system", "help"), FIRST, answer_of(helper), said("user", "more")))
        await ask(service, asked(SYSTEM, FIRST, answer_of(main), told))
        await ask(service, asked(SYSTEM, said("user", "in short: q0, a0")))
        counts = service.book.sessions["s"].tree.counts
        assert (counts.roots, counts.forks, counts.turns) == (3, 0, 5)
        export = await ended(service)
        assert trajectory_of(export).num_segments == 3
        assert trained(export) == sampled([answer for _, answer in sampler.record])

    @runs
    async def test_other_tools_are_another_conversation(self, tmp_path: Path) -> None:
        service = registry(tmp_path)
        service.open("s", floor=3)
        for tools in ((), (LOOK,), (LOOK,)):
            await ask(service, asked(FIRST, tools=tools))
        counts = service.book.sessions["s"].tree.counts
        assert (counts.roots, counts.forks) == (2, 1)

    @runs
    async def test_best_of_four_shares_its_prompt(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        best = await ask(service, asked(FIRST, n=4))
        await ask(service, asked(FIRST, answer_of(best, 2), said("user", "q1")))
        tree = service.book.sessions["s"].tree
        assert (tree.counts.answers, tree.counts.forks, tree.counts.turns) == (5, 3, 2)
        prompt = len(best.prompt)
        assert tree.num_tokens == prompt + 4 * len(spoken("a0")) + len(rendered("<user>q1\x01<assistant>")) + 3
        export = await ended(service)
        assert trajectory_of(export).num_segments == 4
        assert trained(export) == sampled([answer for _, answer in sampler.record])

    @runs
    async def test_calls_at_the_same_time_are_no_retries(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        sampler.gate.clear()
        calls = [asyncio.ensure_future(ask(service, asked(FIRST))) for _ in range(4)]
        await asyncio.sleep(0)
        sampler.gate.set()
        served = await asyncio.gather(*calls)
        assert len({turn.answers[0].node for turn in served}) == 4
        tree = service.book.sessions["s"].tree
        assert (tree.counts.turns, tree.counts.forks, tree.counts.roots) == (4, 3, 1)
        assert trained(await ended(service)) == sampled([answer for _, answer in sampler.record])

    @runs
    async def test_equal_answers_are_told_apart_by_delivery(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler(lambda request: "same")
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        await ask(service, asked(FIRST))
        await service.turn("s", asked(FIRST))  # whose client never reads it
        await ask(service, asked(FIRST, said("assistant", "same"), said("user", "q1")))
        tree = service.book.sessions["s"].tree
        assert [node.delivered for node in tree.nodes if node.message] == [True, False, True]
        assert trained(await ended(service)) == sampled([sampler.record[0][1], sampler.record[2][1]])

    @runs
    async def test_tool_calls_are_compared_by_value(self, tmp_path: Path) -> None:
        service = registry(tmp_path)
        service.open("s", floor=3)
        served = await ask(service, asked(FIRST, tools=(LOOK,)))
        called = said("assistant", answer_of(served)["content"], tool_calls=[{"name": "look", "arguments": {}}])
        await ask(service, asked(FIRST, called, said("tool", "r"), tools=(LOOK,)))
        assert service.book.sessions["s"].tree.counts.roots == 2
        without = said("assistant", answer_of(served)["content"], tool_calls=[])
        await ask(service, asked(FIRST, without, said("tool", "r"), tools=(LOOK,)))
        assert service.book.sessions["s"].tree.counts.roots == 2

    @runs
    async def test_stop_strings_are_not_for_the_client(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler(lambda request: "yes###")
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        served = await ask(service, TurnRequest((FIRST,), stop=("###", 7), max_tokens=9, seed=5, n=2))
        assert answer_of(served)["content"] == "yes"
        assert served.answers[0].tokens.tolist() == spoken("yes###")
        params = sampler.requests[1].params
        assert (params.stop, params.max_tokens, params.seed) == ((END, "###", 7), 9, 6)


class TestRetries:
    @runs
    async def test_a_retry_gets_the_stored_answer(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        lost = await service.turn("s", asked(FIRST, n=2))
        again = await ask(service, asked(FIRST, n=2, retry=True))
        assert [answer.node for answer in again.answers] == [answer.node for answer in lost.answers]
        assert len(sampler.record) == 2
        export = await ended(service)
        assert trained(export) == sampled([answer for _, answer in sampler.record])
        assert (export.metrics["session/retries"], export.metrics["session/undelivered"]) == (1.0, 0.0)

    @runs
    async def test_a_retry_of_another_request_is_sampled(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        await ask(service, asked(FIRST))
        await ask(service, asked(FIRST, n=2, retry=True))
        await ask(service, asked(SYSTEM, FIRST, retry=True))
        assert len(sampler.record) == 4

    @runs
    async def test_each_retry_of_parallel_calls_gets_an_answer_of_its_own(self, tmp_path: Path) -> None:
        service = registry(tmp_path)
        service.open("s", floor=3)
        lost = [await service.turn("s", asked(FIRST)) for _ in range(3)]
        again = [await ask(service, asked(FIRST, retry=True)) for _ in range(3)]
        assert [turn.answers[0].node for turn in again] == [turn.answers[0].node for turn in lost]

    @runs
    async def test_the_retry_of_a_dropped_connection_waits_for_the_same_answer(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        sampler.gate.clear()
        call = asyncio.ensure_future(service.turn("s", asked(FIRST)))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        retry = asyncio.ensure_future(ask(service, asked(FIRST, retry=True)))
        await asyncio.sleep(0)
        sampler.gate.set()
        await retry
        assert len(sampler.record) == 1
        assert trained(await ended(service)) == sampled([sampler.record[0][1]])

    @runs
    async def test_an_answer_that_nobody_fetched_is_masked_and_counted(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        served = await ask(service, asked(FIRST))
        await service.turn("s", asked(FIRST, answer_of(served), said("user", "q1")))
        export = await ended(service)
        assert trained(export) == sampled([sampler.record[0][1]])
        assert export.metrics["session/undelivered"] == 1.0

    @runs
    async def test_an_answer_that_comes_back_was_delivered(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        served = await service.turn("s", asked(FIRST))
        await ask(service, asked(FIRST, answer_of(served), said("user", "q1")))
        assert trained(await ended(service)) == sampled([answer for _, answer in sampler.record])

    @runs
    async def test_a_turn_that_fails_leaves_nothing(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        sampler.fails = RoomFailed("no replica is left")
        with pytest.raises(RoomFailed, match="no replica"):
            await service.turn("s", asked(FIRST, n=3))
        assert service.book.sessions["s"].tree.nodes == []
        sampler.fails = None
        await ask(service, asked(FIRST, retry=True))
        assert len(sampler.record) == 1


class TestEnds:
    @runs
    async def test_an_ended_session_answers_nothing_new(self, tmp_path: Path) -> None:
        service = registry(tmp_path)
        service.open("s", floor=3)
        lost = await service.turn("s", asked(FIRST))
        await service.end("s", "done")
        with pytest.raises(SessionClosed, match="done") as closed:
            await service.turn("s", asked(FIRST))
        assert closed.value.reason == "done"
        again = await ask(service, asked(FIRST, retry=True))
        assert again.answers[0].node == lost.answers[0].node

    @runs
    async def test_the_end_cancels_what_is_being_sampled(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        sampler.gate.clear()
        call = asyncio.ensure_future(service.turn("s", asked(FIRST, n=2)))
        await asyncio.sleep(0)
        with pytest.raises(BadInput, match="open"):
            service.export("s")
        await service.end("s", "evicted")
        with pytest.raises(SessionClosed, match="evicted"):
            await call
        export = service.export("s")
        assert (export.turns, sampler.record) == ((), [])

    @runs
    async def test_a_forgotten_session_and_one_that_never_was_are_closed(self, tmp_path: Path) -> None:
        service = registry(tmp_path)
        service.open("s", floor=3)
        with pytest.raises(BadInput, match="there already"):
            service.open("s", floor=3)
        with pytest.raises(BadInput, match="open"):
            service.forget("s")
        served = await service.turn("s", asked(FIRST))
        await service.end("s", "done")
        service.forget("s")
        service.delivered("s", served)
        for name in ("s", "never"):
            with pytest.raises(SessionClosed, match="never opened, or was forgotten"):
                await service.turn(name, asked(FIRST))

    @pytest.mark.parametrize(
        ("limits", "why"),
        [
            (SessionLimits(2, 10**6, 1e6, 1e6, 1e6), "turns: it had 2"),
            (SessionLimits(100, 45, 1e6, 1e6, 1e6), "tokens: it holds"),
            (SessionLimits(100, 10**6, 15.0, 1e6, 1e6), "seconds: it was opened 20 s ago"),
        ],
    )
    def test_limits(self, limits: SessionLimits, why: str, tmp_path: Path) -> None:
        async def run() -> None:
            clock = Hand()
            service = registry(tmp_path, limits=limits, clock=clock)
            service.open("s", floor=3)
            conversation = [FIRST]
            for _ in range(2):
                served = await ask(service, asked(*conversation))
                conversation += [answer_of(served), said("user", "next")]
                clock.now += 10
            with pytest.raises(SessionClosed, match=why):
                await service.turn("s", asked(*conversation))
            assert len(service.export("s").turns) == 2

        asyncio.run(run())

    @runs
    async def test_calls_at_the_same_time_count_as_turns(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler, limits=SessionLimits(2, 10**6, 1e6, 1e6, 1e6))
        service.open("s", floor=3)
        sampler.gate.clear()
        calls = [asyncio.ensure_future(ask(service, asked(FIRST))) for _ in range(3)]
        await asyncio.sleep(0)
        sampler.gate.set()
        served = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in served] == [ServedTurn, ServedTurn, SessionClosed]
        assert trained(service.export("s")) == sampled([answer for _, answer in sampler.record])

    @runs
    async def test_a_session_that_would_be_too_old_is_refused(self, tmp_path: Path) -> None:
        standing = TrainingStanding(batch=3, lacking=2, others=5, max_steps_off_policy=1)
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler, standing=lambda: standing)
        service.open("young", floor=3)
        service.open("old", floor=2)
        service.open("waited for", floor=2, protected=True)
        for name in ("young", "waited for"):
            await ask(service, asked(FIRST), name)
        with pytest.raises(SessionClosed, match=r"stale: .* version 2, .* batch 3"):
            await service.turn("old", asked(FIRST))
        with pytest.raises(SessionClosed, match="stale"):
            await service.turn("old", asked(FIRST))
        assert service.book.sessions["old"].requests.refused == 2

    @runs
    async def test_leases_are_swept_by_the_clock(self, tmp_path: Path) -> None:
        clock, sampler = Hand(), ScriptedSampler()
        service = registry(tmp_path, sampler, clock=clock)
        for name in ("idle", "busy", "waiting"):
            service.open(name, floor=3)
        clock.now += LIMITS.idle_s - 1
        await ask(service, asked(FIRST), "busy")
        sampler.gate.clear()
        call = asyncio.ensure_future(service.turn("waiting", asked(FIRST)))
        await asyncio.sleep(0)
        clock.now += 1
        assert await service.sweep() == ["idle"]
        assert await service.sweep() == []
        clock.now += LIMITS.seconds - LIMITS.idle_s
        assert sorted(await service.sweep()) == ["busy", "waiting"]
        with pytest.raises(SessionClosed, match="seconds"):
            await call
        clock.now += LIMITS.kept_s
        await service.sweep()
        assert not service.book.sessions

    @runs
    async def test_requests_that_cannot_be_sampled(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler, max_seq_len=30)
        service.open("s", floor=3)
        for request, why in (
            (asked(), "the role none"),
            (asked(FIRST, said("assistant", "a")), "the role assistant"),
            (asked(FIRST, n=0), "n = 0"),
            (asked(said("user", "long" * 10)), "a prompt of .* fewer than 30"),
        ):
            with pytest.raises(BadTurn, match=why):
                await service.turn("s", request)
        await ask(service, asked(FIRST))
        assert sampler.requests[0].params.max_tokens == 30 - len(sampler.requests[0].prompt)

    @runs
    async def test_answers_that_cannot_be_trained_on_are_refused(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler)
        service.open("s", floor=4)
        with pytest.raises(ProvenanceError, match="version 3; its session was promised 4"):
            await service.turn("s", asked(FIRST))
        sampler.version, sample = 4, sampler.sample

        async def broken(request: Any) -> SampledSequence:
            whole = await sample(request)
            return SampledSequence(whole.tokens, whole.logprobs * np.float32("nan"), "stop", whole.spans)

        sampler.sample = broken  # type: ignore[method-assign]
        with pytest.raises(RoomFailed, match="expected as many of both, at least one, all finite"):
            await service.turn("s", asked(FIRST))
        assert service.book.sessions["s"].tree.nodes == []


class TestRewards:
    @runs
    async def test_sources_add_up_and_each_may_say_it_again(self, tmp_path: Path) -> None:
        service = registry(tmp_path)
        service.open("s", floor=3, problem="p")
        first = await ask(service, asked(FIRST))
        second = await ask(service, asked(FIRST, answer_of(first), said("user", "q1")))
        service.reward("s", "call", 5.0, first.answers[0].node)
        service.reward("s", "call", 1.0, first.answers[0].node)
        await service.end("s", "done")
        service.reward("s", "harness", 2.0)
        service.reward("s", "environment", 4.0, metrics={"solved": 1.0})
        export = service.export("s")
        assert [turn.reward for turn in export.turns] == [1.0, 6.0]
        assert (export.reward, trajectory_of(export).reward, export.problem) == (7.0, 7.0, "p")
        assert export.metrics["session/reward_call"] == 1.0
        assert export.metrics["solved"] == 1.0
        assert second.answers[0].node == export.turns[-1].answer

    @runs
    async def test_rewards_that_mean_nothing(self, tmp_path: Path) -> None:
        service = registry(tmp_path)
        service.open("s", floor=3)
        served = await ask(service, asked(FIRST))
        prompt = service.book.sessions["s"].tree.nodes[served.answers[0].node].follows
        for arguments, why in (
            (("call", float("nan")), "finite"),
            (("call", 1.0, 77), "answer 77"),
            (("call", 1.0, prompt), f"answer {prompt}"),
            (("friend", 1.0), "by 'friend'"),
        ):
            with pytest.raises(BadInput, match=why):
                service.reward("s", *arguments)  # type: ignore[arg-type]


class TestRestarts:
    @runs
    async def test_a_session_continues_where_it_was(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        before = registry(tmp_path, sampler)
        before.open("s", floor=3)
        served = await ask(before, asked(FIRST, n=2))
        lost = await before.turn("s", asked(FIRST, answer_of(served), said("user", "q1")))
        after = registry(tmp_path, sampler)
        again = await ask(after, asked(FIRST, answer_of(served), said("user", "q1"), retry=True))
        assert again.answers[0].tokens.tolist() == lost.answers[0].tokens.tolist()
        third = await ask(after, asked(FIRST, answer_of(served), said("user", "q1"), answer_of(again), FIRST))
        assert third.prompt.tolist()[: len(again.prompt)] == again.prompt.tolist()
        assert after.book.sessions["s"].tree.counts.roots == 1
        assert trained(await ended(after)) == sampled([answer for _, answer in sampler.record])

    @runs
    async def test_after_the_machine_was_started_again_sessions_are_closed(self, tmp_path: Path) -> None:
        before = registry(tmp_path)
        before.open("s", floor=3)
        await ask(before, asked(FIRST))
        for boot in ("another", "another"):
            after = registry(tmp_path, boot=boot)
            with pytest.raises(SessionClosed, match="journal: the machine was started again"):
                await after.turn("s", asked(FIRST))
        assert len(after.export("s").turns) == 1

    @runs
    async def test_a_closed_service_can_be_opened_again(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        before = registry(tmp_path, sampler)
        before.open("s", floor=3)
        sampler.gate.clear()
        call = asyncio.ensure_future(before.turn("s", asked(FIRST)))
        await asyncio.sleep(0)
        await before.close()
        with pytest.raises(asyncio.CancelledError):
            await call
        after = registry(tmp_path)
        await ask(after, asked(FIRST, retry=True))
        assert len((await ended(after)).turns) == 1
