"""The command `inference`, up to where it would start something."""

import json
from pathlib import Path

import pytest

from trireme.cli import inference
from trireme.cli.eval import configured
from trireme.core.errors import EXIT_OK

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "assets" / "sort-base")


def test_the_model_comes_first_or_from_a_file() -> None:
    options, keys = inference.parsed([MODEL, "--step", "3", "@", "a.toml", "--seed", "1"])
    assert (options.model, options.step, keys) == (MODEL, 3, ["@", "a.toml", "--seed", "1"])
    options, keys = inference.parsed(["@", "a.toml", "--service.port", "0"])
    assert (options.model, options.step, keys) == ("", None, ["@", "a.toml", "--service.port", "0"])
    assert inference.parsed([])[0].model == ""
    config = configured(None, inference.UNREAD, ["--model.name", MODEL]).config
    assert (config.service.port, config.service.share, config.service.host) == (8000, 1.0, "127.0.0.1")
    keys = ["--model.name", MODEL, "--service.port", "0", "--service.share", "0.5"]
    loaded = configured(None, inference.UNREAD, keys).config
    assert (loaded.service.port, loaded.service.share) == (0, 0.5)


def test_a_dry_run_shows_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert inference.main([MODEL, "--service.port", "8123", "--cluster.device", "cpu", "--dry-run"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert "port 8123" in shown
    plan, _, config = shown.partition("{")
    assert "trainer" not in plan
    assert json.loads("{" + config)["model"]["name"] == MODEL
