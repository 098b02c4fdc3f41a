"""Several requests, or several outcomes, as one message between a router and a replica.

A message is pickled here, since Ray would send a buffer of its own for each array in it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

from inference.handover import Outcome
from trireme.core.errors import TriremeError
from trireme.core.types import SampleRequest


def pack_requests(requests: Sequence[SampleRequest]) -> bytes:
    """Returns `requests` as one message to a replica."""
    return pickle.dumps(requests, protocol=pickle.HIGHEST_PROTOCOL)


def unpack_requests(message: bytes) -> list[SampleRequest]:
    """Returns the requests that `message`, from `pack_requests`, holds."""
    requests: list[SampleRequest] = pickle.loads(message)
    return requests


@dataclass(frozen=True, eq=False)
class Reply:
    """A replica's answer to a caller: outcomes of any of the caller's requests, and why the replica is unusable, if it
    is."""

    outcomes: Sequence[tuple[str, Outcome]] = ()
    """(id of a request, how it ended), for each request that has ended."""
    failure: TriremeError | None = None
    """Why the replica is unusable; None: it is not."""

    def pack(self) -> bytes:
        """Returns this reply as one message."""
        return pickle.dumps(self, protocol=pickle.HIGHEST_PROTOCOL)

    @classmethod
    def unpack(cls, message: bytes) -> Reply:
        """Returns the reply that `message`, from `pack`, holds."""
        reply: Reply = pickle.loads(message)
        return reply
