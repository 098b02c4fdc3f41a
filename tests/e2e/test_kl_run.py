"""One run with a KL penalty whose reference is refreshed, and with steps that are refused until a limit ends it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from poisoned_loss import ALWAYS_FROM, ONCE
from run_support import ROOT, TINY, Ended, run_rl

from trireme.checkpoint.store import CheckpointStore
from trireme.core.errors import EXIT_LIMIT

REFUSED_IN_A_ROW = 3
LAST = ALWAYS_FROM + REFUSED_IN_A_ROW - 1


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run_rl(
        tmp_path_factory.mktemp("r"),
        *TINY,
        *("--max-steps", "40", "--orchestrator.max-steps-off-policy", "0", "--trainer.num-minibatches", "2"),
        *("--trainer.shards", "1", "--trainer.learning-rate", "1e-3", "--trainer.warmup-steps", "0"),
        *("--trainer.loss-fn", "poisoned_loss:loss", "--trainer.max-refused-steps", str(REFUSED_IN_A_ROW)),
        *("--trainer.kl.coef", "0.1", "--trainer.kl.reference.base-model", "./assets/sort-base"),
        *("--trainer.kl.reference.update-every", "2", "--checkpoint.every", "0"),
        environ={"PYTHONPATH": str(ROOT / "tests" / "e2e")},
    )


def test_refused_steps_leave_the_weights_and_the_run_goes_on(ended: Ended) -> None:
    assert [row["optim/refused"] for row in ended.rows] == [0, 0, 1, 0, 1, 1, 1]
    digests = [row["weights/digest"] for row in ended.rows]
    assert digests[ONCE] == digests[ONCE - 1]
    assert len(set(digests[: ALWAYS_FROM - 1])) == ALWAYS_FROM - 2, "every other step has changed them"
    assert set(digests[ALWAYS_FROM:]) == {digests[ALWAYS_FROM - 1]}


def test_the_culprits_are_named(ended: Ended) -> None:
    """The datums by the trainer, their problems by the driver."""
    said = [line for line in ended.out.splitlines() if "was refused" in line]
    assert len(said) == 1 + REFUSED_IN_A_ROW
    refused_at = [ONCE, *range(ALWAYS_FROM, LAST + 1)]
    for step, line in zip(refused_at, said, strict=True):
        assert f"step {step + 1}, update 1 was refused" in line
        assert re.search(r"the gradient norm is nan; nothing was updated.* datum \d+.* of batch [01]", line), line
        assert re.search(r"Their problems: 0\.\d+\.\d+", line), line


def test_a_limit_of_refused_steps_ends_the_run_after_a_commit(ended: Ended) -> None:
    assert ended.code == EXIT_LIMIT, ended.out
    assert f"in {REFUSED_IN_A_ROW} steps in a row the gradient of an update was not finite" in ended.out
    assert [commit.name for commit in CheckpointStore(ended.root).commits()] == [f"step_{LAST + 1:06d}"]
    ended.assert_nothing_left()


def test_the_penalty_is_of_the_distance_to_the_newest_reference(ended: Ended) -> None:
    """The policy is the base in step 0, and its own reference in steps 2 and 4; what was refused has not moved it."""
    distances = [abs(row["kl_policy_base"]) for row in ended.rows]
    assert distances[1] > 1e-3
    assert max(distances[step] for step in (0, 2, 3, 4, 5, 6)) < 1e-4


def test_the_commit_holds_the_reference(ended: Ended) -> None:
    import torch.distributed.checkpoint as dcp

    trainer = Path(ended.root, "checkpoints", f"step_{LAST + 1:06d}", "trainer")
    saved = set(dcp.FileSystemReader(trainer).read_metadata().state_dict_metadata)
    parameters = {name.removeprefix("parameters.") for name in saved if name.startswith("parameters.")}
    assert {name.removeprefix("reference.") for name in saved if name.startswith("reference.")} == parameters
