"""A twin has the same architecture and switches as its model, and is small."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from trainer.twin import VOCABULARY, make_twin, twin_config
from trireme.core.errors import BadInput

SAMPLED = (
    "qwen3",
    "qwen3_5_text",
    "qwen3_moe",
    "deepseek_v3",
    "gemma2",
    "gemma3n_text",
    "gpt_oss",
    "jamba",
    "falcon_h1",
)


def of(model_type: str, **options: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **options)


def switches(section: dict[str, Any]) -> dict[str, Any]:
    """Everything in a configuration that is not a size: flags, scales, names, and what is absent."""
    return {
        key: switches(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if type(value) in (bool, float, str, type(None), dict)
    }


@pytest.mark.parametrize("model_type", SAMPLED)
def test_a_twin_has_the_switches_of_its_model_is_small_and_computes(model_type: str) -> None:
    config = of(model_type)
    before = config.to_dict()
    small = twin_config(config)
    assert type(small) is type(config)
    assert switches(small.to_dict()) == switches(before)
    assert config.to_dict() == before
    model = make_twin(config)
    assert model.num_parameters() < 1_000_000
    logits = model(input_ids=torch.arange(1, 14)[None], use_cache=False).logits
    assert logits.isfinite().all()
    logits.sum().backward()
    assert logits.std() > 0.1
    assert logits.shape[-1] <= VOCABULARY


@pytest.mark.parametrize(
    ("heads", "key_heads", "expected"), [(2, 2, (2, 2)), (3, 3, (3, 3)), (8, 8, (4, 4)), (8, 4, (4, 2))]
)
def test_a_twin_has_as_many_key_heads_as_heads_if_the_model_has(
    heads: int, key_heads: int, expected: tuple[int, int]
) -> None:
    config = of("qwen3", num_attention_heads=heads, num_key_value_heads=key_heads)
    model = make_twin(config)
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == expected
    assert model(input_ids=torch.arange(1, 14)[None], use_cache=False).logits.isfinite().all()


def test_token_ids_are_in_the_vocabulary_and_differ() -> None:
    small = twin_config(
        of("qwen3", vocab_size=151936, bos_token_id=151643, eos_token_id=[151645, 151643], pad_token_id=0)
    )
    assert (small.bos_token_id, small.eos_token_id, small.pad_token_id) == (127, [126, 127], 0)
    assert twin_config(of("qwen3", vocab_size=32, eos_token_id=1)).vocab_size == 32


def test_the_same_seed_gives_the_same_twin_and_leaves_random_numbers_alone() -> None:
    state = torch.random.get_rng_state()
    one, two, other = (make_twin(of("qwen3"), seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_cannot_be_built_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"no small model of the kind reformer can be built \(AssertionError"):
        make_twin(of("reformer"))
