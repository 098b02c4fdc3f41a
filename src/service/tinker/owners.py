"""Identifies callers: everything made with a key belongs to the key's owner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """The sender of a request, identified by the owner of the key."""

    owner: str
    """The owner of everything that is made for this caller; "": no owner."""
    sees_all: bool = False
    """True if the caller has an admin key."""

    def may(self, owner: str) -> bool:
        """Returns True if the caller may see and change things of `owner`."""
        return self.sees_all or (owner == self.owner and owner != "")


SERVER = Caller("", sees_all=True)
"""The server itself."""
