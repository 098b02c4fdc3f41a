"""Sessions against a witness: agents of all kinds, lost connections, retries and restarts in any order. What is
exported is what was sampled and delivered, each token once, with the prompt that it was sampled from."""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from session_support import Hand, Letters, LetterTokens, ScriptedSampler, message_of, registry, rendered, turn_request

from service.answering import AnsweredTurn
from service.requests import TurnRequest
from service.sessions.checks import SessionClosed
from service.sessions.tree import SampledAnswer
from trireme.renderers import Message

T = TypeVar("T")
Spoken = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens and log-probabilities of an answer; no two answers have the same."""


@dataclass
class Witness:
    conversations: list[list[Message]] = field(default_factory=lambda: [[]])
    """Those that it can go on with; each ends with an answer, or is empty."""
    delivered: set[Spoken] = field(default_factory=set)
    unconfirmed: dict[Spoken, Message] = field(default_factory=dict)
    """Answers that it has, but of which the service was not told."""
    texts: list[tuple[str, tuple[int, ...], Spoken | None]] = field(default_factory=lambda: [("", (), None)])
    """Prompts that it can go on with: as text and as tokens, with the answer that they end with."""
    lost: list[tuple[TurnRequest, list[Spoken]]] = field(default_factory=list)
    """Requests whose answers it never saw."""


def spoken_of(turn: AnsweredTurn) -> list[Spoken]:
    return [(tuple(answer.tokens.tolist()), tuple(answer.logprobs.tolist())) for answer in turn.answers]


class Sessions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.place = Path(tempfile.mkdtemp())
        self.sampler, self.clock = ScriptedSampler(lambda request: f"(t)a{len(self.sampler.requests)}"), Hand()
        self.strips = Letters(strips=True)
        self.service = self.started()
        self.agents: dict[str, Witness] = {}
        self.killed: list[Any] = []

    def teardown(self) -> None:
        for name in list(self.agents):
            self.check(name)
        for service in [*self.killed, self.service]:
            self.run(service.close())
        self.loop.close()
        shutil.rmtree(self.place)

    def started(self) -> Any:
        return registry(self.place, self.sampler, renderer=self.strips, clock=self.clock)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def request(self, agent: Witness, data: st.DataObject, n: int) -> TurnRequest:
        """Returns a request that continues a conversation, sometimes as it was asked before."""
        before = data.draw(st.sampled_from(agent.conversations))
        role = data.draw(st.sampled_from(["user", "tool"])) if before else "user"
        return turn_request(*before, message_of(role, data.draw(st.sampled_from("pqr"))), n=n)

    def take(self, name: str, request: TurnRequest, turn: AnsweredTurn, confirmed: bool) -> None:
        agent = self.agents[name]
        for answer, spoken in zip(turn.answers, spoken_of(turn), strict=True):
            assert spoken not in agent.delivered or spoken in agent.unconfirmed
            read = message_of("assistant", answer.message["content"])
            if request.messages:
                agent.conversations.append([*request.messages, read])
            else:
                self.take_text(agent, turn, answer, spoken)
            agent.delivered.add(spoken)
            agent.unconfirmed.pop(spoken, None)
            if not confirmed:
                agent.unconfirmed[spoken] = read
        if confirmed:
            self.service.delivered(name, turn.nodes)

    def take_text(self, agent: Witness, turn: AnsweredTurn, answer: SampledAnswer, spoken: Spoken) -> None:
        """Goes on from the answer as it reads, and from its tokens, with what ended it and without."""
        before = LetterTokens().decode(turn.prompt.tolist())
        whole = (*turn.prompt.tolist(), *spoken[0])
        agent.texts += [
            (before + answer.message["content"], whole[:-1], spoken),
            (LetterTokens().decode(whole), whole, spoken),
        ]

    def asks(self, name: str, request: TurnRequest) -> AnsweredTurn:
        self.clock.now += 1
        turn = self.run(self.service.turn(name, request))
        echoed = [message for message in request.messages if message["role"] == "assistant"][-1:]
        unconfirmed = self.agents[name].unconfirmed
        for spoken in [candidate for candidate, message in unconfirmed.items() if message in echoed]:
            del unconfirmed[spoken]  # the answer came back
        return turn

    @rule(name=st.sampled_from("ab"))
    def open(self, name: str) -> None:
        if name not in self.agents:
            self.service.open(name, floor=3)
            self.agents[name] = Witness()

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), n=st.integers(1, 3), fate=st.sampled_from(["told", "told", "untold", "lost"]))
    def one_turn(self, data: st.DataObject, n: int, fate: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.agents)))
        request = self.request(self.agents[name], data, n)
        turn = self.asks(name, request)
        if fate == "lost":
            self.agents[name].lost.append((request, spoken_of(turn)))
        else:
            self.take(name, request, turn, fate == "told")

    @precondition(lambda self: self.agents)
    @rule(
        data=st.data(),
        n=st.integers(1, 2),
        as_ids=st.booleans(),
        fate=st.sampled_from(["told", "told", "untold", "lost"]),
    )
    def one_prompt(self, data: st.DataObject, n: int, as_ids: bool, fate: str) -> None:
        """A prompt that goes on from an earlier one has the tokens of that, those that were sampled as they were."""
        name = data.draw(st.sampled_from(sorted(self.agents)))
        agent = self.agents[name]
        text, ids, echoed = data.draw(st.sampled_from(agent.texts))
        suffix = data.draw(st.sampled_from(["p", "q", "pq", ""] if text else ["p", "q"]))
        expected = [*ids, *rendered(suffix)]
        request = TurnRequest(ids=np.asarray(expected, np.int32)) if as_ids else TurnRequest(text=text + suffix)
        turn = self.asks(name, replace(request, n=n))
        assert turn.prompt.tolist() == expected
        if echoed:
            agent.unconfirmed.pop(echoed, None)
        if fate == "lost":
            agent.lost.append((replace(request, n=n), spoken_of(turn)))
        else:
            self.take(name, request, turn, fate == "told")

    @staticmethod
    def words_of(request: TurnRequest) -> str | None:
        """The text of a prompt, None for a conversation."""
        return LetterTokens().decode(request.ids.tolist()) if request.ids is not None else request.text

    @precondition(lambda self: any(agent.lost for agent in self.agents.values()))
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, agent in self.agents.items() if agent.lost)))
        agent = self.agents[name]
        request, _ = data.draw(st.sampled_from(agent.lost))
        turn = self.asks(name, replace(request, retry=True))
        lost = [item for item in agent.lost if item[1] == spoken_of(turn)]
        if not lost:  # the service does not know that this agent has it: it is the same answer once more
            assert all(spoken in agent.unconfirmed for spoken in spoken_of(turn))
            self.take(name, request, turn, True)
            return
        assert len(lost) == 1, "a retry gets an answer that was not delivered"
        assert (lost[0][0].messages, lost[0][0].n) == (request.messages, request.n)
        assert self.words_of(lost[0][0]) == self.words_of(request)
        agent.lost.remove(lost[0])
        self.take(name, request, turn, True)

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), calls=st.integers(2, 4), cancelled=st.integers(0, 2))
    def at_the_same_time(self, data: st.DataObject, calls: int, cancelled: int) -> None:
        """Some of the same calls lose their connection before they are answered; then these are asked again."""
        name = data.draw(st.sampled_from(sorted(self.agents)))
        request = self.request(self.agents[name], data, 1)
        before = len(self.sampler.record)

        async def run() -> list[AnsweredTurn]:
            self.sampler.gate.clear()
            tasks = [asyncio.ensure_future(self.service.turn(name, request)) for _ in range(calls)]
            await asyncio.sleep(0)
            for task in tasks[:cancelled]:
                task.cancel()
            await asyncio.sleep(0)
            again = turn_request(*request.messages, retry=True)
            waiting = not self.agents[name].lost  # others of the same words may be stored
            tasks[:cancelled] = [
                asyncio.ensure_future(self.service.turn(name, again)) for _ in range(cancelled if waiting else 0)
            ]
            await asyncio.sleep(0)
            self.sampler.gate.set()
            return await asyncio.gather(*tasks)

        lost = bool(self.agents[name].lost)
        turns = self.run(run())
        assert len(self.sampler.record) == before + calls
        self.asks_nothing_of(name, request)
        for turn in turns:
            self.take(name, request, turn, True)
        if lost and cancelled:
            heard = {spoken for turn in turns for spoken in spoken_of(turn)}
            for _, answer in self.sampler.record[before:]:
                spoken = (tuple(answer.tokens.tolist()), tuple(answer.logprobs.tolist()))
                if spoken not in heard:
                    self.agents[name].lost.append((request, [spoken]))

    def asks_nothing_of(self, name: str, request: TurnRequest) -> None:
        """Takes note of the answer that a request sent back."""
        echoed = [message for message in request.messages if message["role"] == "assistant"][-1:]
        unconfirmed = self.agents[name].unconfirmed
        for spoken in [candidate for candidate, message in unconfirmed.items() if message in echoed]:
            del unconfirmed[spoken]

    @rule()
    def restart(self) -> None:
        """The process is killed: nothing but the journal is left."""
        self.killed.append(self.service)
        self.service = self.started()

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.agents)))
        self.check(name)
        del self.agents[name]
        self.service.forget(name)
        try:
            self.run(self.service.turn(name, turn_request(message_of("user", "p"))))
        except SessionClosed:
            return
        raise AssertionError("a forgotten session answered")

    def check(self, name: str) -> None:
        """Compares the export of a session with the agent's record and the sampler's."""
        self.run(self.service.end(name, "done"))
        export, agent = self.service.export(name), self.agents[name]
        prompts = {tuple(sampled.logprobs.tolist()): request.prompt for request, sampled in self.sampler.record}
        counted: list[Spoken] = []
        prompt: list[int] = []
        for turn in export.turns:
            prompt = [*prompt, *turn.prompt.tolist()] if turn.follows else turn.prompt.tolist()
            spoken = (tuple(turn.tokens.tolist()), tuple(turn.logprobs.tolist()))
            assert prompt == prompts[spoken[1]].tolist()
            prompt += turn.tokens.tolist()
            counted += [spoken] * turn.delivered
        assert len(counted) == len(set(counted)), "no token counts twice"
        assert set(counted) == agent.delivered - agent.unconfirmed.keys()
        assert export.metrics["session/undelivered"] == len(export.turns) - len(counted)


Sessions.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSessions = Sessions.TestCase
