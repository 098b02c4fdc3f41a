"""Which weights belong to the history of a run."""

from hypothesis import given
from hypothesis import strategies as st

from service.sessions.run_history import RunHistory
from trireme.core.types import WeightIdentity


def test_what_a_rollback_gives_up() -> None:
    history = RunHistory([(1, 0), (2, 10)])
    assert not history.given_up(1, 10)
    assert history.given_up(1, 11) == "attempt 2 of the run began with version 10, before version 11 of 1"
    assert not history.given_up(2, 11)
    history.begin(4, 8)
    assert history.given_up(1, 9)
    assert history.given_up(2, 9)
    assert not history.given_up(4, 9)
    assert history.of([WeightIdentity(1, 8, "a"), WeightIdentity(2, 12, "b")])
    assert not history.of([WeightIdentity(1, 8, "a"), WeightIdentity(4, 12, "b")])


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=6))
def test_only_weights_that_are_no_ancestors_of_the_newest_are_given_up(runs: list[tuple[int, int]]) -> None:
    """Each attempt begins with a version that is there, and makes some more."""
    history, lineage, lost, at = RunHistory(), [(1, 0)], set[tuple[int, int]](), 0
    for attempt, (start, steps) in enumerate(runs, start=1):
        at = min(start, at)
        history.begin(attempt, at)
        lost |= {weights for weights in lineage if weights[1] > at}
        lineage = [weights for weights in lineage if weights[1] <= at]
        lineage += [(attempt, version) for version in range(at + (not lineage), at + steps + 1)]
        at += steps
    for attempt, version in lineage:
        assert not history.given_up(attempt, version)
    for attempt, version in lost:
        assert history.given_up(attempt, version)
