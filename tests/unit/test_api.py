"""The configuration and the actors of a user's own loop. Rooms start in tests/e2e/test_examples.py."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plan_support import machines

from trireme.api import loop_config, new_directory
from trireme.config.model_facts import ModelFacts
from trireme.core.errors import BadInput
from trireme.plan.rl import LOOP_ROOMS
from trireme.plan.trainer import TrainerPart
from trireme.plan.whole import Plan

ROOT = Path(__file__).parents[2]
MODEL = ["--model.name", str(ROOT / "assets" / "sort-base"), "--model.max-seq-len", "160"]


def test_a_model_is_all_that_must_be_named_and_files_and_flags_overlay_the_rest(tmp_path: Path) -> None:
    config = loop_config(MODEL)
    assert (config.orchestrator.batch_size, config.inference.sampling.max_tokens) == (16, 128)
    assert config.loss_fn == "importance_sampling", "synchronous"
    file = tmp_path / "own.toml"
    file.write_text("[orchestrator]\nbatch_size = 3\n[trainer]\nshards = 2\n")
    config = loop_config([*MODEL, "@", str(file), "--trainer.shards", "4"])
    assert (config.orchestrator.batch_size, config.trainer.shards) == (3, 4)


def test_refusals_and_warnings_are_those_of_rl(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(BadInput, match=r"--trainer.shard 2(.|\n)*did you mean `--trainer.shards`"):
        loop_config([*MODEL, "--trainer.shard", "2"])
    with pytest.raises(BadInput, match=r"trainer\.kl\.coef = 0\.1 without a reference"):
        loop_config([*MODEL, "--trainer.kl.coef", "0.1"])
    loop_config([*MODEL, "--inference.sampling.top-p", "0.9"])
    assert "warning: inference.sampling.top_p = 0.9" in capsys.readouterr().err


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    """As in `rl_loop.py` and `sl_loop.py` of the examples, before anything starts."""
    assert new_directory(tmp_path / "loop") == tmp_path / "loop"
    assert new_directory(tmp_path / "loop").is_dir(), "an empty one is as good as a new one"
    (tmp_path / "loop" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(BadInput, match=rf"{tmp_path}/loop, which is not empty \(it holds metrics\.jsonl\)"):
        new_directory(tmp_path / "loop")
    for name in ("rl_loop", "sl_loop"):
        text = (ROOT / "examples" / f"{name}.py").read_text()
        assert 0 < text.index("new_directory(") < text.index("    with open_"), name


@pytest.mark.parametrize(("gpus", "trainer_gpus", "replica_gpus"), [(0, 0.0, 0.0), (4, 1.0, 1.0)])
def test_the_actors_of_both_kinds(gpus: int, trainer_gpus: float, replica_gpus: float) -> None:
    config = loop_config([*MODEL, "--trainer.shards", "2", "--inference.replicas", "2"])
    resources = machines(gpus=gpus)
    facts = ModelFacts.of(config, required=True)
    both, alone = Plan(config, facts, resources, LOOP_ROOMS), Plan(config, facts, resources, [TrainerPart])
    shards = ["trainer shard 0", "trainer shard 1"]
    assert both.actor_names == [*shards, "inference replica 0", "inference replica 1"]
    assert alone.actor_names == shards
    gpus_of = {
        room: [options["num_gpus"] for options in options_of_room]
        for room, options_of_room in both.by_room(both.options).items()
    }
    assert gpus_of == {"trainer": [trainer_gpus] * 2, "inference": [replica_gpus] * 2}
    assert list(alone.by_room(alone.options)) == ["trainer"]
    assert (both.gpus_needed, alone.gpus_needed) == ((4, 2) if gpus else (0, 0))
    assert (both.threads, alone.threads) == (2, 4)


def test_ray_is_imported_only_when_rooms_are_opened() -> None:
    """Ray reads much of the environment at that moment, which is prepared before."""
    code = (
        "import sys, trireme.api, trainer.schedule, trireme.core.types; assert not {'ray', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


STABLE = re.findall(
    r"^::: (\S+)(?:\n    options:\n      members: \[([^\]]+)\])?", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE
)
"""Modules and objects of docs/api.md, and the members that the page lists of them."""
OF_ONE_GAME = {"orchestrator.envs.guess", "trireme.renderers.text_renderer"}
"""What examples/agents/guessing.py takes from the built-in game that it plays."""
EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*.py")) if path.parent.name != "recipes"]
"""Recipes are parts of the project outside the package, so they may follow it."""


def stable_names() -> set[tuple[str, str]]:
    """Returns the module and the name of each stable name, but of members of classes."""
    names: set[tuple[str, str]] = set()
    for path, members in STABLE:
        file = ROOT / "src" / path.replace(".", "/")
        if file.is_dir() or file.with_suffix(".py").exists():
            listed = members.replace(",", " ").split() or importlib.import_module(path).__all__
            names |= {(path, name) for name in listed}
        else:
            module, _, name = path.rpartition(".")
            names.add((module, name))
    return names


def test_stable_names_exist_and_modules_of_them_say_so() -> None:
    for module, name in stable_names():
        assert hasattr(importlib.import_module(module), name), (module, name)
    whole = {path for path, _ in STABLE} & {module for module, _ in stable_names()}
    assert [path for path in whole if "stable" not in str(importlib.import_module(path).__doc__)] == []
    assert len(whole) == 6


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_import_stable_names(example: Path) -> None:
    packages = {path.name for path in (ROOT / "src").iterdir()}
    imports = [node for node in ast.walk(ast.parse(example.read_text())) if isinstance(node, ast.ImportFrom)]
    used = {
        (node.module, alias.name)
        for node in imports
        if node.module and node.module.split(".")[0] in packages and node.module not in OF_ONE_GAME
        for alias in node.names
    }
    assert used - stable_names() == set()
