"""What a driver brings to object storage while it trains, and what happens where that fails."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from far_support import FarRun, puts
from store_support import FIXED, Double, Driver, injected, objects, stored
from waiting import wait_for

from trireme.checkpoint.bucket import Bucket
from trireme.checkpoint.manifest import Manifest
from trireme.checkpoint.parts import PartReader, put_parts
from trireme.checkpoint.rows import ROW_FILES
from trireme.checkpoint.store import KEEP, CheckpointStore
from trireme.checkpoint.stored_run import PART_BYTES, StoredCheckpoint
from trireme.core.errors import CheckpointInvalid, LockLost, StorageFailed
from trireme.run import mirror
from trireme.run.mirror import Mirror
from trireme.run.rundir import RunDir

pytestmark = pytest.mark.usefixtures("instant_disk")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "LOOK_S", 0.02)
    monkeypatch.setattr(mirror, "RETRY_S", 0.05)


def prune(driver: Driver, keep_last: int = 3, keep_every: int | None = None) -> None:
    CheckpointStore(driver.run.root).prune(keep_last, keep_every)


def test_a_checkpoint_is_brought_when_it_is_there(url: str, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path)
    notes: list[str] = []
    with driver.remote.mirrored(driver.run, notes.append) as run:
        run.checkout()
        driver.step(1, saved=True)
        wait_for(lambda: stored(url).of_branch(), "the checkpoint in the store")
        run.store.check_owner()
        driver.step(2)
    files = stored(url).files
    size = sum(part.size for part in files["metrics.jsonl"])
    assert size == (driver.run.root / "metrics.jsonl").stat().st_size, "the end of the run is there too"
    assert {"config.json", "trained.jsonl", "checkpoints.jsonl", "logs/attempt_1/HEAD"} <= set(files)
    assert not {name for name in files if name.startswith(("driver.lock", "STORE", "STATUS"))}
    assert notes == []


def test_nothing_new_is_put_once(url: str, server: Double, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path).claim()
    driver.step(1, saved=True)
    driver.bring()
    server.requests.clear()
    driver.bring()
    assert [request.split()[0] for request in server.requests] == ["HEAD"]
    driver.step(2)
    server.requests.clear()
    driver.bring()
    put = [request.rsplit("/", 3)[1:] for request in server.requests if request.startswith("PUT")]
    assert len(put) == 4, "rows, what was trained on, a file of rollouts, HEAD"
    assert not [request for request in server.requests if "commits" in request]


def test_only_the_end_of_a_file_is_put_again(url: str, server: Double, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path).claim()
    log = driver.run.logs / "trainer_0.log"
    log.write_bytes(b"a" * (2 * PART_BYTES + 5))
    driver.bring()
    first = stored(url).files["logs/attempt_1/trainer_0.log"]
    assert [part.size for part in first] == [PART_BYTES, PART_BYTES, 5]
    with log.open("ab") as stream:
        stream.write(b"b" * 7)
    driver.bring()
    second = stored(url).files["logs/attempt_1/trainer_0.log"]
    assert second[:2] == first[:2]
    assert second[2].size == 12
    keys = [key for key in objects(url) if "trainer_0.log" in key]
    assert len(keys) == 3, "the part that was replaced is deleted"


def test_what_is_pruned_here_is_pruned_there(url: str, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path).claim()
    for number in range(1, 5):
        driver.step(number, saved=True)
    driver.bring()
    (CheckpointStore(driver.run.root).checkpoint(1) / KEEP).touch()
    prune(driver, keep_last=2)
    driver.bring()
    assert list(stored(url).of_branch()) == [1, 3, 4]
    assert stored(url).commits["checkpoints/step_000001"].kept
    assert not [key for key in objects(url) if "step_000002-" in key]
    driver.die()
    # On another machine only the newest is on the disk; the others are kept by the same rule.
    second = Driver(url, tmp_path / "two", "--resume", "--checkpoint.keep-last", "1").claim()
    assert [checkpoint.name for checkpoint in second.run.store.checkpoints()] == ["step_000004"]
    second.step(5, saved=True)
    prune(second, keep_last=1)
    second.bring()
    assert list(stored(url).of_branch()) == [1, 5], "the first is marked as kept"


def test_a_checkpoint_deleted_meanwhile_is_left_out(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(url, tmp_path).claim()
    driver.step(1, saved=True)
    driver.step(2, saved=True)
    put = Bucket.put

    def pruned_first(self: Bucket, key: str, contents: bytes | BinaryIO) -> None:
        if "step_000001-" in key and CheckpointStore(driver.run.root).checkpoint(1).exists():
            prune(driver, keep_last=1)
        put(self, key, contents)

    monkeypatch.setattr(Bucket, "put", pruned_first)
    driver.bring()  # what has begun to travel arrives, although its files have no names any more
    assert list(stored(url).of_branch()) == [1, 2]
    driver.bring()
    assert list(stored(url).of_branch()) == [2]


def test_the_store_keeps_its_newest_checkpoint(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are taken, and old ones deleted, faster than the store takes them."""
    driver = Driver(url, tmp_path).claim()
    driver.step(1, saved=True)
    driver.bring()
    driver.step(2, saved=True)
    prune(driver, keep_last=1)
    bring = Mirror._bring_checkpoint

    def deleted_first(self: Mirror, checkpoint: Path, text: bytes, checksum: str, deadline: float) -> StoredCheckpoint:
        if checkpoint.name == "step_000002":
            driver.step(3, saved=True)
            prune(driver, keep_last=1)
        return bring(self, checkpoint, text, checksum, deadline)

    monkeypatch.setattr(Mirror, "_bring_checkpoint", deleted_first)
    driver.bring()
    assert list(stored(url).of_branch()) == [1]
    assert [key for key in objects(url) if "step_000001-" in key]
    driver.bring()
    assert list(stored(url).of_branch()) == [3]
    assert not [key for key in objects(url) if "step_000001-" in key]


def test_rows_that_were_put_before_a_failure_are_named_after_it(url: str, server: Double, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path).claim()
    driver.step(1, saved=True)
    driver.bring()
    driver.step(2, saved=True)
    server.refuses = lambda request: request.startswith("PUT") and "trained.jsonl" in request
    with pytest.raises(StorageFailed):
        driver.bring()
    server.refuses = lambda _request: False
    driver.bring()
    for name in ROW_FILES:
        size = sum(part.size for part in stored(url).files[name])
        assert size == (driver.run.root / name).stat().st_size, name


def test_a_thread_that_ends_early_is_told(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(url, tmp_path)

    def broken(_self: Mirror) -> set[str]:
        raise OSError("stale file handle")

    def work(run: RunDir) -> None:
        monkeypatch.setattr(Mirror, "_new_checkpoints", broken)
        wait_for(stops(run), "the end of the run")

    with pytest.raises(OSError, match="stale file handle"):
        retained(driver, work)


def test_a_new_attempt_is_not_half_there(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(url, tmp_path).claim()
    driver.step(1, saved=True)
    driver.step(2)
    put, begun = Bucket.put, []

    def next_attempt(self: Bucket, key: str, contents: bytes | BinaryIO) -> None:
        put(self, key, contents)
        if not begun and "metrics.jsonl" in key:
            begun.append(driver.run.next_attempt(driver.config, FIXED))
            begun[0].checkout()

    monkeypatch.setattr(Bucket, "put", next_attempt)
    assert driver.mirror.bring() is False
    assert stored(url).written == 0, "no HEAD was put"
    driver.bring()
    assert stored(url).head.attempt == 2
    assert stored(url).head == begun[0].head


def test_a_failed_upload_is_an_incident_and_tried_again(url: str, server: Double, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path)
    notes: list[str] = []
    with driver.remote.mirrored(driver.run, notes.append) as run:
        run.checkout()
        server.refuses = lambda request: request.startswith("PUT") and "commits" in request
        driver.step(1, saved=True)
        wait_for(lambda: notes, "a note of the failure")
        run.store.check_owner()  # checkpoint.max_missed = 3 are allowed
        time.sleep(0.3)
        assert len(notes) == 1, "once, not at each try"
        assert "1 checkpoints among it" in notes[0]
        server.refuses = lambda _request: False
        wait_for(lambda: len(notes) == 2, "a note that everything is there")
    assert "has everything again" in notes[1]
    assert list(stored(url).of_branch()) == [1]


def retained(driver: Driver, work: Callable[[RunDir], None]) -> None:
    """Does `work` as a run that is kept in the store."""
    with driver.remote.mirrored(driver.run, driver.notes.append) as run:
        run.checkout()
        work(run)


def stops(run: RunDir) -> Callable[[], bool]:
    """Returns what looks at the run's right to write, which raises in the end."""

    def look() -> bool:
        run.store.check_owner()
        return False

    return look


def test_too_many_that_are_only_here_stop_the_run(url: str, server: Double, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path, "--checkpoint.max-missed", "1")

    def work(run: RunDir) -> None:
        server.refuses = lambda request: request.startswith("PUT") and "commits" in request
        driver.step(1, saved=True)
        driver.step(2, saved=True)
        wait_for(stops(run), "the end of the run")

    with pytest.raises(StorageFailed, match=r"2 checkpoints among it .*max_missed = 1"):
        retained(driver, work)


@pytest.mark.parametrize("error", [None, RuntimeError("of the run")])
def test_an_end_that_did_not_arrive_is_an_error_or_a_note(
    url: str, server: Double, tmp_path: Path, error: RuntimeError | None
) -> None:
    driver = Driver(url, tmp_path)

    def work(_run: RunDir) -> None:
        server.refuses = lambda request: request.startswith("PUT")
        driver.step(1, saved=True)
        if error:
            raise error

    with pytest.raises(type(error or StorageFailed(""))) as failed:
        retained(driver, work)
    assert "lacks what is new in" in (failed.value.__notes__[0] if error else str(failed.value))


def test_a_superseded_driver_loses_its_right_to_write(url: str, tmp_path: Path) -> None:
    first = Driver(url, tmp_path / "one")

    def work(run: RunDir) -> None:
        first.step(1, saved=True)
        wait_for(lambda: stored(url).of_branch(), "the checkpoint in the store")
        Driver(url, tmp_path / "two", "--resume").claim()
        first.step(2, saved=True)
        wait_for(stops(run), "the refusal")

    with pytest.raises(LockLost, match="was put by"):
        retained(first, work)
    assert list(stored(url).of_branch()) == [1]
    assert stored(url).driver == 2


@pytest.mark.parametrize("grows", [False, True])
def test_a_head_of_a_lost_answer_counts(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool) -> None:
    driver = Driver(url, tmp_path).claim()
    driver.step(1, saved=True)
    swap = Bucket.swap

    def without_answer(self: Bucket, key: str, contents: bytes, tag: str | None) -> str:
        swap(self, key, contents, tag)
        raise StorageFailed("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "swap", without_answer)
        with pytest.raises(StorageFailed, match="no answer"):
            driver.bring()
    if grows:
        driver.step(2, saved=True)
        with pytest.raises(StorageFailed, match="arrived late"):
            driver.bring()  # tried again, as every failure is
    driver.bring()
    assert list(stored(url).of_branch()) == ([1, 2] if grows else [1])
    driver.step(3)
    driver.bring()
    assert stored(url).driver == 1


def test_what_takes_too_long_is_late(url: str, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path, "--timeouts.checkpoint-s", "0.000001").claim()
    driver.step(1, saved=True)
    with pytest.raises(StorageFailed, match=r"timeouts\.checkpoint_s"):
        driver.bring()


@pytest.fixture
def far_run(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FarRun:
    return FarRun(url, tmp_path, monkeypatch)


def checkpoint_keys(url: str) -> list[str]:
    return [key for key in objects(url) if key.startswith("r/commits/")]


def test_parts_of_other_nodes_are_in_the_checkpoint(far_run: FarRun, url: str, server: Double) -> None:
    server.requests.clear()
    checkpoint = far_run.checkpoint(1)
    assert Manifest.verified(checkpoint).step == 1
    assert far_run.leftovers() == [], "they free their disks"
    far_run.driver.bring()
    assert list(stored(url).of_branch()) == [1]
    paths = [path.split("/", 2)[2] for path in puts(server.requests)]
    assert sorted(paths) == sorted(record.path for record in Manifest.read(checkpoint).files), "each is put once"


@pytest.mark.parametrize("point", ["parts.put", "parts.put@2", "parts.fetch", "parts.fetch@2", "commit.manifest"])
def test_before_it_is_sealed_there_is_no_checkpoint(far_run: FarRun, url: str, tmp_path: Path, point: str) -> None:
    far_run.checkpoint(1)
    far_run.driver.bring()
    with injected(point):
        far_run.checkpoint(2)
    far_run.driver.bring()
    assert list(stored(url).of_branch()) == [1]
    assert [key for key in checkpoint_keys(url) if "step_000002" in key], "some parts are there"
    far_run.driver.die()
    second = Driver(url, tmp_path / "elsewhere", "--resume")
    assert second.run.start.step == 1
    second.claim().bring()
    assert not [key for key in checkpoint_keys(url) if "step_000002" in key], "what was left is swept"


def test_the_next_attempt_of_a_driver_sweeps_too(far_run: FarRun, url: str) -> None:
    far_run.checkpoint(1)
    far_run.driver.bring()
    with injected("parts.fetch"):
        far_run.checkpoint(2)
    torn = [key for key in checkpoint_keys(url) if "step_000002" in key]
    again = far_run.run.next_attempt(far_run.driver.config, FIXED)
    again.checkout()
    far_run.run = again
    far_run.far = replace(far_run.far, run=again)
    # A part of the new attempt that is under way stays, and those of the old one go, although one driver put all.
    draft, manifest = far_run.write(2)
    far_run.far.gather(draft, manifest)
    far_run.driver.bring()
    now = [key for key in checkpoint_keys(url) if "step_000002" in key]
    assert torn
    assert now
    assert not set(torn) & set(now)
    again.store.publish(draft, manifest)
    far_run.driver.bring()
    assert list(stored(url).of_branch()) == [1, 2]


@pytest.mark.parametrize("harm", ["altered", "torn", "missing"])
def test_a_part_of_others_is_refused(far_run: FarRun, url: str, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    put = Bucket.put

    def harmful(self: Bucket, key: str, contents: object) -> None:
        data = contents.read() if hasattr(contents, "read") else contents
        if key.endswith("trainer/__0_0.distcp"):
            data = {"altered": data[:-1] + b"?", "torn": data[:-1], "missing": None}[harm]
        if data is not None:
            put(self, key, data)

    draft, manifest = far_run.write(1)
    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "put", harmful)
        with pytest.raises(StorageFailed, match=r"trainer/__0_0\.distcp"):
            far_run.far.gather(draft, manifest)
    assert checkpoint_keys(url) == []
    assert far_run.leftovers() == []
    far_run.run.store.discard(draft)
    far_run.checkpoint(1)  # another try of the same step by the same attempt
    far_run.driver.bring()
    assert list(stored(url).of_branch()) == [1]


def test_a_store_that_refuses_a_part_is_named_by_the_node(far_run: FarRun, url: str, server: Double) -> None:
    draft, manifest = far_run.write(1)
    server.refuses = lambda request: request.startswith("PUT") and "orchestrator" in request
    with pytest.raises(StorageFailed, match=r"orchestrator/state\.json.*403"):
        far_run.far.gather(draft, manifest)
    assert far_run.leftovers() == [], "nodes free their disks after a failure, too"
    assert checkpoint_keys(url) == []


def test_of_nodes_that_share_a_disk_one_puts_a_part(far_run: FarRun, server: Double) -> None:
    draft, manifest = far_run.write(1)
    place = far_run.at("far", draft)
    server.requests.clear()
    for _ in range(2):
        assert put_parts(far_run.mirror.bucket.url, "commits/000001/step_000001-a-1", place, manifest.files) == ""
    assert len(puts(server.requests)) == 1


def test_a_node_fetches_what_it_reads(far_run: FarRun, server: Double) -> None:
    checkpoint = far_run.checkpoint(1)
    far_run.driver.bring()
    source = far_run.source(checkpoint)
    server.requests.clear()
    with PartReader.opened(far_run.at("far", checkpoint / "trainer"), source) as part:
        part.fetch(["__0_0.distcp"])
        assert (part.directory / "__0_0.distcp").read_bytes() == (checkpoint / "trainer" / "__0_0.distcp").read_bytes()
        with pytest.raises(CheckpointInvalid, match=r"trainer/other is no file of the checkpoint s3://"):
            part.fetch(["other"])
    assert not [request for request in server.requests if "orchestrator" in request or "inference" in request]
    assert far_run.leftovers() == []
    with PartReader.opened(far_run.at("farther", checkpoint / "orchestrator"), source) as part:
        part.fetch_all()
        assert [file.name for file in part.directory.iterdir()] == ["state.json"]


def test_a_process_that_sees_the_directory_fetches_nothing(far_run: FarRun, server: Double) -> None:
    checkpoint = far_run.checkpoint(1)
    far_run.driver.bring()
    source = far_run.far.source(checkpoint, Manifest.read(checkpoint))
    server.requests.clear()
    with PartReader.opened(checkpoint / "trainer", source) as part:
        part.fetch_all()
        assert part.directory == checkpoint / "trainer"
    assert server.requests == []
    # A directory that an earlier driver left at the same path is another one.
    stale = replace(source, text="of another attempt")
    with PartReader.opened(checkpoint / "trainer", stale) as part:
        assert part.directory != checkpoint / "trainer"


def test_a_load_waits_until_the_store_has_the_checkpoint(far_run: FarRun, url: str) -> None:
    checkpoint = far_run.checkpoint(1)
    far_run.far = replace(far_run.far, timeout_s=0.0)
    with pytest.raises(StorageFailed, match=r"waited 0 s until s3://.* has step_000001"):
        far_run.source(checkpoint)
    far_run.driver.bring()
    assert far_run.source(checkpoint).key == stored(url).commits["checkpoints/step_000001"].key


def test_a_driver_elsewhere_resumes(far_run: FarRun, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = far_run.checkpoint(1)
    contents = (first / "trainer" / "__0_0.distcp").read_bytes()
    far_run.driver.bring()
    far_run.driver.die()
    second = FarRun(url, tmp_path / "again", monkeypatch, "--resume")
    start = second.run.start
    assert (start.step, start.attempt) == (1, 2)
    source = second.source(start.checkpoint)
    assert source.key.startswith("commits/000001/"), "where the first driver put it"
    with PartReader.opened(second.at("far", start.checkpoint / "trainer"), source) as part:
        part.fetch_all()
        assert (part.directory / "__0_0.distcp").read_bytes() == contents
    second.checkpoint(2)
    second.driver.bring()
    assert list(stored(url).of_branch()) == [1, 2]
    assert CheckpointStore(second.root).checkpoint(2).exists()
