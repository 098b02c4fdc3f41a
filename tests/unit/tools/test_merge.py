"""`trireme export` of a run that trained adapters: as they are, and merged into their base."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from adapter_support import adapted_model, logits, make_adapter_run, make_base
from checkpoint_support import snapshot
from cli_support import refused
from safetensors.torch import load_file
from tools_support import make_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from trireme.checkpoint.store import CheckpointStore
from trireme.cli.trireme import main
from trireme.core.base_digest import base_digest
from trireme.core.errors import EXIT_OK


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def store(base: Path, tmp_path: Path) -> CheckpointStore:
    return make_adapter_run(tmp_path / "run", base)


def test_merged_is_the_adapter_on_its_base_which_the_files_name(store: CheckpointStore, base: Path) -> None:
    assert main(["export", str(store.root), "--merge"]) == EXIT_OK
    out = store.root / "exports" / "step_000002-merged"
    expected = logits(adapted_model(store.checkpoint(2) / "inference", base))
    merged = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    assert (logits(AutoModelForCausalLM.from_pretrained(base)) - expected).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(out).vocab_size == merged.config.vocab_size
    assert len(list(out.glob("*.safetensors"))) == len(list(base.glob("*.safetensors"))) > 1
    assert not list(out.glob("adapter_*"))
    about = json.loads((store.checkpoint(2) / "inference" / "base.json").read_text())
    assert about == {"name": str(base), "digest": base_digest(str(base))}


def test_merged_in_another_dtype_is_rounded_once(store: CheckpointStore, base: Path, tmp_path: Path) -> None:
    flags = ["--merge", "--dtype", "bfloat16", "--out", str(tmp_path / "out")]
    assert main(["export", str(store.root), *flags]) == EXIT_OK
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert got.dtype == torch.bfloat16
    expected = adapted_model(store.checkpoint(2) / "inference", base).merge_and_unload()
    for name, parameter in expected.named_parameters():
        difference = (got.get_parameter(name).float() - parameter.bfloat16().float()).abs()
        assert (difference <= parameter.abs() / 128).all(), name
        assert (difference > 0).float().mean() < 0.01, name  # where float32 lies between two


def test_without_merge_the_adapter_is_copied(store: CheckpointStore, base: Path, tmp_path: Path) -> None:
    assert main(["export", str(store.root)]) == EXIT_OK
    out = store.root / "exports" / "step_000002-adapter"
    assert snapshot(out) == snapshot(store.checkpoint(2) / "inference")
    assert main(["export", str(store.root), "--dtype", "bfloat16", "--out", str(tmp_path / "bf16")]) == EXIT_OK
    assert {t.dtype for t in load_file(tmp_path / "bf16" / "adapter_model.safetensors").values()} == {torch.bfloat16}
    torch.testing.assert_close(
        logits(adapted_model(tmp_path / "bf16", base)), logits(adapted_model(out, base)), rtol=0, atol=0.3
    )


def test_another_base_or_a_whole_model_is_refused(
    store: CheckpointStore, base: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    copy = base.with_name("kept")
    shutil.copytree(base, copy)
    file = sorted(base.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    text = refused(capsys, "export", store.root, "--merge")
    assert f"an adapter of {base}, which now has weights with digest" in text
    shutil.rmtree(base)
    assert f"an adapter of {base}, which is no directory here" in refused(capsys, "export", store.root, "--merge")
    copy.rename(base)
    assert not (store.root / "exports").exists()
    whole = make_run(tmp_path / "whole", 2)
    assert "which holds a whole model" in refused(capsys, "export", whole.root, "--merge")
