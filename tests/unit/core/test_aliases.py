"""Loops and environments that were written for the import paths of before still find what they import."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

from trireme.core.aliases import ALIASES

RL_EXAMPLE = """
from trainer.schedule import scale_lr
from trireme.loop import loop_config, open_rooms
from trireme.types import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams
"""
SL_EXAMPLE = """
from trainer.schedule import get_lr, lr_at
from trireme.loop import loop_config, open_trainer
from trireme.types import AdamParams, Datum, ModelInput
"""
ENVIRONMENTS = """
from orchestrator.env import Env, EnvContext, EnvGroupBuilder, RLDataset, StepResult, StopCondition
from orchestrator.envs.text import Question, QuestionDataset, by_position
from orchestrator.message_env import MessageEnv, MessageEnvGroup, MessageStep
from orchestrator.workers import run_in_worker
from trireme import errors
from trireme.config import Config
from trireme.config.schema import LoraConfig
from trireme.types import ModelInput, SampledSequence, SampleRequest, VersionSpan, WeightIdentity
from trireme.weights import PublishedWeights
assert errors.BadInput
"""


@pytest.mark.parametrize("old", ALIASES)
def test_an_old_path_gives_the_new_module_and_a_warning_that_names_it(
    old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = importlib.import_module(ALIASES[old])
    spec = new.__spec__
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {ALIASES[old]}") as caught:
        assert importlib.import_module(old) is new
    assert caught[0].filename.endswith(("importlib/__init__.py", "test_aliases.py")), "the line that imports"
    assert new.__spec__ is spec
    assert new.__name__ == ALIASES[old]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.import_module(old) is new, "the second import says nothing"


@pytest.mark.parametrize("imports", [RL_EXAMPLE, SL_EXAMPLE, ENVIRONMENTS], ids=["rl", "sl", "environments"])
def test_the_imports_of_loops_and_environments_as_they_were_still_work(imports: str) -> None:
    """In a process of their own, which then has neither Ray nor vLLM: rooms are opened later."""
    code = imports + "import sys; assert not {'ray', 'vllm'} & set(sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "DeprecationWarning: trireme.types is now trireme.core.types" in ended.stderr


def test_an_unknown_path_is_missing_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'trireme\.nothing'"):
        importlib.import_module("trireme.nothing")
