"""The cycle collector of a long-lived process."""

import gc
from collections.abc import Iterator

import pytest

from trireme.process.collector import spare_collector


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


def test_what_is_there_is_not_looked_at_again_and_new_cycles_are_still_found() -> None:
    old: list[object] = []
    old.append(old)
    assert gc.is_tracked(old)
    spare_collector()
    assert all(item is not old for item in gc.get_objects())
    before = gc.get_count()[0]
    for _ in range(10_000):  # more than the usual threshold
        cycle: list[object] = []
        cycle.append(cycle)
    del cycle
    assert gc.get_count()[0] - before > 9_000, "no collection came between"
    assert gc.collect() >= 10_000
