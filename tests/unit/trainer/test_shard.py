"""One shard alone, in a gloo group of one: what it computes against an unsharded model, and what it publishes."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from shard_support import save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.utils._python_dispatch import TorchDispatchMode

# The tiny models and batches are the end-to-end tests' too.
from trainer_support import make_batch, make_model, unsharded_logprobs
from transformers import AutoModelForCausalLM

from trainer import shard as trainer_shard
from trainer.batching import MicroBatch, scatter_outputs, scatter_sums
from trainer.losses import POLICY, mean_log_ratios, resolve_loss, sum_log_ratios, with_sequence_ratios
from trainer.shard import CANARY_TOKENS, TOKENS_OF_EXPERTS, canary_tokens
from trireme.core.batch import BatchPart
from trireme.core.errors import BadInput
from trireme.core.normalization import Normalization
from trireme.core.types import AdamParams, TokenBatch
from trireme.core.weights import AFTER_CANARY, DECODED, EXACT, ROUNDED, check_canary, check_received
from trireme.transports.packing import tensor_of

LENGTHS = (5, 9, 1, 7, 9)


def importance_sampling(p, columns):
    function, config = resolve_loss("importance_sampling", {})
    return function(p, columns, config)


@pytest.fixture(scope="module", params=[("qwen3", True), ("llama", False)], ids=["qwen3-tied", "llama-untied"])
def model(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), *request.param)


def reference(model, batch):
    """Logprobs of each datum by the unsharded model, one datum at a time, in order: [T], and the model."""
    unsharded = AutoModelForCausalLM.from_pretrained(model)
    return unsharded_logprobs(unsharded, batch), unsharded


@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 10_000])
def test_logprobs_and_gradient_are_those_of_the_unsharded_model_at_the_temperature(shard, model, micro_batch_tokens):
    batch = make_batch(LENGTHS, temperature=0.6)
    one = shard(trainer__micro_batch_tokens=micro_batch_tokens)
    p, unsharded = reference(model, batch)
    np.testing.assert_allclose(scatter_outputs(batch, [one.forward(batch)]), p.detach().numpy(), atol=1e-5)
    output = one.forward_backward(batch, "importance_sampling", {}, None)
    loss, _ = importance_sampling(p, {name: torch.from_numpy(c) for name, c in batch.columns.items()})
    loss.backward()
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    assert output.metrics["loss_tokens:sum"] == sum(LENGTHS) - len(LENGTHS)
    for (name, expected), parameter in zip(unsharded.named_parameters(), one._parameters, strict=True):
        torch.testing.assert_close(parameter.grad.to_local(), expected.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_streamed_parts_accumulate_to_the_gradient_of_the_whole_batch(shard):
    batch, one = make_batch(LENGTHS), shard()
    datums = [batch.datum(d) for d in range(len(batch))]

    def gradients(parts):
        for part in parts:
            one.forward_backward(TokenBatch.from_datums(part), "ppo", {}, None)
        tensors = [parameter.grad.to_local().clone() for parameter in one._parameters]
        for parameter in one._parameters:
            parameter.grad = None
        return tensors

    whole, streamed = gradients([datums]), gradients([datums[3:], datums[:1], datums[1:3]])
    for expected, gradient in zip(whole, streamed, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_update_is_adamw_on_the_normalised_and_clipped_gradient(shard, model):
    batch = make_batch(LENGTHS)
    one = shard()
    p, unsharded = reference(model, batch)
    columns = {name: torch.from_numpy(c) for name, c in batch.columns.items()}
    (importance_sampling(p, columns)[0] / 8.0).backward()
    norm = torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 0.5)
    optimizer = torch.optim.AdamW(unsharded.parameters(), lr=1e-2, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)
    optimizer.step()

    one.forward_backward(batch, "importance_sampling", {}, None)
    response = one.optim_step(AdamParams(1e-2, 0.8, 0.9, 1e-3, 0.1, max_grad_norm=0.5), 8.0)
    assert response.metrics == pytest.approx({"lr": 1e-2, "grad_norm": float(norm)}, rel=1e-5)
    assert float(norm) > 0.5, "nothing was clipped"
    for expected, parameter in zip(unsharded.parameters(), one._parameters, strict=True):
        torch.testing.assert_close(parameter.to_local(), expected, rtol=1e-4, atol=1e-5)
        assert parameter.grad is None


def test_what_is_published_is_the_cast_state_dict_and_its_canary(shard, model):
    published = shard(model__dtype="bfloat16").publish_weights(3)
    check_received(published.manifest, published.source)
    unsharded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    expected = dict(unsharded.named_parameters())
    assert {e.name for e in published.manifest.entries} == expected.keys()
    for e in published.manifest.entries:
        assert torch.equal(tensor_of(e, published.source), expected[e.name])
        assert (e.dtype, e.offset % 64) == ("BF16", 0)
    assert (published.identity.attempt, published.identity.version) == (1, 3)
    tokens = torch.from_numpy(published.manifest.canary.tokens.astype(np.int64))
    hidden = unsharded.base_model(tokens[None, :-1]).last_hidden_state[0]
    logits = hidden.float() @ unsharded.get_output_embeddings().weight.float().T
    logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].detach().numpy()
    assert check_canary(published.manifest, logprobs).largest < 1e-5
    assert published.manifest.canary.bound == ROUNDED
    assert shard().publish_weights(0).manifest.canary.bound == EXACT


def test_missing_columns_are_named(shard):
    batch = make_batch((3,))
    batch.columns.pop("mask")
    with pytest.raises(BadInput, match="missing: mask"):
        shard().forward_backward(batch, "ppo", {}, None)


def test_an_advantage_where_the_mask_is_0_is_refused_by_its_datum(shard):
    batch = make_batch(LENGTHS)
    batch.columns["advantages"][LENGTHS[0]] = 2.0
    with pytest.raises(BadInput, match="datum 1 has an advantage of 2 on its token 0, whose mask is 0"):
        shard().forward_backward(batch, "ppo", {}, None)


@pytest.mark.parametrize("options", [{"micro_batch_tokens": 1}, {}, {"packing": "packed"}])
def test_gspo_of_rollouts_in_several_datums_is_that_of_the_whole_model(shard, model, options):
    whole, wide = make_batch(LENGTHS), {"clip_low_threshold": 0.2, "clip_high_threshold": 5.0}
    batch, divisor = Normalization("sequence_mean_token_mean", None).apply(
        replace(whole, sequences=np.array([0, 1, 1, 0, 2])), "mask"
    )
    one = shard(**{f"trainer__{name}": value for name, value in options.items()})
    _, config = resolve_loss("gspo", wide)
    output = one.forward_summarized(BatchPart.of(batch), "policy", POLICY, partial(sum_log_ratios, config=config))
    means = mean_log_ratios(batch.sequences, scatter_sums(len(batch), [output]))
    one.forward_backward(with_sequence_ratios(batch, means), "gspo", wide, None)

    p, unsharded = reference(model, batch)
    q, a, m = (torch.from_numpy(whole.columns[name]) for name in ("logprobs", "advantages", "mask"))
    loss = torch.zeros(())
    for number in range(3):
        mask = torch.from_numpy(np.repeat(batch.sequences == number, batch.lengths)) & (m != 0)
        s = ((p - q)[mask].mean().detach() + p - p.detach()).exp()[mask]
        loss = loss - torch.minimum(s * a[mask], s.clamp(0.2, 5.0) * a[mask]).mean()
    loss.backward()
    assert divisor == 3
    for (name, expected), parameter in zip(unsharded.named_parameters(), one._parameters, strict=True):
        torch.testing.assert_close(parameter.grad.to_local(), expected.grad, rtol=1e-3, atol=1e-5, msg=name)


def mean_over_the_micro_batch(p, columns, config):
    """A loss that divides by the mask's sum, as a user's may: 0 / 0 where no token counts."""
    mask = columns["mask"]
    mean = (mask * columns["advantages"] * p).sum() / mask.sum()
    return -mean, {"mean_of_p:mean": float((mask * p.detach()).sum() / mask.sum())}


def test_a_custom_loss_is_not_asked_where_no_token_counts(shard, monkeypatch):
    """In fillers, and in micro-batches of masked datums; metrics are means over tokens, not over micro-batches."""
    loss, batch = f"{__name__}:mean_over_the_micro_batch", make_batch(LENGTHS)
    assert not batch.columns["mask"][batch.offsets[2] : batch.offsets[3]].any(), "datum 2 has no token that counts"
    one = shard(trainer__micro_batch_tokens=1)
    plan = [*one._micro_batches(batch.find_forest()), MicroBatch((0,), filler=True)]
    monkeypatch.setattr(one, "_micro_batches", lambda _: plan)
    output = one.forward_backward(batch, loss, {}, None)
    logprobs, mask = scatter_outputs(batch, [output]), batch.columns["mask"]
    assert output.suspects == ()
    assert output.metrics["mean_of_p:mean"] == pytest.approx((logprobs * mask).sum() / mask.sum(), rel=1e-5)
    assert one.optim_step(AdamParams(), 1.0).metrics["grad_norm"] > 0


def test_a_reference_of_other_weights(shard, model, tmp_path):
    other = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    other.save_pretrained(tmp_path)
    reference_config = {"base_model": str(model), "load_checkpoint_path": str(tmp_path)}
    one = shard(trainer__kl={"coef": 0.1, "reference": reference_config})
    batch = make_batch(LENGTHS)
    got = scatter_outputs(batch, [one.forward(batch, "reference")])
    np.testing.assert_allclose(got, reference(tmp_path, batch)[0].detach().numpy(), atol=1e-5)
    assert np.abs(got - reference(model, batch)[0].detach().numpy()).max() > 1e-3


def test_without_a_reference_asking_it_is_refused(shard):
    with pytest.raises(BadInput, match=r"trainer.kl.reference.base_model"):
        shard().forward(make_batch(LENGTHS), "reference")


def test_on_cpus_a_shard_touches_no_gpu_of_the_machine(shard, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    one = shard(cluster__device="cpu")
    assert {p.device.type for p in one._parameters} == {"cpu"}
    assert np.isfinite(one.forward(make_batch(LENGTHS)).logprobs).all()
    save(one, tmp_path / "trainer")
    assert {
        name
        for name in _load_state_dict_from_keys(storage_reader=dcp.FileSystemReader(tmp_path / "trainer"))
        if name.startswith("random.")
    } == {*("random.0.torch", "random.0.numpy", "random.0.python")}


def test_a_shard_that_shall_compute_on_a_gpu_computes_nowhere_else(shard, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        BadInput, match=r"cluster\.device = gpu.*CUDA_VISIBLE_DEVICES is '3'(.|\n)*--cluster\.device cpu"
    ):
        shard(cluster__device="gpu")


@pytest.mark.parametrize(
    ("kind", "environ", "calls"),
    [("gpu", {}, 1), ("gpu", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, 0), ("cpu", {}, 0)],
)
def test_segments_grow_on_a_gpu_unless_the_user_has_chosen_settings(monkeypatch, kind, environ, calls):
    settings = []
    change = torch._C._accelerator_setAllocatorSettings

    def changing(text):
        settings.append(text)
        change(text)

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", changing)
    assert trainer_shard.prepare_device(kind, environ).type == {"gpu": "cuda", "cpu": "cpu"}[kind]
    assert settings == ["expandable_segments:True"] * calls
    with pytest.raises(ValueError, match="no_such_setting"):
        change("no_such_setting:True")


class LargestFloat64(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            self.numbers = max(self.numbers, result.numel())
        return result


def test_the_norm_is_exact_without_a_copy_of_a_gradient_in_float64(monkeypatch):
    monkeypatch.setattr(trainer_shard, "SQUARED_AT_ONCE", 64)
    gradients = [torch.randn(30, 40), torch.randn(7), torch.empty(0, 5), torch.full((), 3.0)]
    with LargestFloat64() as largest:
        squares = trainer_shard.sum_of_squares(gradients)
    expected = sum(g.numpy().astype(np.float64).__pow__(2).sum() for g in gradients)
    assert float(squares) == pytest.approx(expected, rel=1e-14)
    assert 0 < largest.numbers <= 64


@pytest.mark.parametrize(
    ("max_seq_len", "experts", "length"),
    [(1024, False, CANARY_TOKENS), (1024, True, TOKENS_OF_EXPERTS), (20, False, 14), (8, True, 2)],
)
def test_what_follows_the_canary_fits_into_the_engine(max_seq_len: int, experts: bool, length: int) -> None:
    """After it come a token of its prefill, DECODED of decode steps, and one of the prefill of all."""
    tokens = canary_tokens(64, max_seq_len, experts=experts)
    assert len(tokens) == length
    assert length + 1 + DECODED + 1 == length + AFTER_CANARY <= max_seq_len
