"""The directory of a driver: others do not enter it, and what a killed driver left is removed by the next one."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from other_user import as_another_user, reached, without_root

from trireme.process import private
from trireme.process.private import LOCK, private_directory


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, which all may use."""
    base = tmp_path / "all"
    base.mkdir()
    base.chmod(0o1777)
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == os.geteuid() and not above.stat().st_mode & stat.S_IXOTH:
            above.chmod(above.stat().st_mode | stat.S_IXOTH)
    monkeypatch.setattr(private.tempfile, "gettempdir", lambda: str(base))
    monkeypatch.setattr(private, "LONGEST_BASE", 1000)
    return base


@without_root
def test_another_user_reaches_nothing_in_it(base: Path) -> None:
    with private_directory() as directory:
        (directory / "r").mkdir()
        (directory / "r").chmod(0o777)  # as Ray does
        (directory / "r" / "log").write_text("a secret")
        (directory / "r" / "log").chmod(0o666)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(directory / "r" / "s"))
            listening.listen()
            (directory / "r" / "s").chmod(0o777)
            paths = [directory, *directory.rglob("*")]
            assert len(paths) == 5
            assert as_another_user(lambda: reached(paths)) == ""
            directory.chmod(0o711)
            assert len(as_another_user(lambda: reached(paths)).split()) == 4, "without the directory it reaches them"
            directory.chmod(0o700)
        assert as_another_user(lambda: (base / "own").touch()) == "", "the attempts fail for the directory alone"
    assert sorted(path.name for path in base.iterdir()) == ["own"]


def left_by_a_killed_driver(base: Path) -> Path:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from trireme.process import private\n"
        f"private.tempfile.tempdir, private.LONGEST_BASE = {str(base)!r}, 1000\n"
        "with private.private_directory() as directory:\n"
        "    (directory / 'r').mkdir(); (directory / 'r' / 'log').touch()\n"
        "    print(directory, flush=True); time.sleep(600)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    directory = Path(driver.stdout.readline().strip())
    with private_directory():
        assert directory.exists(), "its driver lives"
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    return directory


def test_the_next_driver_removes_what_a_killed_one_left_and_nothing_else(base: Path) -> None:
    stale = left_by_a_killed_driver(base)
    assert (stale / "r" / "log").exists()
    for name in ("trireme-eval-x", "other"):
        (base / name / "logs").mkdir(parents=True)
    (base / "trireme-link").symlink_to(base / "other")
    (base / "other" / LOCK).touch()
    with private_directory() as one, private_directory() as other:
        assert not stale.exists()
        assert stat.S_IMODE(one.stat().st_mode) == 0o700
        assert one.exists(), "its own driver lives"
        assert one != other
    assert sorted(path.name for path in base.iterdir()) == ["other", "trireme-eval-x", "trireme-link"]
    assert (base / "other" / "logs").exists()


@without_root
def test_the_directory_of_another_user_is_left_alone(base: Path) -> None:
    def plant() -> None:
        (base / "trireme-planted").mkdir()
        (base / "trireme-planted" / LOCK).touch()

    assert as_another_user(plant) == ""
    with private_directory():
        assert (base / "trireme-planted" / LOCK).exists()


def test_sockets_have_paths_that_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the longest id of a process, and a temporary directory as long as is taken."""
    monkeypatch.undo()
    base = Path("/tmp/" + "b" * (private.LONGEST_BASE - len("/tmp/")))
    base.mkdir(exist_ok=True)
    monkeypatch.setattr(private.tempfile, "gettempdir", lambda: str(base))
    try:
        with private_directory() as directory, socket.socket(socket.AF_UNIX) as listening:
            below = directory / "r/session_2026-11-26_22-21-23_123456_4194304/sockets"
            below.mkdir(parents=True)
            listening.bind(str(below / "plasma_store"))
    finally:
        base.rmdir()
