"""Parts of a run are killed, or stopped, while it goes on, and it comes to its end by itself: real Ray, gloo and vLLM.

All of it is `long`; every victim at every moment, killed or stopped, is a command of its own: `scripts/chaos.py
matrix`. What always runs: a run that loses all its parts one after the other is compared, bit for bit, with one that
lost nothing, and another one closes its environments (test_resume.py).
"""

import os
from pathlib import Path

import pytest
from chaos_support import (
    CHAOS,
    armed,
    assert_whole,
)
from resume_support import DETERMINISTIC, assert_same_run, rows_of
from run_support import Ended, run_rl

from trireme.core.errors import EXIT_OK


def run_with(tmp_path: Path, faults: list[str], *flags: str) -> Ended:
    """A run in which each of `faults` happens, once."""
    outcome = run_rl(tmp_path, *flags, environ=armed(tmp_path, faults))
    assert sorted(os.listdir(tmp_path / "once")) == sorted(faults), outcome.out
    return outcome


@pytest.mark.long
def test_a_deterministic_run_that_lost_one_of_two_replicas_equals_one_that_lost_nothing(tmp_path: Path) -> None:
    flags = [*DETERMINISTIC, "--inference.replicas", "2", "--checkpoint.async-save", "false"]
    (tmp_path / "quiet").mkdir()
    quiet = run_rl(tmp_path / "quiet", *flags)
    assert quiet.code == EXIT_OK, quiet.out
    outcome = run_with(tmp_path, ["inference.sample[1]@4=kill"], *flags)
    assert outcome.code == EXIT_OK, outcome.out
    assert_same_run(outcome.root, quiet.root)
    assert {row["attempt"] for row in outcome.rows} == {2}
    outcome.assert_nothing_left()


@pytest.mark.long
def test_an_environment_that_holds_the_event_loop_for_ever(tmp_path: Path) -> None:
    """The orchestrator cannot say that it lives: it is killed, with the place where it stood in its log."""
    outcome = run_with(tmp_path, ["orchestrator.rollout@40=freeze"], *CHAOS)
    assert_whole(outcome)
    assert "timeouts.heartbeat_s" in rows_of(outcome.root / "incidents.jsonl")[0]["what"]
    assert "in fault_point" in (outcome.root / "logs" / "attempt_1" / "orchestrator_0.log").read_text()
