"""`trireme watch --web` as a command: what it starts, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from trireme.cli.trireme import main
from trireme.core.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED

START_S = 60.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "8000"], "--port without --web"),
        (["--host", "0.0.0.0", "--keys", "k"], "--host --keys without --web"),
        (["--web", "--port", "65536"], "--port 65536"),
        (["--web", "--keys", "/nowhere/keys"], "/nowhere/keys"),
    ],
)
def test_what_is_refused(tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["watch", str(tmp_path), *options]) == EXIT_BAD_INPUT
    text = capsys.readouterr().err
    for part in (said, "given: ", "expected: ", "to do: "):
        assert part in text


def test_a_run_in_object_storage_is_looked_at_where_its_driver_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "s3://bucket/runs/sort", "--web"]) == EXIT_BAD_INPUT
    assert "give outputs/sort" in capsys.readouterr().err


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "trireme.cli.trireme", "watch", str(tmp_path), "--web", "--port", "0"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        ready, _, _ = select.select([running.stdout], [], [], START_S)
        assert ready, f"the command printed no address within {START_S:g} s"
        address = re.search(r"http://127\.0\.0\.1:\d+/console/", running.stdout.readline())
        assert address is not None
        with urlopen(f"{address[0]}api/run", timeout=START_S) as reply:
            assert json.load(reply)["run"] == tmp_path.name
        os.kill(running.pid, signal.SIGINT)
        assert running.wait(START_S) == EXIT_INTERRUPTED
        assert running.stderr is not None
        assert running.stderr.read() == ""
    finally:
        running.kill()
        running.wait(START_S)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
