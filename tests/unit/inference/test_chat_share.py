"""An engine's time by purpose, and the bucket of chats: no time is lost, and none is given twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.metrics.stats import SchedulerStats

from inference.chat_share import BURST_S, ChatShare, EngineClock, EngineReport, report_in, with_report
from trireme.core.engine_use import EngineUse

SHARE = 0.1
STEPS = st.lists(
    st.tuples(
        st.floats(0, 10),  # seconds of the step
        st.floats(0, 10),  # seconds until the next one
        st.integers(0, 9),  # tokens of the run
        st.integers(0, 9),  # tokens of chats
        st.booleans(),  # the engine has more to do at once
        st.booleans(),  # it was paused meanwhile
    )
)


class TestEngineClock:
    @given(STEPS)
    def test_the_time_of_steps_is_divided_by_their_tokens_without_rest(
        self, steps: list[tuple[float, float, int, int, bool, bool]]
    ) -> None:
        clock, now, lasted, since = EngineClock(), 0.0, 0.0, None
        chats = 0.0
        for seconds, between, run, chat, busy, paused in steps:
            clock.begin(now)
            since = now if since is None else since
            now += seconds
            parts = clock.end(now, {"run": run, "chat": chat}, busy=busy)
            if run + chat:
                lasted += now - since
                chats += (now - since) * chat / (run + chat)
            assert sum(use.seconds for use in parts.values()) == pytest.approx(now - since if run + chat else 0.0)
            since = now if busy else None
            now += between
            if paused:
                clock.stand_still()
                since = None
        assert sum(use.seconds for use in clock.uses.values()) == pytest.approx(lasted)
        assert clock.uses["chat"].seconds == pytest.approx(chats)
        assert clock.uses["run"].tokens == sum(run for _, _, run, *_ in steps)
        assert clock.uses["chat"].tokens == sum(chat for _, _, _, chat, *_ in steps)

    def test_steps_that_overlap_count_once(self) -> None:
        """vLLM may begin a step while the one before it is computed."""
        clock = EngineClock()
        clock.begin(0.0)
        clock.begin(1.0)
        clock.end(4.0, {"run": 1, "chat": 0}, busy=True)
        clock.begin(4.0)
        clock.end(6.0, {"run": 0, "chat": 1}, busy=True)
        assert clock.uses == {"run": EngineUse(4.0, 1), "chat": EngineUse(2.0, 1)}

    def test_an_engine_that_waits_works_for_none(self) -> None:
        clock = EngineClock()
        clock.begin(0.0)
        clock.end(1.0, {"run": 1, "chat": 0}, busy=False)
        clock.begin(100.0)
        clock.end(101.0, {"run": 0, "chat": 1}, busy=False)
        assert clock.uses == {"run": EngineUse(1.0, 1), "chat": EngineUse(1.0, 1)}


class TestChatShare:
    @given(st.lists(st.tuples(st.floats(0.001, 0.5), st.floats(0, 1), st.floats(0, 3))), st.floats(0.01, 0.99))
    def test_chats_never_have_more_than_their_share_and_a_step(
        self, steps: list[tuple[float, float, float]], share: float
    ) -> None:
        """Each step has its seconds, the part of it that chats take if they may, and a pause after it."""
        bucket, now, had, longest = ChatShare(share, 0.0), 0.0, 0.0, 0.0
        for seconds, part, pause in steps:
            if not bucket.wait_s(now):
                bucket.charge(part * seconds)
                had, longest = had + part * seconds, max(longest, part * seconds)
            now += seconds
            assert had <= share * now + BURST_S + longest + 1e-9
            now += pause

    @given(st.lists(st.floats(0, 9), max_size=5), st.floats(0.01, 0.99))
    def test_chats_may_go_on_when_it_says(self, charges: list[float], share: float) -> None:
        bucket = ChatShare(share, 0.0)
        for each in charges:
            bucket.charge(each)
        wait_s = bucket.wait_s(0.0)
        assert wait_s == pytest.approx(max(sum(charges) - BURST_S, 0.0) / share)
        assert bucket.wait_s(wait_s * 1.001 + 1e-6) == 0.0

    def test_a_share_of_all_bounds_nothing(self) -> None:
        bucket = ChatShare(1.0, 0.0)
        bucket.charge(1e9)
        assert bucket.wait_s(0.0) == 0.0


def test_statistics_bring_the_report() -> None:
    stats, report = SchedulerStats(), EngineReport(EngineClock().uses | {"chat": EngineUse(0.5, 7)}, 3, 4)
    assert report_in(stats) is None
    assert report_in(with_report(stats, report)) == report
