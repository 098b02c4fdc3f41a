"""The keys that open the service: keys of clients and of administrators, and one for each session.

A file of keys has a line for each: `client KEY` or `admin KEY`, and optionally its owner (`owner=alice`). Several keys
may have one owner, who owns everything made with any of them. Only the user that runs the service may read the file.
The key of a session is in no file: it holds the session's name, signed with the first admin key, so that the service
recognises it after a restart, and also when its session is forgotten.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
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
"""The least number of characters of a key in a file; a shorter key could be guessed."""
ANY_TEXT = "surrogatepass"
"""The error handler for encoding texts of clients as UTF-8; it accepts also characters that UTF-8 cannot hold."""
LINE = re.compile(
    rf"\s*(client|admin)\s+(\S{{{SHORTEST},}})(?:\s+owner=([A-Za-z0-9][A-Za-z0-9_.@-]{{0,63}}))?\s*", re.ASCII
)
"""A line of a file of keys."""


@dataclass(frozen=True)
class ServiceKey:
    """One key of the service: its role, its secret and its owner."""

    role: Role
    """`client` may request answers; `admin` may call every route; `session` may call the routes of its session."""
    value: str = field(repr=False)
    """The secret."""
    session: str = ""
    """The session that the key belongs to; "": it belongs to none."""
    whose: str = ""
    """The name of the owner of the key; "": the file names no owner, and the key itself counts as the owner."""

    @property
    def owner(self) -> str:
        """The name of the owner of this key, who also owns everything that clients make with the key, such as training
        runs. If the file of keys names no owner, this is the key's own name."""
        return self.whose or self.name

    @property
    def name(self) -> str:
        """The name of this key in logs and metrics. The secret cannot be computed from the name."""
        return f"{self.role}-{_digest(self.value).hex()[:8]}"


class ServiceKeys:
    """All keys of a service."""

    def __init__(self, keys: Sequence[ServiceKey]) -> None:
        self._digests = [(key, _digest(key.value)) for key in keys]
        self._signs = next((digest for key, digest in self._digests if key.role == "admin"), None)

    def find(self, value: str | None) -> ServiceKey | None:
        """Returns the key with the secret `value`, or None if no key has this secret. Compares the digest of `value`
        with the digests of all keys, each in constant time, so that the time taken reveals no secret."""
        digest = _digest(value or "")
        match = None
        for key, key_digest in self._digests:
            if hmac.compare_digest(digest, key_digest):
                match = key
        return match or self._of_session(value or "")

    def of_session(self, session: str) -> str:
        """Returns the secret key of a session. Raises BadInput if there is no admin key to sign it."""
        if self._signs is None:
            raise Refusal(
                "a session to be opened, with no admin key in the file of keys",
                "an admin key, which signs the keys of sessions",
                "write a line `admin KEY` into the file of service.keys",
            )
        signed = hmac.new(self._signs, session.encode(errors=ANY_TEXT), hashlib.sha256).hexdigest()
        return f"{OF_SESSIONS}{session}-{signed}"

    def _of_session(self, value: str) -> ServiceKey | None:
        session = value.removeprefix(OF_SESSIONS).rpartition("-")[0]
        if self._signs is None or not value.startswith(OF_SESSIONS):
            return None
        if same_text(value, self.of_session(session)):
            return ServiceKey("session", value, session)
        return None


def same_text(text: str, secret: str) -> bool:
    """Returns True if `text` equals `secret`. Compares their digests in constant time. `text` may have any
    characters."""
    return hmac.compare_digest(_digest(text), _digest(secret))


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode(errors=ANY_TEXT)).digest()


def new_key(role: Role, prefix: str = "tr") -> ServiceKey:
    """Returns a new random key of `role`. Its value begins with `prefix`."""
    return ServiceKey(role, f"{prefix}-{role}-{secrets.token_urlsafe(32)}")


def generate(file: Path, prefix: str = "tr") -> list[ServiceKey]:
    """Makes a client key and an admin key, with values that begin with `prefix`, and writes both to the new file
    `file`, which only its owner can read. Returns the keys. Raises BadInput if the file exists."""
    keys = [new_key(role, prefix) for role in ROLES]
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise Refusal(
            f"the file of keys {file}, which already exists",
            "a file that does not exist yet, for new keys",
            f"name another file. To use the keys that {file} already has, set --service.keys {file}",
        ) from None
    with os.fdopen(descriptor, "w") as opened:
        opened.write("".join(f"{key.role} {key.value}\n" for key in keys))
    return keys


def read(file: Path) -> list[ServiceKey]:
    """Returns the keys in a file. Raises BadInput if the file cannot be read, if other users may read it, if it has no
    key or the same key twice, or if a line is neither `client KEY` nor `admin KEY` with an optional owner."""
    try:
        mode = file.stat().st_mode
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(file, f"which cannot be read: {error}", "name another file") from None
    if mode & 0o077:
        raise _refused(file, f"which others may read (mode {mode & 0o777:o})", f"chmod 600 {file}")
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    if not lines:
        raise _refused(file, "which has no key", "write one, or leave service.keys out: then keys are generated")
    keys = [_key(file, number, line) for number, line in enumerate(lines, 1)]
    if len({key.value for key in keys}) < len(keys):
        raise _refused(file, "which has a key twice", "give each line a key of its own")
    return keys


def _key(file: Path, number: int, line: str) -> ServiceKey:
    """Returns the key in a line of `file`. `number`: the number of the key in the file, for the error. The error must
    not quote the line, because a line holds a secret. Raises BadInput if the line is malformed."""
    match = LINE.fullmatch(line)
    if match is None:
        raise _refused(file, f"whose key number {number} has another form", "correct that line")
    role, value, owner = match.groups("")
    return ServiceKey("admin" if role == "admin" else "client", value, whose=owner)


def _refused(file: Path, problem: str, do: str) -> BadInput:
    expected = (
        f"lines `client KEY` or `admin KEY`, of at least {SHORTEST} characters, and behind that at most owner=NAME "
        "(letters, digits, `_.@-`), in a file of mode 600"
    )
    return Refusal(f"service.keys = {file}, {problem}", expected, do)
