"""Runs the `rl` command as a user would, in a process of its own, and looks at everything it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"
TINY = ["--orchestrator.batch-size", "4", "--orchestrator.group-size", "4", "--max-steps", "3"]
DEADLINE_S = 300


@dataclass(frozen=True)
class Ended:
    """How a run ended. `left` are command lines of processes still alive after `gone_s`, `files` what it left in its
    directory for temporary files, `shm` new files in /dev/shm."""

    code: int
    out: str
    root: Path
    left: list[str]
    files: set[str]
    shm: set[str]

    @property
    def rows(self) -> list[dict[str, Any]]:
        path = self.root / "metrics.jsonl"
        return [json.loads(line) for line in path.open()] if path.exists() else []

    def assert_nothing_left(self) -> None:
        assert self.left == []
        assert self.files == set()
        assert self.shm == set()


def marked_processes(mark: str) -> dict[int, str]:
    """Every living process that inherited `mark`, however it was re-parented: {pid: command line}."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (
                mark.encode() in (entry / "environ").read_bytes()
                and b"State:\tZ" not in (entry / "status").read_bytes()
            ):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it ended while we looked
            continue
    return found


def run_rl(
    tmp_path: Path,
    *flags: str,
    environ: dict[str, str] | None = None,
    on_line: Callable[[str, subprocess.Popen[str]], None] | None = None,
    config: Path = QUICKSTART,
    gone_s: float = 20.0,
) -> Ended:
    """Runs to the end (at most DEADLINE_S). `on_line` sees each line of output as it comes, and may send signals."""
    mark = f"TRIREME_TEST_MARK={uuid.uuid4().hex}"
    before = set(os.listdir("/dev/shm"))
    temporary = tempfile.mkdtemp(prefix="tr-", dir="/tmp")  # short, for Ray's sockets
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "trireme.cli",
            "@",
            str(config),
            "--run.output-dir",
            str(tmp_path),
            "--run.name",
            "run",
            *flags,
        ],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": temporary, **(environ or {}), **dict([mark.split("=")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines = []
    assert process.stdout is not None
    started = time.monotonic()
    for line in process.stdout:
        lines.append(line)
        if on_line:
            on_line(line, process)
        if time.monotonic() - started > DEADLINE_S:
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait(60)
    left = wait_until_gone(mark, gone_s)
    files = set(os.listdir(temporary))
    shutil.rmtree(temporary)
    return Ended(code, "".join(lines), tmp_path / "run", left, files, set(os.listdir("/dev/shm")) - before)


def wait_until_gone(mark: str, timeout_s: float) -> list[str]:
    """Command lines of marked processes that still live after `timeout_s`; these are then killed."""
    deadline = time.monotonic() + timeout_s
    while (alive := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return list(alive.values())


def at_step(step: int, send: signal.Signals) -> Callable[[str, subprocess.Popen[str]], None]:
    """Sends a signal to the driver once it has printed the line of `step` (1-based)."""

    def on_line(line: str, process: subprocess.Popen[str]) -> None:
        if line.split()[:2] == ["step", f"{step}/200"]:
            process.send_signal(send)

    return on_line
