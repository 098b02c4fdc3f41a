"""A replica reports its utilisation."""

from types import SimpleNamespace

import pytest
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from inference.engine_stats import EngineStats
from trireme.core.sampler import ReplicaStats


def step(running: int, kv_used: float = 0.5, preempted: int = 0) -> tuple[SchedulerStats, IterationStats]:
    iteration = IterationStats()
    iteration.num_preempted_reqs = preempted
    return SchedulerStats(num_running_reqs=running, kv_cache_usage=kv_used), iteration


def test_the_newest_step_counts_and_what_it_has_not_seen_waits() -> None:
    log = EngineStats(None)
    assert log.stats(0) == ReplicaStats(0, 0, 0.0, 0)
    log.record(*step(running=9, kv_used=0.9))
    log.record(*step(running=4, kv_used=0.25))
    assert log.stats(7) == ReplicaStats(running=4, waiting=3, kv_used=0.25, preemptions=0)
    assert log.stats(1) == ReplicaStats(running=1, waiting=0, kv_used=0.25, preemptions=0)


def test_preemptions_for_lack_of_space_are_counted_and_those_of_an_update_are_not() -> None:
    log = EngineStats(None)
    log.record(*step(running=3, preempted=2))
    log.cache_cleared(3)
    assert log.stats(3) == ReplicaStats(running=0, waiting=3, kv_used=0.0, preemptions=2)
    log.record(*step(running=2, preempted=2))
    log.record(*step(running=3, preempted=1))
    assert log.stats(3).preemptions == 2
    log.record(*step(running=2, preempted=1))
    assert log.stats(3).preemptions == 3
    log = EngineStats(None)
    log.record(*step(running=3))
    log.cache_cleared(3)
    log.record(*step(running=1, preempted=1))
    log.cache_cleared(1)
    log.record(*step(running=1, preempted=2))
    assert log.stats(1).preemptions == 1, "one that ended during an update excuses nothing after the next"
    log = EngineStats(None)
    log.record(*step(running=2))
    log.cache_cleared(4)
    log.record(*step(running=2))
    log.cache_cleared(4)
    log.record(*step(running=4, preempted=4))
    assert log.stats(4).preemptions == 0, "one that made no token between two updates is excused for both"


def test_an_engine_is_silent_since_its_last_step_or_since_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("inference.engine_stats.time", SimpleNamespace(monotonic=lambda: now[0]))
    log = EngineStats(None)
    log.listen()
    now[0] = 103.0
    assert log.silent_s == 3
    log.record(*step(running=1))
    assert log.silent_s == 0
    now[0] = 110.0
    log.record(None, None)  # aborted requests alone: the engine lives
    assert log.silent_s == 0


def test_an_engine_that_sleeps_says_so_to_no_metric() -> None:
    """vLLM tells each of its loggers; the gauges of the one that this derives from do not exist here."""
    StatLoggerManager.record_sleep_state(SimpleNamespace(stat_loggers=[EngineStats(None)]), 1, 0)
