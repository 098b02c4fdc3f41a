"""Where a process writes, and that it says where it is when it is asked."""

import os
import subprocess
import sys
from pathlib import Path

from waiting import wait_for

from trireme.process.environ import DRIVER_MARK, LOG_LINES, STACKS, end_of_far_log

HANGS = """
import os, sys, time
from pathlib import Path
from trireme.process.environ import redirect_output

def in_a_collective():
    os.system("echo a child")
    print("out", flush=True)
    print("error", file=sys.stderr)
    time.sleep(3600)

redirect_output(Path(sys.argv[1]), "room_0")
in_a_collective()
"""


def test_a_log_has_what_is_printed_and_where_it_hangs(tmp_path: Path) -> None:
    log = tmp_path / "room_0.log"
    with subprocess.Popen([sys.executable, "-c", HANGS, str(tmp_path)], stdout=subprocess.PIPE) as hanging:
        wait_for(lambda: log.exists() and "error\n" in log.read_text(), "its output")
        assert log.read_text().split("\n")[:3] == ["a child", "out", "error"]
        for count in (1, 2):
            os.kill(hanging.pid, STACKS)
            wait_for(lambda: log.read_text().count("in in_a_collective") >= count, "its stacks")  # noqa: B023
        assert hanging.poll() is None, "it lives"
        hanging.kill()
        assert hanging.stdout.read() == b""


def test_the_end_of_a_log_travels_where_the_driver_does_not_see_it(tmp_path: Path) -> None:
    assert end_of_far_log(None, "inference_0") == ""
    assert end_of_far_log(tmp_path, "inference_0") == "", "there is no log"
    (tmp_path / "inference_0.log").write_text("".join(f"line {n}\n" for n in range(LOG_LINES + 5)))
    first, *lines = end_of_far_log(tmp_path, "inference_0").splitlines()
    assert first == f"its log: {tmp_path}/inference_0.log on {os.uname().nodename}, which ends with"
    assert lines == [f"line {n}" for n in range(5, LOG_LINES + 5)]
    (tmp_path / DRIVER_MARK).touch()
    assert end_of_far_log(tmp_path, "inference_0") == ""
