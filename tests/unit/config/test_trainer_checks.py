"""`trainer.lora.*`: which layers get adapters, what is refused, what a resume must find unchanged, what a plan says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sft_support
import torch
from config_support import refused, small
from model_support import FACTS
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from trireme.config import Config
from trireme.config.checks import check
from trireme.config.model_facts import ModelFacts
from trireme.config.resume_compat import fixed_parts
from trireme.config.trainer import LoraConfig
from trireme.config.trainer_checks import RANKS
from trireme.core.errors import BadInput

BASE = Path(__file__).parents[3] / "assets" / "sort-base"
UNTIED = replace(FACTS, tied_embeddings=False)


def config(lora: dict[str, Any], **trainer: Any) -> Config:
    return small(trainer={"lora": lora, **trainer})


def refusal(lora: dict[str, Any], facts: ModelFacts | None = FACTS, **trainer: Any) -> str:
    return refused(lambda: check(config(lora, **trainer), facts))


def test_tokens_weigh_as_the_loss_was_published_unless_the_configuration_says_how() -> None:
    kinds = [config({}, loss_fn=loss).normalization.kind for loss in ("ppo", "gspo", "json:dumps")]
    assert kinds == ["token_mean", "sequence_mean_token_mean", "token_mean"]
    normalization = config({}, loss_fn="gspo", loss_normalization="sequence_mean_token_sum_norm").normalization
    assert (normalization.kind, normalization.longest) == ("sequence_mean_token_sum_norm", 10)
    with pytest.raises(BadInput, match=r"sequence_mean_token_sum_norm without model\.max_seq_len"):
        check(sft_support.config(trainer__loss_normalization="sequence_mean_token_sum_norm"), FACTS)


def test_ranks_are_those_of_the_installed_vllm() -> None:
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == RANKS


@pytest.mark.parametrize(
    ("lora", "named", "expected"),
    [
        ({"rank": 4}, "trainer.lora.rank = 4", "1 or 8"),
        ({"rank": 12}, "trainer.lora.rank = 12", "8 or 16"),
        ({"rank": 300}, "trainer.lora.rank = 300", "256 or 320"),
        ({"rank": 1000}, "trainer.lora.rank = 1000", "to 512"),
        ({"rank": 8, "targets": ["q_proj", "query"]}, "trainer.lora.targets with query", "q_proj, k_proj"),
    ],
)
def test_what_no_engine_or_decoder_takes(lora: dict[str, Any], named: str, expected: str) -> None:
    text = refusal(lora)
    assert named in text
    assert expected in text


def test_the_engine_has_room_for_one_adapter_on_the_layers_that_are_not_merged() -> None:
    from inference.engine import engine_args

    args = engine_args(config({"rank": 16, "train_mlp": False, "train_unembed": True}), on_cpu=True)
    assert (args["enable_lora"], args["max_loras"], args["max_lora_rank"]) == (True, 1, 16)
    assert args["lora_target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert "enable_lora" not in engine_args(config({}), on_cpu=True)
    taken = small(trainer={"lora": {"rank": 16}}, inference={"engine_args": {"max_loras": 4}})
    with pytest.raises(BadInput, match="Trireme sets itself: max_loras"):
        engine_args(taken, on_cpu=True)


def test_layers_that_get_no_adapters() -> None:
    for lora in ({"train_attn": False, "train_mlp": False}, {"targets": ["lm_head"]}):
        assert "at least one of q_proj" in refusal({"rank": 8, "train_attn": False, **lora}, UNTIED)
    assert "adapter for lm_head" in refusal({"rank": 8, "train_unembed": True})
    check(config({"rank": 8, "train_unembed": True}), UNTIED)
    check(config({"rank": 8, "train_unembed": True}), None)
    experts = replace(FACTS, num_chosen=2)
    assert "a mixture of experts" in refusal({"rank": 8}, experts)
    check(config({"rank": 8, "train_mlp": False}), experts)
    facts = replace(FACTS, linear_widths={"o_proj": 1, "fused": 1})
    check(config({"rank": 8}), facts)
    text = refusal({"rank": 8, "train_attn": False}, facts)
    assert "adapters for gate_proj, up_proj, down_proj of m, which has no such layers" in text
    assert "at least one that it has: o_proj" in text


def test_keys_without_a_rank_and_dropout() -> None:
    assert "trainer.lora.alpha without trainer.lora.rank" in refusal({"alpha": 8})
    resolved = config({}).trainer.lora.model_dump()
    assert check(config(resolved), FACTS) == []
    (warning,) = check(config({"rank": 8, "dropout": 0.1}), FACTS)
    assert "trainer.lora.dropout = 0.1" in warning
    with pytest.raises(ValueError, match="dropout"):
        config({"rank": 8, "dropout": 1})


def test_the_base_is_the_reference_and_becomes_the_policy() -> None:
    check(config({"rank": 8}, kl={"coef": 0.1}), FACTS)
    assert "without a reference" in refusal({}, kl={"coef": 0.1})
    assert "without a reference" in refusal({"rank": 8}, kl={"coef": 0.1, "reference": {"load_checkpoint_path": "c"}})
    check(config({"rank": 8}, kl={"coef": 0.1, "reference": {"update_every": 2}}), FACTS)
    named = {"base_model": "m", "update_every": 2}
    check(config({"rank": 8}, kl={"coef": 0.1, "reference": named}), FACTS)
    other = {"base_model": "n", "update_every": 2}
    text = refusal({"rank": 8}, kl={"coef": 0.1, "reference": other})
    assert "trainer.kl.reference.update_every = 2" in text


@pytest.mark.parametrize(
    ("model_type", "lora"),
    [
        ("qwen3", {}),
        ("qwen3", {"train_mlp": False}),
        ("qwen3", {"targets": ["k_proj", "down_proj"]}),
        ("mistral", {}),
        ("starcoder2", {}),
        ("deepseek_v3", {"train_mlp": False}),  # experts get none
    ],
)
def test_parameters_are_counted_as_peft_makes_them(model_type: str, lora: dict[str, Any]) -> None:
    options = LoraConfig.model_validate({"rank": 8, **lora})
    described = AutoConfig.for_model(model_type, num_hidden_layers=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described)
    facts = ModelFacts.from_json("m", described.to_json_string(use_diff=False))
    adapted = get_peft_model(model, PeftConfig(r=8, target_modules=list(options.target_modules)))
    assert facts.trained_parameters(options) == adapted.get_nb_trainable_parameters()[0]


def test_what_a_resume_must_find_unchanged() -> None:
    def parts(**lora: Any) -> dict[str, Any]:
        return fixed_parts(small(trainer={"lora": lora}, model={"tokenizer": str(BASE)}), FACTS)

    assert "lora" not in parts()
    assert parts(rank=8) == parts(rank=8, dropout=0.1, seed=3)
    assert parts(rank=8, targets=["v_proj", "q_proj"]) == parts(rank=8, targets=["q_proj", "v_proj"])
    for other in ({"rank": 16}, {"rank": 8, "alpha": 8}, {"rank": 8, "train_mlp": False}, {}):
        assert parts(**other) != parts(rank=8)
