"""Where a process writes, and that it says where it is when it is asked."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_for

from trireme.process.environ import DRIVER_MARK, LOG_LINES, STACKS, end_of_far_log

DEADLINE_S = 60
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


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", HANGS, str(tmp_path)], stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_what_it_and_its_children_print_goes_to_its_log(tmp_path: Path, hanging: subprocess.Popen[bytes]) -> None:
    log = tmp_path / "room_0.log"
    wait_for(lambda: log.exists() and "error\n" in log.read_text(), "its output")
    assert log.read_text().split("\n")[:3] == ["a child", "out", "error"]
    hanging.kill()
    assert hanging.stdout.read() == b""


def test_one_that_hangs_writes_where_and_lives(tmp_path: Path, hanging: subprocess.Popen[bytes]) -> None:
    log = tmp_path / "room_0.log"
    wait_for(lambda: log.exists() and "error\n" in log.read_text(), "its output")
    for count in (1, 2):
        os.kill(hanging.pid, STACKS)
        wait_for(lambda: log.read_text().count("in in_a_collective") >= count, "its stacks")  # noqa: B023
    assert hanging.poll() is None


def test_a_cluster_of_its_own_is_at_an_address_that_others_cannot_reach() -> None:
    """Ray reads the variable when it is imported. tests/e2e/test_run.py looks at the sockets of a run."""
    code = (
        "from trireme.process.environ import prepare_ray_environment as prepare; prepare(None, 1, False); "
        "import ray; print(ray.util.get_node_ip_address())"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert process.stdout.strip() == "127.0.0.1"


def test_the_end_of_a_log_travels_where_the_driver_does_not_see_it(tmp_path: Path) -> None:
    assert end_of_far_log(None, "inference_0") == ""
    assert end_of_far_log(tmp_path, "inference_0") == "", "there is no log"
    (tmp_path / "inference_0.log").write_text("".join(f"line {n}\n" for n in range(LOG_LINES + 5)))
    first, *lines = end_of_far_log(tmp_path, "inference_0").splitlines()
    assert first == f"its log: {tmp_path}/inference_0.log on {os.uname().nodename}, which ends with"
    assert lines == [f"line {n}" for n in range(5, LOG_LINES + 5)]
    (tmp_path / DRIVER_MARK).touch()
    assert end_of_far_log(tmp_path, "inference_0") == ""
