"""A run starts only where each process that writes to its directory sees it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trireme.core.errors import BadInput
from trireme.launch import writers
from trireme.launch.writers import check_writers, look

ROOMS = {"a": ["trainer", "orchestrator"], "b": ["trainer", "inference"], "c": ["inference"]}
WRITING = ("trainer", "orchestrator")


@pytest.fixture
def nonce(tmp_path: Path) -> Path:
    file = tmp_path / "outputs" / "run" / "logs" / "attempt_1" / "HEAD"
    file.parent.mkdir(parents=True)
    file.write_text("attempt 1")
    return file


@pytest.fixture
def check(nonce: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Checks where the nodes `blind` do not see the file; returns the nodes that were asked."""

    def run(*blind: str, kept: str | None = None) -> list[str]:
        asked: list[str] = []

        def answer(node: str) -> tuple[str, bool]:
            asked.append(node)
            return f"host-{node}", node not in blind

        def options(scheduling_strategy: str) -> Any:
            return SimpleNamespace(remote=lambda *_: answer(scheduling_strategy))

        monkeypatch.setattr(writers.ray, "remote", lambda **_: lambda _: SimpleNamespace(options=options))
        monkeypatch.setattr(writers, "on_node", lambda node: node)
        monkeypatch.setattr(writers.waits, "get_all", lambda refs, **_: refs)
        check_writers(nonce, ROOMS, WRITING, kept, 1.0, lambda *_: None)
        return asked

    return run


def test_only_nodes_with_a_writer_are_asked(check: Callable[..., list[str]]) -> None:
    assert check() == ["a", "b"]
    assert check("c") == ["a", "b"], "a replica needs the model alone"


def test_a_node_that_does_not_see_the_directory_is_refused(check: Callable[..., list[str]], nonce: Path) -> None:
    with pytest.raises(BadInput) as refused:
        check("a", "b")
    text, root = str(refused.value), nonce.parents[2]
    assert (
        f"run.output_dir = {root.parent}; {root} is not seen by host-a (trainer, orchestrator); host-b (trainer)"
        in text
    )
    assert "put --run.output-dir on a file system that these nodes share; or" in text
    assert "keep the run in object storage" in text


def test_with_object_storage_it_is_the_local_directory(check: Callable[..., list[str]]) -> None:
    with pytest.raises(BadInput) as refused:
        check("a", kept="s3://bucket/runs")
    assert "run.local_dir = " in str(refused.value)
    assert str(refused.value).endswith("put --run.local-dir on a file system that these nodes share")


def test_a_file_with_other_contents_is_not_seen(nonce: Path) -> None:
    assert look(nonce, "attempt 1", 0.0) == (os.uname().nodename, True)
    assert look(nonce, "attempt 2", 0.0) == (os.uname().nodename, False)
    assert look(nonce.with_name("none"), "attempt 1", 0.0) == (os.uname().nodename, False)


def test_a_file_that_appears_late_is_waited_for(nonce: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "TICK_S", 0.01)
    later = nonce.with_name("later")
    timer = threading.Timer(0.05, lambda: later.write_text("attempt 1"))
    timer.start()
    assert look(later, "attempt 1", 30.0)[1]
    timer.join()
