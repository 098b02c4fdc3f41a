"""Models of two nodes are compared by their files."""

from pathlib import Path

import huggingface_hub
import pytest

from trireme.core.model_files import file_digests, model_directory


def test_a_model_is_a_directory_with_a_config(tmp_path: Path) -> None:
    assert model_directory(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{}")
    assert model_directory(str(tmp_path)) == tmp_path


def test_a_model_of_the_hub_is_looked_for_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = {"org/base": str(tmp_path / "config.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, _: cache.get(name))
    assert model_directory("org/base") == tmp_path
    assert model_directory("org/other") is None


@pytest.mark.parametrize("place", [0, 5_000_000 - 1])
def test_large_files_are_compared_by_size_and_pieces(tmp_path: Path, place: int) -> None:
    data = bytearray(5_000_000)
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    before = file_digests(tmp_path)
    data[place] = 1
    file.write_bytes(data)
    assert file_digests(tmp_path) != before
    file.write_bytes(bytes(5_000_001))
    assert file_digests(tmp_path) != before
    file.write_bytes(bytes(5_000_000))
    assert file_digests(tmp_path) == before


def test_small_files_are_compared_whole(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("a" * 100_000)
    before = file_digests(tmp_path)
    (tmp_path / "tokenizer.json").write_text("a" * 50_000 + "b" + "a" * 49_999)
    assert set(before) == {"tokenizer.json"}
    assert file_digests(tmp_path) != before


def test_only_weights_configuration_and_tokenizer_are_compared(tmp_path: Path) -> None:
    for name in ("config.json", "merges.txt", "spiece.model", "chat_template.jinja", "model.safetensors"):
        (tmp_path / name).write_text("12")
    before = file_digests(tmp_path)
    assert len(before) == 5
    for name in ("pytorch_model.bin", "modeling_own.py", "README.md", ".hidden.json"):
        (tmp_path / name).write_text("12")
    (tmp_path / "original.json").mkdir()
    assert file_digests(tmp_path) == before
