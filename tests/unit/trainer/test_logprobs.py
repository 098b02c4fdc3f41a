"""Log-probabilities in chunks are those of the whole logits, and so are their gradients."""

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer import logprobs
from trainer.logprobs import SelectedLogprobs, add_token_logprobs, token_logprobs, why_unfused
from trireme.core.errors import BadInput

TOKENS, HIDDEN, VOCABULARY = 37, 8, 50


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    temperature = 0.5 + torch.rand(TOKENS, generator=generator)
    return hidden, weight, targets, temperature, torch.randn(TOKENS, generator=generator)


def whole(hidden, weight, targets, temperature):
    scaled = (hidden @ weight.T).float() / temperature[:, None]
    return scaled.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


@pytest.mark.parametrize("chunk", [1, 7 * VOCABULARY, 10**6], ids=["one token", "seven tokens", "all"])
def test_values_and_gradients_are_those_of_the_whole_logits(monkeypatch, chunk):
    monkeypatch.setattr(logprobs, "chunk_logits", lambda free: chunk)
    hidden, weight, targets, temperature, upstream = inputs()
    p = SelectedLogprobs.apply(hidden, weight, targets, temperature)
    gradients = torch.autograd.grad(p, (hidden, weight), upstream)
    expected = whole(hidden, weight, targets, temperature)
    torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-6)
    for got, reference in zip(gradients, torch.autograd.grad(expected, (hidden, weight), upstream), strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-5, atol=1e-5)


def test_what_is_free_on_a_gpu(monkeypatch):
    """Not run on a GPU: PyTorch's answers are made up."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 2**37))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    assert logprobs._free_bytes(torch.device("cuda")) == 110, "what PyTorch holds and does not use counts too"
    for fraction, free in ((50 / 2**37, 30), (10 / 2**37, 0)):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device, fraction=fraction: fraction)
        assert logprobs._free_bytes(torch.device("cuda")) == free, "a replica has the rest"
    assert logprobs._free_bytes(torch.device("cpu")) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert logprobs._free_bytes(torch.device("cuda")) is None, "what is free differs between two runs"


def test_in_bfloat16_sums_are_taken_in_float32(monkeypatch):
    monkeypatch.setattr(logprobs, "chunk_logits", lambda free: VOCABULARY)  # 37 chunks, whose gradients are added up
    hidden, weight, targets, temperature, upstream = inputs(torch.bfloat16)
    p = SelectedLogprobs.apply(hidden, weight, targets, temperature)
    assert p.dtype == torch.float32
    _, gradient = torch.autograd.grad(p, (hidden, weight), upstream)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    reference = torch.autograd.grad(whole(*exact, targets, temperature), exact, upstream)[1]
    assert gradient.dtype == torch.bfloat16
    assert float((gradient - reference).norm() / reference.norm()) < 0.01


def off_by(reference, arguments, head_dtype):
    return float((SelectedLogprobs.apply(*arguments, head_dtype) - reference).abs().max())


def test_a_model_in_bfloat16_has_exact_logits_unless_they_are_asked_for_in_its_dtype(monkeypatch):
    monkeypatch.setattr(logprobs, "CAST_ELEMENTS", 3 * inputs()[0].shape[1])
    *arguments, _ = inputs(torch.bfloat16)
    reference = whole(*(t.detach().double() for t in arguments[:2]), *arguments[2:])
    assert off_by(reference, arguments, torch.float32) < 1e-5
    assert off_by(reference, arguments, torch.bfloat16) > 1e-3


def test_in_float32_nothing_changes_bit_for_bit(monkeypatch):
    """The logits are those of the plain product, in chunks as without, and no other product is asked for."""
    hidden, weight, targets, temperature, upstream = inputs()
    scaled = logprobs._scaled(logprobs._logits(hidden, weight, torch.float32), temperature)
    assert torch.equal(scaled, (hidden @ weight.T) / temperature[:, None])
    p = SelectedLogprobs.apply(hidden, weight, targets, temperature, torch.float32)
    assert torch.equal(p, scaled.gather(-1, targets[:, None])[:, 0] - scaled.logsumexp(-1))
    monkeypatch.setattr(torch, "mm", None)
    torch.autograd.grad(SelectedLogprobs.apply(hidden, weight, targets, temperature), (hidden, weight), upstream)


def test_the_product_that_cuda_has_is_called_as_torch_declares_it():
    """Tensors without memory go the way of CUDA's: torch knows the shape and dtype of the result there too."""
    hidden, weight, targets, temperature, upstream = (t.detach().to("meta") for t in inputs(torch.bfloat16))
    factors = hidden.requires_grad_(), weight.requires_grad_()
    p = SelectedLogprobs.apply(*factors, targets, temperature)
    assert (p.dtype, p.shape) == (torch.float32, (TOKENS,))
    for gradient, of in zip(torch.autograd.grad(p, factors, upstream), factors, strict=True):
        assert (gradient.dtype, gradient.shape) == (torch.bfloat16, of.shape)


def tiny(**options):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=16, num_key_value_heads=1, head_dim=16, **sizes, **options))


def test_a_bias_of_the_output_matrix_counts_and_is_trained():
    model = tiny()
    model.lm_head = nn.Linear(32, 16, bias=True)
    tokens, targets = torch.arange(6)[None], torch.arange(1, 7)[None]
    expected = model(tokens).logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    p = token_logprobs(add_token_logprobs(model), tokens, targets, torch.ones(1, 6))
    torch.testing.assert_close(p, expected)
    reference, got = (torch.autograd.grad(values.sum(), model.lm_head.bias)[0] for values in (expected, p))
    torch.testing.assert_close(got, reference)


def test_a_model_without_an_output_matrix_is_refused():
    with pytest.raises(BadInput, match="Qwen3Model has no output matrix"):
        add_token_logprobs(tiny().model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_temperature_it_is_1(dtype):
    hidden, weight, targets, temperature, upstream = inputs(dtype)
    factors = hidden.requires_grad_(), weight.requires_grad_()
    with_ones, without = (
        SelectedLogprobs.apply(*factors, targets, divisor) for divisor in (torch.ones_like(temperature), None)
    )
    assert torch.equal(with_ones, without)
    gradients = [torch.autograd.grad(p, factors, upstream) for p in (with_ones, without)]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def forward_by_operations(logits, temperatures, targets, rows):
    """Computes what the kernel does, which `test_head_kernels.py` tests."""
    scaled = logits.float() if temperatures is None else logits / temperatures[:, None]
    normalizers = scaled.logsumexp(-1)
    return normalizers, scaled[rows, targets] - normalizers[rows]


def backward_by_operations(logits, temperatures, targets, rows, normalizers, upstream, dtype):
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        _, p = forward_by_operations(leaf, temperatures, targets, rows)
    return torch.autograd.grad(p, leaf, upstream)[0].to(dtype)


@pytest.fixture
def by_operations(monkeypatch):
    """Operations in place of the kernels, which are for GPUs."""
    monkeypatch.setattr(logprobs, "head_forward", forward_by_operations)
    monkeypatch.setattr(logprobs, "head_backward", backward_by_operations)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_agree_are_used(by_operations, dtype):
    assert why_unfused(torch.device("cpu"), dtype, torch.float32, 60) == ""


def test_without_a_gpu_the_kernels_fail_aloud():
    assert "0 active drivers" in why_unfused(torch.device("cpu"), torch.float32, torch.float32, 60)


def test_kernels_that_compute_something_else_are_not_used(by_operations, monkeypatch):
    def without_temperature(logits, temperatures, *others):
        return forward_by_operations(logits, None, *others)

    def with_wrong_targets(logits, temperatures, targets, *others):
        return backward_by_operations(logits, temperatures, targets.roll(1), *others)

    arguments = torch.device("cpu"), torch.bfloat16, torch.float32, 60
    with monkeypatch.context() as patch:
        patch.setattr(logprobs, "head_backward", with_wrong_targets)
        assert why_unfused(*arguments).startswith("a gradient differs by ")
    monkeypatch.setattr(logprobs, "head_forward", without_temperature)
    assert why_unfused(*arguments).startswith("log-probabilities differ by ")


def test_a_model_passes_its_head_to_the_kernels(by_operations, monkeypatch):
    calls = []
    monkeypatch.setattr(logprobs, "head_forward", lambda *args: calls.append(args) or forward_by_operations(*args))
    tokens, targets = torch.arange(6)[None], torch.arange(1, 7)[None]
    model = tiny()
    temperatures = 0.5 + torch.rand(1, 6)
    expected, got = (
        token_logprobs(add_token_logprobs(model, fused=fused), tokens, targets, temperatures) for fused in (False, True)
    )
    assert len(calls) == 1
    torch.testing.assert_close(got, expected)
