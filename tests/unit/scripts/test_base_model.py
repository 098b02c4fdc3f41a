"""The shipped base model, and the data of the script that made it."""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from orchestrator.envs.sort import PROMPT
from orchestrator.envs.text import is_held_out
from trireme.config.load import load_as
from trireme.config.sft import SftConfig

ROOT = Path(__file__).parents[3]
ASSET = ROOT / "assets" / "sort-base"
EXAMPLES = 2000


@pytest.fixture(scope="module")
def maker():
    """`scripts/make_base_model.py` as a module."""
    spec = importlib.util.spec_from_file_location("make_base_model", ROOT / "scripts" / "make_base_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def examples(maker):
    return [maker.make_example(0, i) for i in range(EXAMPLES)]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(ASSET)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSET)


def test_weights_are_at_most_2_mb():
    assert (ASSET / "model.safetensors").stat().st_size <= 2_000_000


def test_model_is_a_tied_qwen3_of_two_layers(model):
    assert model.config.model_type == "qwen3"
    assert model.config.num_hidden_layers == 2
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.dtype == torch.float32


def test_vocabulary_is_the_tokenizers(model, tokenizer):
    assert model.config.vocab_size == len(tokenizer) == model.get_input_embeddings().num_embeddings


def test_end_of_sequence_is_the_same_everywhere(model, tokenizer):
    generation = json.loads((ASSET / "generation_config.json").read_text())
    assert tokenizer.eos_token_id == model.config.eos_token_id == generation["eos_token_id"]
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id


def test_tokenizer_round_trip_is_one_token_per_character(tokenizer):
    text = PROMPT.format("52413") + "".join(map(chr, range(32, 127)))
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text


def test_shipped_tokenizer_is_the_scripts(maker, tokenizer):
    assert maker.make_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_the_greedy_answer_to_an_easy_problem_is_right(maker, model, tokenizer):
    [reply] = maker.answers(model, tokenizer, ["52413"], greedy=True)
    assert tokenizer.decode(reply) == "12345<eos>"


def test_70_percent_of_the_answers_are_corrupted_in_the_stated_ways(maker, examples):
    kinds = Counter(example.corruption for example in examples)
    corrupted = EXAMPLES - kinds[None]
    assert corrupted / EXAMPLES == pytest.approx(0.7, abs=0.03)
    for kind, share in zip(maker.CORRUPTIONS, maker.CORRUPTION_WEIGHTS, strict=True):
        assert kinds[kind] / corrupted == pytest.approx(share, abs=0.04)


def test_each_corruption_does_what_it_says(examples):
    for example in examples:
        target = "".join(sorted(example.digits))
        changed = sum(a != b for a, b in zip(example.answer, target, strict=True))
        if example.corruption == "copy":
            assert example.answer == example.digits
        elif example.corruption == "shuffle":
            assert "".join(sorted(example.answer)) == target
        else:
            assert changed == (example.corruption == "change")


def test_held_out_strings_are_never_trained_on(examples):
    assert not any(is_held_out(example.digits) for example in examples)


def test_examples_are_a_function_of_the_seed(maker, examples):
    assert examples[:20] == [maker.make_example(0, i) for i in range(20)]
    assert examples[:20] != [maker.make_example(1, i) for i in range(20)]


def test_loss_is_on_the_answer_only(maker, tokenizer):
    tokens, weights = maker.as_tokens(maker.Example("312", "123", None), tokenizer)
    assert tokenizer.decode(tokens) == "Sort: 312\n123<eos>"
    learned = [token for token, weight in zip(tokens, weights, strict=True) if weight]
    assert tokenizer.decode(learned) == "123<eos>"


def test_the_configuration_holds_out_what_the_script_makes_for_that(maker):
    config = load_as(SftConfig, ["@", str(maker.CONFIG)], {}).config
    assert config.data.test_examples == maker.HELD_OUT
    assert config.data.batch_size == maker.BATCH_SIZE
