"""`trireme export`: models taken out of checkpoints, in every dtype, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_support import flip, forge, snapshot
from cli_support import refused
from safetensors.torch import load, save
from tools_support import base_model, make_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from trireme.checkpoint.store import CheckpointStore
from trireme.cli.trireme import main
from trireme.core.errors import EXIT_FAILED, EXIT_OK, BadInput
from trireme.tools.export import cast_tensors


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    """Read only: a run with checkpoints of steps 2 and 4."""
    return make_run(tmp_path_factory.mktemp("runs") / "run", 2, 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_model_opens_in_the_dtype_that_was_asked_for(store: CheckpointStore, dtype: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    assert main(["export", str(store.root), "--step", "2", "--dtype", dtype, "--out", str(out)]) == EXIT_OK
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    assert model.config.dtype == getattr(torch, dtype)
    for name, expected in base_model().named_parameters():
        assert torch.equal(model.get_parameter(name), (expected * 2).to(model.dtype)), name
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    tensors = [tensor for file in files for tensor in load(file.read_bytes()).values()]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors)
    assert AutoTokenizer.from_pretrained(out).encode("sort") == AutoTokenizer.from_pretrained(
        store.checkpoint(2) / "inference"
    ).encode("sort")
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]


def test_without_options_the_newest_good_checkpoint_is_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_run(tmp_path / "run", 2, 4, 6)
    flip(store.checkpoint(6) / "trainer" / "__0_0.distcp")
    assert main(["export", str(store.root)]) == EXIT_OK
    out = store.root / "exports" / "step_000004-float32"
    assert snapshot(out) == snapshot(store.checkpoint(4) / "inference")
    assert f"{store.checkpoint(4)} is now {out}\n" in capsys.readouterr().out


def test_a_file_that_claims_more_than_it_holds_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its manifest fits: a stranger wrote both."""
    store = make_run(tmp_path / "run", 2)
    forge(store.checkpoint(2), "inference/model-00001.safetensors", (1 << 62).to_bytes(8, "little") + b"{}")
    for words in ([], ["--dtype", "bfloat16"]):
        text = refused(capsys, "export", store.root, *words)
        assert "inference/model-00001.safetensors, whose header does not describe it" in text
    assert not (store.root / "exports").exists() or not any((store.root / "exports").iterdir())


def test_where_and_what_cannot_be_written(
    store: CheckpointStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("precious")
    before = snapshot(tmp_path)
    assert f"--out {tmp_path}, which exists" in refused(capsys, "export", store.root, "--out", str(tmp_path))
    assert "mine, which exists" in refused(capsys, "export", store.root, "--out", str(tmp_path / "mine"))
    assert snapshot(tmp_path) == before
    (tmp_path / "empty").mkdir()
    assert main(["export", str(store.root), "--out", str(tmp_path / "empty")]) == EXIT_OK
    assert (tmp_path / "empty" / "config.json").exists()
    output = refused(capsys, "export", store.root, "--step", "3")
    assert "--step 3" in output
    assert "there are: 2, 4" in output
    (tmp_path / "file").write_text("")
    assert main(["export", str(store.root), "--out", str(tmp_path / "file" / "out")]) == EXIT_FAILED
    assert "MiB free" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "model-00002.safetensors", "tokenizer.json"])
def test_damaged_files_are_seen_and_gone(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_run(tmp_path / "run", 2)
    flip(store.checkpoint(2) / "inference" / name)
    output = refused(capsys, "export", store.root, "--step", "2", "--out", str(tmp_path / "out"))
    assert f"the contents of inference/{name} were altered" in output
    (store.checkpoint(2) / "inference" / name).unlink()
    assert f"inference/{name} is missing" in refused(capsys, "export", store.root, "--step", "2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert "none of whose checkpoints verifies" in refused(capsys, "export", store.root)


def test_numbers_that_a_dtype_cannot_hold_are_refused() -> None:
    data = save({"small": torch.ones(2), "large": torch.tensor([1e5, 1.0]), "ids": torch.tensor([70000])})
    with pytest.raises(BadInput, match=r"tensor large, with numbers up to 1e\+05, in torch.float16"):
        cast_tensors(data, "float16")
    cast, size = cast_tensors(data, "bfloat16")
    assert size == 2 * 2 + 2 * 2 + 8
    assert load(cast)["ids"].dtype == torch.int64  # only numbers of floating point are cast
    infinite = save({"masked": torch.tensor([-torch.inf])})
    assert load(cast_tensors(infinite, "float16")[0])["masked"].isinf().all()
