"""Sessions of agents as the orchestrator sees them: it opens one for each rollout that an agent plays, samples the
agent's requests, and gets back all answers. Only `trireme.launch` sees the classes behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trireme.core.sampler import SampledPart
from trireme.core.types import SampledSequence, StopReason

SampleTurn = Callable[..., Awaitable[SampledSequence]]
"""Samples a request, and calls an OnProgress meanwhile, if it gets one too."""


@dataclass(frozen=True)
class AgentAccess:
    """Everything that an agent needs for access to the policy."""

    base_url: str
    """For OpenAI's client."""
    anthropic_base_url: str
    """For Anthropic's client."""
    api_key: str = field(repr=False)
    """The key of its session alone."""
    model: str = "policy"
    """The name of the model to ask for."""


class AgentTurn(SampledPart, Protocol):
    """One answer with its prompt, branch by branch."""

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        """The whole prompt; if it `follows`, the part after the answer before."""

    @property
    def follows(self) -> bool:
        """The prompt begins with the prompt and the answer of the turn before."""

    @property
    def answer(self) -> int:
        """The number of the answer in its session: later answers have larger ones."""

    @property
    def stop_reason(self) -> StopReason: ...

    @property
    def delivered(self) -> bool:
        """False: the agent never got the answer, which must not count in the loss."""


@dataclass(frozen=True, eq=False)
class PlayedSession:
    """A session that has ended."""

    turns: Sequence[AgentTurn]
    metrics: Mapping[str, float]


class AgentSessions(Protocol):
    """Opens sessions of agents, within one event loop."""

    async def start(self) -> None:
        """Opens the port; called once, before any other verb."""

    async def open(self, sample: SampleTurn) -> tuple[str, AgentAccess]:
        """Opens a session; `sample` samples its answers. Returns its name, and the message for its agent."""

    async def close(self, session: str) -> PlayedSession:
        """Ends a session, cancels its running samples, and forgets it. Returns its result."""

    async def stop(self) -> None:
        """Closes the port."""
