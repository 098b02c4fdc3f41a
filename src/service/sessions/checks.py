"""Checks requests of agents, and the answers sampled for them."""

from __future__ import annotations

import math

import numpy as np

from service.requests import RequestRefused, TurnRequest
from trireme.core.errors import RoomFailed
from trireme.core.types import SampledSequence


class SessionClosed(RequestRefused):
    """Raised if no turn may begin in a session, because it has ended or does not exist. Clients must not try again
    (status 410)."""

    def __init__(self, session: str, reason: str) -> None:
        super().__init__(f"session {session} is closed: {reason}", status=410, code="session_closed")
        self.reason = reason


def check_request(request: TurnRequest) -> None:
    """Raises RequestRefused if a conversation does not end with a message to answer, or if one of its messages has
    token ids. Clients must not send token ids, because the session already has the tokens of its answers."""
    if request.is_prompt:
        return
    if request.messages:
        last = request.messages[-1]["role"]
    else:
        last = "none"
    if last in ("assistant", "none"):
        raise RequestRefused(
            f"the last message has the role {last}; expected a message that the assistant is to answer",
            param="messages",
        )
    if [message for message in request.messages if "tokens" in message]:
        raise RequestRefused(
            "token_ids in a message of a session, which has the tokens of its answers itself; leave them out",
            param="messages",
        )


def check_sample(sampled: SampledSequence) -> None:
    """Raises RoomFailed for an answer that cannot be trained on: without tokens, without a finite log-probability for
    each token, or with spans that do not cover all tokens in order."""
    bounds = [0, *(span.end for span in sampled.spans)]
    whole = [span.start for span in sampled.spans] == bounds[:-1] and bounds[-1] == len(sampled.tokens)
    finite = math.isfinite(np.add.reduce(sampled.logprobs))
    if not whole or not 0 < len(sampled.tokens) == len(sampled.logprobs) or not finite:
        raise RoomFailed(
            f"the sampler returned {len(sampled.tokens)} tokens, {len(sampled.logprobs)} log-probabilities and the "
            f"version spans {sampled.spans}; expected at least one token, a finite log-probability for each, and spans "
            "that cover all tokens in order: see the logs of the replicas"
        )
