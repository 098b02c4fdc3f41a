"""Any sequence of training, checkpoints, damage, crashes and resumes: whatever happens, nothing is lost.

A run is trained in a model world: its state is the list of the rows that led to it, and each row is a token that never
comes again. After every resume the rows of the run must be exactly the state of the checkpoint that it resumed from.
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
class Checkpoint:
    """Describes a checkpoint that was published and not deleted by retention."""

    step: int
    lineage: str
    state: list[int]
    damaged: bool = False
    pinned: bool = False


class Runs(RuleBasedStateMachine):
    """`branch`: the checkpoints of HEAD's branch. `elsewhere`: those that were superseded."""

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.output_dir = Path(self.directory.name)
        self.branch: list[Checkpoint] = []
        self.elsewhere: list[Checkpoint] = []
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
        """Opens the run and checks it out; after a crash once more, from the newest checkpoint."""
        before = [checkpoint for checkpoint in self.branch if not checkpoint.damaged]
        try:
            with crash_at(crash):
                self.open(step)
        except Crash:
            if hasattr(self, "run"):
                self.run.lock.close()
            present = set(steps(self.run.store)) if hasattr(self, "run") else set()
            before = [checkpoint for checkpoint in before if checkpoint.step in present]
            step = None
            self.open(None)
        chosen = [checkpoint for checkpoint in before if step is None or checkpoint.step <= step][-1:]
        self.check_start(chosen[0] if chosen else None)

    def check_start(self, chosen: Checkpoint | None) -> None:
        step, state = (chosen.step, chosen.state) if chosen else (0, [])
        note(f"attempt {self.run.start.attempt} starts at {step}")
        assert self.run.start.step == step
        assert self.run.start.attempt > self.attempts
        self.attempts = self.run.start.attempt
        if self.run.start.checkpoint:
            assert json.loads((self.run.start.checkpoint / PARTS[0]).read_text())["state"] == state
        self.state = list(state)
        present = set(steps(self.run.store))
        self.elsewhere += [checkpoint for checkpoint in self.branch if checkpoint.step not in present]
        self.branch = [checkpoint for checkpoint in self.branch if checkpoint.step in present]
        assert self.run.store.partial() == []

    @rule(count=st.integers(1, 3))
    def train(self, count: int) -> None:
        for _ in range(count):
            token = len(self.tokens)
            for name in ROW_FILES:
                append_rows(self.run.root / name, [{"step": len(self.state), "token": token}])
            self.tokens.append(token)
            self.state.append(token)

    @precondition(lambda self: self.state and all(len(self.state) != checkpoint.step for checkpoint in self.branch))
    @rule(crash=crash_points, keep_every=st.sampled_from([None, 3]))
    def checkpoint(self, crash: int | None, keep_every: int | None) -> None:
        checkpoint = Checkpoint(len(self.state), self.run.head.lineage, list(self.state))
        try:
            with crash_at(crash):
                self.save(checkpoint)
                self.run.store.prune(KEEP_LAST, keep_every)
        except Crash:
            self.run.lock.close()
            self.notice(checkpoint, keep_every)
            self.start(None, None)
        else:
            assert self.run.store.checkpoint(checkpoint.step).exists()
            self.notice(checkpoint, keep_every)

    def save(self, checkpoint: Checkpoint) -> None:
        store, attempt = self.run.store, self.run.start.attempt
        draft = store.draft(checkpoint.step, attempt)
        store.publish(draft, fill(draft, manifest(checkpoint.step, checkpoint.lineage, attempt), checkpoint.state))

    def notice(self, checkpoint: Checkpoint, keep_every: int | None) -> None:
        """Returns whether the checkpoint was made, and what retention deleted, after checking that it was allowed
        to."""
        present = set(steps(self.run.store))
        if checkpoint.step in present:
            Manifest.verified(self.run.store.checkpoint(checkpoint.step))
            self.branch.append(checkpoint)
        whole = [item for item in self.branch if not item.damaged]
        for pruned in [item for item in self.branch if item.step not in present]:
            assert pruned not in whole[-1:]
            assert pruned not in self.branch[-KEEP_LAST:]
            assert not pruned.pinned
            assert keep_every is None or pruned.step % keep_every
            self.branch.remove(pruned)

    @precondition(lambda self: any(not checkpoint.damaged for checkpoint in self.branch[:-1]))
    @rule(data=st.data(), part=st.sampled_from(PARTS))
    def damage(self, data: st.DataObject, part: str) -> None:
        """A bit flips in a checkpoint; never in the last whole one, which is a case of its own (`BadInput`)."""
        whole = [checkpoint for checkpoint in self.branch if not checkpoint.damaged]
        if len(whole) > 1:
            checkpoint = data.draw(st.sampled_from(whole))
            flip(self.run.store.checkpoint(checkpoint.step) / part)
            checkpoint.damaged = True

    @precondition(lambda self: self.branch)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        checkpoint = data.draw(st.sampled_from(self.branch))
        (self.run.store.checkpoint(checkpoint.step) / KEEP).touch()
        checkpoint.pinned = True

    @rule(crash=crash_points, torn=st.booleans())
    def kill_and_resume(self, crash: int | None, torn: bool) -> None:
        """The process dies, maybe while it writes a row; the resume may die too."""
        self.run.lock.close()
        if torn:
            with (self.run.root / "metrics.jsonl").open("a") as file:
                file.write('{"step": 12')
        self.start(None, crash)

    @precondition(lambda self: any(not checkpoint.damaged for checkpoint in self.branch))
    @rule(data=st.data(), crash=crash_points)
    def go_back(self, data: st.DataObject, crash: int | None) -> None:
        checkpoint = data.draw(st.sampled_from([checkpoint for checkpoint in self.branch if not checkpoint.damaged]))
        self.run.lock.close()
        self.start(checkpoint.step, crash)

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
    def no_checkpoint_is_lost_or_doubled(self) -> None:
        assert steps(self.run.store) == [checkpoint.step for checkpoint in self.branch]
        manifests = [Manifest.read(path.parent) for path in self.run.root.rglob(MANIFEST)]
        expected = [*self.branch, *self.elsewhere]
        assert Counter((item.lineage, item.step) for item in manifests) == Counter(
            (c.lineage, c.step) for c in expected
        )

    @invariant()
    def rows_of_checkpoints_are_of_this_branch(self) -> None:
        rows = read_json_lines(self.run.store.rows)
        names = [row["name"] for row in rows]
        assert len(set(names)) == len(names)
        assert {checkpoint.name for checkpoint in self.run.store.checkpoints()} <= set(names)
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
