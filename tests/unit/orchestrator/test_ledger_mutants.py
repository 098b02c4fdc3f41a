"""The tests of the ledger fail for each of these wrong ledgers: one rule of its docstring is broken in each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import orchestrator

PACKAGE = Path(orchestrator.__file__).parent
ROOT = Path(__file__).parents[3]
TESTS = "tests/unit/orchestrator/test_ledger.py"
LIMIT_S = 300.0

MUTANTS = {
    "one slot too many": (
        "return (self.max_steps_off_policy + 1) * self.batch_size",
        "return (self.max_steps_off_policy + 1) * self.batch_size + 1",
    ),
    "slots of one batch more": (
        "return (self.max_steps_off_policy + 1) * self.batch_size",
        "return (self.max_steps_off_policy + 2) * self.batch_size",
    ),
    "groups in training hold no slot": (
        "return len(self.active) + sum(map(len, self.consumed.values()))",
        "return len(self.active)",
    ),
    "slots are freed when a batch is released": ("first = min(self.released, self.floor)", "first = self.released"),
    "slots are freed when a version is acknowledged": ("first = min(self.released, self.floor)", "first = self.floor"),
    "slots of the last batch are never freed": ("if step >= first}", "if step >= first - 1}"),
    "dispatched without a replica": ("return useful and bool(self.replicas) and", "return useful and"),
    "dispatched for no step": ("return useful and bool(self.replicas)", "return bool(self.replicas)"),
    "the floor is that of the fastest replica": (
        "self.floor = min(replicas.values(), default=self.floor)",
        "self.floor = max(replicas.values(), default=self.floor)",
    ),
    "a replica joins below what was promised": ("if version < self.floor:", "if version < self.floor - 1:"),
    "the floor falls when all replicas have left": ("default=self.floor)", "default=-1)"),
    "a replica that left is remembered": (
        "self.replicas = dict(replicas)",
        "self.replicas = {**self.replicas, **replicas}",
    ),
    "new problems come before those that wait": (
        "self.requeue.popleft() if self.requeue else (new_problem(), 0)",
        "self.requeue.pop() if self.requeue else (new_problem(), 0)",
    ),
    "requeued problems are forgotten": ("self.requeue.extendleft(", "list("),
    "requeued at the end": ("self.requeue.extendleft(", "self.requeue.extend("),
    "requeued the wrong way round": ("for g in reversed(groups))", "for g in groups)"),
    "requeues are not counted": ("(g.problem, g.requeues + 1)", "(g.problem, g.requeues)"),
    "a group ends twice": (
        "if group.index not in self.active or group.finished:",
        "if group.index not in self.active:",
    ),
    "a filtered group is counted as failed": ("self.tally.filtered += 1", "self.tally.failed += 1"),
    "a failed group is not counted": ("self.tally.failed += 1", "pass"),
    "groups overtake protected ones": (
        "if len(groups) == count or (not group.finished and self.protected(group)):",
        "if len(groups) == count:",
    ),
    "no group overtakes": (
        "if len(groups) == count or (not group.finished and self.protected(group)):",
        "if len(groups) == count or not group.finished:",
    ),
    "a part of a batch is taken": ("if len(groups) < count:\n", "if not groups:\n"),
    "the age is not checked": ("if step - group.floor > self.max_steps_off_policy:", "if False:"),
    "the age is checked one step late": (
        "if step - group.floor > self.max_steps_off_policy:",
        "if step - group.floor > self.max_steps_off_policy + 1:",
    ),
    "what is taken stays": (
        "            del self.active[group.index]\n        self.consumed.setdefault",
        "        self.consumed.setdefault",
    ),
    "cut by each part of a batch": ("self._cut() if count == lacking else []", "self._cut()"),
    "nothing is evicted": (
        "evicted = [g for g in self.active.values() if g.floor < oldest and not self.protected(g)]",
        "evicted = []",
    ),
    "evicted one step too late": (
        "evicted = [g for g in self.active.values() if g.floor < oldest",
        "evicted = [g for g in self.active.values() if g.floor < oldest - 1",
    ),
    "evicted one step too early": (
        "evicted = [g for g in self.active.values() if g.floor < oldest",
        "evicted = [g for g in self.active.values() if g.floor <= oldest",
    ),
    "protected groups are evicted": (
        "evicted = [g for g in self.active.values() if g.floor < oldest and not self.protected(g)]",
        "evicted = [g for g in self.active.values() if g.floor < oldest]",
    ),
    "only finished groups are evicted": (
        "evicted = [g for g in self.active.values() if g.floor < oldest",
        "evicted = [g for g in self.active.values() if g.finished and g.floor < oldest",
    ),
    "protected one requeue late": (
        "group.requeues >= self.max_requeues)",
        "group.requeues > self.max_requeues)",
    ),
    "wait protects nothing": ('self.policy == "wait" or (', "False or ("),
    "dropped groups are requeued": ('if self.policy == "requeue":\n', "if True:\n"),
    "running and finished evictions are confused": (
        "self.tally.expired_finished += group.finished",
        "self.tally.expired_finished += not group.finished",
    ),
    "a batch is released before it is cut": (
        "if step != self.released or step >= self.batch:",
        "if step != self.released:",
    ),
    "batches are released in any order": (
        "if step != self.released or step >= self.batch:",
        "if step >= self.batch:",
    ),
    "late groups are those of any batch": (
        "if len(groups) < count or count < self.batch_size",
        "if len(groups) < count or 0",
    ),
    "late groups displace those of their age": ("if not group.finished][:young]", "if not group.finished]"),
    "protected groups are late": (
        "if not g.finished and g.floor < oldest and not self.protected(g)]",
        "if not g.finished and g.floor < oldest]",
    ),
    "a state beyond the boundary": ("if version > self.released}", "if version > self.released + 1}"),
    "a state without what is in training": (
        "groups = sorted([*self._in_training(), *self.active.values()]",
        "groups = sorted([*self.active.values()]",
    ),
    "a state without the queue": ('"requeue": [list(entry) for entry in self.requeue],', '"requeue": [],'),
    "a resumed running group keeps its floor": (
        "            elif not group.finished:\n                group.floor = self.floor\n",
        "",
    ),
    "kept tokens are always young enough": (
        "if not group.finished and group.index in kept and self._fits(group):",
        "if not group.finished and group.index in kept:",
    ),
    "kept tokens are given up": (
        "if not group.finished and group.index in kept and self._fits(group):",
        "if False:",
    ),
    "a resumed group always fits": (
        "return place < self.slots and latest - group.floor <= self.max_steps_off_policy",
        "return True",
    ),
    "a resumed group needs no slot": ("return place < self.slots and latest", "return latest"),
    "a protected group that is resumed lands at once": (
        "latest = self.batch + (place // self.batch_size if self.protected(group) else 0)",
        "latest = self.batch",
    ),
    "a protected group that is resumed lands one batch early": (
        "place // self.batch_size if self.protected(group)",
        "max(0, place // self.batch_size - 1) if self.protected(group)",
    ),
    "what does not fit is forgotten": (
        "self._requeue([group for group in groups if group.index not in self.active])",
        "pass",
    ),
    "a resume counts nothing": (
        "if group.index not in self.active])\n        self.counts()",
        "if group.index not in self.active])",
    ),
    "losses are not noticed": ('if counts["dispatched"] != sum(counts[name] for name in ends):', "if False:"),
}
"""What is wrong: the text of ledger.py that is replaced, and what takes its place."""


def _tested(package: Path) -> subprocess.CompletedProcess[str]:
    """Runs the tests of the ledger with the `orchestrator` of this directory, up to the first that fails."""
    path = os.pathsep.join([str(package.parent), *sys.path])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_PROFILE": "first failure",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(package.parent),
    }
    return subprocess.run([*command, TESTS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return shutil.copytree(PACKAGE, tmp_path / "orchestrator", ignore=shutil.ignore_patterns("__pycache__"))


def test_each_mutant_replaces_one_place() -> None:
    source = (PACKAGE / "ledger.py").read_text()
    assert {name: source.count(old) for name, (old, _) in MUTANTS.items()} == dict.fromkeys(MUTANTS, 1)


@pytest.mark.long
def test_the_copy_is_what_is_tested_and_the_right_ledger_passes(copied: Path) -> None:
    assert _tested(copied).returncode == 0
    (copied / "ledger.py").write_text("raise RuntimeError('this is the copy')\n")
    assert "this is the copy" in _tested(copied).stdout


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_ledger_is_found(name: str, copied: Path) -> None:
    source = (copied / "ledger.py").read_text()
    (copied / "ledger.py").write_text(source.replace(*MUTANTS[name]))
    ended = _tested(copied)
    assert ended.returncode == 1, f"no test of {TESTS} fails for: {name}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
