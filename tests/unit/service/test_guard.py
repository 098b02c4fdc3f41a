"""The rate of a key. (test_app.py tests the guard before real routes.)"""

from __future__ import annotations

import pytest

from service.asked import RequestRefused
from service.guard import Rates


def test_a_bucket_is_filled_evenly() -> None:
    now = [0.0]
    rates = Rates(6, lambda: now[0])
    for _ in range(6):
        rates.take("a")
    with pytest.raises(RequestRefused) as refused:
        rates.take("a")
    assert refused.value.retry_after_s == pytest.approx(10)
    rates.take("b")
    now[0] = 10.5
    rates.take("a")
    with pytest.raises(RequestRefused):
        rates.take("a")
    now[0] = 1000.0
    for _ in range(6):
        rates.take("a")
    with pytest.raises(RequestRefused):
        rates.take("a")


def test_without_a_limit_none_is_refused() -> None:
    rates = Rates(None)
    for _ in range(1000):
        rates.take("a")


def test_keys_that_were_not_used_for_a_minute_are_not_kept() -> None:
    now = [0.0]
    rates = Rates(6, lambda: now[0])
    for number in range(20_000):  # the keys of sessions
        now[0] += 1.0
        rates.take(f"session-{number}")
        if number % 10 == 0:
            rates.take("steady")
    assert len(rates._left) <= 1024
    for _ in range(5):
        rates.take("steady")
    with pytest.raises(RequestRefused):
        rates.take("steady")
