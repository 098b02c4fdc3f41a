"""A model that does not compute what its own forward pass computes is refused by its behaviour, or laid out in rows."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from shard_support import save

# The tiny models and batches are the end-to-end tests' too.
from trainer_support import make_batch, make_model, unsharded_logprobs
from transformers import AutoConfig, AutoModelForCausalLM

from trainer import logprobs, proof, shared_attention, shared_rows
from trainer import model as trainer_model
from trainer.batching import scatter_outputs
from trainer.logprobs import add_token_logprobs
from trainer.proof import Agreement, decide, prove, prove_reload
from trainer.twin import make_twin
from trireme.core.class_tensors import persistent_buffers
from trireme.core.errors import BadInput
from trireme.core.types import AdamParams
from trireme.core.weights import check_received, weights_digest
from trireme.transports.packing import tensor_of

LENGTHS = (5, 9, 1, 7, 9)
CPU = torch.device("cpu")

LEAKING = {
    "stablelm": {},  # its layers drop the arguments that say where sequences begin
    "nemotron": {"head_dim": 16, "num_key_value_heads": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
}
"""Architectures whose packed sequences see each other, with a layer of each kind."""

OTHER_LOGITS = {
    "falcon_h1": {"lm_head_multiplier": 0.25},
    "recurrent_gemma": {},
    "gemma2": {"final_logit_softcapping": 30.0},
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
}
"""Architectures that change the product of hidden states and output matrix."""

BUFFERS = {
    "glm4_moe": ("e_score_correction_bias", {}),
    "dots1": ("e_score_correction_bias", {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}),
    "apertus": ("act_fn.beta", {}),
    "gemma4_text": ("layer_scalar", {}),
}
"""Architectures with persistent buffers: the last part of the name of one, and sizes that have no default."""


def twin_of(kind, **options):
    return make_twin(AutoConfig.for_model(kind, **options))


def saved(kind, directory, **options):
    """Saves a small model with weights and buffers of its own, and a tokenizer; returns the directory."""
    make_model(directory, "llama", False)  # whose tokenizer is taken
    (directory / "model.safetensors").unlink()
    twin_of(kind, **options).save_pretrained(directory)
    return str(directory)


def agreement(kind, **options):
    twin = add_token_logprobs(twin_of(kind, **options))
    return prove(twin, CPU, torch.float32, packed=True, shares=True, magnified=30.0)


@pytest.mark.parametrize("kind", LEAKING)
def test_sequences_that_see_each_other_in_a_packed_row_are_noticed(kind):
    agreed = agreement(kind, **LEAKING[kind])
    assert agreed.not_rows == ""
    assert "when the sample before it changes" in agreed.not_packed
    assert agreed.leak > 100 * agreed.tolerance
    assert "row of distinct tokens" in agreed.not_shared


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma3_text", "deepseek_v3", "opt"])
def test_what_can_be_packed_agrees_within_rounding(kind):
    agreed = agreement(kind)
    assert (agreed.not_rows, agreed.not_packed) == ("", "")
    assert max(agreed.rows, agreed.packed, agreed.leak, agreed.future) < agreed.tolerance / 2
    if kind == "deepseek_v3":
        assert "Q/K/V should have the same head size" in agreed.not_shared
    else:
        assert agreed.not_shared == ""
        assert max(agreed.shared, agreed.shared_leak) < agreed.tolerance / 2


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_a_wrong_place_in_a_row_of_distinct_tokens_is_noticed(kind, monkeypatch):
    """A path that is off by one; a mask aligned at the top left; targets of one place taken as one."""
    right = shared_rows.SharedRow.arguments

    def off_by_one(row, to_device):
        arguments = right(row, to_device)
        return arguments | {"path": (arguments["path"] + 1).clamp(max=len(row.index) - 1)}

    def top_left(query, path, own_starts, starts, window):
        for own, along, _ in groups(query, path, own_starts, starts, window):
            hidden = torch.ones(own.shape[1], along.shape[1]).tril() == 0
            yield own, along, torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)

    def as_one(rows, bounds, device):
        span, row = targets_of(rows, bounds, device)
        return span, row.clamp(max=0) if bounds is not None else row

    groups = shared_attention._groups
    targets_of = logprobs._targets_of
    for module, name, wrong in (
        (shared_rows.SharedRow, "arguments", off_by_one),
        (shared_attention, "_groups", top_left),
        (logprobs, "_targets_of", as_one),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong)
            assert "row of distinct tokens" in agreement(kind).not_shared, name


@pytest.mark.parametrize("kind", ["gpt_oss", "bloom"])
def test_what_attention_is_given_beyond_packed_rows_is_noticed(kind):
    """Sinks, and a bias for each distance."""
    agreed = agreement(kind)
    assert agreed.not_rows == ""
    assert agreed.not_packed


@pytest.mark.parametrize("kind", OTHER_LOGITS)
def test_logits_that_are_not_a_product_are_noticed(kind):
    assert "of the model's own logits" in agreement(kind, **OTHER_LOGITS[kind]).not_rows


def test_a_model_that_sees_later_tokens_is_noticed():
    assert "when a later token changes" in agreement("bert").not_rows


def test_packed_rows_that_leak_are_refused_by_name(shard, tmp_path):
    with pytest.raises(BadInput, match=r"(?s)packing = packed for StableLmForCausalLM.*moves by.*--trainer.packing"):
        shard(saved("stablelm", tmp_path), trainer__packing="packed")


def test_a_packed_row_that_fails_half_way_leaves_a_sharded_model_as_it_was(shard, tmp_path):
    one, batch = shard(saved("gemma2", tmp_path, final_logit_softcapping=None)), make_batch(LENGTHS)
    before = scatter_outputs(batch, [one.forward(batch)])
    proved = prove(one._model, CPU, torch.float32, packed=True)
    assert proved.packed == math.inf
    assert "a packed row cannot be computed (BadInput: Gemma2Attention uses a soft cap" in proved.not_packed
    np.testing.assert_array_equal(scatter_outputs(batch, [one.forward(batch)]), before)
    one.forward_backward(batch, "importance_sampling", {}, None)
    assert one.optim_step(AdamParams(), 1.0).metrics["grad_norm"] > 0


def test_where_packing_is_chosen_such_a_model_is_computed_in_rows_and_it_is_said(shard, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_model, "has_kernel", lambda device, dtype: True)  # so that auto packs, as on GPUs
    source, batch = saved("stablelm", tmp_path), make_batch(LENGTHS)
    one = shard(source)
    assert not one.proof.packed
    assert "StableLmForCausalLM" in one.proof.text
    message, notice = one.shown()
    assert (message.startswith(one.proof.text), notice) == (True, one.proof.notice)
    assert notice.startswith(f"rows are padded, not packed: {one.proof.why_rows}; common prefixes are computed for")
    assert "a sample of a packed row moves by" in one.proof.why_rows
    unsharded = AutoModelForCausalLM.from_pretrained(source)
    computed = scatter_outputs(batch, [one.forward(batch)])
    np.testing.assert_allclose(computed, unsharded_logprobs(unsharded, batch).detach().numpy(), atol=1e-5)


def test_a_model_that_can_be_packed_is(shard, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_model, "has_kernel", lambda device, dtype: True)
    one = shard(saved("qwen2", tmp_path))
    assert one.proof.packed
    assert "rows are packed and computed by FlashAttention 2; 4 cannot be used here (" in one.proof.text


@pytest.mark.parametrize("kind", BUFFERS)
def test_persistent_buffers_are_published_saved_and_opened_again(shard, tmp_path, kind):
    ending, sizes = BUFFERS[kind]
    source = saved(kind, tmp_path / "source", **sizes)
    stored = load_file(Path(source) / "model.safetensors")
    buffers = [name for name in stored if name.endswith(ending)]
    assert buffers, "the class saves them"
    one, batch = shard(source), make_batch((9, 6))
    one.forward_backward(batch, "importance_sampling", {}, None)
    one.optim_step(AdamParams(learning_rate=1e-2), 20.0)
    published = one.publish_weights(1)
    entries = {entry.name: entry for entry in published.manifest.entries}
    assert {name: entry.shape for name, entry in entries.items()} == {n: tuple(t.shape) for n, t in stored.items()}
    one.save_weights(tmp_path / "saved", published.manifest.entries, published.source)
    weights = {}
    for file in (tmp_path / "saved").glob("*.safetensors"):
        weights |= load_file(file)
    for name in buffers:
        assert torch.equal(weights[name], stored[name].float()), name
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    expected = unsharded_logprobs(reopened, batch).detach().numpy()
    np.testing.assert_allclose(scatter_outputs(batch, [one.forward(batch)]), expected, atol=1e-5)


def test_buffers_return_with_the_state(shard, tmp_path):
    source = saved("apertus", tmp_path / "source")
    save(shard(source), tmp_path / "trainer")
    two = shard(source)
    buffers = {name: buffer.clone() for name, buffer in persistent_buffers(two._model).items()}
    for buffer in persistent_buffers(two._model).values():
        buffer += 1
    two.load_state(tmp_path / "trainer", [])
    assert buffers
    for name, buffer in persistent_buffers(two._model).items():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("kind", ["mixtral", "gpt_neox", "gpt_oss", "qwen3_moe"])
def test_tensors_are_published_under_their_names_in_the_files(shard, tmp_path, kind):
    """In memory they have other names, or several are one."""
    source = saved(kind, tmp_path)
    stored, published = load_file(Path(source) / "model.safetensors"), shard(source).publish_weights(0)
    check_received(published.manifest, published.source)
    assert published.identity.digest == weights_digest(published.manifest.entries)
    assert {e.name: e.shape for e in published.manifest.entries} == {n: tuple(t.shape) for n, t in stored.items()}
    for entry in published.manifest.entries:
        assert torch.equal(tensor_of(entry, published.source), stored[entry.name]), entry.name


def test_what_is_written_without_a_buffer_is_refused(monkeypatch):
    twin = twin_of("glm4_moe")
    prove_reload(twin)
    whole = proof.gathered_units
    units = [[(n, t) for n, t in unit if "e_score" not in n] for unit in whole(twin)]
    monkeypatch.setattr(proof, "gathered_units", lambda _: iter(units))
    with pytest.raises(BadInput, match="e_score_correction_bias"):
        prove_reload(twin)


def test_what_opens_as_another_model_is_refused(monkeypatch):
    twin = twin_of("llama")
    units = [[(n, t * 1.01 if n.endswith("norm.weight") else t) for n, t in u] for u in proof.gathered_units(twin)]
    monkeypatch.setattr(proof, "gathered_units", lambda _: iter(units))
    with pytest.raises(BadInput, match=r"LlamaForCausalLM.*log-probabilities change by"):
        prove_reload(twin)


def test_files_with_other_tensors_are_refused_by_name(shard, tmp_path):
    file = Path(saved("llama", tmp_path)) / "model.safetensors"
    save_file({**load_file(file), "extra": torch.ones(3)}, file, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"(?s)LlamaForCausalLM.*has in addition 1: extra"):
        shard(str(tmp_path))


def test_the_proof_changes_nothing(shard, tmp_path, monkeypatch):
    """A step, and the random numbers after it, bit for bit those of a shard that proved nothing; with dropout."""
    source = saved("qwen3", tmp_path)
    options = {"trainer__lora": {"rank": 8, "dropout": 0.3}, "trainer__checkpointing": True, "model__dtype": "bfloat16"}

    def step():
        one = shard(source, **options)
        one.forward_backward(make_batch(LENGTHS), "importance_sampling", {}, None)
        one.optim_step(AdamParams(learning_rate=1e-2), 20.0)
        return one.publish_weights(1).identity.digest, torch.rand(1).item(), np.random.random()

    proved = step()
    unproved = proof.Proof("none", packed=False, model=Agreement(1.0, 0.0), twin="")
    monkeypatch.setattr("trainer.shard.prove_models", lambda *_: unproved)
    assert step() == proved


def test_prefixes_are_shared_if_both_the_model_and_its_twin_can():
    good = Agreement(tolerance=0.1, rows=0.01, shared=0.02)
    leaking = Agreement(tolerance=1e-4, rows=0.0, shared=1e-5, shared_leak=3.0)
    differing = Agreement(tolerance=1e-4, rows=0.0, shared=3.0)
    broken = Agreement(tolerance=0.1, rows=0.0, shared=math.inf, shared_error="TypeError: no such argument")
    assert decide("A", good, good, packing="auto").shares
    assert "common prefixes can be computed once" in decide("A", good, good, packing="auto").text
    assert not decide("A", Agreement(0.1, 0.0), good, packing="auto").shares, "not tried"
    for model, twin in ((good, leaking), (differing, good), (broken, "no twin")):
        decided = decide("A", model, twin, packing="auto")
        assert not decided.shares
        assert decided.notice.startswith("common prefixes are computed for each sequence: ")
        with pytest.raises(BadInput, match="share_prefixes = on for A"):
            decide("A", model, twin, packing="auto", share="on")


def test_a_verdict_needs_both_the_model_and_its_twin():
    good = Agreement(tolerance=0.1, rows=0.01, packed=0.02)
    leaking = Agreement(tolerance=1e-4, rows=0.0, packed=3.0, leak=3.0)
    broken = Agreement(tolerance=0.1, rows=0.0, packed=math.inf, error="TypeError: no such argument")
    assert decide("A", good, good, packing="auto").packed
    untried = decide("A", good, "sizes do not fit", packing="auto")
    assert untried.packed
    assert untried.text.endswith("(not tried on a small twin: sizes do not fit)")
    assert not decide("A", Agreement(0.1, 0.0), good, packing="auto").packed
    for model, twin in ((good, leaking), (leaking, good), (broken, "no twin")):
        decided = decide("A", model, twin, packing="auto")
        assert not decided.packed
        assert decided.why_rows
        with pytest.raises(BadInput, match="packing = packed for A"):
            decide("A", model, twin, packing="packed")
    with pytest.raises(BadInput, match=r"A: log-probabilities differ by nan.*in a small twin"):
        decide("A", good, Agreement(tolerance=1e-4, rows=math.nan), packing="rows")
