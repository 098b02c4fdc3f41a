"""Sessions of agents as the orchestrator sees them. The orchestrator opens a session for each rollout that an agent
plays, samples the agent's requests, and gets all answers when it closes the session. Only `trireme.launch` sees the
class behind `AgentSessions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trireme.core.sampler import Sample
from trireme.core.types import StopReason, VersionSpan


@dataclass(frozen=True)
class AgentAccess:
    """The addresses, key and model name with which an agent samples from the policy."""

    base_url: str
    """For OpenAI's client."""
    anthropic_base_url: str
    """For Anthropic's client."""
    api_key: str = field(repr=False)
    """The key by which the service accepts this session's requests; no other session has it."""
    model: str = "policy"
    """The name of the model to ask for."""


@dataclass(frozen=True, eq=False)
class AgentTurn:
    """One sampled answer of a session (T tokens), and its prompt. If the prompt does not continue the previous turn,
    the turn begins a new branch of the session. In the list of a session's turns, the turns of a branch are
    consecutive."""

    prompt: npt.NDArray[np.int32]
    """The token ids of the prompt: all of them, or, if the turn `follows`, only those after the answer of the turn
    before."""
    follows: bool
    """True if the prompt begins with the prompt and the answer of the turn before."""
    answer: int
    """The number of the answer in its session: later answers have larger numbers."""
    tokens: npt.NDArray[np.int32]
    """[T], of the answer."""
    logprobs: npt.NDArray[np.float32]
    """[T]."""
    spans: tuple[VersionSpan, ...]
    """The weights that sampled each part of the answer."""
    stop_reason: StopReason
    reward: float
    """The reward that the agent gave to the service. The reward of a rollout is the one that its agent returns."""
    delivered: bool
    """False if the agent never got the answer, which then must not count in the loss."""
    in_bound: bool
    """False if weights beyond the staleness bound sampled a part of the answer; also then the answer must not count in
    the loss."""


@dataclass(frozen=True, eq=False)
class PlayedSession:
    """The result of a session that has ended: the answers that its agent got, and metrics."""

    turns: Sequence[AgentTurn]
    metrics: Mapping[str, float]


class AgentSessions(Protocol):
    """Opens and closes sessions, in which agents sample from the policy over HTTP. All methods run in one event
    loop."""

    async def start(self) -> None:
        """Begins to listen for agents; called once, before all other methods."""

    async def open(self, sample: Sample) -> tuple[str, AgentAccess]:
        """Opens a session; `sample` samples its answers. Returns the session's name, and what the session's agent needs
        for access."""

    async def close(self, session: str) -> PlayedSession:
        """Ends the session with this name: cancels its running samples, returns its result, and forgets the session."""

    async def stop(self) -> None:
        """Stops listening for agents."""
