"""The age of sessions: when a turn may still begin.

A session's *floor* is the lowest version that a live replica had acknowledged when it was opened, as that of a group in
the ledger of the orchestrator; no token of it is older. A turn that could no longer be trained on, as the next step is
beyond the deadline of that floor, is not begun.
"""

from __future__ import annotations

from dataclasses import dataclass

from trireme.core.staleness import deadline


@dataclass(frozen=True)
class TrainingStanding:
    """Where training stands."""

    step: int
    """The step that is trained on next: the newest version that a replica has."""
    max_steps_off_policy: int


def too_old(floor: int, standing: TrainingStanding) -> str | None:
    """Returns why a session of this floor may begin no turn; None if it may."""
    if standing.step <= deadline(floor, standing.max_steps_off_policy):
        return None
    age = standing.step - floor
    bound = standing.max_steps_off_policy
    return (
        f"its oldest tokens may be of version {floor}, and the next training step is {standing.step}: age {age}, at "
        f"most {bound} (orchestrator.max_steps_off_policy) is allowed"
    )
