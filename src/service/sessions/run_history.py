"""The history of a run's weights: the ancestors of its newest weights, and the weights that a rollback has given up.

    attempt 1   0 -- 1 -- 2 -- 3 -- 4      versions 3 and 4 of attempt 1 are given up:
    attempt 2             2 -- 3 -- 4 --   attempt 2 began with version 2, and has its own

A version's number does not tell whether its weights were given up. When an attempt begins with a version, all later
versions of earlier attempts are given up for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from trireme.core.types import WeightIdentity

AttemptStart = tuple[int, int]
"""The number of an attempt, and the version that it began with."""


class RunHistory:
    """The attempts of a run, each with the version with which it began."""

    def __init__(self, starts: Iterable[AttemptStart] = ()) -> None:
        self._starts = dict(starts)

    def begin(self, attempt: int, version: int) -> None:
        """Records that the attempt number `attempt` of the run begins with the weights `version`."""
        self._starts[attempt] = version

    def given_up(self, attempt: int, version: int) -> str | None:
        """Returns a reason if version `version`, made by attempt `attempt`, is no longer valid because a later attempt
        began with an earlier version. Returns None if it is still valid."""
        for later, begins in self._starts.items():
            if attempt < later and begins < version:
                return f"attempt {later} of the run began with version {begins}, before version {version} of {attempt}"
        return None

    def of(self, identities: Iterable[WeightIdentity]) -> str | None:
        """Returns a reason if at least one of the weights in `identities` is no longer valid (`given_up`); None if all
        of them are still valid. If several are not valid, returns the reason for the first."""
        reasons = (self.given_up(identity.attempt, identity.version) for identity in identities)
        return next((reason for reason in reasons if reason), None)
