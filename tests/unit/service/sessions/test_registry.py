"""The verbs of sessions, over a scripted sampler: what agents do to them, and what is exported of it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manual_clock import ManualClock
from session_support import (
    END,
    LIMITS,
    LOOK,
    Letters,
    ScriptedSampler,
    message_of,
    opened_registry,
    registry,
    rendered,
    spoken,
    turn_request,
)

from orchestrator.advantages import WeightedTrajectory, lay_out
from orchestrator.trajectory import Trajectory, TrajectoryBuilder
from service.answering import AnsweredTurn
from service.requests import TurnRequest
from service.sessions.checks import SessionClosed
from service.sessions.registry import SessionRegistry
from service.sessions.session import SessionExport, SessionLimits
from trireme.core.errors import BadInput, RoomFailed
from trireme.core.types import SampledSequence, SamplingParams
from trireme.renderers import Message

FIRST = message_of("user", "q0")


async def ask(service: SessionRegistry, request: TurnRequest, name: str = "s") -> AnsweredTurn:
    served = await service.turn(name, request)
    service.delivered(name, served.nodes)
    return served


def trajectory_of(export: SessionExport) -> Trajectory:
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


async def export_of(service: SessionRegistry) -> SessionExport:
    await service.end("s", "done")
    return service.export("s")


def answer_of(served: AnsweredTurn, number: int = 0) -> Message:
    return served.answers[number].message


class TestAgents:
    async def test_thinking_that_a_client_leaves_out_stays_in_the_prompt(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler(lambda request: "(hm)yes")
        service = opened_registry(tmp_path, sampler)
        served = await ask(service, turn_request(FIRST))
        assert answer_of(served) == message_of("assistant", "yes", thinking="hm")
        served = await ask(service, turn_request(FIRST, message_of("assistant", "yes"), message_of("user", "q1")))
        assert spoken("(hm)yes") == served.prompt.tolist()[len(sampler.requests[0].prompt) :][: len(spoken("(hm)yes"))]

    async def test_thinking_that_the_format_strips_begins_the_tokens_anew(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler(lambda request: "(hm)yes")
        service = opened_registry(tmp_path, sampler, renderer=Letters(strips=True))
        await ask(service, turn_request(FIRST))
        served = await ask(service, turn_request(FIRST, message_of("assistant", "yes"), message_of("user", "q1")))
        assert served.prompt.tolist() == [
            *rendered("<user>q0\x01<assistant>"),
            *spoken("yes"),
            *rendered("<user>q1\x01<assistant>"),
        ]
        counts = service.book.sessions["s"].tree.counts
        assert (counts.roots, counts.retokenised, counts.forks) == (1, 1, 0)
        export = await export_of(service)
        assert trajectory_of(export).num_segments == 2
        assert trained(export) == sampled([answer for _, answer in sampler.record])

    async def test_other_tools_are_another_conversation(self, tmp_path: Path) -> None:
        service = opened_registry(tmp_path)
        for tools in ((), (LOOK,), (LOOK,)):
            await ask(service, turn_request(FIRST, tools=tools))
        counts = service.book.sessions["s"].tree.counts
        assert (counts.roots, counts.forks) == (2, 1)

    async def test_tool_calls_are_compared_by_value(self, tmp_path: Path) -> None:
        service = opened_registry(tmp_path)
        served = await ask(service, turn_request(FIRST, tools=(LOOK,)))
        called = message_of("assistant", answer_of(served)["content"], tool_calls=[{"name": "look", "arguments": {}}])
        await ask(service, turn_request(FIRST, called, message_of("tool", "r"), tools=(LOOK,)))
        assert service.book.sessions["s"].tree.counts.roots == 2
        without = message_of("assistant", answer_of(served)["content"], tool_calls=[])
        await ask(service, turn_request(FIRST, without, message_of("tool", "r"), tools=(LOOK,)))
        assert service.book.sessions["s"].tree.counts.roots == 2

    async def test_stop_strings_are_not_for_the_client(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler(lambda request: "yes###")
        service = opened_registry(tmp_path, sampler)
        served = await ask(
            service, TurnRequest((FIRST,), params=SamplingParams(stop=("###", 7), max_tokens=9, seed=5), n=2)
        )
        assert answer_of(served)["content"] == "yes"
        assert served.answers[0].tokens.tolist() == spoken("yes###")
        sampled_as = sampler.requests[1].params
        assert (sampled_as.stop, sampled_as.max_tokens, sampled_as.seed) == ((END, 7, "###"), 9, 6)


class TestRetries:
    async def test_a_turn_that_fails_leaves_nothing(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = opened_registry(tmp_path, sampler)
        sampler.fails = RoomFailed("no replica is left")
        with pytest.raises(RoomFailed, match="no replica"):
            await service.turn("s", turn_request(FIRST, n=3))
        assert service.book.sessions["s"].tree.nodes == []
        sampler.fails = None
        await ask(service, turn_request(FIRST, retry=True))
        assert len(sampler.record) == 1


class TestEnds:
    async def test_an_ended_session_answers_nothing_new(self, tmp_path: Path) -> None:
        service = opened_registry(tmp_path)
        lost = await service.turn("s", turn_request(FIRST))
        await service.end("s", "done")
        with pytest.raises(SessionClosed, match="done") as closed:
            await service.turn("s", turn_request(FIRST))
        assert closed.value.reason == "done"
        again = await ask(service, turn_request(FIRST, retry=True))
        assert again.nodes == lost.nodes

    async def test_a_forgotten_session_and_one_that_never_was_are_closed(self, tmp_path: Path) -> None:
        service = opened_registry(tmp_path)
        with pytest.raises(BadInput, match="open"):
            service.forget("s")
        served = await service.turn("s", turn_request(FIRST))
        await service.end("s", "done")
        service.forget("s")
        service.delivered("s", served.nodes)
        for name in ("s", "never"):
            with pytest.raises(SessionClosed, match="never opened, or was forgotten"):
                await service.turn(name, turn_request(FIRST))

    @pytest.mark.parametrize(
        ("limits", "reason"),
        [
            (SessionLimits(2, 10**6, 1e6, 1e6, 1e6), "turns: it had 2"),
            (SessionLimits(100, 45, 1e6, 1e6, 1e6), "tokens: it holds"),
            (SessionLimits(100, 10**6, 15.0, 1e6, 1e6), "seconds: it was opened 20 s ago"),
        ],
    )
    async def test_limits(self, limits: SessionLimits, reason: str, tmp_path: Path) -> None:
        clock = ManualClock()
        service = opened_registry(tmp_path, limits=limits, clock=clock)
        conversation = [FIRST]
        for _ in range(2):
            served = await ask(service, turn_request(*conversation))
            conversation += [answer_of(served), message_of("user", "next")]
            clock.now += 10
        with pytest.raises(SessionClosed, match=reason):
            await service.turn("s", turn_request(*conversation))
        assert len(service.export("s").turns) == 2

    async def test_calls_at_the_same_time_count_as_turns(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = opened_registry(tmp_path, sampler, limits=SessionLimits(2, 10**6, 1e6, 1e6, 1e6))
        sampler.gate.clear()
        calls = [asyncio.ensure_future(ask(service, turn_request(FIRST))) for _ in range(3)]
        await asyncio.sleep(0)
        sampler.gate.set()
        served = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(turn) for turn in served] == [AnsweredTurn, AnsweredTurn, SessionClosed]
        assert trained(service.export("s")) == sampled([answer for _, answer in sampler.record])

    async def test_leases_are_swept_by_the_clock(self, tmp_path: Path) -> None:
        clock, sampler = ManualClock(), ScriptedSampler()
        service = registry(tmp_path, sampler, clock=clock)
        for name in ("idle", "busy", "waiting"):
            service.open(name, floor=3)
        clock.now += LIMITS.idle_s - 1
        await ask(service, turn_request(FIRST), "busy")
        sampler.gate.clear()
        call = asyncio.ensure_future(service.turn("waiting", turn_request(FIRST)))
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

    async def test_what_an_owner_forgets_during_a_sweep_does_not_end_it(self, tmp_path: Path) -> None:
        clock, sampler = ManualClock(), ScriptedSampler()
        service = registry(tmp_path, sampler, clock=clock)
        service.open("long", floor=3)
        sampler.gate.clear()
        call = asyncio.ensure_future(service.turn("long", turn_request(FIRST)))
        await asyncio.sleep(0)
        for name in ("ended", "idle"):
            service.open(name, floor=3)
        await service.end("ended", "done")
        clock.now += max(LIMITS.seconds, LIMITS.kept_s)
        sweep = asyncio.ensure_future(service.sweep())
        await asyncio.sleep(0)  # it waits until the turn of the first one is cancelled
        service.forget("ended")
        assert await sweep == ["long", "idle"]
        with pytest.raises(SessionClosed, match="seconds"):
            await call

    async def test_an_agent_that_waited_in_vain_for_long_was_not_silent(self, tmp_path: Path) -> None:
        clock, sampler = ManualClock(), ScriptedSampler()
        service = opened_registry(tmp_path, sampler, clock=clock)
        sampler.gate.clear()
        call = asyncio.ensure_future(service.turn("s", turn_request(FIRST)))
        await asyncio.sleep(0)
        clock.now += LIMITS.idle_s + 1
        sampler.fails = RoomFailed("no replica is left")
        sampler.gate.set()
        with pytest.raises(RoomFailed):
            await call
        assert await service.sweep() == [], "its client asks again in some seconds"
        clock.now += LIMITS.idle_s
        assert await service.sweep() == ["s"]

    async def test_answers_that_cannot_be_trained_on_are_refused(self, tmp_path: Path) -> None:
        class Broken(ScriptedSampler):
            broken = False

            async def sample(self, request: Any, on_progress: Any = None) -> SampledSequence:
                whole = await super().sample(request, on_progress)
                if not self.broken:
                    return whole
                return SampledSequence(whole.tokens, whole.logprobs * np.float32("nan"), "stop", whole.spans)

        sampler = Broken()
        service = registry(tmp_path, sampler)
        service.open("old", floor=4)
        with pytest.raises(SessionClosed, match="version 3; its session was promised 4"):
            await service.turn("old", turn_request(FIRST))
        service.open("s", floor=3)
        sampler.broken = True
        with pytest.raises(RoomFailed, match="expected at least one token, a finite log-probability for each"):
            await service.turn("s", turn_request(FIRST))
        assert service.book.sessions["s"].tree.nodes == []


class TestRestarts:
    async def test_after_the_machine_was_started_again_sessions_are_closed(self, tmp_path: Path) -> None:
        before = opened_registry(tmp_path)
        await ask(before, turn_request(FIRST))
        for boot in ("another", "another"):
            after = registry(tmp_path, boot=boot)
            with pytest.raises(SessionClosed, match="store: the machine was started again"):
                await after.turn("s", turn_request(FIRST))
        assert len(after.export("s").turns) == 1
