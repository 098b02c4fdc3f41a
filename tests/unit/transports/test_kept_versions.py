"""Which versions a trainer rank keeps, whatever is published, leased and released in whatever order."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trireme.core.errors import WeightsGone
from trireme.transports.kept_versions import KeptVersions


class Keeping(RuleBasedStateMachine):
    """Compares with a list of what was published and one of leases."""

    def __init__(self) -> None:
        super().__init__()
        self.versions = KeptVersions()
        self.published: list[int] = []
        self.leased: list[int] = []

    @property
    def expected(self) -> set[int]:
        return {*self.published[-2:], *self.leased}

    @rule()
    def publish(self) -> None:
        version = len(self.published)
        self.versions.begin(version)
        self.versions.keep(version, 3, np.full(4, version, np.uint8))
        self.published.append(version)

    @precondition(lambda self: self.published)
    @rule(back=st.integers(1, 4))
    def lease(self, back: int) -> None:
        version = self.published[-min(back, len(self.published))]
        if version in self.expected:
            self.versions.lease(version)
            self.leased.append(version)
        else:
            with pytest.raises(WeightsGone, match=f"version {version} is gone"):
                self.versions.lease(version)

    @precondition(lambda self: self.leased)
    @rule(which=st.randoms(use_true_random=False))
    def release(self, which) -> None:  # type: ignore[no-untyped-def]
        version = self.leased.pop(which.randrange(len(self.leased)))
        self.versions.release(version)

    @invariant()
    def has_what_is_expected(self) -> None:
        assert set(self.versions._versions) == self.expected
        for version in self.published:
            if version in self.expected:
                assert self.versions.bucket(version, 3).tolist() == [version] * 4
            else:
                with pytest.raises(WeightsGone, match=f"the bytes of version {version} are gone"):
                    self.versions.bucket(version, 3)


TestKeeping = Keeping.TestCase


def test_a_version_that_is_published_again_replaces_itself() -> None:
    """A run that was resumed publishes where it begins; nothing else of it is wanted any more."""
    versions = KeptVersions()
    for value in (1, 2):
        versions.begin(7)
        versions.keep(7, 0, np.full(1, value, np.uint8))
    assert versions.bucket(7, 0).tolist() == [2]
