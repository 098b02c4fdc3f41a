"""How often a part may be started again, and who is silent for too long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.core.errors import LimitReached, RoomFailed
from trireme.supervision.restarts import Restarts

DEATH = RoomFailed("trainer shard 1 died (exit type: SYSTEM_ERROR)")


def take(restarts: Restarts, *, part: str = "replica 0", died: bool = True, step: int = 0, now: float = 0.0) -> None:
    restarts.take(part, DEATH, died=died, step=step, now=now)


class TestBudget:
    def test_one_death_more_than_allowed_within_the_window_stops_the_run(self) -> None:
        restarts = Restarts(2, 100.0)
        take(restarts, now=0.0)
        take(restarts, now=50.0)
        with pytest.raises(LimitReached, match=r"replica 0 failed 3 times within 100 s.*max_restarts.*SYSTEM_ERROR"):
            take(restarts, now=100.0)

    def test_each_part_has_a_budget_of_its_own(self) -> None:
        restarts = Restarts(1, 100.0)
        take(restarts, part="replica 0")
        take(restarts, part="replica 1")

    def test_with_none_the_failure_itself_is_raised(self) -> None:
        with pytest.raises(RoomFailed) as raised:
            take(Restarts(0, 100.0))
        assert raised.value is DEATH

    @given(st.lists(st.floats(0, 1000), max_size=40), st.integers(1, 5), st.floats(1, 500))
    def test_a_window_has_as_many_restarts_as_the_limit(self, times: list[float], limit: int, window_s: float) -> None:
        restarts, taken = Restarts(limit, window_s), []
        for now in sorted(times):
            try:
                take(restarts, now=now)
            except LimitReached:
                assert sum(now - earlier <= window_s for earlier in taken) == limit
                continue
            taken.append(now)
        assert all(later - first > window_s for first, later in zip(taken, taken[limit:], strict=False))


class TestTheSameErrorTwice:
    def test_without_a_step_in_between_is_no_accident(self) -> None:
        restarts = Restarts(3, 100.0)
        take(restarts, died=False, step=4)
        with pytest.raises(RoomFailed) as raised:
            take(restarts, died=False, step=4)
        assert raised.value is DEATH
        assert any("raised it again" in note for note in raised.value.__notes__)

    def test_after_another_step_may_be_one(self) -> None:
        restarts = Restarts(3, 100.0)
        take(restarts, died=False, step=4)
        take(restarts, died=False, step=5)

    def test_a_process_that_dies_says_nothing_of_the_kind(self) -> None:
        restarts = Restarts(3, 100.0)
        take(restarts, step=4)
        take(restarts, step=4)

    def test_process_ids_and_addresses_do_not_make_it_another_error(self) -> None:
        restarts = Restarts(3, 100.0)
        first, second = (RoomFailed(f"pid {pid} at 0x{pid:x}: out of memory") for pid in (1234, 98765))
        restarts.take("replica 0", first, died=False, step=0, now=0.0)
        with pytest.raises(RoomFailed, match="98765"):
            restarts.take("replica 0", second, died=False, step=0, now=1.0)
