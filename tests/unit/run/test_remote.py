"""A run in object storage: what a start finds there, takes over and refuses, and what a crash leaves."""

import shlex
from pathlib import Path

import pytest
from store_support import Double, Driver, everything, injected, objects, rows, stored

from trireme.checkpoint import bucket
from trireme.checkpoint.bucket import Bucket, StoreSilent
from trireme.checkpoint.manifest import MANIFEST, Manifest
from trireme.checkpoint.store import HEAD, KEEP, CheckpointStore
from trireme.config.load import load
from trireme.core.errors import EXIT_FAILED, BadInput, CheckpointInvalid, LockLost, StorageFailed
from trireme.process.faults import InjectedFault
from trireme.run.remote import RemoteRun
from trireme.run.rundir import locked, resume_command

pytestmark = pytest.mark.usefixtures("instant_disk")
POINTS = ("store.file", "store.file@2", "store.manifest", "store.commits", "store.part", "store.part@3", "store.head")


def begun(url: str, local: Path) -> Driver:
    """A run with checkpoints of steps 1 and 2, and the rows of step 3, all in the store."""
    driver = Driver(url, local).claim()
    driver.step(1, saved=True)
    driver.step(2, saved=True)
    driver.step(3)
    driver.bring()
    return driver


def test_brought_to_an_empty_machine_it_goes_on(url: str, tmp_path: Path) -> None:
    first = begun(url, tmp_path / "one")
    first.die()
    second = Driver(url, tmp_path / "two", "--resume", "auto")
    start = second.run.start
    assert (start.step, start.attempt, start.run_id) == (2, 2, first.run.start.run_id)
    assert Manifest.verified(start.checkpoint)
    assert any("was brought from" in line and "step_000002" in line for line in second.lines)
    second.claim()
    assert rows(second.run.root) == [0, 1], "the row of step 3 is of a step that is done again"
    for number in (3, 4):
        second.step(number, saved=number == 4)
    second.bring()
    second.die()
    third = Driver(url, tmp_path / "three", "--resume")
    assert third.run.start.step == 4
    assert rows(third.run.root) == [0, 1, 2, 3]
    assert sorted(file.name for file in (third.run.root / "rollouts").iterdir()) == [
        f"step_{step:06d}.jsonl" for step in range(4)
    ]
    assert list((third.run.root / "branches").glob("*/metrics.jsonl")), "what was superseded is there too"


def test_the_same_machine_needs_nothing_brought(url: str, tmp_path: Path) -> None:
    first = begun(url, tmp_path)
    first.step(4, saved=True)  # only here
    first.die()
    second = Driver(url, tmp_path, "--resume")
    assert second.lines == []
    assert second.run.start.step == 4
    second.claim().bring()
    assert list(stored(url).of_branch()) == [1, 2, 4]


def test_a_directory_that_was_superseded_is_set_aside(url: str, tmp_path: Path) -> None:
    first = begun(url, tmp_path / "one")
    first.die()
    second = Driver(url, tmp_path / "two", "--resume").claim()
    second.step(3, saved=True)
    second.bring()
    second.die()
    again = Driver(url, tmp_path / "one", "--resume")
    assert again.run.start.step == 3
    (aside,) = (tmp_path / "one").glob("r.before-2-*")
    assert CheckpointStore(aside).checkpoint(2).exists()
    assert str(aside) in again.lines[0]


def test_of_two_drivers_the_later_one_has_the_run(url: str, tmp_path: Path) -> None:
    first = begun(url, tmp_path / "one")
    second = Driver(url, tmp_path / "two", "--resume").claim()
    second.step(3, saved=True)
    second.bring()
    winners = objects(url)
    first.step(4, saved=True)
    with pytest.raises(LockLost, match="driver 1") as lost:
        first.bring()
    assert stored(url).holder in str(lost.value)
    after = objects(url)
    assert {key: after.get(key) for key in winners} == winners, "nothing of the winner is touched"
    second.step(4, saved=True)
    second.bring()
    assert list(stored(url).of_branch()) == [2, 3, 4], "checkpoint.keep_last counts what is in the store alone, too"
    # What the loser put, and no HEAD names, goes with the start of the next driver.
    second.die()
    third = Driver(url, tmp_path / "three", "--resume").claim()
    third.bring()
    state = stored(url)
    named = state.parts() | {HEAD}
    for key in objects(url):
        short = key.removeprefix("r/")
        assert short in named or any(short.startswith(f"{checkpoint}/") for checkpoint in state.checkpoint_keys()), key


def test_of_two_that_begin_together_one_is_refused(url: str, tmp_path: Path) -> None:
    begun(url, tmp_path / "one").die()
    second, third = (Driver(url, tmp_path / name, "--resume") for name in ("two", "three"))
    second.claim()
    with pytest.raises(BadInput, match="another driver has taken over"):
        third.claim()


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_leaves_the_last_checkpoint(url: str, tmp_path: Path, point: str) -> None:
    first = begun(url, tmp_path / "one")
    before = stored(url)
    for number in (4, 5):
        first.step(number, saved=True)
    with injected(point):
        first.bring()
    first.die()
    is_named = point == "store.head"
    assert (stored(url) == before) == (not is_named)
    second = Driver(url, tmp_path / "two", "--resume")
    step = 5 if is_named else 2
    assert second.run.start.step == step
    second.claim()
    assert rows(second.run.root) == list(range(step))
    second.step(step + 1, saved=True)
    second.bring()
    third = Driver(url, tmp_path / "three", "--resume")
    assert third.run.start.step == step + 1
    assert rows(third.run.root) == list(range(step + 1))


def test_a_crash_while_it_is_brought_begins_anew(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(url, tmp_path / "one").die()
    with monkeypatch.context() as patched:
        patched.setattr(RemoteRun, "_bring_checkpoint", lambda *_: (_ for _ in ()).throw(InjectedFault("here")))
        with pytest.raises(InjectedFault):
            Driver(url, tmp_path / "two", "--resume")
    assert not (tmp_path / "two" / "r").exists()
    assert Driver(url, tmp_path / "two", "--resume").run.start.step == 2


def test_of_two_that_bring_it_to_one_directory_one_is_refused(url: str, tmp_path: Path) -> None:
    begun(url, tmp_path / "one").die()
    arriving = tmp_path / "two" / "r.arriving"
    arriving.mkdir(parents=True)
    with locked(arriving), pytest.raises(BadInput, match="is running"):
        Driver(url, tmp_path / "two", "--resume")
    assert Driver(url, tmp_path / "two", "--resume").run.start.step == 2
    assert not arriving.exists()


def test_a_checkpoint_that_is_kept_stays_kept(url: str, tmp_path: Path) -> None:
    first = begun(url, tmp_path / "one")
    (first.run.store.checkpoint(2) / KEEP).touch()
    first.bring()
    first.die()
    second = Driver(url, tmp_path / "two", "--resume").claim()
    second.bring()
    assert (second.run.store.checkpoint(2) / KEEP).exists()
    assert stored(url).commits["checkpoints/step_000002"].kept


def test_a_torn_checkpoint_is_passed_over(url: str, tmp_path: Path) -> None:
    begun(url, tmp_path / "one").die()
    state = stored(url)
    key = state.commits["checkpoints/step_000002"].key
    Bucket(f"{url}/r").put(f"{key}/trainer/__0_0.distcp", b"torn")
    second = Driver(url, tmp_path / "two", "--resume")
    assert second.run.start.step == 1
    assert any("passed over checkpoints/step_000002" in line for line in second.lines)
    second.claim().bring()
    (branch,) = [path for path in stored(url).commits if path.startswith("branches/")]
    assert branch == f"branches/{state.head.lineage}/checkpoints/step_000002"
    assert stored(url).commits[branch].key == key, "by reference"
    Bucket(f"{url}/r").delete([f"{state.commits['checkpoints/step_000001'].key}/{MANIFEST}"])
    with pytest.raises(BadInput, match="none of whose checkpoints verifies"):
        Driver(url, tmp_path / "three", "--resume")


def test_altered_rows_are_refused(url: str, tmp_path: Path) -> None:
    begun(url, tmp_path / "one").die()
    key = next(key for key in stored(url).parts() if "/metrics.jsonl/" in key)
    Bucket(f"{url}/r").put(key, b"{}")
    with pytest.raises(StorageFailed, match=r"metrics\.jsonl.*altered"):
        Driver(url, tmp_path / "two", "--resume")


def test_back_to_an_earlier_step(url: str, tmp_path: Path) -> None:
    begun(url, tmp_path / "one").die()
    Driver(url, tmp_path / "two", "--resume").die()
    lineage = stored(url).head.lineage
    second = Driver(url, tmp_path / "two", "--resume.step", "1").claim()
    assert "lacks the checkpoint" in second.lines[0], "it is in the store alone"
    assert second.run.start.step == 1
    second.step(2, saved=True)
    second.bring()
    state = stored(url)
    assert set(state.commits) == {
        "checkpoints/step_000001",
        "checkpoints/step_000002",
        f"branches/{lineage}/checkpoints/step_000002",
    }
    assert len(state.checkpoint_keys()) == 3
    with pytest.raises(BadInput, match="there are: 1, 2"):
        Driver(url, tmp_path / "three", "--resume.step", "7")


def test_a_new_run_does_not_take_an_old_ones_place(url: str, tmp_path: Path) -> None:
    first = begun(url, tmp_path / "one")
    first.die()
    with pytest.raises(BadInput, match="which already exists"):
        Driver(url, tmp_path / "two")
    second = Driver(url, tmp_path / "two", "--clean").claim()
    second.step(1, saved=True)
    second.bring()
    assert stored(url).head.run_id != first.run.start.run_id
    assert not [key for key in objects(url) if "/000001/" in key], "the old run is deleted"
    assert everything(first.run.root), "but on its own machine"
    # The driver of the deleted run is another run's now.
    with pytest.raises(LockLost):
        first.bring()


@pytest.mark.parametrize("condition", ["HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"])
def test_a_store_without_conditions_is_refused(url: str, server: Double, tmp_path: Path, condition: str) -> None:
    server.ignores = (condition,)
    with pytest.raises(BadInput, match="although this condition was") as refused:
        Driver(url, tmp_path)
    assert url in str(refused.value)
    assert Bucket(url).keys("") == []
    assert not (tmp_path / "r").exists()


def test_a_store_that_cannot_be_asked_is_refused(url: str, server: Double, tmp_path: Path) -> None:
    server.refuses = lambda request: request.startswith("PUT")
    (tmp_path / "files").mkdir()
    for place in (url, f"file://{tmp_path}/files"):
        with pytest.raises(BadInput, match="did not take a conditional put"):
            Driver(place, tmp_path / "local")


@pytest.mark.parametrize("reason", ["nothing listens", "it is busy"])
def test_a_store_that_does_not_answer_is_no_wrong_input(
    reason: str, url: str, server: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "RETRY_S", 0.1)
    if reason == "it is busy":
        server.busy = True
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreSilent, match=r"does not answer: .* start the same command again") as failed:
        Driver(url, tmp_path)
    assert failed.value.exit_code == EXIT_FAILED
    assert not (tmp_path / "r").exists()


def test_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"correct --run\.output-dir"):
        Driver("gopher://bucket/prefix", tmp_path)


def test_the_claim_counts_if_only_its_answer_is_lost(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(url, tmp_path)
    swap = Bucket.swap

    def twice(self: Bucket, key: str, contents: bytes, tag: str | None) -> str:
        swap(self, key, contents, tag)
        return swap(self, key, contents, tag)

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "swap", twice)
        driver.claim()
        driver.step(1, saved=True)
        driver.bring()
    driver.step(2, saved=True)
    driver.bring()
    assert list(stored(url).of_branch()) == [1, 2]


def test_the_command_that_resumes_names_both_places(url: str, tmp_path: Path) -> None:
    driver = Driver(url, tmp_path)
    words = shlex.split(resume_command(driver.run.root, trusted=True))
    loaded = load(words[words.index("@") :], {}).config
    assert (loaded.run, loaded.resume.latest) == (driver.config.run, True)


def test_a_damaged_head_is_named_with_its_place(url: str, tmp_path: Path) -> None:
    begun(url, tmp_path / "one").die()
    Bucket(f"{url}/r").put(HEAD, b"{}")
    with pytest.raises(CheckpointInvalid, match=f"{url}/r: "):
        Driver(url, tmp_path / "two", "--resume")
