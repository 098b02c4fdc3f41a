"""Logs and traces that grow on another machine arrive here once, whole and in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trireme.core.errors import StorageFailed
from trireme.run.tails import GrownFile, append, grown

LOG, TRACE = "logs/attempt_2/trainer_1.log", "trace/attempt_2/trainer_1.json"


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    with (root / path).open("a") as file:
        file.write(text)


def collect(there: Path, here: Path, known: dict[str, int], part_bytes: int = 4) -> int:
    """One round. Returns how many parts came."""
    parts = grown(there, known, 2, part_bytes)
    for part in parts:
        append(here, part)
        known[part.path] = part.end
    return len(parts)


def test_what_grows_there_grows_here(tmp_path: Path) -> None:
    there, here, known = tmp_path / "there", tmp_path / "here", {}
    written = ""
    for text in ("one\n", "two\nthree\n", "", "four"):
        write(there, LOG, text)
        written += text
        while collect(there, here, known):
            pass
        assert (here / LOG).read_text() == written


def test_nothing_new_costs_nothing(tmp_path: Path) -> None:
    write(tmp_path / "there", LOG, "one\n")
    known: dict[str, int] = {}
    assert [collect(tmp_path / "there", tmp_path / "here", known) for _ in range(2)] == [1, 0]


def test_other_files_and_earlier_commands_are_left_out(tmp_path: Path) -> None:
    for path in ("logs/attempt_1/trainer_1.log", "logs/attempt_2/HEAD", "logs/other/a.log", "checkpoints/a.json"):
        write(tmp_path, path, "x")
    assert grown(tmp_path, {}, 2) == []


def test_a_successor_on_another_node_continues_the_log_and_the_array_of_the_trace(tmp_path: Path) -> None:
    here = tmp_path / "here"
    for number, node in enumerate(("first", "second")):
        write(tmp_path / node, LOG, f"{node}\n")
        write(tmp_path / node, TRACE, f'[{{"n": {number}}}\n,{{"n": {number}.5}}')
        known: dict[str, int] = {}
        while collect(tmp_path / node, here, known, 7):
            pass
    assert (here / LOG).read_text() == "first\nsecond\n"
    assert [event["n"] for event in json.loads((here / TRACE).read_text() + "]")] == [0, 0.5, 1, 1.5]


def test_a_path_of_something_else_is_refused(tmp_path: Path) -> None:
    for path in ("checkpoints/a.json", "logs/../../a.log"):
        with pytest.raises(ValueError, match="is no log and no trace"):
            append(tmp_path, GrownFile(path, 0, b"x"))


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(StorageFailed, match="logs"):
        append(tmp_path, GrownFile(LOG, 0, b"x"))
