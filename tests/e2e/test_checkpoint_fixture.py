"""The checkpoint in the fixtures is resumed, and trains on as its run did.

Where this fails because a format has changed, `checkpoint_fixture.py` writes the fixture anew.
"""

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_fixture import COMMIT, FIXTURE, STEPS
from resume_support import comparable, rows_of
from run_support import run_rl

from trireme.core.errors import EXIT_OK

TOLERANCE = 1e-5
BITS = ("weights/digest",)
"""Columns that are equal only on a processor with the same instructions."""


def contents_of(directory: Path) -> dict[Path, bytes]:
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.long
def test_it_trains_on_as_the_run_that_wrote_it(tmp_path: Path) -> None:
    source = shutil.copytree(FIXTURE, tmp_path / "source")  # a fork shares its source's files
    model = source / COMMIT / "inference"
    flags = ["--model.name", str(model), "--resume.dir", str(source), "--resume.step", str(STEPS)]
    outcome = run_rl(tmp_path, *flags, config=source / "config.json")
    assert outcome.code == EXIT_OK, outcome.out
    assert contents_of(source) == contents_of(FIXTURE), "a fork leaves its source as it is"
    expected = json.loads((FIXTURE / "expected.json").read_text())
    assert comparable(rows_of(outcome.root / "trained.jsonl"))[STEPS:] == expected["trained"]
    rows = comparable(outcome.rows)[STEPS:]
    assert len(rows) == len(expected["metrics"]) == 2
    for row, written in zip(rows, expected["metrics"], strict=True):
        assert row.keys() >= written.keys(), "no metric was lost"
        compared = {name: value for name, value in written.items() if name not in BITS}
        assert {name: row[name] for name in compared} == pytest.approx(compared, rel=TOLERANCE, abs=TOLERANCE)
