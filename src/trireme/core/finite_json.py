"""Turns values into JSON; the only module that does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

JsonObject = dict[str, object]
"""A JSON object that is only written, or whose values are checked where they are read."""
PLAIN = json.JSONEncoder(allow_nan=False).encode
"""Writes JSON without options; `json.dumps` would make an encoder for each value."""


def to_json(value: object, **options: Any) -> str:
    """Returns `value` as JSON, with the `options` of `json.dumps`. NaN and infinities become null, because they are not
    JSON: readers other than Python's refuse them.

    >>> to_json({"grad_norm": float("nan"), "lr": 0.5})
    '{"grad_norm": null, "lr": 0.5}'
    """
    try:
        if options:
            return json.dumps(value, allow_nan=False, **options)
        return PLAIN(value)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **options)


def is_json(value: object) -> bool:
    """Returns True if JSON can hold `value` unchanged.

    >>> is_json([1, "nan"]), is_json([1, float("nan")])
    (True, False)
    """
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError):
        return False
    return True


def _finite(value: object) -> object:
    if isinstance(value, float):
        if isfinite(value):
            return value
        return None
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
