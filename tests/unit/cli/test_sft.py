"""The command `sft` until anything starts: its configurations, the dry run, and bad input with exit code 2."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from model_support import FACTS
from plan_support import machines

from trireme.cli.sft import main
from trireme.config.checks import check
from trireme.config.load import load_as
from trireme.config.sft import SftConfig
from trireme.core.errors import EXIT_BAD_INPUT, EXIT_OK
from trireme.launch.sft import SftRun
from trireme.plan.sft import sft_plan
from trireme.run.rundir import command_of, resume_command
from trireme.sft.data import ExampleCursor, Examples, SftData
from trireme.sft.reading import Example

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").glob("sft-*.toml"))
pytestmark = pytest.mark.usefixtures("in_the_repository", "no_cluster")
TWO_GPUS = machines(gpus=2)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Returns the arguments of a run on five examples."""
    lines = [json.dumps({"tokens": [5, 6, 7 + n], "weights": [0, 1, 1]}) + "\n" for n in range(5)]
    (tmp_path / "d.jsonl").write_text("".join(lines))
    data = ["--data.train", str(tmp_path / "d.jsonl"), "--data.batch-size", "2"]
    place = ["--run.output-dir", str(tmp_path / "out"), "--cluster.device", "cpu"]
    return ["--model.name", "./assets/sort-base", *data, *place]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_each_config_is_read_checked_and_planned(path: Path) -> None:
    config = load_as(SftConfig, ["@", str(path)], {}).config
    check(config, FACTS.__class__.of(config, required=True))
    assert sft_plan(config, FACTS, TWO_GPUS).rows()


def test_a_dry_run_without_the_model_plans_by_its_sizes(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    facts = ["--model.name", "Qwen/Qwen3-4B", "--model.facts", "examples/recipes/facts/qwen3-4b.json"]
    assert main([*flags[2:], *facts, "--dry-run"]) == EXIT_OK
    shown = " ".join(capsys.readouterr().out.split())
    assert "4,022,468,096 parameters" in shown
    assert "a shard up to" in shown


def test_a_dry_run_says_how_long_it_takes(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = ["--data.test-examples", "1", "--eval.every", "1", "--data.epochs", "3"]
    assert main([*flags, *extra, "--dry-run"]) == EXIT_OK
    out = " ".join(capsys.readouterr().out.split())
    assert "4 examples of 12 tokens (the longest 3), 8 of which are trained on" in out
    assert "6 of 2 examples: 3 epochs" in out
    assert "1 examples of 3 tokens" in out
    assert '"batch_size": 2' in out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--data.trane", "x"], "did you mean `--data.train`"),
        (["--orchestrator.batch-size", "2"], "`sft --help` lists all keys"),
        (["--trainer.kl.coef", "0.1"], "a known key"),
        (["--data.train", "none.jsonl"], "none.jsonl, which matches no file"),
        (["--data.train", "{}/broken.jsonl"], "/broken.jsonl:1: message 1 with role 'narrator'"),
        (["--data.train-on", "everything"], "all_assistant_messages"),
        (["--model.max-seq-len", "2"], "at most 2"),
        (["--model.name", "./no/such/model"], "./no/such/model"),
        (["--data.test-examples", "5", "--eval.every", "1"], "some that are trained on"),
        (["--cluster.device", "gpu", "--trainer.shards", "64"], "which need 64 GPUs"),
    ],
)
def test_is_refused(
    extra: list[str], message: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.jsonl").write_text('{"messages": [{"role": "narrator", "content": "x"}]}\n')
    assert main([*flags, *[word.format(tmp_path) for word in extra]]) == EXIT_BAD_INPUT
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_and_resume_are_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert "usage: sft " in out
    assert "--data.too-long" in out
    assert "--orchestrator" not in out
    for kind, keys in (("sft", {"data": {}}), ("rl", {"orchestrator": {}})):
        (tmp_path / "config.json").write_text(json.dumps(keys))
        assert command_of(tmp_path) == kind
        assert resume_command(tmp_path).startswith(f"uv run {kind} @")


def test_what_may_change_between_checkpoint_and_resume(flags: list[str]) -> None:
    def fixed(*extra: str, seed: int = 0) -> Mapping[str, object]:
        config = load_as(SftConfig, [*flags, *extra], {}).config
        facts = FACTS.__class__.of(config, required=True)
        examples = Examples.of([Example(np.arange(3, dtype=np.int32), np.ones(3, np.float32), "f:1")])
        data = SftData(examples, None, ExampleCursor(1, seed, True))
        return SftRun(config, facts, sft_plan(config, facts, TWO_GPUS, data), data).fixed

    may = (
        ["--trainer.shards", "3"],
        ["--data.batch-size", "7"],
        ["--trainer.learning-rate", "0.1"],
        ["--max-steps", "9"],
    )
    assert all(fixed(*change) == fixed() for change in may)
    assert fixed("--trainer.loss-normalization", "sum") != fixed()
    assert fixed(seed=1) != fixed()
