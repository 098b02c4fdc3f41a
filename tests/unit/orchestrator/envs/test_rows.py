"""Rows of files: patterns, files on the hub, and what is no such file."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest

from orchestrator.envs.rows import read_rows


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "b.jsonl").write_text('{"n": 2}\n\n{"n": 3}\n')
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"n": 1}]), folder / "a.parquet")


def test_a_pattern_names_several_files_in_order(tmp_path: Path) -> None:
    write(tmp_path)
    rows = list(read_rows(str(tmp_path / "*")))
    assert [row for _, row in rows] == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert [place for place, _ in rows] == [
        f"row 1 of {tmp_path}/a.parquet",
        f"line 1 of {tmp_path}/b.jsonl",
        f"line 3 of {tmp_path}/b.jsonl",
    ]


def test_files_of_the_hub_are_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, revision = tmp_path / "datasets--acme--sums", "c0ffee" * 6 + "c0ff"
    write(repository / "snapshots" / revision / "train")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert [row for _, row in read_rows("hf://datasets/acme/sums/train/*.jsonl")] == [{"n": 2}, {"n": 3}]
    with pytest.raises(ValueError, match=r"there is no file .*test\.jsonl"):
        list(read_rows("hf://datasets/acme/sums/test.jsonl"))
