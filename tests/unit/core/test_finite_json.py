"""JSON without what JSON does not have."""

import json
from math import inf, nan

from trireme.core.finite_json import to_json


def test_only_what_is_no_number_is_null() -> None:
    value = {"a": nan, "b": [1.5, (-inf, "nan")], "c": {"d": inf, "e": None}, "f": True, 1: 10**400}
    expected = {"a": None, "b": [1.5, [None, "nan"]], "c": {"d": None, "e": None}, "f": True, "1": 10**400}
    assert json.loads(to_json(value)) == expected


def test_finite_values_are_as_json_writes_them() -> None:
    value = {"b": 0.1, "a": [1, "\u00e9"]}
    assert to_json(value, indent=1, sort_keys=True) == json.dumps(value, indent=1, sort_keys=True)
