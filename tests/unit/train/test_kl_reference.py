"""The KL reference is found, fits the model, and is kept."""

import json
import shutil
from pathlib import Path

import pytest
from config_support import small

from trireme.checkpoint.manifest import MANIFEST
from trireme.config import Config
from trireme.config.model_facts import ModelFacts
from trireme.core.errors import BadInput
from trireme.train.kl_reference import keep_reference, resolve_reference

BASE = Path(__file__).parents[3] / "assets" / "sort-base"


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(BASE, tmp_path / "base")
    shutil.copytree(BASE, tmp_path / "step_000004" / "inference")
    (tmp_path / "step_000004" / MANIFEST).write_text("{}")
    return tmp_path


def resolved(base_model="./base", path=None, update_every=0) -> Config:
    reference = {"base_model": base_model, "load_checkpoint_path": path, "update_every": update_every}
    config = small(model={"name": str(BASE)}, trainer={"kl": {"coef": 0.1, "reference": reference}})
    facts = ModelFacts.of(config, required=True)
    return resolve_reference(config, facts)


def test_paths_are_absolute_and_a_checkpoint_is_its_weights_and_kept(models):
    config = resolved(path="step_000004")
    reference = config.trainer.kl.reference
    assert (reference.base_model, reference.load_checkpoint_path) == (
        str(models / "base"),
        str(models / "step_000004" / "inference"),
    )
    keep_reference(config)
    assert (models / "step_000004" / "KEEP").exists()


def test_a_plain_directory_is_taken_as_it_is(models):
    config = resolved(path="step_000004/inference/../../base")
    keep_reference(config)
    assert not list(models.rglob("KEEP"))


def test_a_reference_that_is_not_there_or_does_not_fit_is_refused(models):
    with pytest.raises(BadInput, match="nowhere") as refusal:
        resolved(base_model="./nowhere")
    assert "trainer.kl.reference.base_model" in "".join(refusal.value.__notes__)
    described = json.loads((models / "base" / "config.json").read_text()) | {"vocab_size": 7}
    (models / "base" / "config.json").write_text(json.dumps(described))
    with pytest.raises(BadInput, match="vocabulary of 7 tokens"):
        resolved()


def test_a_reference_that_will_be_the_policy_has_its_architecture(models):
    file = models / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-5, "use_cache": False}))
    assert resolved(update_every=0).trainer.kl.reference.update_every == 0
    with pytest.raises(BadInput, match=r"update_every = 3 .*differs .* in rms_norm_eps"):
        resolved(update_every=3)
    shutil.copy(BASE / "config.json", file)
    assert resolved(update_every=3).trainer.kl.reference.update_every == 3
