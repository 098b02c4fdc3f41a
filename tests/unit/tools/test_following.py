"""Reading a run directory while the run writes it."""

import os
from pathlib import Path

from trireme.tools.following import LineFollower, driver_state, is_live, run_config, tokenizer_of


def test_lines_are_read_once_and_an_unfinished_line_waits(tmp_path: Path) -> None:
    """Curves are read in bounded parts, and again from a file that was replaced: test_curves.py."""
    rows = tmp_path / "rows"
    rows.write_text("one\ntwo\nthree\n")
    follower = LineFollower(rows)
    assert follower.poll() == (True, [b"one", b"two", b"three"])
    assert follower.poll() == (False, [])
    with rows.open("a") as file:
        file.write("fo")
        file.flush()
        assert follower.poll() == (False, [])
        file.write("ur\n")
    assert follower.poll() == (False, [b"four"])


def test_what_is_known_of_a_run_that_has_not_begun(tmp_path: Path) -> None:
    assert LineFollower(tmp_path / "rows").poll() == (False, [])
    assert run_config(tmp_path) == {}
    assert driver_state(tmp_path) == "not started"
    assert not is_live(driver_state(tmp_path))
    assert tokenizer_of({"model": {"name": str(tmp_path), "tokenizer": None}}) == str(tmp_path)
    assert tokenizer_of({"model": {"name": "some/model"}}) is None
    assert tokenizer_of({}) is None


def test_a_driver_is_a_process_that_holds_the_lock_file(tmp_path: Path) -> None:
    lock = tmp_path / "driver.lock"
    node = os.uname().nodename
    lock.write_text(f"pid {os.getpid()} on {node}\n")
    assert driver_state(tmp_path) == "not running", "another process may have the number by now"
    with lock.open():
        assert driver_state(tmp_path) == f"running, process {os.getpid()}"
        assert is_live(driver_state(tmp_path))
    lock.write_text("pid 1 on elsewhere\n")
    assert driver_state(tmp_path) == "driver on elsewhere, process 1"
    assert is_live(driver_state(tmp_path))
