"""Identifies the sender of a request."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from service.guard import KEY
from service.keys import ServiceKey
from service.tinker.owners import Caller


def caller_of(request: Request) -> Caller:
    """Returns the sender of a request, found by the request's API key, which the guard has checked."""
    key: ServiceKey | None = request.scope[KEY]
    if key:
        return Caller(key.owner, key.role == "admin")
    return Caller("")


Asking = Annotated[Caller, Depends(caller_of)]
