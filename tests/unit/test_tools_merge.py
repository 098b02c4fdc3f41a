"""`trireme export` of a run that trained adapters: as they are, and merged into their base."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_support import manifest, snapshot
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from tools_support import BASE_MODEL, make_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.hugging_face import tokenizer_files
from trainer.lora import adapter_files, peft_config, write_adapter
from trainer.publish import Packer
from trireme.base_digest import base_digest
from trireme.checkpoint.store import CheckpointStore
from trireme.config.schema import LoraConfig
from trireme.errors import EXIT_BAD_INPUT, EXIT_OK
from trireme.tools.main import main
from trireme.weights import Adapter

LORA = LoraConfig(rank=8, alpha=12)
PROMPT = torch.tensor([[3, 5, 2, 7, 1, 4]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the base, in several files, that may be spoilt."""
    path = tmp_path_factory.mktemp("base") / "model"
    AutoModelForCausalLM.from_pretrained(BASE_MODEL).save_pretrained(path, max_shard_size="400KB")
    AutoTokenizer.from_pretrained(BASE_MODEL).save_pretrained(path)
    return path


@pytest.fixture
def store(base: Path, tmp_path: Path) -> CheckpointStore:
    """A run with one commit, of step 2, whose adapters are random."""
    store = make_run(tmp_path / "run")
    torch.manual_seed(0)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft_config(LORA))
    tensors = {name: torch.randn_like(t) / 20 for name, t in get_peft_model_state_dict(adapted).items()}
    entries, buckets = Packer(np.copy).pack([[item] for item in tensors.items()])
    head = store.head()
    assert head is not None
    draft = store.draft(2, head.attempt)
    about = Adapter(base_digest(str(base)), 8, LORA.alpha)
    companions = {**tokenizer_files(str(base)), **adapter_files(LORA, about, str(base))}
    files = write_adapter(draft / "inference", entries, buckets, companions)
    store.publish(draft, replace(manifest(2, head.lineage, head.attempt, None), files=tuple(files)))
    return store


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


def adapted_model(directory: Path, base: Path) -> torch.nn.Module:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory)


def test_merged_is_the_adapter_on_its_base(store: CheckpointStore, base: Path) -> None:
    assert main(["export", str(store.root), "--merge"]) == EXIT_OK
    out = store.root / "exports" / "step_000002-merged"
    expected = logits(adapted_model(store.commit(2) / "inference", base))
    merged = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    assert (logits(AutoModelForCausalLM.from_pretrained(base)) - expected).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(out).vocab_size == merged.config.vocab_size
    assert len(list(out.glob("*.safetensors"))) == len(list(base.glob("*.safetensors"))) > 1
    assert not list(out.glob("adapter_*"))


def test_merged_in_another_dtype_is_rounded_once(store: CheckpointStore, base: Path, tmp_path: Path) -> None:
    assert (
        main(["export", str(store.root), "--merge", "--dtype", "bfloat16", "--out", str(tmp_path / "out")]) == EXIT_OK
    )
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert got.dtype == torch.bfloat16
    expected = adapted_model(store.commit(2) / "inference", base).merge_and_unload()
    for name, parameter in expected.named_parameters():
        difference = (got.get_parameter(name).float() - parameter.bfloat16().float()).abs()
        assert (difference <= parameter.abs() / 128).all(), name
        assert (difference > 0).float().mean() < 0.01, name  # where float32 lies between two


def test_without_merge_the_adapter_is_copied(store: CheckpointStore, base: Path, tmp_path: Path) -> None:
    assert main(["export", str(store.root)]) == EXIT_OK
    out = store.root / "exports" / "step_000002-adapter"
    assert snapshot(out) == snapshot(store.commit(2) / "inference")
    assert main(["export", str(store.root), "--dtype", "bfloat16", "--out", str(tmp_path / "bf16")]) == EXIT_OK
    assert {t.dtype for t in load_file(tmp_path / "bf16" / "adapter_model.safetensors").values()} == {torch.bfloat16}
    torch.testing.assert_close(
        logits(adapted_model(tmp_path / "bf16", base)), logits(adapted_model(out, base)), rtol=0, atol=0.3
    )


def test_a_base_that_changed_or_went_is_refused(
    store: CheckpointStore, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = base.with_name("kept")
    shutil.copytree(base, kept)
    file = sorted(base.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert main(["export", str(store.root), "--merge"]) == EXIT_BAD_INPUT
    assert f"an adapter of {base}, which now has weights with digest" in capsys.readouterr().err
    shutil.rmtree(base)
    assert main(["export", str(store.root), "--merge"]) == EXIT_BAD_INPUT
    assert f"an adapter of {base}, which is no directory here" in capsys.readouterr().err
    kept.rename(base)
    assert not (store.root / "exports").exists()


def test_a_whole_model_has_nothing_to_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = make_run(tmp_path / "whole", 2)
    assert main(["export", str(whole.root), "--merge"]) == EXIT_BAD_INPUT
    assert "which holds a whole model" in capsys.readouterr().err


def test_the_files_name_their_base(store: CheckpointStore, base: Path) -> None:
    about = json.loads((store.commit(2) / "inference" / "base.json").read_text())
    assert about == {"name": str(base), "digest": base_digest(str(base))}
