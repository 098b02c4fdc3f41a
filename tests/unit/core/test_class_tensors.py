"""Files of a model against the tensors of its class: what is missing or has another shape is named."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from trireme.core.class_tensors import refuse_other_tensors
from trireme.core.errors import BadInput

SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
SIZES |= {"num_key_value_heads": 1, "intermediate_size": 16}
NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"

Tensors = dict[str, torch.Tensor]


def saved(directory: Path, *, tied: bool) -> Path:
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)).save_pretrained(directory)
    return directory


def change(directory: Path, edit: Callable[[Tensors], Mapping[str, torch.Tensor]]) -> None:
    file = directory / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in edit(load_file(file)).items()}, file, metadata={"format": "pt"})


def refuse(directory: Path) -> None:
    refuse_other_tensors(str(directory), "the model", "take another")


def test_experts_that_files_have_apart_are_taken(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, decoder_sparse_step=1
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    refuse(tmp_path)
    expert = "model.layers.0.mlp.experts.3.down_proj.weight"
    change(tmp_path, lambda tensors: {name: t for name, t in tensors.items() if name != expert})
    with pytest.raises(BadInput, match=r"the model, .* its class Qwen3MoeForCausalLM: it lacks 1: .*experts.3.down"):
        refuse(tmp_path)


@pytest.mark.parametrize("name", [NORM, HEAD, "model.layers.0.self_attn.q_norm.weight"])
def test_what_is_missing_is_named(name: str, tmp_path: Path) -> None:
    saved(tmp_path, tied=False)
    change(tmp_path, lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name})
    with pytest.raises(BadInput, match=f"lacks 1: {name}"):
        refuse(tmp_path)


def test_one_of_tied_tensors_is_enough(tmp_path: Path) -> None:
    saved(tmp_path, tied=True)
    change(tmp_path, lambda tensors: {HEAD if name == EMBEDDING else name: t for name, t in tensors.items()})
    refuse(tmp_path)
    change(tmp_path, lambda tensors: {name: t for name, t in tensors.items() if name != HEAD})
    with pytest.raises(BadInput, match=f"lacks 1: {EMBEDDING}"):
        refuse(tmp_path)


def test_files_may_leave_out_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    saved(tmp_path, tied=True)
    change(tmp_path, lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items()})
    refuse(tmp_path)


def test_another_shape_is_named(tmp_path: Path) -> None:
    saved(tmp_path, tied=False)
    change(tmp_path, lambda tensors: {name: t[:-1] if name in (NORM, HEAD) else t for name, t in tensors.items()})
    with pytest.raises(BadInput, match=f"has in another shape 2: {HEAD}, {NORM}"):
        refuse(tmp_path)


def test_files_that_are_no_safetensors_are_not_looked_into(tmp_path: Path) -> None:
    saved(tmp_path, tied=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refuse(tmp_path)
