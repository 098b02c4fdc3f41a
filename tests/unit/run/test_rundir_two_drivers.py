"""Two drivers in one run directory, on a file system whose locks do not hold: the older one changes nothing more."""

import fcntl
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_support import FIXED, names, read_json_lines, snapshot
from config_support import REQUIRED
from written_checkpoints import Room, weights

from trireme.checkpoint import store as store_module
from trireme.checkpoint.manifest import Manifest
from trireme.checkpoint.store import LOCK, CheckpointStore
from trireme.config import Config
from trireme.config.load import load
from trireme.core.errors import LockLost
from trireme.run import metrics as metrics_module
from trireme.run.checkpoints import Checkpoints
from trireme.run.metrics import Journal
from trireme.run.rundir import RunDir

pytestmark = pytest.mark.usefixtures("instant_disk", "no_locks")


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process gets every lock."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


def config(output_dir: Path, *flags: str) -> Config:
    every = ["--checkpoint.every", "2", "--checkpoint.keep-last", "1", "--max-steps", "100"]
    return load([*REQUIRED, *every, "--run.output-dir", str(output_dir), "--run.name", "r", *flags], {}).config


class Driver:
    """A driver whose rooms are stand-ins; `step` trains one."""

    def __init__(self, output_dir: Path, *flags: str) -> None:
        run_config = config(output_dir, *flags)
        self.config, self.run, self.trainer, self.incidents = run_config, RunDir.open(run_config, FIXED), Room(), []
        orchestrator = Room()
        self.trainer.gate.set()
        orchestrator.gate.set()
        self.run.checkout()
        rooms = {"orchestrator": orchestrator}
        self.checkpoints = Checkpoints(run_config, self.run, FIXED, {}, self.trainer, rooms, self.incidents.append)
        self.journal = Journal(self.run.root, str, io.StringIO(), [], self.checkpoints)
        self.version = self.run.start.step
        self.checkpoints.at_boundary(self.version)

    def step(self) -> None:
        self.checkpoints.leave_boundary()
        self.version += 1
        self.checkpoints.at_boundary(self.version, weights(self.version))
        self.journal.write({"step": self.version - 1, "attempt": self.run.start.attempt}, {"groups": []})
        self.checkpoints.seal()

    def steps(self, last: int) -> None:
        while self.version < last:
            self.step()
        self.checkpoints._settle()

    @property
    def steps_on_disk(self) -> list[str]:
        return names(self.run.store)


@pytest.fixture
def old(tmp_path: Path) -> Driver:
    """A driver that has saved step 2, and trained one step more."""
    driver = Driver(tmp_path)
    driver.steps(3)
    return driver


ACTIONS: dict[str, Callable[[Driver], Any]] = {
    "a row": lambda old: old.journal.write({"step": 3, "attempt": 1}, {"groups": []}),
    "a draft": lambda old: old.run.store.draft(4, 1),
    "a checkpoint that was begun": lambda old: old.steps(4),
    "pruning": lambda old: old.run.store.prune(1, None),
    "room on a full disk": lambda old: old.checkpoints.make_room(),
    "a checkout": lambda old: old.run.checkout(),
    "another attempt": lambda old: old.run.next_attempt(old.config, FIXED),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_the_old_driver_writes_publishes_and_deletes_nothing(old: Driver, action: str, tmp_path: Path) -> None:
    new = Driver(tmp_path, "--resume")
    new.config = config(tmp_path, "--checkpoint.keep-last", "9")
    new.checkpoints._keep_last = 9
    new.steps(6)
    before = snapshot(new.run.root)
    with pytest.raises(LockLost) as lost:
        ACTIONS[action](old)
    assert snapshot(new.run.root) == before
    text = str(lost.value)
    assert "attempt 2 of run" in text
    assert (new.run.root / LOCK).read_text().strip() in text
    assert all(part in text for part in ("given: ", "expected: ", "to do: "))
    new.steps(8)
    assert new.steps_on_disk == ["step_000002", "step_000004", "step_000006", "step_000008"]
    assert [row["step"] for row in read_json_lines(new.run.root / "metrics.jsonl")] == list(range(8))


def test_what_was_being_written_when_the_lock_was_lost_is_no_checkpoint(old: Driver, tmp_path: Path) -> None:
    old.trainer.gate.clear()
    old.step()
    new = Driver(tmp_path, "--resume")
    old.trainer.gate.set()
    with pytest.raises(LockLost):
        old.step()
    assert new.steps_on_disk == ["step_000002"]
    assert old.incidents == [], "it is no missed checkpoint"
    new.steps(4)
    assert Manifest.verified(new.run.store.checkpoint(4)).attempt == 2


class TestBetweenTheLookAndTheChange:
    """The one moment in which nothing tells the older driver: what it then does is lost."""

    @pytest.fixture
    def at(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Driver]]:
        """Another driver starts when the older one comes to a fault point."""

        def arm(point: str) -> list[Driver]:
            started: list[Driver] = []

            def another_starts(name: str) -> None:
                if name == point and not started:
                    started.append(Driver(tmp_path, "--resume"))

            monkeypatch.setattr(store_module, "fault_point", another_starts)
            monkeypatch.setattr(metrics_module, "fault_point", another_starts)
            return started

        return arm

    def test_a_checkpoint_is_not_published(self, old: Driver, at: Callable[[str], list[Driver]]) -> None:
        started = at("commit.checked")
        with pytest.raises(LockLost):
            old.steps(4)
        (new,) = started
        assert new.steps_on_disk == ["step_000002"]
        new.steps(4)
        assert (new.steps_on_disk, new.incidents) == (["step_000004"], [])
        assert Manifest.verified(new.run.store.checkpoint(4)).attempt == 2

    def test_a_row_is_lost(self, old: Driver, at: Callable[[str], list[Driver]]) -> None:
        started = at("row.metrics.jsonl")
        with pytest.raises(LockLost):
            old.steps(4)
        (new,) = started
        new.steps(6)
        rows = read_json_lines(new.run.root / "metrics.jsonl")
        assert [(row["step"], row["attempt"]) for row in rows] == [(0, 1), (1, 1), (2, 2), (3, 2), (4, 2), (5, 2)]

    def test_a_checkpoint_that_was_published_before_the_checkout_is_parked(self, old: Driver, tmp_path: Path) -> None:
        """The other driver has chosen where it starts; this one is faster than the start of its rooms."""
        other = RunDir.open(config(tmp_path, "--resume"), FIXED)
        old.run.__dict__["store"] = CheckpointStore(old.run.root)  # does not look at HEAD
        old.checkpoints._keep_last = 9
        old.steps(4)
        assert old.steps_on_disk == ["step_000002", "step_000004"]
        other.checkout()
        (parked,) = other.root.glob("branches/*/checkpoints/*")
        assert parked.name == "step_000004"


def test_no_two_drivers_take_one_attempt(old: Driver, tmp_path: Path) -> None:
    """Another one has taken the number, and has not yet written HEAD."""
    (old.run.root / "logs" / "attempt_2").mkdir()
    with RunDir.open(config(tmp_path, "--resume"), FIXED) as run:
        assert (run.start.attempt, run.head.attempt) == (3, 3)


def test_a_run_that_was_emptied_and_begun_again_is_another(old: Driver, tmp_path: Path) -> None:
    new = Driver(tmp_path, "--clean")
    assert new.run.start.attempt == old.run.start.attempt == 1
    with pytest.raises(LockLost, match="attempt 1 of run"):
        old.step()
    shutil.rmtree(new.run.root)
    with pytest.raises(LockLost, match="a driver that removed HEAD"):
        old.run.store.check_owner()


def test_a_checkpoint_of_an_earlier_attempt_that_arrives_late_is_refused_too(old: Driver) -> None:
    """The same driver: its rooms failed, and a checkpoint hung for longer than it was waited for."""
    draft = old.run.store.draft(4, 1)
    later = old.run.next_attempt(old.config, FIXED)
    later.checkout()
    draft.mkdir()
    manifest = Manifest.read(later.store.checkpoint(2))
    with pytest.raises(LockLost):
        old.run.store.publish(draft, type(manifest)(**{**vars(manifest), "step": 4, "files": ()}))
    assert names(CheckpointStore(later.root)) == ["step_000002"]
