"""Requests bear the CPU time of their process, each its part."""

from __future__ import annotations

import pytest

from trireme.process.cpu_meter import MOST_S, CpuMeter


def test_requests_that_were_counted_share_the_time_since_the_last_call() -> None:
    used_s = 5.0
    meter = CpuMeter(lambda: used_s)
    for _ in range(4):
        meter.count()
    used_s += 0.004
    assert meter.take() == pytest.approx(0.001)
    assert meter.take() == 0.0
    used_s += 0.002
    assert meter.take() == pytest.approx(0.002), "without any that was counted, all of it"


def test_no_request_bears_more_than_a_bound() -> None:
    used_s = 0.0
    meter = CpuMeter(lambda: used_s)
    used_s = 60.0
    assert meter.take() == MOST_S
    assert meter.take() == 0.0, "the rest is not borne by the next one"


def test_the_time_of_this_process_is_measured() -> None:
    meter = CpuMeter()
    before = meter.take()
    sum(range(300_000))
    assert before >= 0.0
    assert meter.take() > 0.0
