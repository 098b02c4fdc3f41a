"""A small configuration that passes."""

from __future__ import annotations

from typing import Any

from trireme.config import Config

BASE: dict[str, dict[str, Any]] = {
    "model": {"name": "m"},
    "env": {"id": "sort"},
    "orchestrator": {"batch_size": 16},
    "inference": {"sampling": {"max_tokens": 10}},
}


def small(**given: Any) -> Config:
    """Lays sections, key by key, and plain values over the small configuration."""
    sections = {name: {**BASE.get(name, {}), **value} for name, value in given.items() if isinstance(value, dict)}
    return Config.model_validate({**BASE, **given, **sections})
