"""`trireme scale` while a run goes on: a replica more that samples, one less, and nothing that anybody would miss."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from itertools import groupby
from pathlib import Path

from run_support import DEADLINE_S, ROOT, TINY, Ended, assert_bound_and_conservation, run_rl

from trireme.checkpoint.store import CheckpointStore
from trireme.core.errors import EXIT_BAD_INPUT, EXIT_SIGTERM
from trireme.tools.timeline import json_lines


def scale(run: Path, replicas: int) -> str:
    """What the command says, which must end well."""
    command = [sys.executable, "-m", "trireme.cli.trireme", "scale", str(run), "--replicas", str(replicas)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    return ended.stdout + ended.stderr


def test_replicas_come_and_go_while_the_run_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    second: list[Ended] = []

    def up_and_down(process: subprocess.Popen[str]) -> None:
        second.append(run_rl(tmp_path, *TINY, "--resume"))
        said.extend(scale(tmp_path / "run", replicas) for replicas in (2, 1))
        os.killpg(process.pid, signal.SIGTERM)  # of the run's whole group of processes, as a scheduler ends a job

    def on_line(line: str, process: subprocess.Popen[str]) -> None:
        if line.split()[:2] == ["step", "1/9999"]:
            threading.Thread(target=up_and_down, args=(process,)).start()

    ended = run_rl(tmp_path, *TINY, "--trainer.shards", "1", "--max-steps", "9999", on_line=on_line)
    assert ended.code == EXIT_SIGTERM, ended.out
    assert [commit.name for commit in CheckpointStore(ended.root).commits()][-1] == f"step_{len(ended.rows):06d}"
    assert second[0].code == EXIT_BAD_INPUT, "the run has a driver"
    assert "is running" in second[0].out
    up, down = said
    assert "1 replica; 1 more to start" in up.splitlines()  # whoever waits for an answer is told so first
    assert up.splitlines()[-1] == "2 of 2 replicas serve"
    assert "2 replicas; 1 to leave, once they have done what they sample" in down.splitlines()
    assert down.splitlines()[-1] == "1 of 1 replicas serve"
    assert [replicas for replicas, _ in groupby(row["perf/replicas"] for row in ended.rows)] == [1, 2, 1]
    spans = json_lines(ended.root / "trace" / "attempt_1" / "inference_1.json")
    assert any(event["name"] == "sampling" and event["ph"] == "X" for event in spans), "the new one sampled"
    assert_bound_and_conservation(ended, bound=1)
    assert not (ended.root / "incidents.jsonl").exists()
    assert json.loads((ended.root / "STATUS").read_text())["ended"]["exit_code"] == EXIT_SIGTERM
    ended.assert_nothing_left()
