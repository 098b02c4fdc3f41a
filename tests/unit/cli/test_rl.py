"""Bad input: the command ends with exit code 2 and says what was given, expected and to do, before Ray is touched."""

import ast
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from trireme.cli.rl import _next_steps, main
from trireme.config.load import load
from trireme.core.errors import EXIT_BAD_INPUT, EXIT_OK
from trireme.run.rollout_records import write_records

pytestmark = pytest.mark.usefixtures("in_the_repository", "no_cluster")
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.sharts", "2"], "did you mean `--trainer.shards`"),
        (["--model.max-seq-len", "100000"], "256"),
        (["--cluster.device", "gpu", "--trainer.shards", "64"], "GPU"),
        (["--inference.engine-args.seed", "3"], "seed"),
    ],
)
def test_is_refused(flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["@", "configs/quickstart.toml", "--run.output-dir", str(tmp_path), *flags]) == EXIT_BAD_INPUT
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find_spec(name, *rest)
    )
    assert main(["@", "configs/quickstart.toml"]) == EXIT_BAD_INPUT
    refused = capsys.readouterr().err
    assert [part for part in ("no vLLM", "`uv sync`", "--group gpu") if part not in refused] == []


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (ROOT / "configs").glob("*.toml") if not path.stem.startswith("sft-"))
)
def test_every_config_passes_a_dry_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["@", f"configs/{name}.toml", "--dry-run"]) == EXIT_OK
    out = capsys.readouterr().out
    assert '"max_steps"' in out
    assert "staleness" in out


@pytest.mark.parametrize(
    "prompt", ["Sort: \"$HOME\" `ls` 'it'\n", "Sort: 361695\n", "it's", "2 \\ 3", "Wow!", "$1", "`1`", "'1", '"1']
)
def test_the_command_that_asks_the_model_has_a_prompt_of_the_run(tmp_path: Path, prompt: str) -> None:
    """Whatever is in it: quotes, line ends, what a shell would read."""
    turns = [{"observation_text": prompt, "action_text": "1", "versions": []}]
    group = {"rewards": [1.0], "rollouts": [{"turns": turns, "stop_reason": "stop"}]}
    write_records(tmp_path / "rollouts", 3, [json.dumps(group)])
    (tmp_path / "config.json").write_text("{}")
    config = load(["@", "configs/quickstart.toml"], {}).config
    (line,) = [line for line in _next_steps(config, tmp_path, 1.0).splitlines() if "pipeline" in line]
    printed = ["bash", "-c", f"printf '%s\\0' {line}"]
    *_, flag, code = subprocess.run(printed, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    assert flag == "-c"
    assert ('"from' in line) == (prompt == "Sort: 361695\n")
    (call,) = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call) and node.keywords]
    assert ast.literal_eval(call.args[0]) == prompt
    assert [(keyword.arg, ast.literal_eval(keyword.value)) for keyword in call.keywords] == [("max_new_tokens", 10)]
