"""The routes of sessions other than turns, for agents and owners of sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request
from pydantic import Field

from service.dialects.wire import Body, spans_of
from service.errors import JsonReply
from service.gateway import Gateway
from service.requests import RequestRefused
from trireme.core.agents import AgentTurn

Metrics = Annotated[dict[str, float], Field(max_length=256)]


class OpenBody(Body):
    """The body of a request that opens a session."""

    problem: Annotated[str, Field(max_length=1024)] = ""
    """A name of the agent's task, which the export of the session repeats."""


class RewardBody(Body):
    """The body of a request that gives a reward."""

    value: float
    answer: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    """The number of the answer, as the field `usage.answers` of its reply has it; None: the reward is for the whole
    session."""
    metrics: Metrics = Field({})


class EndBody(Body):
    """The body of a request that ends a session."""

    reason: Annotated[str, Field(max_length=1024)] = "its agent ended it"


class SessionRoutes:
    """The functions behind the routes of sessions, one for each route."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._registry = gateway.registry

    async def open(self, request: Request, body: OpenBody | None = None) -> JsonReply:
        """Opens a session. Returns its name, its key and its URLs."""
        opened = await self._gateway.open(body.problem if body else "")
        base = str(request.base_url).rstrip("/") + f"/sessions/{opened.name}"
        fields = {"session": opened.name, "key": opened.key, "floor": opened.floor}
        return JsonReply({**fields, "openai_base_url": f"{base}/v1", "anthropic_base_url": base})

    async def list(self) -> JsonReply:
        """Lists all sessions that were not forgotten."""
        sessions = self._registry.book.sessions
        return JsonReply({"sessions": [session.summary() for session in sessions.values()]})

    async def state(self, session: str) -> JsonReply:
        """Returns the present state of a session."""
        agent_session = self._registry.book.sessions.get(session)
        if agent_session is None:
            raise RequestRefused(f"there is no session {session}", status=410, code="session_closed")
        return JsonReply(agent_session.summary())

    async def reward(self, session: str, body: RewardBody) -> JsonReply:
        """Stores a reward. The route needs the admin key."""
        self._registry.reward(session, body.value, body.answer, body.metrics)
        return JsonReply({"session": session, "reward": body.value})

    async def end(self, session: str, body: EndBody | None = None) -> JsonReply:
        """Ends a session."""
        await self._registry.end(session, (body or EndBody()).reason)
        return await self.state(session)

    async def export(self, session: str) -> JsonReply:
        """Returns the training data of a session."""
        export = self._registry.export(session)
        return JsonReply(
            {
                "session": session,
                "problem": export.problem,
                "temperature": export.temperature,
                "reward": export.reward,
                "metrics": dict(export.metrics),
                "turns": [_exported(turn) for turn in export.turns],
            }
        )

    async def forget(self, session: str) -> JsonReply:
        """Forgets a session that has ended, and removes its records."""
        self._registry.forget(session)
        return JsonReply({"session": session, "forgotten": True})


def _exported(turn: AgentTurn) -> dict[str, object]:
    return {
        "prompt": turn.prompt.tolist(),
        "follows": turn.follows,
        "answer": turn.answer,
        "tokens": turn.tokens.tolist(),
        "logprobs": turn.logprobs.tolist(),
        "version_spans": spans_of(turn.spans),
        "stop_reason": turn.stop_reason,
        "reward": turn.reward,
        "in_loss": turn.delivered and turn.in_bound,
    }
