"""Sizes are those of the model that transformers builds, of whatever architecture."""

import json
from typing import Any

import pytest
from config_support import refused
from transformers import AutoConfig

from trireme.config.model_facts import PLAIN_TYPES, ModelFacts

PUBLISHED = {
    "mixtral": (46.70e9, 12.75e9, 32),  # the configurations of transformers are those of the first models
    "gpt_oss": (116.83e9, 5.13e9, 36),
    "deepseek_v3": (671.03e9, 36.63e9, 61),
    "jamba": (51.57e9, 11.84e9, 4),
    "minimax": (47.37e9, 13.42e9, 16),
    "llama4_text": (107.77e9, 17.17e9, 48),
    "qwen3_next": (79.67e9, 3.564e9, 12),
    "modernbert-decoder": (0.1497e9, 0.1490e9, 22),
    "gpt2": (0.1244e9, 0.1237e9, 12),
}


def facts_of(model_type: str, **options: Any) -> ModelFacts:
    described = AutoConfig.for_model(model_type, **options).to_dict()
    return ModelFacts.from_json("m", json.dumps({**described, "model_type": model_type}))


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_parameters_and_layers_with_attention(model_type: str) -> None:
    """That a token is multiplied with: without those of its embedding, and of experts the chosen ones."""
    facts = facts_of(model_type)
    total, multiplied, layers = PUBLISHED[model_type]
    assert facts.num_parameters == pytest.approx(total, rel=1e-3)
    assert facts.multiplied_parameters == pytest.approx(multiplied, rel=1e-3)
    assert len(facts.windows) == layers


@pytest.mark.parametrize("model_type", PLAIN_TYPES)
def test_plain_models_are_counted_as_they_are_measured(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = facts_of(model_type)
    monkeypatch.setattr("trireme.config.model_facts.PLAIN_TYPES", ())
    measured = facts_of(model_type)
    for name in ("num_parameters", "multiplied_parameters", "head_dim", "num_kv_heads", "tied_embeddings", "windows"):
        assert getattr(counted, name) == getattr(measured, name), name
    assert {name: measured.linear_widths[name] for name in counted.linear_widths} == counted.linear_widths
    assert counted.mlp_size == pytest.approx(measured.mlp_size, rel=0.01)


def test_windows() -> None:
    assert facts_of("mistral", num_hidden_layers=2).windows == (4096,) * 2
    assert facts_of("mistral", num_hidden_layers=2, sliding_window=None).windows == (None,) * 2
    assert facts_of("gemma3_text", num_hidden_layers=6).windows == (4096,) * 5 + (None,)


def test_the_text_part_of_a_model_that_also_sees() -> None:
    facts = facts_of("gemma3", text_config={"num_hidden_layers": 2, "hidden_size": 64})
    assert (facts.num_layers, facts.hidden_size) == (2, 64)
    assert facts.multiplied_parameters < facts.num_parameters  # the tower for images multiplies no token of text


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"model_type": "no_such"}, "model_type = no_such is none that transformers"),
        ({"hidden_size": 64}, "model_type = None"),
        ({"model_type": "mamba", "num_hidden_layers": 2}, "write max_position_embeddings into it"),
        ({"model_type": "deepseek_v2"}, "top_k_experts is missing"),
        ({"model_type": "reformer"}, "transformers cannot build the model (AssertionError"),
        ({"model_type": "clip"}, "Unrecognized configuration class"),
    ],
)
def test_what_cannot_be_read_is_named(described: dict[str, Any], message: str) -> None:
    assert message in refused(lambda: ModelFacts.from_json("m", json.dumps(described)))


def test_infinity_in_a_config_json_is_read() -> None:
    config = AutoConfig.for_model("bamba", num_hidden_layers=2)
    assert ModelFacts.from_json("m", config.to_json_string(use_diff=False)).num_layers == 2


def test_a_stated_length_is_enough() -> None:
    facts = ModelFacts.from_json("m", json.dumps({"model_type": "mamba", "max_position_embeddings": 99}))
    assert (facts.max_position_embeddings, facts.kv_values_per_token, facts.windows) == (99, 0, ())
