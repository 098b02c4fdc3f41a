"""A model's own arithmetic is counted, and compared with the peaks of GPUs."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from model_support import SMALL
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.mfu import peak_flops, train_flops
from trireme.config.model_facts import ModelFacts

NOTHING = np.array([0])
SIZES = SMALL | {"tie_word_embeddings": False, "max_position_embeddings": 1024}


@pytest.mark.parametrize("length", [16, 512])
def test_operations_are_those_that_pytorch_counts(length: int) -> None:
    """But for causality: attention without a mask computes all pairs, of which half count here."""
    facts = ModelFacts.from_json("m", json.dumps({**SIZES, "model_type": "qwen3"}))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES), attn_implementation="eager")
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=torch.zeros((1, length), dtype=torch.long), use_cache=False).logits.sum().backward()
    pairs = 12 * facts.attention_width * length**2
    assert counter.get_total_flops() - pairs / 2 == pytest.approx(
        train_flops(facts, np.array([length]), NOTHING), rel=0.02
    )


def test_with_a_window_only_the_pairs_within_it_count() -> None:
    """The last 2 of 6 tokens do not see 1 and 2 others: as many as in a triangle of side 2, by n^2 / 2."""
    every = ModelFacts.from_json("m", json.dumps({**SIZES, "model_type": "qwen3"}))
    some = replace(every, windows=(4, None, None))
    length = np.array([6])
    assert (
        train_flops(every, length, NOTHING) - train_flops(some, length, NOTHING)
        == 12 * every.num_heads * every.head_dim * 2**2 / 2
    )
    assert train_flops(replace(every, windows=()), length, NOTHING) == 6 * every.multiplied_parameters * 6


def test_a_shared_prefix_counts_once() -> None:
    """Its tokens and pairs are computed in the first datum; the others' own tokens see them."""
    facts = replace(ModelFacts.from_json("m", json.dumps({**SIZES, "model_type": "qwen3"})), windows=(4, None, None))
    whole = np.array([6])
    both = train_flops(facts, np.array([6, 6]), np.array([0, 5]))
    last = train_flops(facts, whole, NOTHING) - train_flops(facts, np.array([5]), NOTHING)
    assert both == train_flops(facts, whole, NOTHING) + last


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H200", 989)],
)
def test_the_peak_of_a_gpu_is_known_by_its_name(name: str, tflops: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(gpu, torch.bfloat16) == tflops * 1e12
    assert peak_flops(gpu, torch.float32) == float("inf")
    assert peak_flops(torch.device("cpu"), torch.bfloat16) == float("inf")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GeForce GTX 970")
    assert peak_flops(gpu, torch.bfloat16) == float("inf")
