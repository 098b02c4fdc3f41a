"""Runs the `rl` command as a user would, in a process of its own, and looks at everything it leaves behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from trireme.core.own_packages import ENTRY

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"
TINY = ["--orchestrator.batch-size", "4", "--orchestrator.group-size", "4", "--max-steps", "3"]
DEADLINE_S = 600
"""A run that has not ended by then hangs. A quickstart takes 80 s alone on two cores, and 300 s beside two others."""
GONE_S = 20.0
KILLED_GONE_S = 100.0
"""After SIGKILL to a driver. Two of Ray's processes of a node, which see its raylet end, may try for 60 s to tell the
cluster (`publish_error` in `ray._private.process_watcher`), which has ended too; then they end."""
SHM_S = 3.0
"""What another program is given to map a file that it has made, or to take its name away."""
RESOURCE_TRACKER = "from multiprocessing.resource_tracker import main"
"""In the command line of the process that removes what a program of multiprocessing leaves, and ends after it."""
RL, SFT = "trireme.cli.rl", "trireme.cli.sft"
"""The modules behind the commands."""


@dataclass(frozen=True)
class Ended:
    """How a run ended. `remaining` are command lines of processes alive GONE_S after it, `files` what it left in its
    directory for temporary files, `shm` in /dev/shm."""

    code: int
    out: str
    root: Path
    remaining: list[str]
    files: set[str]
    shm: set[str]

    @property
    def rows(self) -> list[dict[str, Any]]:
        path = self.root / "metrics.jsonl"
        return [json.loads(line) for line in path.open()] if path.exists() else []

    def assert_nothing_left(self) -> None:
        assert self.remaining == [], f"processes were left: {self.remaining}"
        assert self.files == set(), f"temporary files were left: {self.files}"
        assert self.shm == set(), f"shared memory was left: {self.shm}"


def marked_processes(mark: str) -> dict[int, str]:
    """Every living process that inherited `mark`, however it was re-parented: {pid: command line}."""
    commands = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (
                mark.encode() in (entry / "environ").read_bytes()
                and b"State:\tZ" not in (entry / "status").read_bytes()
            ):
                commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it ended while we looked
            continue
    return commands


def shm_left_since(before: Collection[str]) -> set[str]:
    """Files in /dev/shm that are new and stay there, although no living process has them mapped or open, or will remove
    them when it ends: those of other programs come and go."""
    deadline = time.monotonic() + SHM_S
    while (remaining := set(os.listdir("/dev/shm")) - set(before)) and (
        remaining := remaining - shm_in_use() - tracked_semaphores()
    ):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return remaining


def tracked_semaphores() -> set[str]:
    """Semaphores of multiprocessing in /dev/shm that are younger than a living resource tracker.

    A process that is killed leaves its semaphores, which then nobody has mapped, until the tracker of its program
    removes them, when the program ends. The tracker of the program that is looked at has ended by then.
    """
    trackers = [
        process.info["create_time"]
        for process in psutil.process_iter(["cmdline", "create_time"])
        if RESOURCE_TRACKER in " ".join(process.info["cmdline"] or [])
    ]
    names = set()
    for file in Path("/dev/shm").glob("sem.mp-*"):
        with suppress(OSError):  # it was removed while we looked
            if any(begun < file.stat().st_ctime for begun in trackers):
                names.add(file.name)
    return names


def shm_in_use() -> set[str]:
    """Files in /dev/shm that a living process has mapped or open."""
    used: list[str] = []
    for entry in filter(lambda entry: entry.name.isdigit(), Path("/proc").iterdir()):
        with suppress(OSError):  # it ended while we looked
            used += [line.split()[-1] for line in (entry / "maps").read_text().splitlines() if "/dev/shm/" in line]
            for file in os.listdir(entry / "fd"):
                with suppress(OSError):
                    used.append(os.readlink(entry / "fd" / file))
    return {Path(path).name for path in used if path.startswith("/dev/shm/")}


@dataclass(frozen=True)
class Running:
    """A started `rl`. All its processes inherit `mark`; `temporary` is their directory for temporary files."""

    process: subprocess.Popen[str]
    mark: str
    temporary: Path
    shm_before: frozenset[str]

    @classmethod
    def start(
        cls,
        *flags: str,
        environ: dict[str, str] | None = None,
        out: int | IO[str] = subprocess.PIPE,
        module: str = RL,
        cwd: Path = ROOT,
    ) -> Running:
        mark = f"TRIREME_TEST_MARK={uuid.uuid4().hex}"
        before = frozenset(os.listdir("/dev/shm"))
        temporary = tempfile.mkdtemp(prefix="tr-", dir="/tmp")  # short, for Ray's sockets
        process = subprocess.Popen(
            [sys.executable, "-m", ENTRY, module, *flags],
            cwd=cwd,
            env={**os.environ, "TMPDIR": temporary, **(environ or {}), **dict([mark.split("=")])},
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return cls(process, mark, Path(temporary), before)

    def kill_tree(self) -> None:
        """SIGKILL to every process of the run, until none is left."""
        deadline = time.monotonic() + KILLED_GONE_S
        while alive := marked_processes(self.mark):
            assert time.monotonic() < deadline, f"{KILLED_GONE_S:g} s after SIGKILL there are still {alive}"
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(60)

    def lines(self, limit_s: float = DEADLINE_S) -> Iterator[str]:
        """Yields what it prints, line by line. After `limit_s` seconds all of its processes are killed, and the last
        line says so: one that hangs prints nothing more, and would be read for ever."""
        assert self.process.stdout is not None
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            self.kill_tree()

        timer = threading.Timer(limit_s, kill)
        timer.start()
        try:
            yield from iter(self.process.stdout.readline, "")  # whose end does not close it
            if killed.is_set():
                yield f"(all of its processes were killed, as it had not ended in {limit_s:g} s)\n"
        finally:
            timer.cancel()

    def files_left(self) -> set[str]:
        """Returns the contents of the directory for temporary files, and removes it."""
        files = set(os.listdir(self.temporary))
        shutil.rmtree(self.temporary)
        return files

    def shm_left(self) -> set[str]:
        return shm_left_since(self.shm_before)


def in_directory(tmp_path: Path, config: Path = QUICKSTART) -> list[str]:
    """Flags of a run that is called `run` and lies in `tmp_path`."""
    return ["@", str(config), "--run.output-dir", str(tmp_path), "--run.name", "run"]


def run_rl(
    tmp_path: Path,
    *flags: str,
    environ: dict[str, str] | None = None,
    on_line: Callable[[str, subprocess.Popen[str]], None] | None = None,
    config: Path = QUICKSTART,
    directory: bool = True,
    module: str = RL,
    limit_s: float = DEADLINE_S,
    cwd: Path = ROOT,
) -> Ended:
    """Runs to the end (at most `limit_s`). `on_line` sees each line of output as it comes, and may send signals.
    `directory`: whether configuration and run directory are given here, or by `flags`."""
    running = Running.start(
        *(in_directory(tmp_path, config) if directory else []), *flags, environ=environ, module=module, cwd=cwd
    )
    process = running.process
    lines = []
    for line in running.lines(limit_s):
        lines.append(line)
        if on_line:
            on_line(line, process)
    code = process.wait(60)
    remaining = wait_until_disconnected(running.mark, GONE_S)
    return Ended(code, "".join(lines), tmp_path / "run", remaining, running.files_left(), running.shm_left())


def taken(logs: Path, replica: int, how: str) -> set[int]:
    """Returns the versions that a replica took "as it was broadcast" or "on demand"."""
    text = "".join(log.read_text() for log in logs.rglob(f"inference_{replica}.log"))
    return {int(version) for version in re.findall(rf"replica {replica} takes version (\d+) {how}", text)}


def wait_until_disconnected(mark: str, timeout_s: float) -> list[str]:
    """Command lines of marked processes that still live after `timeout_s`; these are then killed."""
    deadline = time.monotonic() + timeout_s
    while (alive := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return list(alive.values())


def assert_bound_and_conservation(outcome: Ended, bound: int) -> None:
    assert_rows_keep_the_bound(outcome.rows, bound)


def assert_rows_keep_the_bound(rows: Iterable[dict[str, Any]], bound: int) -> None:
    """Checks the rows of a run: no group is older than `bound`, and no rollout is lost."""
    for row in rows:
        assert row["off_policy/max"] <= bound
        terms = ("trained", "in_training", "filtered", "resampled", "dropped", "failed", "active")
        assert row["ledger/dispatched"] == sum(row[f"ledger/{term}"] for term in terms)


def key_in(text: str, role: str = "client") -> str:
    """Returns a key of the file of keys that a service has named in its output; "" before it has."""
    named = re.search(r"are in (\S+), which only you can read", text)
    words = Path(named[1]).read_text().split() if named else []
    return words[words.index(role) + 1] if role in words else ""
