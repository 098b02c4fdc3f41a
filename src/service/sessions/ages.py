"""The age of sessions: when a turn may still begin.

A session's *floor* is the lowest version that a live replica had acknowledged when it was opened, as that of a group in
the ledger of the orchestrator; no token of it is older. K = `max_steps_off_policy`. When batch s is cut, the ledger
evicts every unprotected group with floor < s + 1 - K, running or finished, so that no token is trained on too old. A
turn that would be sampled for nothing is not begun: where the next cut would evict its session, and the batch can be
cut without it, the turn is refused. A protected session is waited for, so that it is never too old (see
`orchestrator.ledger` for the proof).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingStanding:
    """Where training stands, in the ledger's terms."""

    batch: int
    """The batch that is being assembled."""
    lacking: int
    """So many groups it lacks."""
    others: int
    """So many groups could fill it without the session's own: those in flight, and those that may be dispatched."""
    max_steps_off_policy: int


def too_old(floor: int, protected: bool, standing: TrainingStanding) -> str | None:
    """Returns why a session of this floor may begin no turn; None if it may."""
    age, most = standing.batch + 1 - floor, standing.max_steps_off_policy
    if protected or age <= most or (age == most + 1 and standing.others < standing.lacking):
        return None
    return (
        f"its oldest tokens may be of version {floor}, and it would be given up when batch {standing.batch} is cut: "
        f"age {age} in the next one, at most {most} (orchestrator.max_steps_off_policy) is allowed"
    )
