"""What a driver brings to object storage while it trains, and what happens where that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from store_support import Double, Driver, objects, stored

from trireme.checkpoint.bucket import Bucket
from trireme.checkpoint.rows import ROW_FILES
from trireme.checkpoint.store import KEEP, CheckpointStore
from trireme.checkpoint.stored_run import PART_BYTES, StoredCommit
from trireme.core.errors import LockLost, StorageFailed
from trireme.run import mirror
from trireme.run.mirror import Mirror
from trireme.run.rundir import RunDir

pytestmark = pytest.mark.usefixtures("instant_disk")
DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "LOOK_S", 0.02)
    monkeypatch.setattr(mirror, "RETRY_S", 0.05)


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s until {what}"
        time.sleep(0.01)


def prune(driver: Driver, keep_last: int = 3, keep_every: int | None = None) -> None:
    CheckpointStore(driver.run.root).prune(keep_last, keep_every)


def test_a_commit_is_brought_when_it_is_there(url: str, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path)
    notes: list[str] = []
    with driver.remote.kept(driver.run, notes.append) as run:
        assert run.mirror
        run.checkout()
        driver.step(1, committed=True)
        until(lambda: stored(url).of_branch(), "the commit is in the store")
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
    driver.step(1, committed=True)
    driver.bring()
    server.asked.clear()
    driver.bring()
    assert [request.split()[0] for request in server.asked] == ["HEAD"]
    driver.step(2)
    server.asked.clear()
    driver.bring()
    put = [request.rsplit("/", 3)[1:] for request in server.asked if request.startswith("PUT")]
    assert len(put) == 4, "rows, what was trained on, a file of rollouts, HEAD"
    assert not [request for request in server.asked if "commits" in request]


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
    held = [key for key in objects(url) if "trainer_0.log" in key]
    assert len(held) == 3, "the part that was replaced is deleted"


def test_what_is_pruned_here_is_pruned_there(url: str, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path).claim()
    for number in range(1, 5):
        driver.step(number, committed=True)
    driver.bring()
    (CheckpointStore(driver.run.root).commit(1) / KEEP).touch()
    prune(driver, keep_last=2)
    driver.bring()
    assert list(stored(url).of_branch()) == [1, 3, 4]
    assert stored(url).commits["checkpoints/step_000001"].kept
    assert not [key for key in objects(url) if "step_000002-" in key]
    driver.die()
    # On another machine only the newest is on the disk; the others are kept by the same rule.
    second = Driver(url, tmp_path / "two", "--resume", "--checkpoint.keep-last", "1").claim()
    assert [each.name for each in second.run.store.commits()] == ["step_000004"]
    second.step(5, committed=True)
    prune(second, keep_last=1)
    second.bring()
    assert list(stored(url).of_branch()) == [1, 5], "the first is marked as kept"


def test_a_commit_that_is_deleted_meanwhile_is_left_out(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(url, tmp_path).claim()
    driver.step(1, committed=True)
    driver.step(2, committed=True)
    put = Bucket.put

    def pruned_first(self: Bucket, key: str, contents: bytes | BinaryIO) -> None:
        if "step_000001-" in key and CheckpointStore(driver.run.root).commit(1).exists():
            prune(driver, keep_last=1)
        put(self, key, contents)

    monkeypatch.setattr(Bucket, "put", pruned_first)
    driver.bring()  # what has begun to travel arrives, although its files have no names any more
    assert list(stored(url).of_branch()) == [1, 2]
    driver.bring()
    assert list(stored(url).of_branch()) == [2]


def test_the_store_keeps_its_newest_commit_until_a_newer_one_is_there(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits are taken, and old ones deleted, faster than the store takes them."""
    driver = Driver(url, tmp_path).claim()
    driver.step(1, committed=True)
    driver.bring()
    driver.step(2, committed=True)
    prune(driver, keep_last=1)
    bring = Mirror._bring_commit

    def deleted_first(self: Mirror, commit: Path, text: bytes, checksum: str, deadline: float) -> StoredCommit:
        if commit.name == "step_000002":
            driver.step(3, committed=True)
            prune(driver, keep_last=1)
        return bring(self, commit, text, checksum, deadline)

    monkeypatch.setattr(Mirror, "_bring_commit", deleted_first)
    driver.bring()
    assert list(stored(url).of_branch()) == [1]
    assert [key for key in objects(url) if "step_000001-" in key]
    driver.bring()
    assert list(stored(url).of_branch()) == [3]
    assert not [key for key in objects(url) if "step_000001-" in key]


def test_rows_that_were_put_before_a_failure_are_named_after_it(url: str, server: Double, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path).claim()
    driver.step(1, committed=True)
    driver.bring()
    driver.step(2, committed=True)
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
        monkeypatch.setattr(Mirror, "_new_commits", broken)
        until(stops(run), "the run stops")

    with pytest.raises(OSError, match="stale file handle"):
        kept(driver, work)


def test_a_new_attempt_is_not_half_there(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(url, tmp_path).claim()
    driver.step(1, committed=True)
    driver.step(2)
    put, begun = Bucket.put, []

    def next_attempt(self: Bucket, key: str, contents: bytes | BinaryIO) -> None:
        put(self, key, contents)
        if not begun and "metrics.jsonl" in key:
            begun.append(
                driver.run.next_attempt(driver.config, {"model": {"hidden_size": 64}, "loss": {"loss_fn": "ppo"}})
            )
            begun[0].checkout()

    monkeypatch.setattr(Bucket, "put", next_attempt)
    assert driver.mirror
    assert driver.mirror.bring() is False
    assert stored(url).written == 0, "no HEAD was put"
    driver.bring()
    assert stored(url).head.attempt == 2
    assert stored(url).head == begun[0].head


def test_a_failed_upload_is_an_incident_and_tried_again(url: str, server: Double, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path)
    notes: list[str] = []
    with driver.remote.kept(driver.run, notes.append) as run:
        run.checkout()
        server.refuses = lambda request: request.startswith("PUT") and "commits" in request
        driver.step(1, committed=True)
        until(lambda: notes, "the failure is told")
        run.store.check_owner()  # checkpoint.max_missed = 3 are allowed
        time.sleep(0.3)
        assert len(notes) == 1, "once, not at each try"
        assert "1 commits among it" in notes[0]
        server.refuses = lambda _request: False
        until(lambda: len(notes) == 2, "it is told that everything is there")
    assert "has everything again" in notes[1]
    assert list(stored(url).of_branch()) == [1]


def kept(driver: Driver, work: Callable[[RunDir], None]) -> None:
    """Does `work` as a run that is kept in the store."""
    with driver.remote.kept(driver.run, driver.notes.append) as run:
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
        driver.step(1, committed=True)
        driver.step(2, committed=True)
        until(stops(run), "the run stops")

    with pytest.raises(StorageFailed, match=r"2 commits among it .*max_missed = 1"):
        kept(driver, work)


def test_an_end_that_did_not_arrive_is_an_error(url: str, server: Double, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path)

    def work(_run: RunDir) -> None:
        server.refuses = lambda request: request.startswith("PUT")
        driver.step(1, committed=True)

    with pytest.raises(StorageFailed, match="lacks what is new in"):
        kept(driver, work)


def test_an_error_of_the_run_is_the_one_that_is_told(url: str, server: Double, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path)

    def work(_run: RunDir) -> None:
        server.refuses = lambda request: request.startswith("PUT")
        driver.step(1, committed=True)
        raise RuntimeError("of the run")

    with pytest.raises(RuntimeError, match="of the run") as failed:
        kept(driver, work)
    assert "lacks what is new in" in failed.value.__notes__[0]


def test_a_superseded_driver_loses_its_right_to_write(url: str, tmp_path: Path) -> None:
    first = Driver(url, tmp_path / "one")

    def work(run: RunDir) -> None:
        first.step(1, committed=True)
        until(lambda: stored(url).of_branch(), "the commit is in the store")
        Driver(url, tmp_path / "two", "--resume").claim()
        first.step(2, committed=True)
        until(stops(run), "it is refused")

    with pytest.raises(LockLost, match="was put by"):
        kept(first, work)
    assert list(stored(url).of_branch()) == [1]
    assert stored(url).driver == 2


@pytest.mark.parametrize("grows", [False, True])
def test_a_head_whose_answer_was_lost_is_its_own(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    driver = Driver(url, tmp_path).claim()
    driver.step(1, committed=True)
    swap = Bucket.swap

    def without_answer(self: Bucket, key: str, contents: bytes, tag: str | None) -> str:
        swap(self, key, contents, tag)
        raise StorageFailed("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "swap", without_answer)
        with pytest.raises(StorageFailed, match="no answer"):
            driver.bring()
    if grows:
        driver.step(2, committed=True)
        with pytest.raises(StorageFailed, match="arrived late"):
            driver.bring()  # tried again, as every failure is
    driver.bring()
    assert list(stored(url).of_branch()) == ([1, 2] if grows else [1])
    driver.step(3)
    driver.bring()
    assert stored(url).driver == 1


def test_what_takes_too_long_is_late(url: str, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path, "--timeouts.checkpoint-s", "0.000001").claim()
    driver.step(1, committed=True)
    with pytest.raises(StorageFailed, match=r"timeouts\.checkpoint_s"):
        driver.bring()
