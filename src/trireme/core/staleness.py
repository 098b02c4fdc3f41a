"""The rule of staleness, which the ledger, the trainer and the service share."""

from __future__ import annotations


def deadline(floor: int, max_steps_off_policy: int) -> int:
    """Returns the last training step that may use tokens sampled from version `floor` on."""
    return floor + max_steps_off_policy
