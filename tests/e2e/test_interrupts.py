"""Ctrl-C at any moment of a start: exit code 130, what was started or the command that continues, and no traceback."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chaos_support import wait_for
from run_support import DEADLINE_S, RL, ROOT, TINY, Ended, Running, in_directory, wait_until_disconnected

from trireme.core.errors import EXIT_INTERRUPTED

STOPPING = "stopping: waiting for the end of what was started; a second signal ends this at once\n"


def interrupt(tmp_path: Path, point: str) -> Ended:
    """Sends Ctrl-C to the driver once a process of the run stands at a fault point, and then lets that go on."""
    reached = tmp_path / "reached"
    environ = {"TRIREME_FAULTS": f"{point}=freeze", "TRIREME_FAULT_REACHED": str(reached)}
    running = Running.start(*in_directory(tmp_path), *TINY, environ=environ, module=RL)
    try:
        wait_for(point, reached.exists, running, DEADLINE_S)
        running.process.send_signal(signal.SIGINT)
        signalled_at = time.monotonic()
        if point.startswith("driver."):  # the signal is handled there, in Python
            reached.unlink()
        out, _ = running.process.communicate(timeout=DEADLINE_S)
        print(f"ended {time.monotonic() - signalled_at:.1f} s after the signal at {point}")
    except BaseException:
        running.kill_tree()
        raise
    remaining = wait_until_disconnected(running.mark, 20.0)
    return Ended(running.process.returncode, out, tmp_path / "run", remaining, running.files_left(), running.shm_left())


@pytest.mark.parametrize(
    "point",
    [
        "inference.start",
        # The ends of what these have started are a part of that one's.
        *(
            pytest.param(point, marks=pytest.mark.long)
            for point in ("driver.cluster", "trainer.start", "orchestrator.start")
        ),
    ],
)
def test_while_the_run_starts(point: str, tmp_path: Path) -> None:
    """After `driver.cluster` the driver waits in Ray's compiled code, which raises an error of its own then."""
    outcome = interrupt(tmp_path, point)
    assert outcome.code == EXIT_INTERRUPTED, outcome.out
    assert "Traceback" not in outcome.out
    assert "stopped by a signal" in outcome.out
    assert "There is no checkpoint yet; resume the run with:\n" in outcome.out
    status = json.loads((outcome.root / "STATUS").read_text())
    assert status["ended"] == {"exit_code": EXIT_INTERRUPTED, "why": "stopped by a signal"}
    outcome.assert_nothing_left()


def test_before_the_run_has_a_directory(tmp_path: Path) -> None:
    outcome = interrupt(tmp_path, "driver.command")
    assert (outcome.code, outcome.out) == (
        EXIT_INTERRUPTED,
        STOPPING + "stopped by a signal; nothing is left running\n",
    )
    assert not outcome.root.exists()
    outcome.assert_nothing_left()


def test_while_the_command_is_imported(tmp_path: Path) -> None:
    """A module that is imported first, which is searched before that of the standard library, holds it up."""
    (tmp_path / "rich.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(600)\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from trireme.cli.start import rl; sys.exit(rl())"
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    expected = "starting\nstopped by a signal; nothing was started\n"
    assert (process.returncode, process.stderr) == (EXIT_INTERRUPTED, expected)
