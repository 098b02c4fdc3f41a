"""A model's sizes from its config.json, and the ways in which there is none."""

import json
from pathlib import Path

import pytest
from config_support import refused, small
from model_support import SMALL

from gpu_check.shapes import SHAPES
from trireme.config import Config, model_facts
from trireme.config.model_facts import ModelFacts
from trireme.core.tokenizer import looks_like_path

QWEN3_06B = {**SHAPES["0.6b"], "architectures": ["Qwen3ForCausalLM"]}


def config(name: str) -> Config:
    return small(model={"name": name})


def refusal(name: str) -> str:
    return refused(lambda: ModelFacts.of(config(name), required=True))


def test_local_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    facts = ModelFacts.of(config(str(tmp_path)), required=True)
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (1024, 28, 151936)
    assert facts.num_parameters == 596_049_920  # as published, without the tied head
    assert facts.kv_values_per_token == 2 * 28 * 8 * 128
    assert facts.tied_embeddings


class TestFactsOfAFile:
    """`model.facts`: a file in place of a model that cannot be reached."""

    @pytest.fixture
    def named(self, tmp_path: Path) -> Config:
        (tmp_path / "sizes.json").write_text(json.dumps(QWEN3_06B))
        return small(model={"name": "Qwen/Qwen3-0.6B", "facts": str(tmp_path / "sizes.json")})

    def test_a_dry_run_plans_by_it_and_asks_no_hub(self, named: Config, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_facts, "_read_hub", lambda *_: pytest.fail("asked the hub"))
        facts = ModelFacts.of(named, required=False)
        assert (facts.name, facts.num_parameters) == ("Qwen/Qwen3-0.6B", 596_049_920)

    def test_a_start_is_refused(self, named: Config) -> None:
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
    from transformers import AutoConfig, AutoModelForCausalLM

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


def test_what_a_token_is_multiplied_with(tmp_path: Path) -> None:
    """Every parameter, the embeddings once: looking one up is no product."""
    tied = ModelFacts.from_json("m", json.dumps(QWEN3_06B))
    untied = ModelFacts.from_json("m", json.dumps(QWEN3_06B | {"tie_word_embeddings": False}))
    assert tied.multiplied_parameters == untied.multiplied_parameters == tied.num_parameters
    assert untied.num_parameters - tied.num_parameters == 151936 * 1024
    assert tied.attention_length == tied.num_parameters // (28 * 16 * 128)


def test_sizes_that_older_files_leave_out() -> None:
    left_out = ("head_dim", "num_key_value_heads", "tie_word_embeddings", "architectures")
    facts = ModelFacts.from_json("m", json.dumps({k: v for k, v in QWEN3_06B.items() if k not in left_out}))
    assert (facts.head_dim, facts.num_kv_heads, facts.tied_embeddings, facts.architecture) == (64, 16, False, "qwen3")


def test_a_path_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_facts, "_read_hub", lambda *_: pytest.fail("asked the hub"))
    text = refusal("./Qwen/nowhere")
    assert "model.name = ./Qwen/nowhere, which is no directory" in text
    assert str(tmp_path) in text
    assert "correct --model.name" in text


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({**QWEN3_06B, "hidden_size": None})])
def test_a_config_json_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    assert "a directory without config.json" in refusal(str(tmp_path))
    (tmp_path / "config.json").write_text(text)
    assert "config.json cannot be used" in refusal(str(tmp_path))


def test_paths_and_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(map(looks_like_path, (".", "./a", "../a", "/a", "~/a", "a/b/c")))
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "Qwen/Qwen3-0.6B"):
        assert not looks_like_path(name)
        (tmp_path / name).mkdir(parents=True)
        assert looks_like_path(name)


class TestHub:
    """A hub model on a machine without a hub and with an empty cache."""

    @pytest.fixture(autouse=True)
    def _no_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def test_a_dry_run_does_without_and_a_run_is_refused(self) -> None:
        assert ModelFacts.of(config("Qwen/Qwen3-0.6B"), required=False) is None
        text = refusal("Qwen/Qwen3-0.6B")
        assert "cannot be reached" in text
        assert "hf download Qwen/Qwen3-0.6B" in text
        assert "correct the name" in refusal("no such name!")

    def test_a_cached_model(self, tmp_path: Path) -> None:
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
