"""The command `trireme serve`, up to where it would start something."""

import json
import shutil
from pathlib import Path

import pytest

from trireme.cli import trireme
from trireme.core.errors import EXIT_BAD_INPUT, EXIT_OK

MODEL = str(Path(__file__).parents[3] / "assets" / "sort-base")
FLAGS = ("serve", "--model.name", MODEL, "--model.max-seq-len", "32", "--cluster.device", "cpu")


def test_a_dry_run_shows_trainer_and_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    assert trireme.main([*FLAGS, "--inference.replicas", "2", "--dry-run"]) == EXIT_OK
    plan, _, config = capsys.readouterr().out.partition("{")
    assert "trainer" in plan
    assert "2 vLLM replicas" in plan
    service = json.loads("{" + config)["service"]
    assert (service["port"], service["max_body_mb"]) == (8000, 64.0), "the client sends parts of 5 MB and more"


def test_what_is_served(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lora = ("--trainer.lora.rank", "8")
    assert trireme.main([*FLAGS, *lora, "--dry-run"]) == EXIT_OK
    assert json.loads("{" + capsys.readouterr().out.partition("{")[2])["service"]["models"] == 16
    untied = tmp_path / "untied"
    shutil.copytree(MODEL, untied)
    config = (untied / "config.json").read_text()
    (untied / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    flags = [*FLAGS, *lora, "--model.name", str(untied), "--trainer.lora.train-unembed", "true", "--dry-run"]
    assert trireme.main(flags) == EXIT_BAD_INPUT
    assert "for lm_head and `trireme serve`" in capsys.readouterr().err
    assert trireme.main([*FLAGS, "--run.output-dir", "s3://bucket/runs", "--dry-run"]) == EXIT_BAD_INPUT
    assert "run.output_dir = s3://bucket/runs" in capsys.readouterr().err
