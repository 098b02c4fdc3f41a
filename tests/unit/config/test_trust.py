"""A configuration that a run wrote may be a stranger's: what it would run is listed, and runs only by consent."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from config_support import BASE
from model_support import SMALL

from trireme.cli.rl import main as rl
from trireme.cli.trireme import main as trireme
from trireme.config import Config
from trireme.config.keys import keys_of
from trireme.config.load import load
from trireme.core.errors import EXIT_BAD_INPUT, BadInput
from trireme.run.rundir import resume_command

ORDINARY: dict[str, Any] = BASE | {"model": {"name": "./model"}, "env": [{"id": "sort"}]}
HOSTILE = {
    "env.0.id": {"env": [{"id": "evil:Env"}]},
    "env.1.id": {"env": [{"id": "sort"}, {"id": "evil:Env"}]},
    "env.0.path.0": {"env": [{"id": "sort", "path": ["/evil"]}]},
    "eval.env.0.id": {"eval": {"every": 1, "env": [{"id": "evil:Env"}]}},
    "renderer.name": {"renderer": {"name": "evil:Renderer"}},
    "trainer.loss_fn": {"trainer": {"loss_fn": "evil:loss"}},
    "inference.engine_args.worker_cls": {"inference": {"engine_args": {"worker_cls": "evil.Worker"}}},
    "inference.engine_args.trust_remote_code": {"inference": {"engine_args": {"trust_remote_code": True}}},
    "inference.engine_args.hf_overrides": {"inference": {"engine_args": {"hf_overrides": {"auto_map": {}}}}},
    "inference.engine_args.logits_processors": {"inference": {"engine_args": {"logits_processors": ["evil:P"]}}},
    "cluster.address": {"cluster": {"address": "evil:6379"}},
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes ORDINARY with some sections changed to a file; the module `evil` leaves a canary when it is imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMALL | {"model_type": "qwen3"}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\nloss = Env = Renderer = print\n")
    monkeypatch.syspath_prepend(tmp_path)

    def write(sections: dict[str, Any], name: str = "run/config.json") -> list[str]:
        inference = {**ORDINARY["inference"], **sections.get("inference", {})}
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(ORDINARY | sections | {"inference": inference}))
        return ["@", str(file)]

    yield write
    assert not (tmp_path / "canary").exists(), "code of the configuration ran"


@pytest.mark.parametrize("key", HOSTILE)
def test_code_of_a_recorded_configuration_is_listed(write: Any, key: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It runs only where it is trusted; a file of one's own needs no trust."""
    arguments = write(HOSTILE[key])
    for words in (arguments, [*arguments, "--dry-run"]):
        assert rl(words) == EXIT_BAD_INPUT
        output = capfd.readouterr().err
        assert f"\n    {key} = " in output
        assert "add --trust-config" in output
        assert arguments[1] in output
    local = load(write(HOSTILE[key], "own.json"), {}).config
    assert capfd.readouterr().err == ""
    assert load([*arguments, "--trust-config"], {}).config == local
    assert capfd.readouterr().err.startswith(f"--trust-config: {key} = ")


@pytest.mark.parametrize("key", HOSTILE)
def test_the_command_that_continues_a_run_of_ones_own_runs(write: Any, key: str) -> None:
    root = Path(write(HOSTILE[key])[1]).parent
    assert "--trust-config" in resume_command(root, trusted=True)
    assert "--trust-config" not in resume_command(root), "what is printed of a stranger's run does not consent"
    write({"written_by": {"environment": {"PYTHONPATH": "/evil"}}})
    assert "--trust-config" not in resume_command(root, trusted=True)
    assert "PYTHONPATH" not in resume_command(root), "where a stranger's modules are"


def test_what_needs_trust_and_what_does_not(write: Any, tmp_path: Path) -> None:
    load(write({}), {})  # an ordinary one
    recorded = write(HOSTILE["env.0.id"])
    assert load([*recorded, "--env.id", "sort"], {}).config.env[0].id == "sort"
    assert load([*recorded, "--env.id", "evil:Env"], {}).config.env[0].id == "evil:Env", "they wrote it too"
    assert load(recorded, {"TRIREME__ENV__ID": "my:Env"}).config.env[0].id == "my:Env"
    before = write(HOSTILE["env.0.id"] | {"model": {"name": "n"}}, "own.json")
    load([*before, *recorded], {})
    with pytest.raises(BadInput, match="evil:Other"):
        load([*before, *write({"env": [{"id": "evil:Other"}]})], {})
    (tmp_path / "run" / "config.json").write_text('{"loss_fn": "evil:loss"}')
    with pytest.raises(BadInput, match=r"trainer.loss_fn = \"evil:loss\""):
        load([*write({}, "own.json"), "--trainer", "@", str(tmp_path / "run" / "config.json")], {})


def test_a_checkpoints_configuration_needs_trust(write: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tools_support import make_run

    make_run(tmp_path / "run", 2)
    for key, sections in HOSTILE.items():
        write(sections)
        assert trireme(["eval", str(tmp_path / "run"), "--eval.samples", "1"]) == EXIT_BAD_INPUT
        assert f"\n    {key} = " in capfd.readouterr().err


def test_every_key_that_takes_code_is_marked() -> None:
    """Their descriptions say so."""
    speaks = {
        key.dotted
        for key in keys_of(Config).options.values()
        if re.search(r"module:|AsyncEngineArgs|Ray cluster|Environment of", key.description)
    }
    marked = {key.dotted for key in keys_of(Config).options.values() if key.names_code}
    assert marked == speaks
    assert len(marked) == 7
