"""Tiny random models and batches for the trainer's tests."""

import itertools

import numpy as np
import torch
from model_support import SMALL
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trireme.config import Config
from trireme.core.types import Datum, ModelInput, TokenBatch

VOCAB = SMALL["vocab_size"]
CLASSES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


def make_model(directory, family, tied, layers=2, **other_sizes):
    """Saves a random model with a tokenizer of single characters, fp32; returns the directory as a string."""
    sizes = {**SMALL, "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"max_position_embeddings": 128, "tie_word_embeddings": tied, "initializer_range": 0.2}
    sizes |= {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0, **other_sizes}
    torch.manual_seed(1)
    config_class, model_class = CLASSES[family]
    if family == "qwen3_moe":
        sizes = {**EXPERTS, **sizes}
    model_class(config_class(**sizes)).save_pretrained(directory)
    words = {chr(ord("0") + i): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="1", pad_token="0").save_pretrained(directory)
    return str(directory)


def make_config(model, **overrides):
    """A configuration with the sections that the trainer reads; `overrides` are dotted with `__`, or at the root."""
    tree = {
        "model": {"name": model, "dtype": "float32"},
        "orchestrator": {"batch_size": 2, "max_steps_off_policy": 1},
        "env": {"id": "sort"},
        "inference": {"sampling": {"max_tokens": 8}},
        "trainer": {},
        "timeouts": {},
        "cluster": {"device": "cpu"},
    }
    for key, value in overrides.items():
        section, _, name = key.rpartition("__")
        (tree[section] if section else tree)[name] = value
    return Config.model_validate(tree)


def make_batch(lengths, temperature=0.7, seed=0):
    """Random datums of these lengths; the first token of each is masked, and has no advantage."""
    rng = np.random.default_rng(seed)

    def datum(n):
        return Datum(
            ModelInput(rng.integers(0, VOCAB, n).astype(np.int32)),
            {
                "target_tokens": rng.integers(0, VOCAB, n),
                "mask": np.arange(n) > 0,
                "logprobs": -4 - rng.random(n),
                "advantages": rng.normal(size=n) * (np.arange(n) > 0),
            },
            temperature,
        )

    return TokenBatch.from_datums([datum(n) for n in lengths])


def unsharded_logprobs(model, batch):
    """Returns the log-probabilities of each datum by a model of Hugging Face, one datum at a time, in order: [T]."""
    rows = []
    tokens, targets = (torch.from_numpy(x.astype(np.int64)) for x in (batch.tokens, batch.columns["target_tokens"]))
    for d, (start, end) in enumerate(itertools.pairwise(batch.offsets.tolist())):
        scaled = model(tokens[None, start:end]).logits[0] / float(batch.temperatures[d])
        rows.append(scaled.log_softmax(-1).gather(-1, targets[start:end, None])[:, 0])
    return torch.cat(rows)
