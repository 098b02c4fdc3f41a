"""Which checkpoint is chosen, what is refused, and that a fork leaves its source alone."""

import errno
import os
from pathlib import Path

import pytest
from checkpoint_support import PARTS, append_rows, checkpoint, flip, read_json_lines, snapshot, steps, truncate
from config_support import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.checkpoint.manifest import MANIFEST, Manifest
from trireme.checkpoint.resume import check_fixed, choose, differences, fork
from trireme.checkpoint.store import KEEP, CheckpointStore, Head, VerifiedCheckpoint
from trireme.core.errors import CheckpointInvalid

pytestmark = pytest.mark.usefixtures("instant_disk")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    opened = CheckpointStore(tmp_path / "run")
    opened.root.mkdir()
    opened.write_head(Head("cafecafe", "aaaaaaaa", 1, None))
    for step in (20, 40):
        checkpoint(opened, step, state=["tokens"] * step)
    for name in ("metrics.jsonl", "trained.jsonl"):
        append_rows(opened.root / name, [{"step": step} for step in range(45)])
    return opened


@pytest.mark.parametrize("step", [None, -1])
def test_when_none_verifies_all_reasons_are_shown(store: CheckpointStore, step: int | None) -> None:
    """Starting from the beginning would throw the run away: that is for a person to decide."""
    truncate(store.checkpoint(40) / PARTS[0])
    (store.checkpoint(20) / MANIFEST).unlink()
    text = refused(lambda: choose(store, step))
    assert f"step_000040: {PARTS[0]} has" in text
    assert f"step_000020: {MANIFEST} is missing" in text


def test_a_step_that_is_not_there_is_refused(store: CheckpointStore) -> None:
    text = refused(lambda: choose(store, 30))
    assert "--resume.step 30" in text
    assert "there are: 20, 40" in text


nested = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3),
    max_leaves=6,
)
values = st.dictionaries(st.text("abc", min_size=1, max_size=2), nested, max_size=3)


class TestWhatMayNotChange:
    def chosen(self, store: CheckpointStore) -> VerifiedCheckpoint:
        return choose(store, None)

    def test_each_difference_is_shown(self, store: CheckpointStore) -> None:
        now = {"model": {"hidden_size": 128, "layers": 2}, "data": {}}
        text = refused(lambda: check_fixed(self.chosen(store), now, force=False))
        assert "model.hidden_size: 64 in the checkpoint, 128 now" in text
        assert "model.layers: (absent) in the checkpoint, 2 now" in text
        assert 'loss.loss_fn: "ppo" in the checkpoint, (absent) now' in text
        assert "--resume.force" in text

    @settings(deadline=None)
    @given(values, values)
    def test_only_equal_values_have_no_difference(self, one: dict[str, object], other: dict[str, object]) -> None:
        assert differences(one, one) == []
        assert bool(differences(one, other)) == (one != other)


class TestFork:
    @pytest.fixture
    def target(self, tmp_path: Path) -> CheckpointStore:
        (tmp_path / "fork").mkdir()
        return CheckpointStore(tmp_path / "fork")

    def forked(self, store: CheckpointStore, target: CheckpointStore, step: int = 20) -> tuple[VerifiedCheckpoint, str]:
        return fork(choose(store, step), target, 2)

    def check(self, store: CheckpointStore, target: CheckpointStore) -> None:
        assert steps(target) == [20]
        assert Manifest.verified(target.checkpoint(20)) == Manifest.verified(store.checkpoint(20))
        for name in ("metrics.jsonl", "trained.jsonl"):
            assert [row["step"] for row in read_json_lines(target.root / name)] == list(range(20))
        assert target.partial() == []
        target.write_head(Head.new())
        assert target.checkout(20) == []
        assert [row["name"] for row in read_json_lines(target.rows)] == ["step_000020"]

    def test_files_are_shared_and_the_source_stays(self, store: CheckpointStore, target: CheckpointStore) -> None:
        (store.checkpoint(20) / KEEP).touch()
        before = snapshot(store.root)
        chosen, note = self.forked(store, target)
        self.check(store, target)
        assert snapshot(store.root) == before
        assert chosen.path == target.checkpoint(20)
        assert "hard links" in note
        for part in PARTS:
            assert (target.checkpoint(20) / part).samefile(store.checkpoint(20) / part)
        assert not (target.checkpoint(20) / MANIFEST).samefile(store.checkpoint(20) / MANIFEST)
        assert not (target.checkpoint(20) / KEEP).exists()

    @pytest.mark.parametrize("of_another_user", [False, True])
    def test_where_there_are_no_links_or_another_user_has_them_files_are_copied(
        self, store: CheckpointStore, target: CheckpointStore, monkeypatch: pytest.MonkeyPatch, of_another_user: bool
    ) -> None:
        """Another user could change them through the hard link, whenever the fork has verified them."""

        def other_device(*_: object, **__: object) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        if of_another_user:
            monkeypatch.setattr(os, "geteuid", lambda: 1 + (store.checkpoint(20) / PARTS[0]).stat().st_uid)
        else:
            monkeypatch.setattr(os, "link", other_device)
        _, note = self.forked(store, target)
        self.check(store, target)
        assert "a copy of" in note
        assert not (target.checkpoint(20) / PARTS[0]).samefile(store.checkpoint(20) / PARTS[0])

    def test_a_source_that_changes_meanwhile(self, store: CheckpointStore, target: CheckpointStore) -> None:
        source = choose(store, 20)
        flip(store.checkpoint(20) / PARTS[0])
        with pytest.raises(CheckpointInvalid, match="were altered"):
            fork(source, target, 2)
        assert steps(target) == []
