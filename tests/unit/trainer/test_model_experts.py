"""A mixture of experts: stacked in memory, apart in all that leaves the trainer."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

# The tiny models and batches are the end-to-end tests' too.
from trainer_support import EXPERTS, make_batch, make_model
from transformers import AutoModelForCausalLM

from trireme.core.types import AdamParams
from trireme.core.weights import check_received, weights_digest


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3_moe", False)


@pytest.fixture
def shard(shard):
    return shard()


def tensors(published):
    return {
        e.name: torch.from_numpy(published.source[e.bucket][e.offset : e.offset + e.nbytes])
        .view(torch.float32)
        .view(e.shape)
        for e in published.manifest.entries
    }


def test_each_expert_is_published_under_its_name_in_the_checkpoint(shard, model):
    published = shard.publish_weights(0)
    check_received(published.manifest, published.source)
    saved = load_file(Path(model) / "model.safetensors")  # as save_pretrained wrote it
    assert sum(".mlp.experts." in name for name in saved) == 2 * EXPERTS["num_experts"] * 3, "2 layers, 3 matrices each"
    got = tensors(published)
    assert got.keys() == saved.keys()
    for name, expected in saved.items():
        assert torch.equal(got[name], expected), name
    assert published.identity.digest == weights_digest(published.manifest.entries)


def test_gate_and_up_of_an_expert_share_a_bucket(shard):
    place = {e.name: e.bucket for e in shard.publish_weights(0).manifest.entries}
    for layer, expert in itertools.product(range(2), range(EXPERTS["num_experts"])):
        prefix = f"model.layers.{layer}.mlp.experts.{expert}."
        assert place[prefix + "gate_proj.weight"] == place[prefix + "up_proj.weight"]


def test_what_was_trained_opens_with_from_pretrained(shard, tmp_path):
    batch = make_batch((5, 9, 7))
    before = tensors(shard.publish_weights(0))
    shard.forward_backward(batch, "importance_sampling", {}, None)
    shard.optim_step(AdamParams(learning_rate=1e-2), 20.0)
    published = shard.publish_weights(1)
    moved = [name for name, tensor in tensors(published).items() if not torch.equal(tensor, before[name])]
    assert any(".mlp.experts." in name for name in moved)
    assert any(name.endswith(".mlp.gate.weight") for name in moved), "the router learns too"

    shard.save_weights(tmp_path / "saved", published.manifest.entries, published.source)
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    logits = reopened(torch.from_numpy(batch.tokens[:5]).long()[None]).logits[0] / batch.temperatures[0]
    targets = torch.from_numpy(batch.columns["target_tokens"][:5]).long()
    expected = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].detach().numpy()
    output = shard.forward(batch)
    start = sum(int(batch.lengths[d]) for d in output.datums[: output.datums.index(0)])
    np.testing.assert_allclose(output.logprobs[start : start + 5], expected, atol=1e-5)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["num_experts_per_tok"] == 2
