"""Rollouts that agents play: each has a session, and the answers in it become the trajectory.

    agent --HTTP--> session --sample--> SessionTurns --> the rollout's own requests --> replicas
      |                |
    reward          turns, branch by branch --> Trajectory: a segment for each branch, each sampled token once

The reward comes from the environment, never over HTTP: the policy's tools have the session's key.

An agent may ask for several answers at once. They are sampled one after the other, because the limit on the load of the
replicas counts rollouts, not requests. Where requests have seeds, these follow from the order of the requests, so that
an agent without branches is sampled like an `Env`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from orchestrator.env import AgentEnv, Trajectory, result_of
from orchestrator.lifetimes import uninterrupted
from orchestrator.rollout import RolloutError, RolloutKey, RolloutLimits, check_report, check_spans, checked
from orchestrator.trajectory import TrajectoryBuilder
from trireme.config.schema import SamplingConfig
from trireme.core.agents import AgentSessions, PlayedSession
from trireme.core.errors import BadInput, TriremeError
from trireme.core.sampler import OnProgress, Sample
from trireme.core.types import SampledSequence, SampleRequest
from trireme.process import trace
from trireme.process.faults import fault_point


class NoAnswer(RolloutError):
    """The agent ended without an answer from the policy: there is nothing to train on."""


_current: AgentSessions | None = None


@asynccontextmanager
async def agent_sessions(factory: Callable[[], AgentSessions]) -> AsyncIterator[None]:
    """Context manager: makes an AgentSessions object by `factory`, starts it, and stops it at the end of the
    `async with` block. Within the block, `play_session` uses this object to open and close a session for each rollout.
    A run enters the block once and stays in it until the run ends."""
    global _current
    _current = started = factory()
    await started.start()
    try:
        yield
    finally:
        _current = None
        await started.stop()


class SessionTurns:
    """Samples the turns of one rollout's session."""

    def __init__(
        self,
        sample: Sample,
        key: RolloutKey,
        limits: RolloutLimits,
        sampling: SamplingConfig,
        run_seed: int | None,
    ) -> None:
        self._sample = sample
        self._key = key
        self._limits = limits
        self._sampling = sampling
        self._run_seed = run_seed
        self._one_by_one = asyncio.Lock()
        self._number = 0
        self.failure: Exception | None = None
        """The first error of a request that is not the agent's fault; None: there is none. An error of a room replaces
        an error of another kind, and stays. Any other error is forgotten when a later request is answered."""

    async def sample(self, request: SampleRequest, *on_progress: OnProgress) -> SampledSequence:
        """Samples the answer to an agent's request with the sampling settings and seeds of the run, one request at a
        time. Raises BadInput for a prompt that is too long, RolloutError, and the errors of the rollout's sampler."""
        try:
            async with self._one_by_one:
                sampled = await self._one(request, *on_progress)
        except Exception as error:
            if type(error) is not BadInput and (self.failure is None or (is_of_a_room(error) and not self.of_a_room)):
                self.failure = error
            raise
        if not self.of_a_room:  # its client asked again
            self.failure = None
        return sampled

    @property
    def of_a_room(self) -> bool:
        """True if `failure` is an error of a room. Such an error concerns more than this rollout, and is raised even if
        the agent hides it."""
        return is_of_a_room(self.failure)

    async def _one(self, request: SampleRequest, *on_progress: OnProgress) -> SampledSequence:
        key = self._key
        limits = self._limits
        prompt = len(request.prompt)
        room = limits.max_seq_len - prompt
        if room <= 0 or prompt > (limits.max_prompt_len or prompt):
            raise BadInput(
                f"a prompt of {prompt} tokens; it leaves no room below model.max_seq_len = {limits.max_seq_len}, or "
                f"exceeds orchestrator.max_prompt_len = {limits.max_prompt_len}: shorten the conversation"
            )
        turn = self._number
        self._number += 1
        stop = tuple(dict.fromkeys((*request.params.stop_token_ids, *request.params.stop_strings, *limits.stop)))
        params = self._sampling.params(key.seed(self._run_seed, turn), stop, room)
        session_request = SampleRequest(
            request_id=f"{key.problem}/{key.sample}/{key.attempt}/{turn}",
            prompt=request.prompt,
            params=replace(params, max_tokens=min(params.max_tokens or room, request.params.max_tokens or room)),
            route_key=key.route_key,
            began=request.began,
        )
        sampled = checked(await self._sample(session_request, *on_progress), session_request, key, limits)
        check_spans(sampled.spans, len(sampled.tokens))
        return sampled


def is_of_a_room(error: Exception | None) -> bool:
    """Returns True if `error` is an error of a room (any TriremeError except BadInput), not of a single request."""
    return isinstance(error, TriremeError) and not isinstance(error, BadInput)


async def play_session(
    env: AgentEnv,
    sample: Sample,
    key: RolloutKey,
    limits: RolloutLimits,
    sampling: SamplingConfig,
    run_seed: int | None,
) -> Trajectory:
    """Opens a session, lets the agent `env` play one episode in it with answers from `sample`, and always closes the
    session. Returns the trajectory. Raises RolloutError and errors of the agent. Raises errors of the rooms even if the
    agent hides them."""
    fault_point("orchestrator.rollout")
    sessions = _current  # an agent that ignores its cancellation may outlast the block of `agent_sessions`
    assert sessions is not None, "an agent is played within agent_sessions"
    turns = SessionTurns(sample, key, limits, sampling, run_seed)
    session, access = await sessions.open(turns.sample)
    closed: list[PlayedSession] = []

    async def close() -> None:
        closed.append(await sessions.close(session))

    try:
        with trace.overlapping("play", "environment", problem=key.problem):
            played = await result_of(env.play, access)
    except asyncio.CancelledError as error:  # perhaps by its deadline, while its client still waits to ask again
        if turns.failure and turns.of_a_room:
            raise turns.failure from error
        raise
    except Exception as error:
        if turns.failure:
            raise turns.failure from error
        raise
    finally:
        await uninterrupted(close())
    if turns.failure and turns.of_a_room:
        raise turns.failure
    reward, metrics = _reward(played)
    check_report(reward, metrics, key)
    return _trajectory(closed[0], reward, {**closed[0].metrics, **metrics}, key)


def _reward(played: Any) -> tuple[Any, Any]:
    """Splits the result of an agent's `play` into reward and metrics. A pair has both; anything else is a reward
    without metrics. Checks neither value; `check_report` does."""
    if isinstance(played, tuple) and len(played) == 2:
        return played
    return (played, {})


def _trajectory(session: PlayedSession, reward: float, metrics: Mapping[str, float], key: RolloutKey) -> Trajectory:
    """Makes the trajectory of a session. `reward`, `metrics` and the trajectory's stop reason belong to the last answer
    that the agent got; answers that it never got are masked out of the loss. Raises NoAnswer for a session without
    turns."""
    if not session.turns:
        raise NoAnswer(f"{key}: the agent ended without an answer of the policy; there is nothing to train on")
    builder = TrajectoryBuilder()
    last = max(session.turns, key=lambda turn: (turn.delivered, turn.answer))
    for turn in session.turns:
        builder.ask(turn.prompt, follows=turn.follows)
        turn_reward = float(reward) if turn is last else 0.0
        turn_metrics = metrics if turn is last else {}
        builder.answer(
            turn.tokens,
            turn.logprobs,
            turn.spans,
            turn.stop_reason,
            turn_reward,
            turn_metrics,
            {},
            bool(turn.delivered),
        )
    return builder.finish(last.stop_reason)
