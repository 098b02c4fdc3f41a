"""A start builds no twin of a model whose kind docs/models.md shows, and one of any other."""

from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from trainer import proof, proved
from trainer.proved import ProvedType, proved_type, versions
from trireme.core.errors import BadInput

LLAMA_3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0} | {
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DESCRIBED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5-1.5B": ("qwen2", {"tie_word_embeddings": True, "num_hidden_layers": 28, "rope_theta": 1e6}),
    "Qwen3-0.6B": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 8, "eos_token_id": 151_645}),
    "Qwen3-30B-A3B": ("qwen3_moe", {"norm_topk_prob": True, "num_experts": 128, "num_hidden_layers": 48}),
    "Llama-3.2-1B": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA_3_ROPE, "rms_norm_eps": 1e-5}),
    "Mistral-7B-v0.3": ("mistral", {"sliding_window": None, "vocab_size": 32_768, "dtype": "bfloat16"}),
    "OLMo-2-7B": ("olmo2", {"vocab_size": 100_352, "max_position_embeddings": 4096}),
}
UNPROVED: dict[str, tuple[str, dict[str, Any]]] = {
    "a type that is refused": ("gemma2", {}),
    "a scale": ("granite", {"logits_scaling": 8.0}),
    "another function": ("llama", {"hidden_act": "gelu"}),
    "layers of another kind": (
        "qwen3",
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]},
    ),
    "rotary embeddings of another type": ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "an option of which the class knows nothing": ("qwen3", {"of_my_own": True}),
    "without what its example has": ("dots1", {"n_routed_experts": None}),
}


def config(model_type: str, **options: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **options)


def refuse(*_: Any) -> Any:
    raise BadInput("a twin was made")


def shown(model_config: PretrainedConfig, *, packed: bool = True, shares: bool = True) -> Any:
    return proof._prove_kind(model_config, packed=packed, shares=shares)


@pytest.mark.parametrize("name", DESCRIBED)
def test_models_that_people_train_need_no_twin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "make_twin", refuse)
    model_type, options = DESCRIBED[name]
    result = shown(config(model_type, **options))
    assert result.not_packed == ""
    assert ("same head size" in result.not_shared) == (model_type == "deepseek_v3")


@pytest.mark.parametrize("name", UNPROVED)
def test_a_twin_of_any_other_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "make_twin", refuse)
    model_type, options = UNPROVED[name]
    model_config = config(model_type)
    for key, value in options.items():
        setattr(model_config, key, value)
    assert shown(model_config) == "a twin was made"


@pytest.mark.parametrize("package", ["transformers", "vllm"])
def test_other_versions_show_nothing(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert proved_type(config("llama")) == ProvedType("", "")
    monkeypatch.setattr(proved, "versions", lambda: versions() | {package: "0.0.1"})
    assert proved_type(config("llama")) is None


def test_a_type_that_is_computed_in_rows_says_why() -> None:
    model_config = config("gpt_oss")
    result = proved_type(model_config)
    assert "of a packed row differ by" in result.not_packed
    assert "of a row of distinct tokens differ by" in result.not_shared
    assert shown(model_config) == result
    assert shown(model_config, packed=False) == ProvedType("", result.not_shared)
    assert shown(model_config, shares=False) == ProvedType(result.not_packed, "")
    model = proof.Agreement(tolerance=0.1, rows=0.0)
    decided = proof.decide("G", model, result, packing="auto")
    assert (decided.packed, decided.why_rows) == (False, f"{result.not_packed} (docs/models.md)")
    assert (decided.shares, decided.why_whole) == (False, f"{result.not_shared} (docs/models.md)")
    with pytest.raises(BadInput, match=r"share_prefixes = on for G: log-prob.*\(docs/models\.md\)"):
        proof.decide("G", model, result, packing="auto", share="on")
    with pytest.raises(BadInput, match=r"packing = packed for G: log-prob.*\(docs/models\.md\)"):
        proof.decide("G", model, result, packing="packed")
