"""Any sequence of training, commits, damage, crashes and resumes: whatever happens, nothing is lost.

A run is trained in a model world: its state is the list of the rows that led to it, and each row is a token that never
comes again. After every resume the rows of the run must be exactly the state of the commit that it resumed from.
"""

import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoint_support import FIXED, PARTS, Crash, append_rows, crash_at, fill, flip, manifest, read_json_lines, steps
from config_support import REQUIRED
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trireme.checkpoint.manifest import MANIFEST, Manifest
from trireme.checkpoint.rows import ROW_FILES
from trireme.checkpoint.store import KEEP
from trireme.config import Config
from trireme.config.load import load
from trireme.run.rundir import RunDir

pytestmark = pytest.mark.usefixtures("instant_disk")

KEEP_LAST = 2
crash_points = st.none() | st.integers(1, 60)


def config(output_dir: Path, *flags: str) -> Config:
    return load([*REQUIRED, "--run.output-dir", str(output_dir), "--run.name", "r", *flags], {}).config


@dataclass
class Commit:
    """Describes a commit that was published and not deleted by retention."""

    step: int
    lineage: str
    state: list[int]
    damaged: bool = False
    pinned: bool = False


class Runs(RuleBasedStateMachine):
    """`branch`: the commits of HEAD's branch. `elsewhere`: those that were superseded."""

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.output_dir = Path(self.directory.name)
        self.branch: list[Commit] = []
        self.elsewhere: list[Commit] = []
        self.tokens: list[int] = []
        self.state: list[int] = []
        self.attempts = 0
        self.start(None, None)

    def teardown(self) -> None:
        self.run.lock.close()
        self.directory.cleanup()

    def open(self, step: int | None) -> None:
        flags = ["--resume"] if step is None else ["--resume.step", str(step)]
        self.run = RunDir.open(config(self.output_dir, *flags), FIXED)
        self.run.checkout()

    def start(self, step: int | None, crash: int | None) -> None:
        """Opens the run and checks it out; after a crash once more, from the newest commit."""
        before = [commit for commit in self.branch if not commit.damaged]
        try:
            with crash_at(crash):
                self.open(step)
        except Crash:
            if hasattr(self, "run"):
                self.run.lock.close()
            present = set(steps(self.run.store)) if hasattr(self, "run") else set()
            before = [commit for commit in before if commit.step in present]
            step = None
            self.open(None)
        chosen = [commit for commit in before if step is None or commit.step <= step][-1:]
        self.check_start(chosen[0] if chosen else None)

    def check_start(self, chosen: Commit | None) -> None:
        step, state = (chosen.step, chosen.state) if chosen else (0, [])
        note(f"attempt {self.run.start.attempt} starts at {step}")
        assert self.run.start.step == step
        assert self.run.start.attempt > self.attempts
        self.attempts = self.run.start.attempt
        if self.run.start.commit:
            assert json.loads((self.run.start.commit / PARTS[0]).read_text())["state"] == state
        self.state = list(state)
        present = set(steps(self.run.store))
        self.elsewhere += [commit for commit in self.branch if commit.step not in present]
        self.branch = [commit for commit in self.branch if commit.step in present]
        assert self.run.store.partial() == []

    @rule(count=st.integers(1, 3))
    def train(self, count: int) -> None:
        for _ in range(count):
            token = len(self.tokens)
            for name in ROW_FILES:
                append_rows(self.run.root / name, [{"step": len(self.state), "token": token}])
            self.tokens.append(token)
            self.state.append(token)

    @precondition(lambda self: self.state and all(len(self.state) != commit.step for commit in self.branch))
    @rule(crash=crash_points, keep_every=st.sampled_from([None, 3]))
    def commit(self, crash: int | None, keep_every: int | None) -> None:
        commit = Commit(len(self.state), self.run.head.lineage, list(self.state))
        try:
            with crash_at(crash):
                self.save(commit)
                self.run.store.prune(KEEP_LAST, keep_every)
        except Crash:
            self.run.lock.close()
            self.notice(commit, keep_every)
            self.start(None, None)
        else:
            assert self.run.store.commit(commit.step).exists()
            self.notice(commit, keep_every)

    def save(self, commit: Commit) -> None:
        store, attempt = self.run.store, self.run.start.attempt
        draft = store.draft(commit.step, attempt)
        store.publish(draft, fill(draft, manifest(commit.step, commit.lineage, attempt), commit.state))

    def notice(self, commit: Commit, keep_every: int | None) -> None:
        """Returns whether the commit was made, and what retention deleted, after checking that it was allowed to."""
        present = set(steps(self.run.store))
        if commit.step in present:
            Manifest.verified(self.run.store.commit(commit.step))
            self.branch.append(commit)
        whole = [item for item in self.branch if not item.damaged]
        for pruned in [item for item in self.branch if item.step not in present]:
            assert pruned not in whole[-1:]
            assert pruned not in self.branch[-KEEP_LAST:]
            assert not pruned.pinned
            assert keep_every is None or pruned.step % keep_every
            self.branch.remove(pruned)

    @precondition(lambda self: any(not commit.damaged for commit in self.branch[:-1]))
    @rule(data=st.data(), part=st.sampled_from(PARTS))
    def damage(self, data: st.DataObject, part: str) -> None:
        """A bit flips in a commit; never in the last whole one, which is a case of its own (`BadInput`)."""
        whole = [commit for commit in self.branch if not commit.damaged]
        if len(whole) > 1:
            commit = data.draw(st.sampled_from(whole))
            flip(self.run.store.commit(commit.step) / part)
            commit.damaged = True

    @precondition(lambda self: self.branch)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        commit = data.draw(st.sampled_from(self.branch))
        (self.run.store.commit(commit.step) / KEEP).touch()
        commit.pinned = True

    @rule(crash=crash_points, torn=st.booleans())
    def kill_and_resume(self, crash: int | None, torn: bool) -> None:
        """The process dies, maybe while it writes a row; the resume may die too."""
        self.run.lock.close()
        if torn:
            with (self.run.root / "metrics.jsonl").open("a") as file:
                file.write('{"step": 12')
        self.start(None, crash)

    @precondition(lambda self: any(not commit.damaged for commit in self.branch))
    @rule(data=st.data(), crash=crash_points)
    def go_back(self, data: st.DataObject, crash: int | None) -> None:
        commit = data.draw(st.sampled_from([commit for commit in self.branch if not commit.damaged]))
        self.run.lock.close()
        self.start(commit.step, crash)

    @invariant()
    def rows_are_the_state(self) -> None:
        for name in ROW_FILES:
            rows = read_json_lines(self.run.root / name)
            assert [row["token"] for row in rows] == self.state
            assert [row["step"] for row in rows] == list(range(len(self.state)))

    @invariant()
    def no_row_is_lost_or_doubled(self) -> None:
        for name in ROW_FILES:
            everywhere = [row["token"] for file in self.run.root.rglob(name) for row in read_json_lines(file)]
            assert sorted(everywhere) == self.tokens

    @invariant()
    def no_commit_is_lost_or_doubled(self) -> None:
        assert steps(self.run.store) == [commit.step for commit in self.branch]
        manifests = [Manifest.read(path.parent) for path in self.run.root.rglob(MANIFEST)]
        expected = [*self.branch, *self.elsewhere]
        assert Counter((item.lineage, item.step) for item in manifests) == Counter(
            (c.lineage, c.step) for c in expected
        )

    @invariant()
    def rows_of_commits_are_of_this_branch(self) -> None:
        rows = read_json_lines(self.run.store.rows)
        names = [row["name"] for row in rows]
        assert len(set(names)) == len(names)
        assert {commit.name for commit in self.run.store.commits()} <= set(names)
        assert all(row["step"] <= len(self.state) for row in rows)

    @invariant()
    def lineages_descend_from_one_another(self) -> None:
        heads = self.run.store.lineages()
        lineages = [head.lineage for head in heads]
        assert len(set(lineages)) == len(lineages)
        assert len({head.run_id for head in heads}) == 1
        assert all(head.base is None or head.base.lineage in lineages for head in heads)
        assert not self.run.store.branch(self.run.head.lineage).exists()


TestRuns = Runs.TestCase
TestRuns.settings = settings(
    max_examples=40, stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
