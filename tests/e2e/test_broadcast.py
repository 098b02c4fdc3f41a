"""Runs whose weights travel by broadcasts, or through memory that shards and engines share: real Ray, two shards and
two vLLM engines.

That each run learns, publishes the same weights as with the object store, and loses no more than a lost replica. What a
sender and receivers do when one of them is lost: unit/transports/test_broadcast.py; what shards keep for checkpoints:
unit/transports/test_kept_versions.py. That it is the same run after another transport: test_resume.py.
"""

import os
import re
from pathlib import Path

import pytest
from chaos_support import armed
from resume_support import rows_of
from run_support import Ended, run_rl, taken
from test_quickstart import assert_learned

from trireme.core.errors import EXIT_OK

STEPS = 4
TWO_BY_TWO = [
    *("--trainer.shards", "2", "--inference.replicas", "2", "--orchestrator.max-steps-off-policy", "0"),
    *("--orchestrator.batch-size", "4", "--orchestrator.group-size", "4", "--max-steps", str(STEPS)),
]
"""Synchronous: a replica that still takes a version is not asked for the next one, and fetches that."""


def versions(outcome: Ended, replica: int, how: str) -> set[int]:
    return taken(outcome.root / "logs", replica, how)


def steps_meanwhile(outcome: Ended, replica: int, version: int) -> int:
    """Returns how many steps the replica's engine decoded for, with no requests of the run, while it received."""
    logs = "".join(log.read_text() for log in (outcome.root / "logs").rglob(f"inference_{replica}*.log"))
    (steps,) = re.findall(rf"decoded for (\d+) steps while version {version} was on its way", logs)
    return int(steps)


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--inference.replicas", "2"),
        ("--inference.tensor-parallel", "2"),
        ("--trainer.lora.rank", "16", "--trainer.learning-rate", "2e-3"),
    ],
    ids=["one replica", "two replicas", "two ranks", "adapters"],
)
@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_a_run_learns_by_broadcasts(tmp_path: Path, flags: tuple[str, ...], transport: str) -> None:
    """It has two shards, and its updates are in flight. (With the object store: test_run.py, test_quickstart.py.)"""
    outcome = run_rl(tmp_path, *flags, "--inference.transport", transport)
    steps = len(assert_learned(outcome))
    for replica in range(1 + ("--inference.replicas" in flags)):
        assert len(versions(outcome, replica, "as it was broadcast")) > steps / 2
        assert steps_meanwhile(outcome, replica, version=0) > 0
    shards = "".join(log.read_text() for log in (outcome.root / "logs").rglob("trainer_*.log"))
    shared = "weights travel through memory of this process to inference replica 0" in shards
    assert shared == (transport == "ipc") or {"--inference.tensor-parallel", "--trainer.lora.rank"} & set(flags)


POINTS = (
    *("transport.offer", "transport.ready", "transport.bucket", "transport.finish"),
    *("inference.update", "inference.load"),
)
LOST = [
    (transport, f"{point}[1]@3={action}")
    for transport, points in (("broadcast", POINTS), ("ipc", (*POINTS, "transport.slab")))
    for point in points
    for action in ("kill", "stop")
]


@pytest.mark.long  # of senders and receivers without a run: unit/transports/test_broadcast.py
@pytest.mark.parametrize(("transport", "fault"), LOST)
def test_a_replica_that_is_lost_in_the_middle_costs_the_run_nothing_else(
    tmp_path: Path, transport: str, fault: str
) -> None:
    """Every version has one bucket, so it is the third version. The trainer gives the sending up at its deadline."""
    flags = [*TWO_BY_TWO, "--inference.transport", transport, "--timeouts.update-s", "20"]
    outcome = run_rl(tmp_path, *flags, environ=armed(tmp_path, [fault]))
    assert os.listdir(tmp_path / "once") == [fault], outcome.out
    assert outcome.code == EXIT_OK, outcome.out
    assert {row["attempt"] for row in outcome.rows} == {1}, "the trainer has seen nothing of it"
    assert len({row["weights/digest"] for row in outcome.rows}) == STEPS
    lost = {incident["part"] for incident in rows_of(outcome.root / "incidents.jsonl")}
    assert lost <= {"inference_1"}, "which the run may not live long enough to report"
    assert versions(outcome, 0, "as it was broadcast") >= set(range(1, STEPS + 1))
    outcome.assert_nothing_left()
