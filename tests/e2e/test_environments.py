"""What environments hold is given back by a run that loses parts, begins again, and is then asked to end."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from run_support import TINY, at_step, run_rl

from trireme.core.errors import EXIT_SIGTERM
from trireme.supervision.status import Status


@pytest.mark.long
def test_all_are_closed_after_a_rebuild_and_after_sigterm(tmp_path: Path) -> None:
    """A shard is killed in the third step: the orchestrator, which is alive and has rollouts in flight, is replaced by
    another process. That gets SIGTERM itself in the fifth step, and is replaced too. SIGTERM ends the run in the eighth
    step."""
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
    sent: list[int] = []

    def on_line(line: str, process: subprocess.Popen[str]) -> None:
        at_step(8, signal.SIGTERM)(line, process)
        status = Status.read(tmp_path / "run")
        if line.split()[:2] == ["step", "5/200"] and status and not sent:
            sent.extend(part.pids[0] for part in status.parts if part.name == "orchestrator_0")
            os.kill(sent[0], signal.SIGTERM)

    ended = run_rl(tmp_path, *flags, environ=environ, on_line=on_line)
    assert ended.code == EXIT_SIGTERM, ended.out
    made = [line.split() for line in (tmp_path / "made").read_text().splitlines()]
    makers = {name.partition("-")[0] for name, _ in made}
    assert len(makers) == 4, "the trial before the start, and three orchestrators"
    assert str(sent[0]) in makers
    assert len(made) > 5 * 16
    assert {others for _, others in made} == {"0"}, "each process closes its own before the next one makes any"
    assert os.listdir(files) == []
    ended.assert_nothing_left()
