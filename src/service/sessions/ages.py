"""The age of sessions: which answers they may have.

A session's *floor* is the lowest version that a live replica had acknowledged when it was opened, as that of a group in
the ledger of the orchestrator; no token of it is older. An answer counts by the version that its replica held at the
moment of its first token: beyond the deadline of the floor it could not be trained on, and the session ends.
"""

from __future__ import annotations

from trireme.core.staleness import deadline


def too_old(floor: int, version: int, max_steps_off_policy: int | None) -> str | None:
    """Returns why a session of this floor may have no answer that begins with this version; None if it may."""
    if max_steps_off_policy is None or version <= deadline(floor, max_steps_off_policy):
        return None
    return (
        f"its oldest tokens may be of version {floor}, and the next training step is {version}: age {version - floor}, "
        f"at most {max_steps_off_policy} (orchestrator.max_steps_off_policy) is allowed"
    )
