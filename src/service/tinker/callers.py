"""Tells who sent a request, and which part of the state they may see.

What belongs to others is answered as what is not there, in the same words. An admin key sees all. Published paths may
be read by all, and changed by their owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from service.guard import KEY
from service.keys import ServiceKey
from service.tinker.clients import ClientModel, ClientSampler, ClientSession
from service.tinker.owners import UNKNOWN, Caller
from service.tinker.promises import Promise, UnknownId
from service.tinker.state import ProtocolState


def caller_of(request: Request) -> Caller:
    """Returns who sent a request, whose key was checked."""
    key: ServiceKey | None = request.scope[KEY]
    return Caller(key.owner, key.role == "admin") if key else UNKNOWN


Asking = Annotated[Caller, Depends(caller_of)]


@dataclass(frozen=True)
class OwnThings:
    """The part of a state that a caller may see. Its methods raise UnknownId for the rest, as for what is not there."""

    state: ProtocolState
    caller: Caller

    def session(self, session_id: str) -> ClientSession:
        """Returns a session, which may have ended."""
        session = self.state.sessions.get(session_id)
        if session is None or not self.caller.may(session.owner):
            raise UnknownId(f"the session {session_id!r}; expected one that create_session gave since the server began")
        return session

    def model(self, model_id: str) -> ClientModel:
        """Returns a model."""
        model = self.state.models.get(model_id)
        if model is None or not self._has(model.session_id):
            raise UnknownId(f"the model {model_id!r}; expected one that was created since the server began")
        return model

    def sampler(self, sampler_id: str) -> ClientSampler:
        """Returns a sampling session."""
        sampler = self.state.samplers.get(sampler_id)
        if sampler is None or not self._has(sampler.session_id):
            raise UnknownId(f"the sampler {sampler_id!r}; expected one that was created since the server began")
        return sampler

    def promise(self, request_id: str) -> Promise:
        """Returns a promise. Raises GoneError where its outcome is forgotten."""
        owner_id = request_id.rpartition("/")[0]
        owner = self.state.models.get(owner_id) or self.state.samplers.get(owner_id)
        if owner is None or not self._has(owner.session_id):
            raise UnknownId(f"the request {request_id!r}; expected one that was accepted here")
        return self.state.promise(request_id)

    def sessions(self) -> list[ClientSession]:
        """Returns all sessions, the oldest first."""
        return [each for each in self.state.sessions.values() if self.caller.may(each.owner)]

    def _has(self, session_id: str) -> bool:
        return self.caller.may(self.state.sessions[session_id].owner)
