"""Commits of which nodes write parts that do not see the run directory: each is whole in the store or is not there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from far_support import FarRun, puts
from store_support import FIXED, Double, Driver, objects, stored

from trireme.checkpoint.bucket import Bucket
from trireme.checkpoint.manifest import Manifest
from trireme.checkpoint.parts import PartReader, put_parts
from trireme.checkpoint.store import CheckpointStore
from trireme.core.errors import CheckpointInvalid, StorageFailed
from trireme.process.faults import InjectedFault

pytestmark = pytest.mark.usefixtures("instant_disk")


@pytest.fixture
def far_run(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FarRun:
    return FarRun(url, tmp_path, monkeypatch)


def commit_keys(url: str) -> list[str]:
    return [key for key in objects(url) if key.startswith("r/commits/")]


def test_parts_of_other_nodes_are_in_the_commit(far_run: FarRun, url: str, server: Double) -> None:
    server.asked.clear()
    commit = far_run.commit(1)
    assert Manifest.verified(commit).step == 1
    assert far_run.leftovers() == [], "they free their disks"
    far_run.driver.bring()
    assert list(stored(url).of_branch()) == [1]
    there = [path.split("/", 2)[2] for path in puts(server.asked)]
    assert sorted(there) == sorted(record.path for record in Manifest.read(commit).files), "each is put once"


@pytest.mark.parametrize("point", ["parts.put", "parts.put@2", "parts.fetch", "parts.fetch@2", "commit.manifest"])
def test_before_it_is_sealed_there_is_no_commit(
    far_run: FarRun, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    far_run.commit(1)
    far_run.driver.bring()
    name, _, passage = point.partition("@")
    with monkeypatch.context() as patched:
        patched.setenv("TRIREME_FAULTS", f"{name}@{passage or 1}=raise")
        patched.setattr("trireme.process.faults._passed", Counter())
        with pytest.raises(InjectedFault):
            far_run.commit(2)
    far_run.driver.bring()
    assert list(stored(url).of_branch()) == [1]
    assert [key for key in commit_keys(url) if "step_000002" in key], "some parts are there"
    far_run.driver.die()
    second = Driver(url, tmp_path / "elsewhere", "--resume")
    assert second.run.start.step == 1
    second.claim().bring()
    assert not [key for key in commit_keys(url) if "step_000002" in key], "what was left is swept"


def test_the_next_attempt_of_a_driver_sweeps_too(far_run: FarRun, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    far_run.commit(1)
    far_run.driver.bring()
    with monkeypatch.context() as patched:
        patched.setenv("TRIREME_FAULTS", "parts.fetch@1=raise")
        patched.setattr("trireme.process.faults._passed", Counter())
        with pytest.raises(InjectedFault):
            far_run.commit(2)
    left = [key for key in commit_keys(url) if "step_000002" in key]
    again = far_run.run.next_attempt(far_run.driver.config, FIXED)
    again.checkout()
    far_run.run = again
    far_run.far = replace(far_run.far, run=again)
    # A part of the new attempt that is under way stays, and those of the old one go, although one driver put all.
    draft, manifest = far_run.write(2)
    far_run.far.gather(draft, manifest)
    far_run.driver.bring()
    now = [key for key in commit_keys(url) if "step_000002" in key]
    assert left
    assert now
    assert not set(left) & set(now)
    again.store.publish(draft, manifest)
    far_run.driver.bring()
    assert list(stored(url).of_branch()) == [1, 2]


@pytest.mark.parametrize("harm", ["altered", "torn", "missing"])
def test_a_part_that_is_not_the_one_that_was_written_is_refused(
    far_run: FarRun, url: str, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
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
    assert commit_keys(url) == []
    assert far_run.leftovers() == []
    far_run.run.store.discard(draft)
    far_run.commit(1)  # another try of the same step by the same attempt
    far_run.driver.bring()
    assert list(stored(url).of_branch()) == [1]


def test_a_store_that_refuses_a_part_is_named_by_the_node(far_run: FarRun, url: str, server: Double) -> None:
    draft, manifest = far_run.write(1)
    server.refuses = lambda request: request.startswith("PUT") and "orchestrator" in request
    with pytest.raises(StorageFailed, match=r"orchestrator/state\.json.*403"):
        far_run.far.gather(draft, manifest)
    assert far_run.leftovers() == [], "nodes free their disks after a failure, too"
    assert commit_keys(url) == []


def test_of_nodes_that_share_a_disk_one_puts_a_part(far_run: FarRun, server: Double) -> None:
    draft, manifest = far_run.write(1)
    place = far_run.at("far", draft)
    server.asked.clear()
    for _ in range(2):
        assert put_parts(far_run.mirror.bucket.url, "commits/000001/step_000001-a-1", place, manifest.files) == ""
    assert len(puts(server.asked)) == 1


def test_a_node_fetches_what_it_reads(far_run: FarRun, server: Double) -> None:
    commit = far_run.commit(1)
    far_run.driver.bring()
    source = far_run.source(commit)
    server.asked.clear()
    with PartReader.opened(far_run.at("far", commit / "trainer"), source) as part:
        part.fetch(["__0_0.distcp"])
        assert (part.directory / "__0_0.distcp").read_bytes() == (commit / "trainer" / "__0_0.distcp").read_bytes()
        with pytest.raises(CheckpointInvalid, match=r"trainer/other is no file of the commit s3://"):
            part.fetch(["other"])
    assert not [request for request in server.asked if "orchestrator" in request or "inference" in request]
    assert far_run.leftovers() == []
    with PartReader.opened(far_run.at("farther", commit / "orchestrator"), source) as part:
        part.fetch_all()
        assert [file.name for file in part.directory.iterdir()] == ["state.json"]


def test_a_process_that_sees_the_directory_fetches_nothing(far_run: FarRun, server: Double) -> None:
    commit = far_run.commit(1)
    far_run.driver.bring()
    source = far_run.far.source(commit, Manifest.read(commit))
    server.asked.clear()
    with PartReader.opened(commit / "trainer", source) as part:
        part.fetch_all()
        assert part.directory == commit / "trainer"
    assert server.asked == []
    # A directory that an earlier driver left at the same path is another one.
    stale = replace(source, text="of another attempt")
    with PartReader.opened(commit / "trainer", stale) as part:
        assert part.directory != commit / "trainer"


def test_an_altered_commit_is_never_loaded(far_run: FarRun) -> None:
    commit = far_run.commit(1)
    far_run.driver.bring()
    source = far_run.source(commit)
    far_run.mirror.bucket.put(f"{source.key}/trainer/__0_0.distcp", b"altered")
    with PartReader.opened(far_run.at("far", commit / "trainer"), source) as part, pytest.raises(StorageFailed):
        part.fetch_all()


def test_a_load_waits_until_the_store_has_the_commit(far_run: FarRun, url: str) -> None:
    commit = far_run.commit(1)
    far_run.far = replace(far_run.far, timeout_s=0.0)
    with pytest.raises(StorageFailed, match=r"waited 0 s until s3://.* has step_000001"):
        far_run.source(commit)
    far_run.driver.bring()
    assert far_run.source(commit).key == stored(url).commits["checkpoints/step_000001"].key


def test_a_driver_elsewhere_resumes_and_its_nodes_load(
    far_run: FarRun, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = far_run.commit(1)
    contents = (first / "trainer" / "__0_0.distcp").read_bytes()
    far_run.driver.bring()
    far_run.driver.die()
    second = FarRun(url, tmp_path / "again", monkeypatch, "--resume")
    start = second.run.start
    assert (start.step, start.attempt) == (1, 2)
    assert start.commit
    source = second.source(start.commit)
    assert source.key.startswith("commits/000001/"), "where the first driver put it"
    with PartReader.opened(second.at("far", start.commit / "trainer"), source) as part:
        part.fetch_all()
        assert (part.directory / "__0_0.distcp").read_bytes() == contents
    second.commit(2)
    second.driver.bring()
    assert list(stored(url).of_branch()) == [1, 2]
    assert CheckpointStore(second.root).commit(2).exists()
