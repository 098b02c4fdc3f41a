"""The table of docs/asynchrony.md: the script still makes it, of the same shape."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "staleness_simulation.py"
DEADLINE_S = 300


def rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]


def test_the_table_is_that_of_the_docs() -> None:
    command = [sys.executable, SCRIPT, "--steps", "2"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    table = rows(printed.stdout)
    page = (ROOT / "docs" / "asynchrony.md").read_text()
    section = page.partition("\n## What it gains, and what it costs\n")[2].partition("\n## ")[0]
    documented = rows(section)
    assert len(table) == 2 + 10
    assert [row[:2] for row in table] == [row[:2] for row in documented]
    assert table[0] == documented[0]
