"""What a test run has started ends with it, also when `timeout` or the kernel ends it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ENDS_S = 30.0
TESTS = """
import subprocess, time
from reaper import reap_after_this_process
reap_after_this_process()
subprocess.run(["sh", "-c", "setsid sleep 600 & echo $!"])  # its parent ends at once
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_all_that_was_started_ends(sent: signal.Signals) -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "support")}
    with subprocess.Popen([sys.executable, "-c", TESTS], env=environ, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout
        started = [psutil.Process(int(tests.stdout.readline())) for _ in range(2)]
        tests.send_signal(sent)
    assert psutil.wait_procs(started, timeout=ENDS_S)[1] == []
