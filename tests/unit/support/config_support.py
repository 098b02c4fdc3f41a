"""A small configuration that passes."""

from collections.abc import Callable
from typing import Any

import pytest

from trireme.config import Config
from trireme.core.errors import EXIT_BAD_INPUT, BadInput

BASE: dict[str, dict[str, Any]] = {
    "model": {"name": "m"},
    "env": {"id": "sort"},
    "orchestrator": {"batch_size": 16},
    "inference": {"sampling": {"max_tokens": 10}},
}
REQUIRED = [
    *("--model.name", "m", "--env.id", "sort"),
    *("--orchestrator.batch-size", "16", "--inference.sampling.max-tokens", "10"),
]
"""The same as flags."""


def small(**options: Any) -> Config:
    """Lays sections, key by key, and plain values over the small configuration."""
    sections = {name: {**BASE.get(name, {}), **value} for name, value in options.items() if isinstance(value, dict)}
    return Config.model_validate({**BASE, **options, **sections})


def refused(call: Callable[[], object]) -> str:
    """Returns the text with which a call refuses its input; its three parts must be there."""
    with pytest.raises(BadInput) as refusal:
        call()
    assert refusal.value.exit_code == EXIT_BAD_INPUT
    text = str(refusal.value)
    for part in ("given: ", "expected: ", "to do: "):
        assert part in text
    return text
