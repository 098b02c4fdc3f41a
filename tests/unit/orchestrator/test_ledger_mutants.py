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
    "dispatched into one slot too many": ("self.slots_taken < self.slots", "self.slots_taken <= self.slots"),
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
    "new problems come before those to resample": (
        "self.resample.popleft() if self.resample else new_problem()",
        "self.resample.pop() if self.resample else new_problem()",
    ),
    "problems to resample are forgotten": ("self.resample.extendleft(", "list("),
    "resampled at the end": ("self.resample.extendleft(", "self.resample.extend("),
    "resampled the wrong way round": ("extendleft(reversed(refused))", "extendleft(refused)"),
    "a group ends twice": (
        "if group.index not in self.active or group.finished:",
        "if group.index not in self.active:",
    ),
    "a filtered group is counted as failed": ("self.tally.filtered += 1", "self.tally.failed += 1"),
    "a failed group is not counted": ("self.tally.failed += 1", "pass"),
    "groups overtake in order": (
        "groups = list(takewhile(lambda group: group.finished, groups))",
        "pass",
    ),
    "nothing overtakes": ("if self.in_order:\n", "if True:\n"),
    "any finished group is taken": ("if all(spare[d] > 0 for d in before_deadline):", "if True:"),
    "a due group has no place itself": (
        "before_deadline = range(max(self.deadline(group) - self.batch, 0))",
        "before_deadline = range(max(self.deadline(group) - self.batch, 0) + 1)",
    ),
    "places are kept for earlier deadlines than the one before": (
        "before_deadline = range(max(self.deadline(group) - self.batch, 0))",
        "before_deadline = range(max(self.deadline(group) - self.batch - 1, 0))",
    ),
    "only what is due now has its place": (
        "if all(spare[d] > 0 for d in before_deadline):",
        "if all(spare[d] > 0 for d in before_deadline[:1]):",
    ),
    "a place is given twice within a take": ("                    spare[d] -= 1\n", "                    pass\n"),
    "what is assembled has left its places free": (
        "spare.append(self.lacking + d * self.batch_size - needed)",
        "spare.append(self.batch_size + d * self.batch_size - needed)",
    ),
    "places are needed by running groups alone": (
        "for group in self.active.values())\n        spare = []",
        "for group in self.active.values() if not group.finished)\n        spare = []",
    ),
    "places are needed by earlier deadlines alone": (
        "            needed += due[d]\n            spare.append(self.lacking + d * self.batch_size - needed)\n",
        "            spare.append(self.lacking + d * self.batch_size - needed)\n            needed += due[d]\n",
    ),
    "a part of a batch is taken": ("if len(groups) < count:\n", "if not groups:\n"),
    "the age is not checked": ("if step > self.deadline(group):", "if False:"),
    "the age is checked one step late": ("if step > self.deadline(group):", "if step > self.deadline(group) + 1:"),
    "the deadline is one step late": (
        "return deadline(group.floor, self.max_steps_off_policy)",
        "return deadline(group.floor, self.max_steps_off_policy) + 1",
    ),
    "what is taken stays": (
        "            del self.active[group.index]\n        self.consumed.setdefault",
        "        self.consumed.setdefault",
    ),
    "cut by each part of a batch": ("self._cut() if self.lacking == 0 else []", "self._cut()"),
    "nothing is dropped": (
        "dropped = [group for group in self.active.values() if self.deadline(group) < self.batch]",
        "dropped = []",
    ),
    "dropped one step too late": ("if self.deadline(group) < self.batch]", "if self.deadline(group) < self.batch - 1]"),
    "dropped one step too early": ("if self.deadline(group) < self.batch]", "if self.deadline(group) <= self.batch]"),
    "only finished groups are dropped": (
        "if self.deadline(group) < self.batch]",
        "if group.finished and self.deadline(group) < self.batch]",
    ),
    "running and finished drops are confused": (
        "self.tally.expired_finished += group.finished",
        "self.tally.expired_finished += not group.finished",
    ),
    "a part leaves no room for older groups": ("max(min(count, self.lacking - older), 0)", "count"),
    "a batch is released before it is cut": (
        "if step != self.released or step >= self.batch:",
        "if step != self.released:",
    ),
    "batches are released in any order": (
        "if step != self.released or step >= self.batch:",
        "if step >= self.batch:",
    ),
    "a state beyond the boundary": ("if version > self.released}", "if version > self.released + 1}"),
    "a state beyond what replicas had that have left": ("if ahead or self.floor > self.released:", "if ahead:"),
    "a state without what is in training": (
        "groups = sorted([*self._in_training(), *self.active.values()]",
        "groups = sorted([*self.active.values()]",
    ),
    "a state without the queue": ('"resample": list(self.resample),', '"resample": [],'),
    "a resumed running group keeps its floor": (
        "if not group.finished and (group.index not in retained or self.deadline(group) < self.batch):",
        "if False:",
    ),
    "retained tokens are always young enough": (
        "group.index not in retained or self.deadline(group) < self.batch",
        "group.index not in retained",
    ),
    "retained tokens are given up": (
        "if not group.finished and (group.index not in retained or self.deadline(group) < self.batch):",
        "if not group.finished:",
    ),
    "a group with retained tokens is refused and not sampled again": ("        if late:\n", "        if False:\n"),
    "a loaded group is always accepted": ("if place < self.slots and lands <= self.deadline(group):", "if True:"),
    "a loaded group needs no slot": (
        "if place < self.slots and lands <= self.deadline(group):",
        "if lands <= self.deadline(group):",
    ),
    "a loaded group lands at once": (
        'lands = self.batch if self.policy == "drop" else self.batch + place // self.batch_size',
        "lands = self.batch",
    ),
    "a loaded group lands one batch early": (
        "else self.batch + place // self.batch_size",
        "else self.batch + max(0, place // self.batch_size - 1)",
    ),
    "groups are loaded in order of dispatch": (
        "in_order = groups if self.in_order else sorted(",
        "in_order = groups if True else sorted(",
    ),
    "groups in order are loaded by deadline": (
        "in_order = groups if self.in_order else sorted(",
        "in_order = groups if False else sorted(",
    ),
    "refused groups are not counted": ("self.tally.resampled += len(refused)", "pass"),
    "a resume counts nothing": (
        "        self.tally.resampled += len(refused)\n        self.counts()",
        "        self.tally.resampled += len(refused)",
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
