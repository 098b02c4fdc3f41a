"""What a node reports of itself, on this machine."""

import sys
from pathlib import Path

import pytest

from trireme.doctor import facts as module
from trireme.doctor.facts import Questions, collect


def test_a_node_reports_what_it_has_and_a_digest_for_each_file_of_the_model() -> None:
    facts = collect(Questions())
    assert {"python", "torch", "ray", "source", "driver", "numpy"} <= set(facts.versions)
    assert facts.machine.free_bytes <= facts.machine.memory_bytes
    assert facts.shm_free <= facts.machine.shm_bytes
    assert facts.model is None
    assert facts.shares_run_directory, "there is none to look at"
    model = Path(module.__file__).parents[3] / "assets" / "sort-base"
    digests = collect(Questions(model=str(model))).model
    assert set(digests) >= {"config.json", "model.safetensors"}


@pytest.mark.parametrize("value", ["1", "0", None])
def test_a_node_may_be_offline(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    if value is not None:
        monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert collect(Questions()).offline == (value == "1")


def test_the_source_of_all_packages_has_a_digest_of_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(text: str, *places: Path) -> str:
        """Of a package at each of two places, which may be the same."""
        for room, place in zip(("trireme", "trainer"), places, strict=True):
            (place / room).mkdir(parents=True, exist_ok=True)
            (place / room / "__init__.py").touch()
            (place / room / "a.py").write_text(text)
        monkeypatch.setattr(sys, "path", [str(place) for place in dict.fromkeys(places)])
        module.source_digest.cache_clear()
        return module.source_digest()

    one = tmp_path / "one"
    try:
        first = digest("a = 1\n", one, one)
        assert digest("a = 1\n", tmp_path / "two", tmp_path / "three") == first, "Ray brings each package by itself"
        assert digest("a = 2\n", one, one) != first
    finally:
        module.source_digest.cache_clear()
    source = Path(module.__file__).parents[2]
    packages = {file.parent.name for file in source.glob("*/__init__.py")} | {
        directory.name for directory in source.iterdir() if any(directory.glob("*.py"))
    }
    assert packages == set(module.ROOMS)
