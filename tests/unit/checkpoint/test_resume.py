"""Which commit is chosen, what is refused, and that a fork leaves its source alone."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_support import (
    FIXED,
    PARTS,
    append_rows,
    commit,
    crashes,
    flip,
    read_json_lines,
    snapshot,
    steps,
    truncate,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.checkpoint.manifest import MANIFEST, Manifest
from trireme.checkpoint.resume import check_fixed, choose, differences, fork
from trireme.checkpoint.store import KEEP, CheckpointStore, Head, VerifiedCommit
from trireme.core.errors import EXIT_BAD_INPUT, BadInput, CheckpointInvalid

pytestmark = pytest.mark.usefixtures("instant_disk")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path / "run")
    made.root.mkdir()
    made.write_head(Head("cafecafe", "aaaaaaaa", 1, None))
    for step in (20, 40):
        commit(made, step, state=["tokens"] * step)
    for name in ("metrics.jsonl", "trained.jsonl"):
        append_rows(made.root / name, [{"step": step} for step in range(45)])
    return made


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(BadInput) as refused:
        call()
    assert refused.value.exit_code == EXIT_BAD_INPUT
    for part in ("given: ", "expected: ", "to do: "):
        assert part in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("step", [None, -1])
class TestTheNewest:
    def test_is_chosen(self, store: CheckpointStore, step: int | None) -> None:
        chosen = choose(store, step)
        assert chosen is not None
        assert (chosen.path, chosen.manifest.step, chosen.notes) == (store.commit(40), 40, ())

    def test_when_it_is_damaged_the_one_before(self, store: CheckpointStore, step: int | None) -> None:
        flip(store.commit(40) / PARTS[1])
        chosen = choose(store, step)
        assert chosen is not None
        assert chosen.manifest.step == 20
        (note,) = chosen.notes
        assert "passed over" in note
        assert "step_000040" in note
        assert PARTS[1] in note

    def test_of_none(self, tmp_path: Path, step: int | None) -> None:
        assert choose(CheckpointStore(tmp_path), step) is None

    def test_when_none_verifies_all_reasons_are_shown(self, store: CheckpointStore, step: int | None) -> None:
        """Starting from the beginning would throw the run away: that is for a person to decide."""
        truncate(store.commit(40) / PARTS[0])
        (store.commit(20) / MANIFEST).unlink()
        text = refusal(lambda: choose(store, step))
        assert f"step_000040: {PARTS[0]} has" in text
        assert f"step_000020: {MANIFEST} is missing" in text


class TestAStep:
    def test_is_chosen(self, store: CheckpointStore) -> None:
        chosen = choose(store, 20)
        assert chosen is not None
        assert chosen.path == store.commit(20)

    def test_that_is_not_there(self, store: CheckpointStore) -> None:
        text = refusal(lambda: choose(store, 30))
        assert "--resume.step 30" in text
        assert "there are: 20, 40" in text

    def test_where_there_is_none(self, tmp_path: Path) -> None:
        text = refusal(lambda: choose(CheckpointStore(tmp_path), 0))
        assert "which holds no commit" in text
        assert "without --resume.step" in text

    @pytest.mark.parametrize("file", [*PARTS, MANIFEST])
    @pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
    def test_that_is_damaged_is_refused(
        self, store: CheckpointStore, file: str, damage: Callable[[Path], None]
    ) -> None:
        damage(store.commit(40) / file)
        text = refusal(lambda: choose(store, 40))
        assert "does not verify" in text
        assert file in text

    def test_of_another_format(self, store: CheckpointStore) -> None:
        values = json.loads((store.commit(40) / MANIFEST).read_text())
        (store.commit(40) / MANIFEST).write_text(json.dumps({**values, "format": 7}))
        assert "has format 7; expected 4: resume with the version of Trireme" in refusal(lambda: choose(store, 40))


nested = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3),
    max_leaves=6,
)
values = st.dictionaries(st.text("abc", min_size=1, max_size=2), nested, max_size=3)


class TestWhatMayNotChange:
    def chosen(self, store: CheckpointStore) -> VerifiedCommit:
        chosen = choose(store, None)
        assert chosen is not None
        return chosen

    def test_the_same(self, store: CheckpointStore) -> None:
        assert check_fixed(self.chosen(store), FIXED, force=False) == ()

    def test_each_difference_is_shown(self, store: CheckpointStore) -> None:
        now = {"model": {"hidden_size": 128, "layers": 2}, "data": {}}
        text = refusal(lambda: check_fixed(self.chosen(store), now, force=False))
        assert "model.hidden_size: 64 in the commit, 128 now" in text
        assert "model.layers: (absent) in the commit, 2 now" in text
        assert 'loss.loss_fn: "ppo" in the commit, (absent) now' in text
        assert "--resume.force" in text

    def test_forced(self, store: CheckpointStore) -> None:
        now = {**FIXED, "model": {"hidden_size": 128}}
        notes = check_fixed(self.chosen(store), now, force=True)
        assert notes == ("changed, and forced: model.hidden_size: 64 in the commit, 128 now",)

    @settings(deadline=None)
    @given(values, values)
    def test_equal_values_and_only_they_have_no_difference(
        self, one: dict[str, object], other: dict[str, object]
    ) -> None:
        assert differences(one, one) == []
        assert bool(differences(one, other)) == (one != other)

    def test_tuples_are_lists_in_json(self) -> None:
        assert differences({"x": [1, 2]}, {"x": (1, 2)}) == []


class TestFork:
    @pytest.fixture
    def target(self, tmp_path: Path) -> CheckpointStore:
        (tmp_path / "fork").mkdir()
        return CheckpointStore(tmp_path / "fork")

    def forked(self, store: CheckpointStore, target: CheckpointStore, step: int = 20) -> tuple[VerifiedCommit, str]:
        source = choose(store, step)
        assert source is not None
        return fork(source, target, 2)

    def check(self, store: CheckpointStore, target: CheckpointStore) -> None:
        assert steps(target) == [20]
        assert Manifest.verified(target.commit(20)) == Manifest.verified(store.commit(20))
        for name in ("metrics.jsonl", "trained.jsonl"):
            assert [row["step"] for row in read_json_lines(target.root / name)] == list(range(20))
        assert target.partial() == []
        target.write_head(Head.new())
        assert target.checkout(20) == []
        assert [row["name"] for row in read_json_lines(target.rows)] == ["step_000020"]

    def test_files_are_shared_and_the_source_is_untouched(
        self, store: CheckpointStore, target: CheckpointStore
    ) -> None:
        (store.commit(20) / KEEP).touch()
        before = snapshot(store.root)
        chosen, note = self.forked(store, target)
        self.check(store, target)
        assert snapshot(store.root) == before
        assert chosen.path == target.commit(20)
        assert "hard links" in note
        for part in PARTS:
            assert (target.commit(20) / part).samefile(store.commit(20) / part)
        assert not (target.commit(20) / MANIFEST).samefile(store.commit(20) / MANIFEST)
        assert not (target.commit(20) / KEEP).exists()

    def test_pruning_either_leaves_the_other(self, store: CheckpointStore, target: CheckpointStore) -> None:
        self.forked(store, target)
        store.prune(1, None)
        assert steps(store) == [40]
        Manifest.verified(target.commit(20))

    def test_where_there_are_no_links_files_are_copied(
        self, store: CheckpointStore, target: CheckpointStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def other_device(*_: object, **__: object) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        monkeypatch.setattr(os, "link", other_device)
        _, note = self.forked(store, target)
        self.check(store, target)
        assert "a copy of" in note
        assert not (target.commit(20) / PARTS[0]).samefile(store.commit(20) / PARTS[0])

    def test_a_source_that_changes_meanwhile(self, store: CheckpointStore, target: CheckpointStore) -> None:
        source = choose(store, 20)
        assert source is not None
        flip(store.commit(20) / PARTS[0])
        with pytest.raises(CheckpointInvalid, match="were altered"):
            fork(source, target, 2)
        assert steps(target) == []

    def test_a_crash_anywhere_leaves_the_source_and_the_fork_can_be_done_again(
        self, store: CheckpointStore, tmp_path: Path
    ) -> None:
        before = snapshot(store.root)
        for change in itertools.count(1):
            target = CheckpointStore(tmp_path / f"fork-{change}")
            target.root.mkdir()
            crashed = crashes(change, lambda: self.forked(store, target))  # noqa: B023
            assert target.newest()[1] == {}
            self.forked(store, target)
            self.check(store, target)
            assert snapshot(store.root) == before
            shutil.rmtree(target.root)
            if not crashed:
                break
        assert change > 20
