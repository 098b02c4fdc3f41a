"""The age of sessions: which answers they may have.

A session's *floor* is the lowest version that a live replica had acknowledged when it was opened; no token of it is
older. Its age counts from its oldest token, as a group's age in the orchestrator's ledger counts from the start of its
sampling: however long a session waits for its first turn, it does not age. An answer counts by the version that its
replica held at the moment of the answer's first token. If this version is beyond the deadline of the session's oldest
token, the session could not be trained on, and ends.
"""

from __future__ import annotations

from trireme.core.staleness import deadline


def too_old(oldest: int, version: int, max_steps_off_policy: int | None) -> str | None:
    """Returns the reason if one more answer would make a session too old to train on, else None. `oldest`: the version
    of the session's oldest token; `version`: the version at the first token of the answer. `max_steps_off_policy`: the
    greatest age allowed; None: there is no bound."""
    if max_steps_off_policy is None or version <= deadline(oldest, max_steps_off_policy):
        return None
    return (
        f"its oldest tokens are of version {oldest}, and the next training step is {version}: age {version - oldest}, "
        f"at most {max_steps_off_policy} (orchestrator.max_steps_off_policy) is allowed"
    )
