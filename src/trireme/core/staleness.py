"""The rule of staleness, which ledger, trainer and service share: how old tokens may be that are trained on."""

from __future__ import annotations


def deadline(floor: int, max_steps_off_policy: int) -> int:
    """Returns the last training step that may use tokens sampled from version `floor` or later ones."""
    return floor + max_steps_off_policy
