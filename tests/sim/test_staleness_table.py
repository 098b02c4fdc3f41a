"""The table of docs/asynchrony.md: the script still makes it, of the same shape."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "staleness_simulation.py"


def rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]


def test_the_table_is_that_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("staleness_simulation", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(["--steps", "2"])
    table = rows(capsys.readouterr().out)
    page = (ROOT / "docs" / "asynchrony.md").read_text()
    section = page.partition("\n## What it gains, and what it costs\n")[2].partition("\n## ")[0]
    documented = rows(section)
    assert len(table) == 2 + 10
    assert [row[:2] for row in table] == [row[:2] for row in documented]
    assert table[0] == documented[0]
