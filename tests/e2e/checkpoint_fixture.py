"""Writes `tests/fixtures/checkpoint` anew: `uv run python tests/e2e/checkpoint_fixture.py`, whenever a format changes.

The fixture is the run directory of a deterministic run of a tiny model (15,616 parameters), as it was after two of its
four steps. `expected.json` has the rows of the other two. The model is that of the last fixture's checkpoint.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from resume_support import comparable, rows_of
from run_support import ROOT, run_rl

from trireme.core.errors import EXIT_OK

FIXTURE = ROOT / "tests" / "fixtures" / "checkpoint"
COMMIT = Path("checkpoints", "step_000002")
STEPS = 2


def renew() -> None:
    """Runs the four steps, and replaces all of the fixture but its configuration."""
    with tempfile.TemporaryDirectory() as temporary:
        model = shutil.copytree(FIXTURE / COMMIT / "inference", Path(temporary) / "model")
        outcome = run_rl(Path(temporary), "--model.name", str(model), config=FIXTURE / "config.json")
        assert outcome.code == EXIT_OK, outcome.out
        shutil.rmtree(FIXTURE / "checkpoints")
        shutil.copytree(outcome.root / COMMIT, FIXTURE / COMMIT)
        shutil.copy(outcome.root / "HEAD", FIXTURE)
        rows = {name: rows_of(outcome.root / f"{name}.jsonl") for name in ("metrics", "trained", "checkpoints")}
    for name in ("metrics", "trained"):
        _write_rows(FIXTURE / f"{name}.jsonl", [row for row in rows[name] if row["step"] < STEPS])
    _write_rows(FIXTURE / "checkpoints.jsonl", [row for row in rows["checkpoints"] if row["step"] == STEPS])
    expected = {name: comparable(rows[name])[STEPS:] for name in ("metrics", "trained")}
    (FIXTURE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def _write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    renew()
