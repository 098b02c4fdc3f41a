"""Paths that files name: names below a directory, and nothing else."""

from pathlib import Path

import pytest

from trireme.core.errors import CheckpointInvalid
from trireme.core.paths import path_in


@pytest.mark.parametrize("path", ["a", "a/b.c", "a/..b/c..", "a b/\u00e9", "steps: 3"])
def test_names_lie_below_the_directory(tmp_path: Path, path: str) -> None:
    assert path_in(tmp_path, path) == tmp_path / path


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "/etc", "a/..", "../a", "a//b", "a/./b", "a\0b", "c:a", "a\\..\\b", "\ud800", None, 7, Path("a")],
)
def test_what_is_no_name_is_refused(tmp_path: Path, path: object) -> None:
    with pytest.raises(CheckpointInvalid, match="expected names joined by slashes"):
        path_in(tmp_path, path)


@pytest.mark.parametrize("target", ["../outside", "inside", "link"])
def test_a_link_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "link").symlink_to(target)
    for path in ("link", "link/a/b"):
        with pytest.raises(CheckpointInvalid, match="symbolic link"):
            path_in(tmp_path, path)
