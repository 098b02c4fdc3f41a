"""A datum's own tokens see all of its tokens up to their own, in a window, and their gradients return to the row."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_support import kernel_on_cpus
from model_support import FACTS
from torch._subclasses import FakeTensorMode
from torch.nn.attention import varlen

from memory import PASS, LiveBytes
from trainer.attention import masked_attention
from trainer.shared_attention import shared_attention, shared_attention_backward
from trainer.shared_rows import SharedRow
from trireme.plan.memory import FLAT_TOKENS, PLACE_BYTES, ModelMemory

OFFSETS = np.array([0, 8, 10, 13, 13 + 4, 13 + 4 + 10])
SHARED = (0, 2, 0, 3, 4)
"""A root of 8 tokens, a datum without own tokens, another root of 3, a branch of it, and a branch of that branch."""


def states(row, key_heads=2):
    torch.manual_seed(0)
    return [torch.randn(len(row.index), heads, 16, requires_grad=True) for heads in (4, key_heads, key_heads)]


def arguments(row):
    return [*map(torch.from_numpy, (row.path, row.own_starts, row.starts)), row.longest_own, row.longest]


def whole(row, query, key, value, window):
    """The attention of each datum whole, of which the own tokens are taken."""
    path = torch.from_numpy(row.path)
    starts = torch.from_numpy(row.starts)
    out = masked_attention(query[path], key[path], value[path], starts, window)
    own = [np.arange(row.starts[d] + shared, row.starts[d + 1]) for d, shared in enumerate(SHARED)]
    return out[np.concatenate(own)]


@pytest.fixture(params=["cpu", "gpu"])
def _device(request):
    """The code for GPUs runs around another kernel, in float64, with the same arguments and results."""
    if request.param == "cpu":
        yield
    else:
        with kernel_on_cpus():
            yield


on_devices = pytest.mark.usefixtures("_device")


@on_devices
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize(("window", "scale"), [(None, None), (3, None), (1, 0.2)])
def test_outputs_and_gradients_are_those_of_whole_datums(window, scale, key_heads):
    row = SharedRow(OFFSETS, np.arange(5), SHARED)
    query, key, value = inputs = states(row, key_heads)
    out, _ = shared_attention(*inputs, *arguments(row), window, scale)
    factor = 1 if scale is None else scale * 16**0.5
    expected = whole(row, factor * query, key, value, window)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, upstream)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=5e-6)


@on_devices
def test_it_is_one_operator_for_autograd_and_the_compiler():
    row = SharedRow(OFFSETS, np.arange(5), SHARED)
    torch.library.opcheck(shared_attention, (*states(row), *arguments(row), 3, 0.2))


@on_devices
def test_gathered_keys_are_not_kept_for_the_backward_pass():
    row = SharedRow(OFFSETS, np.arange(5), SHARED)
    kept = []

    def note(tensor):
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        shared_attention(*states(row), *arguments(row), None, None)
    floats = [shape for shape in kept if len(shape) > 1]
    assert floats
    assert {max(shape) for shape in floats} == {len(row.index)}, "distinct tokens"


@on_devices
def test_in_16_bits_the_gradients_of_many_branches_are_summed_in_float32():
    """Of 128 branches with 1 to 128 tokens of their own after 20 common ones."""
    branches = 128
    offsets = np.cumsum([0, *range(21, 21 + branches)])
    row = SharedRow(offsets, np.arange(branches), [0] + [20] * (branches - 1))
    inputs = [state.detach().bfloat16().requires_grad_() for state in states(row)]
    exact = [state.detach().float().requires_grad_() for state in inputs]
    rounded, _ = shared_attention(*inputs, *arguments(row), None, None)
    expected, _ = shared_attention(*exact, *arguments(row), None, None)
    upstream = torch.ones_like(expected)
    gradients = torch.autograd.grad(rounded, inputs, upstream.bfloat16())
    for gradient, other in zip(gradients[1:], torch.autograd.grad(expected, exact, upstream)[1:], strict=True):
        assert (gradient - other)[:20].norm() < 0.004 * other[:20].norm()


def test_the_plan_knows_the_bytes_of_gathered_keys():
    """Counted with more and more branches of two tokens, in the backward pass: keys, values and their gradients."""
    heads, key_heads, dim = 2, 1, 16
    peaks = []
    for branches in (60, 120):
        offsets = np.arange(branches + 1) * 400
        row = SharedRow(offsets, np.arange(branches), [0] + [398] * (branches - 1))
        query, key, value = (torch.randn(len(row.index), count, dim) for count in (heads, key_heads, key_heads))
        inputs = (query, key, value, *shared_attention(query, key, value, *arguments(row), None, None))
        count = LiveBytes()
        with count, count.moment(PASS):
            shared_attention_backward._init_fn(torch.randn_like(query), *inputs, *arguments(row), None, None)
        peaks.append(count.peaks[PASS].device)
    facts = replace(FACTS, num_kv_heads=key_heads, head_dim=dim)
    planned = ModelMemory(facts, 4, on_gpus=False).flat(1) / FLAT_TOKENS - PLACE_BYTES
    assert planned <= (peaks[1] - peaks[0]) / (60 * 400) < 1.1 * planned


def test_the_kernel_of_gpus_has_the_arguments_with_which_it_is_called():
    """On GPUs the operator calls what PyTorch's own backward pass calls, in the same order: held against its source."""
    names = ["grad_out", "query", "key", "value", "out", "lse", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    names += ["is_causal", "rng_state", "scale", "window_size"]
    schema = torch.ops.torch_attn._varlen_attn_backward.default._schema
    assert [argument.name for argument in schema.arguments] == names
    source = inspect.getsource(varlen)
    assert "is_causal = window_size == (-1, 0)" in source
    assert "(2,), dtype=torch.uint64, device=query.device" in source, "the state of a dropout that is 0"
    forward = list(inspect.signature(varlen.varlen_attn).parameters)
    assert forward[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"return_aux", "scale", "window_size", "enable_gqa"} <= set(forward)
    assert not varlen._should_use_cudnn(0), "cuDNN knows no windows and no groups of query heads"


def test_the_compiler_knows_the_sizes_of_the_kernel_of_gpus():
    """Its docstring has [tokens, heads] for the logarithms, but they are [heads, tokens]."""
    row = SharedRow(OFFSETS, np.arange(5), SHARED)
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value = (state.detach().to("cuda", torch.bfloat16) for state in states(row))
        path, *bounds = (value.cuda() if torch.is_tensor(value) else value for value in arguments(row))
        computed = shared_attention(query, key, value, path, *bounds, None, None)
        options = {"return_aux": varlen.AuxRequest(lse=True), "enable_gqa": True}
        kernel = varlen.varlen_attn(query, key[path], value[path], *bounds, **options)
        shapes = [[(tensor.shape, tensor.dtype) for tensor in outputs] for outputs in (computed, kernel)]
    assert shapes[0] == shapes[1]
    assert shapes[0][1] == ((4, len(row.index)), torch.float32)
