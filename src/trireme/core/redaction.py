"""Replaces secrets in the output of a run: code.diff, config.json, manifests, data for trackers.

A secret is the value of an environment variable with a name like a secret's, such as API_KEY; a text in the format of a
known service's keys; or a long random text that is assigned to such a name. Other long texts (digests, paths) stay.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "(secret, left out)"
CERTAIN = r"(?:api_?key|access_?key|secret(?:_?key)?|private_?key|auth_?key|password|passwd|credentials?)"
NAME = rf"(?:{CERTAIN}|(?<![a-z])token)"
"""A pattern for names like a secret's. Models read tokens too, so a name with `token` makes only a random text a
secret."""
_certain, _names = (re.compile(rf"{name}$", re.IGNORECASE) for name in (CERTAIN, NAME))
_formats = re.compile(
    r"hf_[A-Za-z0-9]{30,}|sk-[\w-]{20,}|gh[oprsu]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|xox[abeoprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{35}|wandb_v1_\w{20,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_assigned = re.compile(rf"({NAME}[\"']?\s*[=:]\s*[\"']?)(?=[\w+/=.-]*\d)([\w+/=.-]{{16,}})", re.IGNORECASE)
_like_secrets = re.compile(r"TOKEN(?!IZER)|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_with_password = re.compile(r"://[^/\s@]+@|^[^/\s@:]+:[^/\s@]+@")
SHORTEST = 8
"""Characters. Shorter values of variables are words that may stand anywhere."""


def is_secret(name: str, value: str) -> bool:
    """Returns True if the environment variable `name` with this `value` has to be treated as a secret: its name looks
    like a secret's, its value has the format of a secret, or its value is an address that contains a user name or
    password, such as a proxy's. Errs on the side of True."""
    return bool(_like_secrets.search(name) or _with_password.search(value)) or MASK in redact_values(value, name)


def redact(text: str) -> str:
    """Returns `text` with each secret replaced by MASK."""
    named = {value for name, value in os.environ.items() if _names.search(name) and len(value) >= SHORTEST}
    for value in sorted(named, key=len, reverse=True):
        text = text.replace(value, MASK)
    return _assigned.sub(rf"\1{MASK}", _formats.sub(MASK, text))


def redact_values(values: Any, name: str = "") -> Any:
    """Returns `values`, which are JSON values, with MASK in place of each string that is or contains a secret. `name`:
    the key of `values` in the enclosing object."""
    if isinstance(values, Mapping):
        return {key: redact_values(value, str(key)) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [redact_values(value, name) for value in values]
    if isinstance(values, str) and values:
        certain = _certain.search(name) and len(values) >= SHORTEST
        if certain or MASK in redact(f"{name}={values}"):
            return MASK
        return values
    return values
