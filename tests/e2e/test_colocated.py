"""Trainer and replicas take turns: real Ray, FSDP2 over gloo and vLLM. On CPUs a sleeping engine makes no steps."""

import os
from pathlib import Path

import pytest
from chaos_support import armed
from resume_support import DETERMINISTIC, assert_same_run, rows_of, run_and_kill
from run_support import TINY, Ended, assert_bound_and_conservation, run_rl

from trireme.core.errors import EXIT_OK

COLOCATED = ["--placement", "colocated"]
LOSSES = ["inference.sleep[0]@1=kill", "trainer.forward_backward[0]@1=kill", "inference.update[0]@3=kill"]
"""In a run that begins after step 4, in step 5: as the replica falls asleep, in the next attempt while it sleeps, and
in the one after that as it wakes: its actor has taken version 4 in each of two attempts."""


@pytest.mark.long  # CI takes turns in test_resume.py
def test_turns_change_no_bit_whatever_is_killed_in_whichever_phase(tmp_path: Path, deterministic: Ended) -> None:
    """Colocated for two steps, split for two, and colocated again: compared with a run that was split."""
    waiting = [*DETERMINISTIC, "--checkpoint.async-save", "false"]
    run_and_kill(tmp_path, [*waiting, *COLOCATED], at="trainer.forward_backward@3")
    run_and_kill(tmp_path, [*waiting, "--resume"], at="trainer.forward_backward@3")
    outcome = run_rl(tmp_path, *waiting, *COLOCATED, "--resume", environ=armed(tmp_path, LOSSES))
    assert sorted(os.listdir(tmp_path / "once")) == sorted(LOSSES), outcome.out
    assert outcome.code == EXIT_OK, outcome.out
    assert_same_run(outcome.root, deterministic.root)
    assert [row["attempt"] for row in outcome.rows] == [1, 1, 2, 2, 6, 6]
    assert ["time/hand_over" in row for row in outcome.rows] == [True, True, False, False, True, True]
    outcome.assert_nothing_left()


@pytest.mark.long
def test_a_replica_that_is_lost_as_it_falls_asleep_starts_again_when_the_others_wake(tmp_path: Path) -> None:
    """With K = 1 the devices change hands after every second step, or earlier for an evaluation, and ages are 0 and
    1."""
    loss = "inference.sleep[0]@2=kill"
    flags = [*TINY, *COLOCATED, "--max-steps", "7", "--eval.every", "5", "--eval.problems", "4"]
    outcome = run_rl(tmp_path, *flags, environ=armed(tmp_path, [loss]))
    assert os.listdir(tmp_path / "once") == [loss], outcome.out
    assert outcome.code == EXIT_OK, outcome.out
    assert_bound_and_conservation(outcome, 1)
    assert [row["attempt"] for row in outcome.rows] == [1] * 7
    assert ["time/hand_over" in row for row in outcome.rows] == [True, False, True, False, True, True, False]
    assert [row["off_policy/max"] for row in outcome.rows] == [0, 1, 0, 1, 0, 1, 1]
    assert [row["off_policy/versions_spanned"] for row in outcome.rows] == [1] * 7, "nothing is interrupted"
    incidents = [incident["what"] for incident in rows_of(outcome.root / "incidents.jsonl")]
    assert any("its successor serves" in what for what in incidents), incidents
    outcome.assert_nothing_left()
