"""What environments hold is given back by a run that loses a part, begins again, and is then asked to end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from run_support import TINY, at_step, run_rl

from trireme.core.errors import EXIT_SIGTERM


def test_all_are_closed_after_a_rebuild_and_after_sigterm(tmp_path: Path) -> None:
    """A shard is killed in the third step: the orchestrator, which is alive and has rollouts in flight, is replaced by
    another process. SIGTERM ends that one in the sixth step."""
    files = tmp_path / "files"
    files.mkdir()
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environ = {
        "PYTHONPATH": path,
        "TRIREME_TEST_FILES": str(files),
        "TRIREME_FAULTS": "trainer.forward_backward@3=kill",
        "TRIREME_FAULT_ONCE": str(tmp_path / "once"),
    }
    (tmp_path / "once").mkdir()
    flags = [*TINY, "--max-steps", "200", "--trainer.shards", "1", "--env.id", "file_env:FileSort"]
    flags += ["--checkpoint.every", "2"]
    ended = run_rl(tmp_path, *flags, environ=environ, on_line=at_step(6, signal.SIGTERM))
    assert ended.code == EXIT_SIGTERM, ended.out
    made = (tmp_path / "made").read_text().split()
    assert len({name.partition("-")[0] for name in made}) == 2, "two processes have made environments"
    assert len(made) > 5 * 16
    assert os.listdir(files) == []
    ended.assert_nothing_left()
