"""The command's own options, and an examination of this machine alone."""

import json
from pathlib import Path

import pytest

from trireme.cli import trireme as command
from trireme.core.errors import EXIT_BAD_INPUT

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.toml")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_this_machine_alone_as_a_run_needs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor", "@", QUICKSTART, "--run.output-dir", str(tmp_path / "new"), "--json"]) in (0, 2)
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["nodes"]) == 1
    assert not (tmp_path / "new").exists(), "it leaves nothing"
    assert {finding["check"] for finding in answer["findings"]} <= {"memory", "shm"}
    gpus = ["--cluster.device", "gpu", "--trainer.shards", "64"]
    assert command.main(["doctor", "@", QUICKSTART, *gpus, "--json"]) == EXIT_BAD_INPUT
    checks = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert "GPUs" in checks["plan"]["actual"]
    assert checks["plan"]["fatal"]


def test_nodes_and_clusters_that_are_not_there_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor", "--nodes", "gpu-1,gpu-2"]) == EXIT_BAD_INPUT
    output = capsys.readouterr()
    assert "gpu-1" in output.out
    assert "gpu-1, gpu-2" in output.err
    assert command.main(["doctor", "--nodes", "3"]) == EXIT_BAD_INPUT
    assert "names or addresses of nodes" in capsys.readouterr().err
    assert command.main(["doctor", "--cluster.address", "127.0.0.1:1", "@", QUICKSTART]) == EXIT_BAD_INPUT
    assert "no Ray cluster answers" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--nodes", ","], ["--cluster.address"], ["model.name", "--cluster.address", "a:1"]])
def test_what_cannot_be_read_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor", *words]) == EXIT_BAD_INPUT
    assert words[0] in capsys.readouterr().err
