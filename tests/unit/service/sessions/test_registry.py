"""The verbs of sessions, over a scripted sampler: what agents do to them, and what is exported of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from registry_agents import FIRST, SYSTEM, answer_of, ask, ended, sampled, trained, trajectory_of
from session_support import (
    END,
    LOOK,
    Letters,
    ScriptedSampler,
    asked,
    registry,
    rendered,
    said,
    spoken,
)

from service.asked import TurnRequest
from trireme.core.errors import RoomFailed
from trireme.core.types import SamplingParams


class TestAgents:
    async def test_thinking_that_a_client_leaves_out_stays_in_the_prompt(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler(lambda request: "(hm)yes")
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        served = await ask(service, asked(FIRST))
        assert answer_of(served) == said("assistant", "yes", thinking="hm")
        served = await ask(service, asked(FIRST, said("assistant", "yes"), said("user", "q1")))
        assert spoken("(hm)yes") == served.prompt.tolist()[len(sampler.requests[0].prompt) :][: len(spoken("(hm)yes"))]

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

    async def test_other_tools_are_another_conversation(self, tmp_path: Path) -> None:
        service = registry(tmp_path)
        service.open("s", floor=3)
        for tools in ((), (LOOK,), (LOOK,)):
            await ask(service, asked(FIRST, tools=tools))
        counts = service.book.sessions["s"].tree.counts
        assert (counts.roots, counts.forks) == (2, 1)

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

    async def test_stop_strings_are_not_for_the_client(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler(lambda request: "yes###")
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        served = await ask(
            service, TurnRequest((FIRST,), params=SamplingParams(stop=("###", 7), max_tokens=9, seed=5), n=2)
        )
        assert answer_of(served)["content"] == "yes"
        assert served.answers[0].tokens.tolist() == spoken("yes###")
        sampled_as = sampler.requests[1].params
        assert (sampled_as.stop, sampled_as.max_tokens, sampled_as.seed) == ((END, 7, "###"), 9, 6)


class TestRetries:
    async def test_a_retry_of_another_request_is_sampled(self, tmp_path: Path) -> None:
        sampler = ScriptedSampler()
        service = registry(tmp_path, sampler)
        service.open("s", floor=3)
        await ask(service, asked(FIRST))
        await ask(service, asked(FIRST, n=2, retry=True))
        await ask(service, asked(SYSTEM, FIRST, retry=True))
        assert len(sampler.record) == 4

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
