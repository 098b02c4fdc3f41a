"""What a start says while it waits."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from trireme.launch.common import PROGRESS_EVERY_S, StartProgress


def test_a_long_start_says_why_it_waits(tmp_path: Path) -> None:
    (tmp_path / "trainer_1.log").touch()
    (tmp_path / "inference_0.log").write_text("INFO [one]\nLoading weights [1/2]\n\n")
    out = io.StringIO()
    progress = StartProgress(Console(file=out, width=400), tmp_path)
    names = ["trainer shard 0", "trainer shard 1", "inference replica 0", "Ray to place 3 actors"]
    progress(names, PROGRESS_EVERY_S - 1)
    assert out.getvalue() == ""
    progress(names, PROGRESS_EVERY_S)
    assert out.getvalue() == (
        "waiting for trainer shard 0: its process is starting, trainer shard 1: it imports packages and loads the "
        "model, inference replica 0: Loading weights [1/2], Ray to place 3 actors (5 s)\n"
    )
