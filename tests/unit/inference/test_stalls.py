"""An engine that works, however slowly, is told from one that stands still."""

import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.third_party import pynvml
from waiting import wait_for

from inference import stalls as module
from inference.stalls import QUIET_S, StallClock, cpu_seconds, gpus_compute

MOST_S = 2 * QUIET_S
"""What works is never said to have stood still for longer."""
SPIN = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'])"


class Process:
    """One that gets a share of a core; its clock is the one that `StallClock` reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.used_s = self.silent_s = 0.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.computes = False
        self.clock = StallClock(lambda: (self.used_s,), lambda: (self.computes,))

    def work(self, seconds: float, share: float, look_every_s: float = 1.0) -> float:
        """Time passes without an answer. Returns the longest time without progress that was seen."""
        longest_s, end = 0.0, self.now + seconds
        while self.now < end:
            self.now += look_every_s
            self.silent_s += look_every_s
            self.used_s += share * look_every_s
            longest_s = max(longest_s, self.clock.look(self.silent_s))
        return longest_s

    def answer(self) -> float:
        taught_s, self.silent_s = self.clock.answered(self.silent_s), 0.0
        return taught_s


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


@pytest.mark.parametrize("share", [0.02, 1.0, 30.0])
def test_what_uses_cpu_time_makes_progress_however_long_it_takes(process: Process, share: float) -> None:
    assert process.work(3600.0, share) <= MOST_S
    assert process.answer() <= MOST_S, "and teaches nothing of longer stalls"
    assert process.work(60.0, 0.003) >= 55.0, "what uses none stands still, also if threads wake up now and then"


def test_ranks_stand_still_as_soon_as_one_does_for_which_the_others_wait_busily(process: Process) -> None:
    """As in a collective, where a rank looks again and again if the others have come."""
    stopped_s = 5.0
    process.clock = StallClock(lambda: (process.used_s, min(process.used_s, stopped_s)), lambda: (False, False))
    assert process.work(stopped_s, 1.0) <= MOST_S
    assert process.work(60.0, 1.0) >= 55.0


def test_what_waits_for_its_gpu_makes_progress_as_long_as_that_of_each_rank_computes(process: Process) -> None:
    process.computes = True
    assert process.work(3600.0, 0.0) <= MOST_S
    process.computes = False
    assert process.work(60.0, 0.0) >= 55.0
    process.clock = StallClock(lambda: (0.0, 0.0), lambda: (True, False))
    assert process.work(60.0, 0.0) >= 55.0


def test_the_driver_says_which_gpus_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three one computes, one is idle, and one does not say."""
    driver = create_autospec(pynvml)
    driver.NVMLError = OSError
    rates = [SimpleNamespace(gpu=31), SimpleNamespace(gpu=0), OSError("Not Supported")]
    driver.nvmlDeviceGetUtilizationRates.side_effect = rates
    monkeypatch.setattr("vllm.third_party.pynvml", driver)
    platform = SimpleNamespace(device_id_to_physical_device_id=lambda number: number + 5)
    monkeypatch.setattr("vllm.platforms.current_platform", platform, raising=False)
    assert gpus_compute(3) == [True, False, True]
    assert [call.args for call in driver.nvmlDeviceGetHandleByIndex.call_args_list] == [(5,), (6,), (7,)]
    assert driver.nvmlInit.call_count == driver.nvmlShutdown.call_count == 1


def test_an_answer_ends_a_stall_also_where_nobody_looked(process: Process) -> None:
    process.work(10.0, 0.0)
    assert process.answer() == pytest.approx(10.0)
    assert process.work(1.0, 0.0) == 1.0
    process.answer()
    process.now += 3.0
    process.silent_s = 3.0
    assert process.answer() == 3.0, "nobody looked"
    process.work(2.0, 1.0)
    stopped_itself = process.work(600.0, 0.0, look_every_s=600.0)  # Ctrl-Z, or a machine that sleeps
    assert stopped_itself <= module.LONGEST_GAP_S


phases = st.tuples(st.floats(1.0, 300.0), st.floats(0.02, 8.0))


@given(st.lists(phases, max_size=6), st.floats(5.0, 60.0))
def test_only_a_stop_is_seen_whatever_came_before(before: list[tuple[float, float]], stopped_s: float) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        process = Process(monkeypatch)
        for seconds, share in before:
            assert process.work(seconds, share) <= MOST_S
        assert stopped_s - MOST_S <= process.work(stopped_s, 0.0) <= stopped_s + MOST_S


def test_cpu_time_of_a_real_process_counts_what_it_started_and_stops_with_it() -> None:
    """As compilers that an engine starts."""
    with subprocess.Popen([sys.executable, "-c", SPIN]) as parent:
        try:
            wait_for(lambda: cpu_seconds(parent.pid) >= 0.3, "CPU time")
            before = cpu_seconds(parent.pid)
            child = module.psutil.Process(parent.pid).children()[0]
            for process in (parent, child):
                process.send_signal(signal.SIGSTOP)
            wait_for(lambda: child.status() == "stopped", "the child to stop")
            stopped = cpu_seconds(parent.pid)
            time.sleep(0.3)
            assert cpu_seconds(parent.pid) == stopped >= before
        finally:
            child.kill()
            parent.kill()
    assert cpu_seconds(parent.pid) == 0.0
