"""A run starts only where each process that writes to its directory sees it, or reaches the store of the run."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from config_support import refused

from trireme.checkpoint.bucket import StoreSilent
from trireme.core.errors import StorageFailed
from trireme.launch import writers
from trireme.launch.writers import FarNodes, Sight, check_writers, look

ROOMS = {"a": ["trainer", "orchestrator"], "b": ["trainer", "inference"], "c": ["inference"]}
WRITING = ("trainer", "orchestrator")
URL = "s3://bucket/runs/run"


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    file = tmp_path / "outputs" / "run" / "logs" / "attempt_1" / "HEAD"
    file.parent.mkdir(parents=True)
    file.write_text("attempt 1")
    return file


@pytest.fixture
def check(mark: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], FarNodes | None]]:
    """Checks where the nodes `blind` do not see the file; returns the nodes that were asked, and the far ones."""

    def run(*blind: str, url: str | None = None, problem: str = "") -> tuple[list[str], FarNodes | None]:
        nodes: list[str] = []

        def answer(node: str) -> Sight:
            nodes.append(node)
            return Sight(f"host-{node}", node not in blind, problem if node in blind else "")

        def options(scheduling_strategy: str) -> Any:
            return SimpleNamespace(remote=lambda *_: answer(scheduling_strategy))

        monkeypatch.setattr(writers.ray, "remote", lambda **_: lambda _: SimpleNamespace(options=options))
        monkeypatch.setattr(writers, "on_node", lambda node: node)
        monkeypatch.setattr(writers.waits, "get_all", lambda refs, **_: refs)
        mirror = SimpleNamespace(bucket=SimpleNamespace(url=url)) if url else None
        opened: Any = SimpleNamespace(root=mark.parents[2], nonce=mark, mirror=mirror)
        return nodes, check_writers(opened, ROOMS, WRITING, 1.0, 1.0, lambda *_: None)

    return run


Check = Callable[..., tuple[list[str], FarNodes | None]]


def test_only_nodes_with_a_writer_must_see_the_directory(check: Check, mark: Path) -> None:
    assert check() == (["a", "b"], None)
    assert check("c") == (["a", "b"], None), "a replica needs the model alone"
    text, root = refused(lambda: check("a", "b")), mark.parents[2]
    blind = f"{root} is not seen by host-a (trainer, orchestrator); host-b (trainer)"
    assert f"run.output_dir = {root.parent}; {blind}" in text
    assert "put --run.output-dir on a file system that these nodes share; or" in text
    assert "keep the run in object storage" in text


def test_with_object_storage_a_node_needs_the_directory_or_the_store(check: Check, mark: Path) -> None:
    _, far = check("b", url=URL)
    assert far.nodes == {"b": "host-b (trainer)"}
    assert f"{mark.parents[2]} is not seen by host-b (trainer)" in far.text
    assert check(url=URL)[1] is None
    text = refused(lambda: check("b", url=URL, problem="403 Forbidden"))
    assert f"run.output_dir = {URL}, which cannot be read on" in text
    assert "host-b (trainer): 403 Forbidden" in text


def test_a_node_tries_the_store_and_sweeps_its_disk(mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[tuple[bytes, str] | None] = [(b"HEAD", "tag"), None]
    errors: list[StorageFailed] = [StorageFailed("403 Forbidden")]

    def read(_key: str) -> tuple[bytes, str] | None:
        if answers:
            return answers.pop(0)
        raise errors[0]

    monkeypatch.setattr(writers, "Bucket", lambda _url: SimpleNamespace(read=read))
    draft = mark.parents[2] / "checkpoints" / "step_000002.partial-1"
    checkpoint = draft.with_name("step_000001")
    for directory in (draft / "trainer", checkpoint):
        directory.mkdir(parents=True)
    node = os.uname().nodename
    assert look(mark, "attempt 1", URL, 0.0) == Sight(node, True)
    assert draft.exists(), "the directory of a run has its own sweep"
    assert look(mark, "attempt 2", URL, 0.0) == Sight(node, False)
    assert not draft.exists()
    assert checkpoint.exists()
    assert look(mark, "attempt 2", URL, 0.0).problem == f"{URL}/HEAD is missing"
    assert look(mark, "attempt 2", URL, 0.0).problem == "403 Forbidden"
    errors[:] = [StoreSilent("HTTP error")]
    with pytest.raises(StoreSilent, match=f"does not answer {node}: HTTP error"):
        look(mark, "attempt 2", URL, 0.0)


def test_a_file_is_seen_by_its_contents_also_late(mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(mark, "attempt 1", None, 0.0).sees
    assert not look(mark, "attempt 2", None, 0.0).sees
    assert not look(mark.with_name("none"), "attempt 1", None, 0.0).sees
    monkeypatch.setattr(writers, "TICK_S", 0.01)
    later = mark.with_name("later")
    timer = threading.Timer(0.05, lambda: later.write_text("attempt 1"))
    timer.start()
    assert look(later, "attempt 1", None, 30.0).sees
    timer.join()
