"""The keys that open the service: those of clients, those of an administrator, and one for each session.

A file of keys has a line for each: `client KEY` or `admin KEY`. Only its owner may read it. The key of a session is in
no file: it holds the session's name, signed with the first admin key, so that it is known again after a restart, and
also when its session is forgotten.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trireme.core.errors import BadInput
from trireme.core.refusals import Refusal

Role = Literal["client", "admin", "session"]
ROLES: tuple[Role, ...] = ("client", "admin")
"""The roles of keys in files."""
OF_SESSIONS = "tr-session-"
"""The beginning of the keys of sessions."""
SHORTEST = 16
"""Characters of a key that cannot be guessed."""


@dataclass(frozen=True)
class ServiceKey:
    """One key."""

    role: Role
    """`client` may ask for answers; `admin` may call every route; `session` may call those of its session."""
    value: str = field(repr=False)
    """The secret."""
    session: str = ""
    """The session that it belongs to; "": none."""

    @property
    def name(self) -> str:
        """A name for it in logs and metrics, from which the secret cannot be found."""
        return f"{self.role}-{_digest(self.value).hex()[:8]}"


class ServiceKeys:
    """All keys of a service."""

    def __init__(self, keys: Sequence[ServiceKey]) -> None:
        self._known = [(key, _digest(key.value)) for key in keys]
        self._signs = next((known for key, known in self._known if key.role == "admin"), None)

    def find(self, given: str | None) -> ServiceKey | None:
        """Returns the key that was given, None if it is none. Takes as long whatever was given: digests are compared in
        constant time, and all of them."""
        digest, found = _digest(given or ""), None
        for key, known in self._known:
            if hmac.compare_digest(digest, known):
                found = key
        return found or self._of_session(given or "")

    def of_session(self, session: str) -> str:
        """Returns the key of a session. Raises BadInput where no admin key signs it."""
        if self._signs is None:
            raise Refusal(
                "a file of keys without an admin key, and a session to be opened",
                "an admin key, which signs the keys of sessions",
                "write a line `admin KEY` into the file of service.keys",
            ).error()
        signed = hmac.new(self._signs, session.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()
        return f"{OF_SESSIONS}{session}-{signed}"

    def _of_session(self, given: str) -> ServiceKey | None:
        session = given.removeprefix(OF_SESSIONS).rpartition("-")[0]
        if self._signs is None or not given.startswith(OF_SESSIONS):
            return None
        same = hmac.compare_digest(_digest(given), _digest(self.of_session(session)))
        return ServiceKey("session", given, session) if same else None


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode(errors="surrogateescape")).digest()


def new_key(role: Role, prefix: str = "tr") -> ServiceKey:
    """Makes a key, which begins with `prefix`."""
    return ServiceKey(role, f"{prefix}-{role}-{secrets.token_urlsafe(32)}")


def generate(file: Path, prefix: str = "tr") -> list[ServiceKey]:
    """Makes a key of each role, which begins with `prefix`, and writes them to `file`, which only its owner can read.
    Raises BadInput if it is there already."""
    keys = [new_key(role, prefix) for role in ROLES]
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise Refusal(
            f"the file of keys {file}, which exists", "a new file for new keys", f"--service.keys {file} uses its keys"
        ).error() from None
    with os.fdopen(descriptor, "w") as opened:
        opened.write("".join(f"{key.role} {key.value}\n" for key in keys))
    return keys


def read(file: Path) -> list[ServiceKey]:
    """Reads a file of keys. Raises BadInput if others may read it, or a line has another form."""
    try:
        mode, lines = file.stat().st_mode, file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(file, f"which cannot be read: {error}", "name another file") from None
    if mode & 0o077:
        raise _refused(file, f"which others may read (mode {mode & 0o777:o})", f"chmod 600 {file}")
    words = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    for number, each in enumerate(words, 1):
        if len(each) != 2 or each[0] not in ROLES or len(each[1]) < SHORTEST:  # the line itself is a secret
            raise _refused(file, f"whose key number {number} has another form", "correct that line")
    if not words:
        raise _refused(file, "which has no key", "write one, or leave service.keys out: then keys are generated")
    return [ServiceKey(role, value) for role, value in words]  # type: ignore[arg-type]


def _refused(file: Path, why: str, do: str) -> BadInput:
    expected = f"lines `client KEY` or `admin KEY`, of at least {SHORTEST} characters, in a file of mode 600"
    return Refusal(f"service.keys = {file}, {why}", expected, do).error()
