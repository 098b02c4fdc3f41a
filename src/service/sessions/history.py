"""The history of a run's weights: the ancestors of its newest weights, and the weights that a rollback has given up.

    attempt 1   0 -- 1 -- 2 -- 3 -- 4      versions 3 and 4 of attempt 1 are given up:
    attempt 2             2 -- 3 -- 4 --   attempt 2 began with version 2, and has its own

A version's number does not show that. When an attempt begins with a version, all later weights of earlier attempts are
given up, however far the run comes later.
"""

from __future__ import annotations

from collections.abc import Iterable

from trireme.core.types import WeightIdentity

AttemptStart = tuple[int, int]
"""The number of an attempt, and the version that it began with."""


class RunHistory:
    """The attempts of a run that led to its newest weights."""

    def __init__(self, starts: Iterable[AttemptStart] = ()) -> None:
        self._starts = dict(starts)

    def begin(self, attempt: int, version: int) -> None:
        """Records that an attempt begins with a version."""
        self._starts[attempt] = version

    def given_up(self, attempt: int, version: int) -> str | None:
        """Returns why a version of an attempt is not in this history; None if it is."""
        for later, begins in self._starts.items():
            if attempt < later and begins < version:
                return f"attempt {later} of the run began with version {begins}, before version {version} of {attempt}"
        return None

    def of(self, identities: Iterable[WeightIdentity]) -> str | None:
        """Returns why some of these weights are not in this history; None if all are."""
        reasons = (self.given_up(identity.attempt, identity.version) for identity in identities)
        return next((reason for reason in reasons if reason), None)
