"""When checkpoints are taken, what they hold, and what happens when one cannot be written. Rooms are stand-ins."""

import errno
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from checkpoint_support import manifest
from config_support import small
from written_checkpoints import Room, weights

from trireme.checkpoint import store as store_module
from trireme.checkpoint.manifest import MANIFEST, CheckpointRef, Manifest
from trireme.checkpoint.rows import ROW_FILES
from trireme.checkpoint.store import CheckpointStore, Head
from trireme.config import Config
from trireme.core.errors import EXIT_SIGTERM, DiskFull, LimitReached, RoomFailed, StorageFailed, WeightsRefused
from trireme.core.types import WeightIdentity
from trireme.process import faults
from trireme.process.signals import Stopped, StoppedWithoutCheckpoint
from trireme.run.checkpoints import Checkpoints
from trireme.run.rundir import Start


@dataclass
class Far:
    errors: list[Exception | None]
    """Of the next gatherings, in order."""
    calls: list[str] = field(default_factory=list)

    def gather(self, draft: Path, manifest: Manifest) -> None:
        assert len(manifest.files) == 3
        assert not (draft / MANIFEST).exists(), "it is no checkpoint yet"
        self.calls.append(f"gather {manifest.step}")
        if error := self.errors.pop(0):
            raise error

    def discard(self, draft: Path) -> None:
        assert draft.exists()
        self.calls.append("discard")
        raise RoomFailed("a node of which nothing is heard")


DECIDED = {"inference.on_update": "keep_kv"}


@dataclass
class Bench:
    """Everything around a `Checkpoints`."""

    root: Path
    config: Config
    start: Start
    trainer: Room = field(default_factory=Room)
    orchestrator: Room = field(default_factory=Room)
    incidents: list[str] = field(default_factory=list)
    far: Far | None = None

    def __post_init__(self) -> None:
        self.store = CheckpointStore(self.root)
        for name in ROW_FILES:
            (self.root / name).touch()
        self.trainer.gate.set()
        self.orchestrator.gate.set()

    def checkpoints(self) -> Checkpoints:
        rooms = {"orchestrator": self.orchestrator}
        head = SimpleNamespace(lineage="aaaaaaaa")
        run: Any = SimpleNamespace(root=self.root, store=self.store, start=self.start, head=head)
        return Checkpoints(
            self.config, run, {"loss": "ppo"}, DECIDED, self.trainer, rooms, self.incidents.append, self.far
        )

    @property
    def steps(self) -> list[str]:
        return [checkpoint.name for checkpoint in self.store.checkpoints()]


def config(**checkpoint: Any) -> Config:
    return small(
        max_steps=6, orchestrator={"batch_size": 16, "max_steps_off_policy": 1}, checkpoint={"every": 2, **checkpoint}
    )


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    start = Start(step=0, checkpoint=None, manifest=None, attempt=1, notes=(), run_id="cafecafe")
    opened = Bench(tmp_path, config(async_save=request.param), start)
    opened.store.write_head(Head("cafecafe", "aaaaaaaa", 1, None))
    yield opened
    opened.trainer.gate.set()


def run_all(bench: Bench, last: int) -> None:
    """From the start of a run to the checkpoint of `last`."""
    with bench.checkpoints() as checkpoints:
        checkpoints.at_boundary(0, weights(0))
        run_to(checkpoints, last)


@contextmanager
def ended_by(error: BaseException, bench: Bench) -> Iterator[Checkpoints]:
    """The checkpoints of an attempt that `error` ends after the block."""
    with suppress(type(error)), bench.checkpoints() as checkpoints:
        yield checkpoints
        raise error


def run_to(checkpoints: Checkpoints, last: int, first: int = 1) -> None:
    for version in range(first, last + 1):
        checkpoints.leave_boundary()
        checkpoints.at_boundary(version, weights(version))
        checkpoints.seal()


def test_checkpoints_are_taken_at_their_steps_and_at_the_end(bench: Bench) -> None:
    bench.config = config(every=4, async_save=bench.config.checkpoint.async_save)
    run_all(bench, 6)
    assert bench.steps == ["step_000004", "step_000006"]


def test_parts_of_other_nodes_belong_to_the_checkpoint_or_it_is_missed(bench: Bench) -> None:
    bench.far = Far([StorageFailed("the store is silent"), None, None])
    run_all(bench, 6)
    assert bench.far.calls == ["gather 2", "discard", "gather 4", "gather 6"]
    assert bench.steps == ["step_000004", "step_000006"]
    assert bench.store.partial() == []
    (note,) = bench.incidents
    assert "checkpoint missed (1 in a row" in note
    assert "the store is silent" in note


def test_a_checkpoint_names_what_it_holds(bench: Bench) -> None:
    run_all(bench, 4)
    manifest = Manifest.verified(bench.store.checkpoint(4))
    assert manifest.identities == (weights(3).identity, weights(4).identity)  # K + 1 of them
    assert manifest.parent == CheckpointRef("aaaaaaaa", 2)
    assert (manifest.step, manifest.attempt, manifest.shards, manifest.replicas) == (4, 1, 1, 1)
    assert manifest.fixed == {"loss": "ppo"}
    assert manifest.decided == DECIDED
    assert [record.path for record in manifest.files] == ["orchestrator/part", "trainer/part", "inference/part"]


def test_training_goes_on_while_a_checkpoint_is_written(bench: Bench) -> None:
    bench.config = config(async_save=True)
    bench.trainer.gate.clear()
    with bench.checkpoints() as checkpoints:
        checkpoints.at_boundary(0, weights(0))
        run_to(checkpoints, 3)
        assert bench.steps == []
        bench.trainer.gate.set()
    assert bench.steps == ["step_000002"]


def test_nothing_is_a_checkpoint_before_its_step_is_written_down(bench: Bench) -> None:
    with bench.checkpoints() as checkpoints:
        checkpoints.at_boundary(0, weights(0))
        run_to(checkpoints, 1)
        checkpoints.at_boundary(2, weights(2))
        assert bench.steps == []
        checkpoints.seal()
    assert bench.steps == ["step_000002"]


@pytest.mark.parametrize(
    ("max_missed", "error"), [(0, StorageFailed("cannot write: no space")), (9, RoomFailed("trainer died"))], ids=str
)
def test_a_missed_checkpoint_stops_the_run_where_none_may_be(bench: Bench, max_missed: int, error: Exception) -> None:
    bench.config = config(max_missed=max_missed, async_save=bench.config.checkpoint.async_save)
    bench.trainer.errors.append(error)
    with pytest.raises(type(error), match=str(error)):
        run_all(bench, 2)
    assert bench.steps == []
    assert bool(bench.store.partial()) == (max_missed > 0), "what a dead room has not written is left to the next start"


def test_checkpoints_may_be_missed_if_allowed(bench: Bench) -> None:
    bench.config = config(max_missed=1, async_save=bench.config.checkpoint.async_save)
    bench.trainer.errors.append(StorageFailed("cannot write: no space"))
    run_all(bench, 6)
    assert bench.steps == ["step_000004", "step_000006"]
    (incident,) = bench.incidents
    assert "checkpoint missed (1 in a row; up to checkpoint.max_missed = 1 may be): cannot write: no space" in incident
    assert "deleted" not in incident
    assert Manifest.verified(bench.store.checkpoint(4)).parent is None


def test_the_last_checkpoint_may_not_be_missed(bench: Bench) -> None:
    bench.config = config(every=0, max_missed=5)
    bench.trainer.errors.append(StorageFailed("cannot write: no space"))
    with pytest.raises(StorageFailed, match="no space"):
        run_all(bench, 6)


class TestFullDisk:
    """No checkpoint fits beside two others, or none at all."""

    @pytest.fixture
    def full(self, bench: Bench) -> Bench:
        bench.config = config(keep_last=9, async_save=bench.config.checkpoint.async_save)
        return bench

    def test_room_is_made_and_the_next_boundary_is_saved(self, full: Bench) -> None:
        full.config = full.config.model_copy(update={"max_steps": 10})
        with full.checkpoints() as checkpoints:
            checkpoints.at_boundary(0, weights(0))
            run_to(checkpoints, 5)
            full.orchestrator.errors.append(DiskFull("cannot write: no space"))
            run_to(checkpoints, 6, first=6)
            checkpoints._settle()
            run_to(checkpoints, 10, first=7)
        assert full.steps == ["step_000010"], "no more than the newest from then on"
        (incident,) = full.incidents
        assert "deleted step_000002, and from now on only the newest checkpoint is kept" in incident
        parent = Manifest.verified(full.store.checkpoint(10)).parent
        assert parent.step == 8
        assert full.trainer.calls.count("trainer") == 6, "at 2, 4, 6, 7, 8 and 10"

    def test_the_last_checkpoint_is_tried_again(self, full: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(faults, "_passed", Counter())
        monkeypatch.setenv("TRIREME_FAULTS", "commit.manifest@3=full")
        run_all(full, 6)
        assert full.steps == ["step_000006"]
        assert full.store.partial() == []
        (incident,) = full.incidents
        assert "No space left on device" in incident
        assert "deleted step_000002" in incident

    def test_of_a_signal_too(self, full: Bench) -> None:
        with ended_by(Stopped(EXIT_SIGTERM), full) as checkpoints:
            checkpoints.at_boundary(0, weights(0))
            run_to(checkpoints, 5)
            checkpoints._settle()
            full.trainer.errors.append(DiskFull("cannot write: no space"))
        assert full.steps == ["step_000005"]

    def test_when_nothing_can_be_deleted_the_run_ends_after_so_many(self, full: Bench) -> None:
        full.config = full.config.model_copy(update={"max_steps": 100})
        full.trainer.errors += [DiskFull("cannot write: no space")] * 9
        with pytest.raises(DiskFull):
            run_all(full, 20)
        assert len(full.incidents) == 4, "3 may be missed"
        assert list(full.store.directory.iterdir()) == []

    def test_the_last_checkpoint_ends_the_run_when_it_cannot_be_written(self, full: Bench) -> None:
        """Each try that fails deletes a checkpoint; when only the newest is left, it is over."""
        full.trainer.errors += [None, None, None, None, *[DiskFull("cannot write: no space")] * 9]
        with pytest.raises(DiskFull):
            run_all(full, 6)
        assert full.steps == ["step_000004"]
        assert len(full.incidents) == 2

    def test_what_is_kept_for_good_stays(self, full: Bench) -> None:
        full.config = config(keep_last=1, keep_every=2, async_save=full.config.checkpoint.async_save)
        with full.checkpoints() as checkpoints:
            checkpoints.at_boundary(0, weights(0))
            run_to(checkpoints, 4)
            checkpoints.make_room()
        assert full.steps == ["step_000002", "step_000004"]

    def test_a_row_gets_the_room_of_the_draft_of_its_step_last(self, full: Bench) -> None:
        with full.checkpoints() as checkpoints:
            checkpoints.at_boundary(0, weights(0))
            run_to(checkpoints, 3)
            checkpoints.leave_boundary()
            checkpoints.at_boundary(4, weights(4))
            checkpoints.make_room()
            assert full.steps == ["step_000002"]
            assert full.store.partial() == []
            checkpoints.seal()
            run_to(checkpoints, 6, first=5)
        assert "its space was needed for the rows of its step" in full.incidents[0]
        assert full.steps == ["step_000002", "step_000006"]

    def test_a_checkpoint_without_its_row_counts(self, full: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(store_module, "write_rows", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
            run_all(full, 4)
        assert full.steps == ["step_000002", "step_000004"]
        assert full.incidents == []
        full.store.record_checkpoints()
        assert len(full.store.rows.read_text().splitlines()) == 2


class TestEndingEarly:
    @pytest.mark.parametrize(
        ("error", "last", "unfinished", "steps"),
        [
            (Stopped(EXIT_SIGTERM), 3, False, ["step_000002", "step_000003"]),
            (LimitReached("too many refused steps"), 2, False, ["step_000002"]),
            (Stopped(EXIT_SIGTERM), 3, True, ["step_000002"]),
            (StoppedWithoutCheckpoint(EXIT_SIGTERM), 3, False, ["step_000002"]),
            (RoomFailed("trainer died"), 3, False, ["step_000002"]),
        ],
    )
    def test_a_boundary_is_saved_once_unless_the_rest_is_left(
        self, bench: Bench, error: BaseException, last: int, unfinished: bool, steps: list[str]
    ) -> None:
        """In the middle of a step (`unfinished`) the newest checkpoint stands; what is in flight still becomes one."""
        with ended_by(error, bench) as checkpoints:
            checkpoints.at_boundary(0, weights(0))
            run_to(checkpoints, last)
            if unfinished:
                checkpoints.leave_boundary()
        assert bench.steps == steps
        assert bench.trainer.calls == ["trainer", "inference"] * len(steps)

    def test_weights_that_were_not_published_are_where_they_are_saved(self, bench: Bench) -> None:
        with ended_by(Stopped(EXIT_SIGTERM), bench) as checkpoints:
            checkpoints.at_boundary(0, weights(0))
            for version in (1, 2, 3):
                checkpoints.leave_boundary()
                checkpoints.at_boundary(version)
                checkpoints.seal()
        assert bench.steps == ["step_000002", "step_000003"]
        assert [call for call in bench.trainer.calls if call.startswith("publish")] == ["publish 2", "publish 3"]
        assert Manifest.verified(bench.store.checkpoint(3)).identities[-1] == weights(3).identity


class TestResumed:
    @pytest.fixture
    def resumed(self, bench: Bench) -> Bench:
        at_2 = bench.store.checkpoint(2)
        bench.start = Start(
            2, checkpoint=at_2, manifest=manifest(2, "bbbbbbbb"), attempt=2, notes=(), run_id="cafecafe"
        )
        return bench

    def test_identities_and_parent_go_on(self, resumed: Bench) -> None:
        again = SimpleNamespace(identity=WeightIdentity(2, 2, weights(2).identity.digest))
        with resumed.checkpoints() as checkpoints:
            checkpoints.at_boundary(2, again)
            run_to(checkpoints, 4, first=3)
        assert Manifest.verified(resumed.store.checkpoint(4)).parent == CheckpointRef("bbbbbbbb", 2)

    def test_other_weights_than_were_saved_are_refused(self, resumed: Bench) -> None:
        with (
            resumed.checkpoints() as checkpoints,
            pytest.raises(WeightsRefused, match="the checkpoint has weights with digest"),
        ):
            checkpoints.at_boundary(2, weights(2, digest="f" * 32))

    def test_a_stop_before_the_first_step_saves_nothing_new(self, resumed: Bench) -> None:
        with ended_by(Stopped(EXIT_SIGTERM), resumed) as checkpoints:
            checkpoints.at_boundary(2, weights(2))
        assert resumed.trainer.calls == []
