"""What the driver's node gives of a model, and when another node takes it. (Through a real cluster:
tests/e2e/test_cluster.py.)"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plan_support import plan

from trireme.config import Config
from trireme.core.model_files import ModelFiles
from trireme.core.model_places import PLACES, place_of
from trireme.process import model_source
from trireme.process.model_cache import ModelPiece
from trireme.process.model_source import KEPT, ModelSource, bring_models, sent_text


class Cluster:
    """Stands for Ray: calls are made where they are waited for, in this process."""

    def __init__(self, source: ModelSource | None) -> None:
        self.source, self.here, self.asked = source, "driver", ""

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_source.ray, "is_initialized", lambda: True)
        monkeypatch.setattr(model_source.ray, "get_actor", self.get_actor)
        monkeypatch.setattr(model_source.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=self.node))
        monkeypatch.setattr(model_source.ray.util, "get_node_ip_address", lambda: f"address of {self.here}")
        monkeypatch.setattr(model_source.waits, "get", self.get)

    def node(self) -> str:
        return self.here

    def get_actor(self, name: str) -> Any:
        if self.source is None:
            raise ValueError(name)
        verbs = {verb: SimpleNamespace(remote=self.call(verb)) for verb in ("offered", "read", "sent")}
        return SimpleNamespace(**verbs)

    def call(self, verb: str) -> Any:
        return lambda *arguments: lambda: getattr(self.source, verb)(*arguments)

    def get(self, reference: Any, who: str, timeout_s: float) -> Any:
        self.asked, asking = who, self.here
        self.here = "driver"  # a call runs on the node of the source
        try:
            return reference() if callable(reference) else reference
        finally:
            self.here = asking


def made(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(1000))
    (directory / "pytorch_model.bin").write_bytes(bytes(1000))
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return made(tmp_path / "model")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run of the model /models/base, which this machine lacks unless a test makes it."""
    monkeypatch.setenv(PLACES, "{}")
    given = plan().config
    assert isinstance(given, Config)
    monkeypatch.setattr("trireme.process.model_source.MODEL_CACHE", str(tmp_path / "cache"))
    there = given.model.model_copy(update={"name": str(tmp_path / "base")})
    return given.model_copy(update={"model": there})


def source_of(config: Config, directory: Path) -> ModelSource:
    return ModelSource({config.model.name: directory}, put=lambda value: value)


def test_a_node_without_the_model_gets_it_once(
    config: Config, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(source_of(config, model))
    cluster.use(monkeypatch)
    cluster.here = "second"
    assert sent_text() == ""
    for _ in range(2):  # two processes of the node
        bring_models(config)
    place = Path(place_of(config.model.name))
    assert place.parent == tmp_path / "cache"
    assert sorted(file.name for file in place.iterdir()) == ["config.json", "model.safetensors"], "no pickle travels"
    assert cluster.source is not None
    assert cluster.source.sent() == {"address of second": ModelFiles.of(model).total_bytes}
    assert sent_text() == "files of the model were sent: 0.0 MB to address of second"
    assert "address of driver" in cluster.asked or "node of the driver" in cluster.asked


def test_a_node_with_the_model_keeps_its_own(config: Config, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(Path(config.model.name))
    cluster = Cluster(source_of(config, model))
    cluster.use(monkeypatch)
    cluster.here = "second"
    bring_models(config)
    assert place_of(config.model.name) == config.model.name
    (Path(config.model.name) / "config.json").write_text('{"another": 1}')
    bring_models(config)
    assert place_of(config.model.name) != config.model.name, "all nodes of a run read the same files"


@pytest.mark.parametrize("case", ["its own node", "another model", "no source", "no Ray"])
def test_nothing_travels(case: str, config: Config, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(None if case == "no source" else source_of(config, model))
    cluster.use(monkeypatch)
    cluster.here = "driver" if case == "its own node" else "second"
    if case == "no Ray":
        monkeypatch.setattr(model_source.ray, "is_initialized", lambda: False)
    if case == "another model":
        config = config.model_copy(update={"model": config.model.model_copy(update={"name": "org/other"})})
    bring_models(config)
    assert place_of(config.model.name) == config.model.name
    assert sent_text() == ""


def test_a_piece_is_read_once_for_nodes_that_ask_together(model: Path) -> None:
    stored: list[Any] = []

    def put(value: Any) -> int:
        stored.append(value)
        return len(stored)

    source = ModelSource({"m": model}, put)
    piece = ModelPiece("m", "model.safetensors", 0, 100)
    assert source.read(piece, "a") == source.read(piece, "b") == [1]
    for number in range(1, KEPT + 1):
        source.read(ModelPiece("m", "model.safetensors", number, 100), "a")
    assert source.read(piece, "b") == [len(stored)] != [1], "it was not kept for ever"
    assert source.sent() == {"a": 100 * (KEPT + 1), "b": 200}
