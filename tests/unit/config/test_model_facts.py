"""A model's sizes from its config.json, and the ways in which there is none."""

import json
from pathlib import Path
from typing import Any

import pytest
from config_support import refused, small
from model_support import SMALL
from transformers import AutoConfig

from gpu_check.shapes import SHAPES
from trireme.config import Config, model_facts
from trireme.config.model_facts import PLAIN_TYPES, ModelFacts
from trireme.core.tokenizer import looks_like_path

QWEN3_06B = {**SHAPES["0.6b"], "architectures": ["Qwen3ForCausalLM"]}


def config(name: str) -> Config:
    return small(model={"name": name})


def refusal(name: str) -> str:
    return refused(lambda: ModelFacts.of(config(name), required=True))


def test_local_directory(tmp_path: Path) -> None:
    assert "a directory without config.json" in refusal(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    facts = ModelFacts.of(config(str(tmp_path)), required=True)
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (1024, 28, 151936)
    assert facts.num_parameters == 596_049_920  # as published, without the tied head
    assert facts.kv_values_per_token == 2 * 28 * 8 * 128
    # A token is multiplied with every parameter, the embeddings once: looking one up is no product.
    untied = ModelFacts.from_json("m", json.dumps(QWEN3_06B | {"tie_word_embeddings": False}))
    assert facts.multiplied_parameters == untied.multiplied_parameters == facts.num_parameters
    assert untied.num_parameters - facts.num_parameters == 151936 * 1024
    assert facts.attention_length == facts.num_parameters // (28 * 16 * 128)
    assert (facts.tied_embeddings, untied.tied_embeddings) == (True, False)


class TestFactsOfAFile:
    """`model.facts`: a file in place of a model that cannot be reached."""

    @pytest.fixture
    def named(self, tmp_path: Path) -> Config:
        (tmp_path / "sizes.json").write_text(json.dumps(QWEN3_06B))
        return small(model={"name": "Qwen/Qwen3-0.6B", "facts": str(tmp_path / "sizes.json")})

    def test_a_dry_run_plans_by_it_and_a_start_is_refused(self, named: Config, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_facts, "_read_hub", lambda *_: pytest.fail("asked the hub"))
        facts = ModelFacts.of(named, required=False)
        assert (facts.name, facts.num_parameters) == ("Qwen/Qwen3-0.6B", 596_049_920)
        assert "without --dry-run" in refused(lambda: ModelFacts.of(named, required=True))

    @pytest.mark.parametrize("content", [None, b"\xff", b"{"])
    def test_a_file_that_cannot_be_used(self, named: Config, content: bytes | None) -> None:
        file = Path(named.model.facts or "")
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        assert "cannot be" in refused(lambda: ModelFacts.of(named, required=False))


@pytest.mark.parametrize("sparse", [{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
def test_count_with_experts_is_that_of_the_real_model(sparse: dict) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, **sparse}
    sizes = SMALL | {"tie_word_embeddings": False} | experts
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes))
    facts = ModelFacts.from_json("m", json.dumps({**sizes, "model_type": "qwen3_moe"}))
    assert facts.num_parameters == model.num_parameters()
    of_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert facts.multiplied_parameters == model.num_parameters() - of_experts * 6 // 8 - 50 * 64
    assert facts.num_chosen == 2
    assert facts.mlp_size == pytest.approx(80, rel=0.2), "a mean, with dense layers and routers"


def test_sizes_that_older_files_leave_out() -> None:
    left_out = ("head_dim", "num_key_value_heads", "tie_word_embeddings", "architectures")
    facts = ModelFacts.from_json("m", json.dumps({k: v for k, v in QWEN3_06B.items() if k not in left_out}))
    assert (facts.head_dim, facts.num_kv_heads, facts.tied_embeddings, facts.architecture) == (64, 16, False, "qwen3")


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({**QWEN3_06B, "hidden_size": None})])
def test_a_config_json_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "config.json cannot be used" in refusal(str(tmp_path))
    (tmp_path / "config.json").rename(tmp_path / "adapter_config.json")
    assert "a LoRA adapter without the model it belongs to" in refusal(str(tmp_path))


def test_paths_and_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(map(looks_like_path, (".", "./a", "../a", "/a", "~/a", "a/b/c")))
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "Qwen/Qwen3-0.6B"):
        assert not looks_like_path(name)
        (tmp_path / name).mkdir(parents=True)
        assert looks_like_path(name)
    monkeypatch.setattr(model_facts, "_read_hub", lambda *_: pytest.fail("asked the hub"))
    text = refusal("./Qwen/nowhere")
    assert "model.name = ./Qwen/nowhere, which is no directory" in text
    assert str(tmp_path) in text
    assert "correct --model.name" in text


class TestHub:
    """A hub model on a machine without a hub and with an empty cache."""

    @pytest.fixture(autouse=True)
    def _no_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def test_a_dry_run_does_without_and_a_run_needs_it_or_its_cache(self, tmp_path: Path) -> None:
        assert ModelFacts.of(config("Qwen/Qwen3-0.6B"), required=False) is None
        text = refusal("Qwen/Qwen3-0.6B")
        assert "cannot be reached" in text
        assert "hf download Qwen/Qwen3-0.6B" in text
        assert "correct the name" in refusal("no such name!")
        repository = tmp_path / "cache" / "models--Qwen--Qwen3-0.6B"
        (repository / "snapshots" / "abc").mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc")
        (repository / "snapshots" / "abc" / "config.json").write_text(json.dumps(QWEN3_06B))
        facts = ModelFacts.of(config("Qwen/Qwen3-0.6B"), required=True)
        assert facts.hidden_size == 1024


@pytest.mark.parametrize(("error", "reachable"), [("http", True), ("network", False)])
def test_whether_the_hub_answers(monkeypatch: pytest.MonkeyPatch, error: str, reachable: bool) -> None:
    """An error page is an answer; no route is none."""
    import urllib.error
    import urllib.request
    from email.message import Message

    failure = (
        urllib.error.HTTPError("u", 404, "no", Message(), None) if error == "http" else urllib.error.URLError("no")
    )

    def urlopen(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    assert model_facts.hub_reachable("https://hub.example") is reachable


# ---- measured: sizes are those of the model that transformers builds, of whatever architecture

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


def test_what_is_read_of_windows_text_parts_and_lengths() -> None:
    assert facts_of("mistral", num_hidden_layers=2).windows == (4096,) * 2
    assert facts_of("mistral", num_hidden_layers=2, sliding_window=None).windows == (None,) * 2
    assert facts_of("gemma3_text", num_hidden_layers=6).windows == (4096,) * 5 + (None,)
    facts = facts_of("gemma3", text_config={"num_hidden_layers": 2, "hidden_size": 64})
    assert (facts.num_layers, facts.hidden_size) == (2, 64)
    assert facts.multiplied_parameters < facts.num_parameters  # the tower for images multiplies no token of text
    config = AutoConfig.for_model("bamba", num_hidden_layers=2)
    assert ModelFacts.from_json("m", config.to_json_string(use_diff=False)).num_layers == 2
    facts = ModelFacts.from_json("m", json.dumps({"model_type": "mamba", "max_position_embeddings": 99}))
    assert (facts.max_position_embeddings, facts.kv_values_per_token, facts.windows) == (99, 0, ())


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
