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
    LAST_STEP,
    armed,
    assert_whole,
    end_of,
    reached,
    started,
    successors_serve,
    wait_for,
)
from resume_support import DETERMINISTIC, assert_same_run, rows_of
from run_support import DEADLINE_S, Ended, run_rl

from trireme.checkpoint.store import CheckpointStore
from trireme.core.errors import EXIT_LIMIT, EXIT_OK


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


LAST = {"garbage": "make no sense", "nan": "make no sense", "stranger": "it was given"}
"""What is said of a replica that answers so."""


@pytest.mark.long
@pytest.mark.parametrize("wrong", LAST)
def test_a_replica_whose_answers_are_wrong_is_replaced(tmp_path: Path, wrong: str) -> None:
    """From one answer in the middle of an update's requests on. Nothing of it is trained on."""
    faults = [f"inference.answer[0]@40+={wrong}", LAST_STEP]
    environ = armed(tmp_path, faults)
    with started(tmp_path, CHAOS, environ) as running:
        last = reached(tmp_path, LAST_STEP)
        wait_for("the last step", last.exists, running, DEADLINE_S)
        wait_for("its successor", lambda: successors_serve(tmp_path / "run"), running, DEADLINE_S)
        last.unlink()
        outcome = end_of(running, tmp_path)
    assert sorted(os.listdir(tmp_path / "once")) == sorted(faults)
    assert_whole(outcome)
    assert {row["attempt"] for row in outcome.rows} == {1}, "the trainer has seen nothing of it"
    lost, served = rows_of(outcome.root / "incidents.jsonl")
    assert lost["part"] == served["part"] == "inference_0"
    assert LAST[wrong] in lost["what"]
    assert "its successor serves" in served["what"]


@pytest.mark.long
def test_a_replica_that_answers_late_is_waited_for(tmp_path: Path) -> None:
    outcome = run_with(tmp_path, ["inference.answer[0]@20+=late"], *CHAOS)
    assert_whole(outcome)
    assert not (outcome.root / "incidents.jsonl").exists()


@pytest.mark.long
def test_an_environment_that_holds_the_event_loop_for_ever(tmp_path: Path) -> None:
    """The orchestrator cannot say that it lives: it is killed, with the place where it stood in its log."""
    outcome = run_with(tmp_path, ["orchestrator.rollout@40=freeze"], *CHAOS)
    assert_whole(outcome)
    assert "timeouts.heartbeat_s" in rows_of(outcome.root / "incidents.jsonl")[0]["what"]
    assert "in fault_point" in (outcome.root / "logs" / "attempt_1" / "orchestrator_0.log").read_text()


@pytest.mark.long
def test_a_replica_that_dies_again_and_again_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """The trainer and what was sampled are whole: what was done since the last checkpoint is kept."""
    flags = [*CHAOS, "--checkpoint.every", "0", "--max-steps", "9999", "--cluster.max-restarts", "2"]
    flags += ["--cluster.min-replicas", "2"]  # as many as there are: none can be left out
    faults = {"TRIREME_FAULTS": "inference.loaded[0]@4=kill"}  # each successor's fourth
    outcome = run_rl(tmp_path, *flags, environ=faults)
    assert outcome.code == EXIT_LIMIT, outcome.out
    assert "inference replica 0 failed 3 times" in outcome.out
    outcome.assert_nothing_left()
    steps = len(outcome.rows)
    assert [checkpoint.name for checkpoint in CheckpointStore(outcome.root).checkpoints()] == [f"step_{steps:06d}"]
    assert_whole(run_rl(tmp_path, *CHAOS, "--max-steps", str(steps + 2), "--resume"), steps + 2)
