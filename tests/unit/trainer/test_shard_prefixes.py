"""What a shard computes with shared prefixes is what it computes with each sequence whole."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prefix_support import check_same_gradients, datum, fill, gradients_of, make_forest, margin_of_experts, norm_of
from shard_support import save

# The tiny models are the end-to-end tests' too.
from trainer_support import VOCAB, make_model
from transformers import MistralConfig, MistralForCausalLM

from memory import PASS, LiveBytes
from trainer import proof
from trainer.batching import scatter_outputs
from trireme.core.batch import BatchPart
from trireme.core.errors import BadInput
from trireme.core.types import AdamParams, TokenBatch
from trireme.plan.memory import PLACE_BYTES

LORA = {"rank": 4, "alpha": 8.0}
MODELS = {
    "qwen3-tied": ("qwen3", True, {}),
    "llama": ("llama", False, {}),
    "qwen3-moe": ("qwen3_moe", False, {}),
    "mistral-window": ("mistral", False, {"sliding_window": 6}),
    "lora": ("llama", True, {}),
}
TIE = 1e-5
"""Rounding may choose another expert for a token if the logits of two are as close."""


@pytest.fixture(scope="module", params=MODELS)
def source(request, tmp_path_factory):
    family, tied, sizes = MODELS[request.param]
    directory = tmp_path_factory.mktemp("model")
    if family == "mistral":
        make_model(directory, "llama", tied)  # for its tokenizer and sizes
        (directory / "model.safetensors").unlink()
        torch.manual_seed(1)
        shared = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
        config = MistralConfig(vocab_size=VOCAB, max_position_embeddings=128, **shared, **heads, **sizes)
        MistralForCausalLM(config).save_pretrained(directory)
    else:
        make_model(directory, family, tied, **sizes)
    return str(directory), {"lora": LORA} if request.param == "lora" else {}


def make(shard, source, **options):
    """Returns a shard of the model, whose adapters change what it computes."""
    directory, adapters = source
    one = shard(directory, trainer={**options, **adapters})
    if adapters:
        fill(one, 1)
    return one


@pytest.mark.parametrize("budget", [10_000, 45])
def test_log_probabilities_and_gradients_are_those_of_whole_sequences(shard, source, budget):
    """A batch in which the last chosen expert and the next one of a token nearly tie is left out."""
    one = make(shard, source, share_prefixes="off")
    batch = next(batch for batch in map(make_forest, range(9)) if margin_of_experts(one, batch) > TIE)
    results = {}
    for share in ("off", "on"):
        one = make(shard, source, share_prefixes=share, micro_batch_tokens=budget)
        assert one._sharding.shares == (share == "on")
        assert any(micro.shared for micro in one._micro_batches(batch.find_forest())) == (share == "on")
        logprobs = scatter_outputs(batch, [one.forward(batch)])
        for wants_logprobs in (True, False):
            output = one.forward_backward(batch, "ppo", {}, None, wants_logprobs)
            results[share, wants_logprobs] = output, gradients_of(one)
        results[share] = logprobs, scatter_outputs(batch, [results[share, True][0]])
        assert one._model.config._attn_implementation == "sdpa", "whole sequences are computed as before"
    for shared, flat in zip(results["on"], results["off"], strict=True):
        np.testing.assert_allclose(shared, flat, atol=1e-5)
    for wants_logprobs in (True, False):
        output, gradients = results["on", wants_logprobs]
        flat_output, flat_gradients = results["off", wants_logprobs]
        check_same_gradients(gradients, flat_gradients)
        assert output.metrics == pytest.approx(flat_output.metrics, rel=1e-5)
    check_same_gradients(results["off", False][1], results["off", True][1])


def test_layers_that_are_computed_again_compute_the_same(shard):
    """The model still has the attention of packed rows when its backward pass computes the layers again."""
    batch = make_forest()
    other = shard(trainer={"share_prefixes": "off", "checkpointing": False})
    other.forward_backward(batch, "ppo", {}, None)
    flat = gradients_of(other)
    one = shard(trainer={"share_prefixes": "on", "checkpointing": True})
    one.forward_backward(batch, "ppo", {}, None)
    check_same_gradients(gradients_of(one), flat)


def test_equal_steps_have_the_same_bits_also_after_a_resume(shard, tmp_path):
    """The second run is loaded from a save between its steps."""
    steps = []
    for loads in (False, True):
        one = shard(trainer__share_prefixes="on", deterministic=True)
        for seed in range(3):
            if seed == 1:
                path = tmp_path / str(loads)
                save(one, path)
            if seed == 1 and loads:
                one = shard(trainer__share_prefixes="on", deterministic=True)
                one.load_state(path, [])
            output = one.forward_backward(make_forest(seed), "ppo", {}, None)
            assert output.distinct < output.tokens
            update = one.optim_step(AdamParams(1e-2, weight_decay=0.1), 8.0).metrics
            weights = one.publish_weights(seed).identity.digest
            steps.append((output.logprobs.tobytes(), output.metrics, update, weights))
    assert steps[:3] == steps[3:]
    assert steps[0] != steps[1]


@st.composite
def trees(draw):
    """Returns datums of one or two trees with 1 to 5 places where they branch."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    sequences = []
    for _ in range(draw(st.integers(1, 2))):
        tokens = rng.integers(0, VOCAB, draw(st.integers(16, 20))).tolist()
        for _ in range(draw(st.integers(1, 5))):
            for _ in range(draw(st.integers(0, 2))):
                sequences.append(tokens + rng.integers(0, VOCAB, draw(st.integers(0, 6))).tolist())
            tokens = tokens + rng.integers(0, VOCAB, draw(st.integers(1, 18))).tolist()
        sequences.append(tokens)
    data = [datum(rng, tokens, (0.7, 1.0)[rng.integers(2)]) for tokens in sequences]
    return TokenBatch.from_datums([data[d] for d in rng.permutation(len(data))])


def test_trees_of_any_depth_are_computed_as_whole_sequences(shard, tmp_path):
    one = shard(make_model(tmp_path / "model", "llama", True, layers=1), trainer={"share_prefixes": "on"})
    shared_tokens = []

    @settings(max_examples=30, deadline=None)
    @given(trees(), st.sampled_from([50, 200, 10_000]))
    @example(make_forest(), 10_000)
    def check(batch, budget):
        one._config = one._config.model_copy(
            update={"trainer": one._config.trainer.model_copy(update={"micro_batch_tokens": budget})}
        )
        results = []
        for shares in (True, False):
            one._sharding.shares = shares
            output = one.forward_backward(batch, "importance_sampling", {}, None)
            results.append((scatter_outputs(batch, [output]), gradients_of(one), output))
        (logprobs, gradients, output), (flat_logprobs, flat_gradients, _) = results
        np.testing.assert_allclose(logprobs, flat_logprobs, atol=1e-5)
        difference = norm_of([a - b for a, b in zip(gradients, flat_gradients, strict=True)])
        assert difference <= 1e-5 * norm_of(flat_gradients)
        shared_tokens.append(output.tokens - output.distinct)

    check()
    assert shared_tokens[0] > 0, "of the example, which comes first; draws may have no common prefix within the budget"


def test_the_arithmetic_at_the_peak_counts_distinct_tokens(shard):
    one = shard(trainer__share_prefixes="on")
    one._peak_flops = 1.0
    batch = make_forest()
    shared = one.forward_backward(batch, "ppo", {}, None).peak_s
    other = shard(trainer__share_prefixes="off")
    other._peak_flops = 1.0
    flat = other.forward_backward(batch, "ppo", {}, None).peak_s
    forest = batch.find_forest()
    saving = forest.lengths.sum() / (forest.lengths - forest.shared).sum()
    assert flat / shared == pytest.approx(saving, rel=0.05)


@pytest.mark.parametrize("loss_fn", ["ppo", "gspo"])
def test_the_plan_knows_the_bytes_of_columns(shard, loss_fn):
    """Counted with more and more equal datums, which add nothing else; in attention they have no query."""
    one = shard(trainer__share_prefixes="on")
    rng = np.random.default_rng(0)
    equal = datum(rng, rng.integers(0, VOCAB, 120), 1.0)
    peaks = []
    for number in (100, 200):
        count = LiveBytes()
        with count, count.moment(PASS):
            output = one.forward_backward(TokenBatch.from_datums([equal] * number), loss_fn, {}, None)
        assert (output.tokens, output.distinct) == (120 * number, 120)
        peaks.append(count.peaks[PASS].device)
    assert 0.8 * PLACE_BYTES < (peaks[1] - peaks[0]) / (100 * 120) <= PLACE_BYTES


def test_a_model_that_cannot_is_computed_whole_aloud_or_refused(shard, monkeypatch):
    leaking = proof.Agreement(tolerance=1e-4, rows=0.0, shared=2.0, shared_leak=2.0)
    monkeypatch.setattr(proof, "_prove_kind", lambda config, packed, shares: leaking)
    one = shard()
    assert not one._sharding.shares
    assert one.shown()[1] == (
        "common prefixes are computed for each sequence: a sample of a row of distinct tokens moves by 2 when another "
        "one changes (in a small twin of it, float32)"
    )
    batch = make_forest()
    assert not any(micro.shared for micro in one._micro_batches(batch.find_forest()))
    one.forward_backward(BatchPart.of(batch), "ppo", {}, None)
    assert one.optim_step(AdamParams(), 1.0).metrics["grad_norm"] > 0
    with pytest.raises(BadInput, match=r"(?s)share_prefixes = on for Qwen3ForCausalLM.*--trainer.share-prefixes out"):
        shard(trainer__share_prefixes="on")


def test_with_a_dropout_sequences_are_computed_whole(shard):
    one = shard(trainer__lora=LORA | {"dropout": 0.1})
    assert not one._sharding.shares
    assert not any(micro.shared for micro in one._micro_batches(make_forest().find_forest()))
