"""Whatever is killed comes back exactly: real Ray, FSDP2 over gloo and vLLM, whole trees of processes killed.

A chain is one run that is killed at one point after another, resumed each time, and in the end compared with a run that
nothing happened to: every row, every problem, every file of every checkpoint. Deterministic mode, so the comparison is
bit for bit; `weights/digest` in each row says that the weights of every step are the same.

The long chains, through every point and through ten random times, are marked `long` and left out of a plain `pytest`:
`pytest -m long tests/e2e/test_resume.py` runs them.
"""

import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from chaos_support import armed
from formats import run_formats, stored_formats
from resume_support import DETERMINISTIC, assert_same_run, comparable, rows_of, run_and_kill
from run_support import TINY, Ended, assert_bound_and_conservation, run_rl, taken

from trireme.checkpoint.manifest import MANIFEST, Manifest
from trireme.checkpoint.store import CheckpointStore
from trireme.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK

START_UP = ["trainer.start@1", "inference.start@1", "orchestrator.start@1"]
STEP = [
    "orchestrator.minibatch@2",
    "inference.sample@2",
    "trainer.forward_backward@2",
    "trainer.optim_step@2",
    "trainer.publish@3",
    "inference.update@3",
    "inference.loaded@3",
    "orchestrator.release@2",
    "orchestrator.evaluation@2",
]
COMMIT = [
    "commit.draft@1",
    "commit.parts@1",
    "orchestrator.save@1",
    "commit.orchestrator@1",
    "trainer.save@1",
    "commit.trainer@1",
    "trainer.save_weights@1",
    "commit.inference@1",
    "commit.manifest@1",
    "commit.renamed@1",
]
RESUME = ["trainer.load@1", "checkout.parked@1", "checkout.rows@1"]
SWITCHES = ["inference.sleep@2", "trainer.publish@3", "inference.update@3", "inference.loaded@3"]
"""Where devices change hands: from the replicas to the trainer in step 2, and back after it."""
RANDOM_KILLS = 10


LONGER = [*DETERMINISTIC, "--max-steps", "24", "--checkpoint.every", "3"]
SMALL = [*TINY, "--checkpoint.every", "2"]
"""Asynchronous: the quickstart's max_steps_off_policy = 1, and checkpoints in the background."""
PARTS = ["orchestrator.minibatch@2=kill", "trainer.forward_backward[1]@3=kill"]
"""Of an attempt that begins with the checkpoint after step 2: in step 4; and in step 5 of the attempt that begins there
again."""
LOSSES = {
    "side by side": [
        *PARTS,
        "inference.loaded[0]@7=kill",
    ],  # of the update after step 5; the engine has seen six before
    "in turns": [*PARTS, "inference.sleep[0]@7=kill"],  # in step 6; the engine has slept six times before
}
SECOND_TURN = "inference.sample@22"
"""In deterministic mode all rollouts take a turn together, four turns a step and an evaluation: after two evaluations
and three steps this is the second turn of the fourth step's games."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A deterministic run that nothing happens to."""
    outcome = run_rl(tmp_path_factory.mktemp("reference"), *DETERMINISTIC)
    assert outcome.code == EXIT_OK, outcome.out
    outcome.assert_nothing_left()
    return outcome


def assert_goes_on_to_the_end(tmp_path: Path, reference: Ended, *flags: str) -> None:
    outcome = run_rl(tmp_path, *flags, "--resume")
    assert outcome.code == EXIT_OK, outcome.out
    assert_same_run(outcome.root, reference.root)
    outcome.assert_nothing_left()


def kill_and_compare(tmp_path: Path, reference: Ended, flags: list[str], point: str) -> None:
    run_and_kill(tmp_path, [*flags, "--resume"], at=point)
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert comparable(rows) == comparable(reference.rows[: len(rows)]), point


def test_a_run_leaves_the_files_and_keys_that_are_stored(reference: Ended) -> None:
    """It may leave more: some columns depend on the moment."""
    files = run_formats(reference.root)
    for name, keys in stored_formats()["run"].items():
        assert name in files
        assert set(keys) <= set(files[name]), name


def assert_killed_in_the_middle_of_games_and_then_part_by_part(
    tmp_path: Path, reference: Ended, losses: list[str], *flags: str
) -> Ended:
    """Kills a run in the middle of a step's games of several turns, which are played again from their beginning, out of
    the checkpoint after step 1: it knows where each environment stood in its problems. Resumed with `flags` the run
    loses an orchestrator, a shard and an engine, one after the other. (Each write of a checkpoint:
    tests/unit/checkpoint/test_crashes.py.)"""
    waiting = [*DETERMINISTIC, "--checkpoint.async-save", "false"]
    kill_and_compare(tmp_path, reference, waiting, SECOND_TURN)
    assert [checkpoint.name for checkpoint in CheckpointStore(tmp_path / "run").checkpoints()] == ["step_000002"]
    outcome = run_rl(tmp_path, *waiting, *flags, "--resume", environ=armed(tmp_path, losses))
    assert sorted(os.listdir(tmp_path / "once")) == sorted(losses), outcome.out
    assert outcome.code == EXIT_OK, outcome.out
    assert_same_run(outcome.root, reference.root)
    assert [row["attempt"] for row in outcome.rows] == [1, 1, 3, 3, 5, 5]
    parked = [rows_of(path) for path in sorted((outcome.root / "branches").glob("*/metrics.jsonl"))]
    assert [row["attempt"] for rows in parked for row in rows], "what was superseded lies under branches"
    outcome.assert_nothing_left()
    return outcome


def test_killed_in_the_middle_and_resumed_in_turns(tmp_path: Path, reference: Ended) -> None:
    """Trainer and replicas then take turns, which changes no bit."""
    assert all(row["env/guess/turns_per_episode"] > 1 for row in reference.rows)
    assert all(row["env/sort/turns_per_episode"] == 1 for row in reference.rows if "env/sort/turns_per_episode" in row)
    assert all(row["perf/prefix_saving"] > 1 for row in reference.rows if "env/sort/turns_per_episode" in row)
    problems = [group["problem"] for row in rows_of(reference.root / "trained.jsonl") for group in row["groups"]]
    assert {problem.partition("/")[0] for problem in problems} == {"guess", "sort"}
    outcome = assert_killed_in_the_middle_of_games_and_then_part_by_part(
        tmp_path, reference, LOSSES["in turns"], "--placement", "colocated"
    )
    assert ["time/hand_over" in row for row in outcome.rows] == [False, False, True, True, True, True]


@pytest.mark.long
def test_killed_in_the_middle_and_resumed_with_another_transport(tmp_path: Path, reference: Ended) -> None:
    outcome = assert_killed_in_the_middle_of_games_and_then_part_by_part(
        tmp_path, reference, LOSSES["side by side"], "--inference.transport", "broadcast"
    )
    assert taken(outcome.root / "logs", 0, "as it was broadcast")


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_killed_at_every_point(tmp_path: Path, reference: Ended, asynchronous: str) -> None:
    flags = [*DETERMINISTIC, "--checkpoint.async-save", asynchronous]
    for point in [*START_UP, *STEP, *COMMIT, *RESUME, "commit.prune@1"]:
        kill_and_compare(tmp_path, reference, flags, point)
    assert_goes_on_to_the_end(tmp_path, reference, *flags)


@pytest.mark.long
def test_killed_at_every_point_where_devices_change_hands_and_resumed_side_by_side(
    tmp_path: Path, reference: Ended
) -> None:
    for point in SWITCHES:
        kill_and_compare(tmp_path, reference, [*DETERMINISTIC, "--placement", "colocated"], point)
    assert_goes_on_to_the_end(tmp_path, reference, *DETERMINISTIC, "--placement", "split")


@pytest.mark.long
def test_killed_at_random_times(tmp_path: Path) -> None:
    """Ten times, anywhere between the start of the program and its end."""
    times = random.Random(0)
    started = time.monotonic()
    reference = run_rl(tmp_path / "reference", *LONGER)
    assert reference.code == EXIT_OK, reference.out
    longest_s = time.monotonic() - started
    for _ in range(RANDOM_KILLS):
        run_and_kill(tmp_path, [*LONGER, "--resume"], after_s=times.uniform(0.05, 0.9) * longest_s)
    assert_goes_on_to_the_end(tmp_path, reference, *LONGER)


@pytest.mark.long
def test_a_fault_in_a_room_stops_a_run_without_restarts_with_its_reason(tmp_path: Path) -> None:
    fault = {"TRIREME_FAULTS": "inference.loaded@2=corrupt"}
    failed = run_rl(tmp_path, *TINY, "--cluster.max-restarts", "0", environ=fault)
    assert failed.code == EXIT_FAILED, failed.out
    assert "the engine has loaded values that differ from the published ones" in failed.out.replace("\n", " ")
    failed.assert_nothing_left()


@dataclass(frozen=True)
class Chain:
    """A run of two attempts: how they ended."""

    stopped: Ended
    outcome: Ended


LAST = 12


def ctrl_c_after_step_6(line: str, process: subprocess.Popen[str]) -> None:
    """Sends the signal as a terminal does, to the run's whole group of processes."""
    if line.split()[:2] == ["step", f"6/{LAST}"]:
        os.killpg(process.pid, signal.SIGINT)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """One asynchronous run, which answers chats too, is stopped by Ctrl-C, and is resumed by the command that it
    printed with another layout."""
    tmp_path = tmp_path_factory.mktemp("r")
    flags = [*SMALL, "--max-steps", str(LAST), "--checkpoint.every", "3"]
    flags += ["--wandb.project", "test", "--wandb.mode", "offline", "--service.port", "0"]
    flags += ["--checkpoint.async-save", "false"]  # so that it is certain which checkpoints are there
    stopped = run_rl(tmp_path, *flags, on_line=ctrl_c_after_step_6)
    command = stopped.out.split("resume the run with:\n")[-1].split("uv run rl ")[-1].split()
    changed = ["--trainer.shards", "1", "--inference.replicas", "2", "--trainer.micro-batch-tokens", "64"]
    return Chain(stopped, run_rl(tmp_path, *command, *changed, directory=False))


class TestAsynchronous:
    """Checks what must hold of that run in any case."""

    @pytest.fixture
    def outcome(self, chain: Chain) -> Ended:
        return chain.outcome

    def test_a_signal_saves_and_says_how_to_go_on(self, chain: Chain) -> None:
        """Ctrl-C; SIGTERM differs by its code alone (test_sft.py). The service of the run ends too."""
        assert chain.stopped.code == EXIT_INTERRUPTED, chain.stopped.out
        chain.stopped.assert_nothing_left()

    def test_goes_on_to_the_end(self, outcome: Ended) -> None:
        assert outcome.code == EXIT_OK, outcome.out
        assert [row["step"] for row in outcome.rows] == list(range(LAST))
        attempts = [row["attempt"] for row in outcome.rows]
        first = attempts.count(1)
        assert attempts == [1] * first + [2] * (LAST - first)
        assert first in (6, 7), "the signal after step 6 ends it at the next boundary"
        outcome.assert_nothing_left()

    def test_bound_and_conservation_hold(self, outcome: Ended) -> None:
        assert_bound_and_conservation(outcome, bound=1)
        assert outcome.rows[-1]["ledger/trained"] == 4 * LAST
        assert outcome.rows[-1]["ledger/active"] == 0

    def test_every_problem_is_trained_exactly_once_in_the_order_of_the_data(self, outcome: Ended) -> None:
        """The witness: nothing is lost, nothing is trained twice, and no problem comes before its time."""
        rows = rows_of(outcome.root / "trained.jsonl")
        assert [row["step"] for row in rows] == list(range(LAST))
        problems = [group["problem"] for row in rows for group in row["groups"]]
        data = [f"0.{n // 16}.{n % 16}" for n in range(4 * LAST)]
        assert sorted(problems, key=data.index) == data
        for row in rows:  # at most (K + 1) batches are under way
            assert all(data.index(group["problem"]) < 4 * (row["step"] + 2) for group in row["groups"])

    def test_weights_and_biases_goes_on_in_the_same_run(self, outcome: Ended) -> None:
        """Offline each attempt has a directory of its own, which `wandb sync` joins by the id."""
        attempts = sorted(outcome.root.glob("wandb/offline-run-*"), key=lambda path: path.name)
        assert len(attempts) == 2
        assert len({path.name.rpartition("-")[2] for path in attempts}) == 1

    def test_each_checkpoint_opens_with_transformers_and_names_all_of_its_files(self, outcome: Ended) -> None:
        """A file that its manifest names and that is damaged is not used: tests/unit/checkpoint."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        for checkpoint in CheckpointStore(outcome.root).checkpoints():
            files = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
            assert {record.path for record in Manifest.verified(checkpoint).files} == files - {MANIFEST}
            model = AutoModelForCausalLM.from_pretrained(checkpoint / "inference")
            assert len(AutoTokenizer.from_pretrained(checkpoint / "inference")) == model.config.vocab_size

    def test_at_max_steps_there_is_nothing_to_do(self, outcome: Ended) -> None:
        again = run_rl(outcome.root.parent, *SMALL, "--resume", "--max-steps", str(LAST))
        assert again.code == EXIT_OK
        assert "nothing to do" in again.out
