"""The merge of layers, and the reason why pydantic-settings does not read them."""

from pathlib import Path

import pytest
from config_support import BASE, REQUIRED

from trireme.config import Config
from trireme.config.load import load


def test_a_config_from_values_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIREME__SEED", "5")
    monkeypatch.setenv("SEED", "5")
    assert Config.model_validate(BASE).seed == 0
    assert type(load(REQUIRED).config) is Config
    assert load(REQUIRED).config.seed == 5


def args_of_layers(tmp_path: Path, *layers: str) -> dict:
    words = list(REQUIRED)
    for n, layer in enumerate(layers):
        (tmp_path / f"{n}.toml").write_text(f"[env.args]\n{layer}")
        words += ["@", str(tmp_path / f"{n}.toml")]
    return load(words, {}).config.env[0].args


@pytest.mark.parametrize(
    ("layers", "args"),
    [
        (("a.x = 1", "a.y = 2"), {"a": {"x": 1, "y": 2}}),
        (("a.x = 1", "a = 5", "a.y = 2"), {"a": {"y": 2}}),
        (("a.x = 1", "a = {}"), {"a": {}}),
        (("a.x = 1", "a = {}", "a.y = 2"), {"a": {"y": 2}}),
    ],
)
def test_a_replaced_table_does_not_come_back(tmp_path: Path, layers: tuple[str, ...], args: dict) -> None:
    assert args_of_layers(tmp_path, *layers) == args
