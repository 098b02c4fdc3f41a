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


def test_a_version_lies_in_the_memory_of_one_that_is_gone_and_not_being_read() -> None:
    versions = KeptVersions()
    places = []

    def publish(version: int, nbytes: int) -> None:
        versions.begin(version, reuse=True)
        for number in (0, 1):
            whole = versions.memory(nbytes)
            whole[:] = 10 * version + number
            places.append(whole.ctypes.data)
            versions.keep(version, number, whole[:nbytes])

    for version in range(4):
        publish(version, 64)
    assert set(places[4:6]) == set(places[:2]) != set(places[2:4]) == set(places[6:])
    reads, reads_a_part = versions.bucket(2, 0), versions.bucket(2, 1)[3:5]
    publish(4, 64)
    assert not set(places[8:]) & set(places[:8])
    assert (reads.tolist(), reads_a_part.tolist()) == ([20] * 64, [21] * 2), "readers see what they asked for"
    del reads, reads_a_part
    publish(5, 65)
    assert [len(versions.bucket(5, number)) for number in (0, 1)] == [65, 65]


def test_memory_of_a_leased_version_is_not_used_again() -> None:
    versions = KeptVersions()
    for version in range(4):
        versions.begin(version, reuse=True)
        bucket = versions.memory(8)
        bucket[:] = version
        versions.keep(version, 0, bucket)
        if version == 0:
            versions.lease(0)
    assert versions.bucket(0, 0).tolist() == [0] * 8
