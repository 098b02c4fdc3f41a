"""Packed rows: no token sees another sequence, whichever function computes them."""

import ast
import itertools
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import _fa4, _registry, current_flash_attention_impl, restore_flash_attention_impl
from torch.nn.functional import scaled_dot_product_attention

from trainer import attention
from trainer.attention import masked_attention, packed_attention
from trireme.core.errors import BadInput

ROOT = Path(__file__).parents[3]
LENGTHS = (3, 1, 6, 2)
HEADS, KEY_HEADS, DIM = 4, 2, 8
STARTS = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)


def states(batch=1, length=12):
    """In float64: what differs by more than rounding is wrong."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, length, DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def one_by_one(query, key, value, lengths, window=None):
    """Each sequence alone: [1, T, heads, dim]."""
    parts = zip(*(tokens.split(list(lengths), dim=2) for tokens in (query, key, value)), strict=True)
    outputs = []
    for q, k, v in parts:
        back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        mask = (back >= 0) & (back < (window or q.shape[2] + 1))
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True))
    return torch.cat(outputs, dim=2).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_sequences_of_a_row_are_as_if_alone(window):
    inputs, upstream = states(), torch.randn(1, sum(LENGTHS), HEADS, DIM, dtype=torch.float64)
    out, _ = packed_attention(
        nn.Module(), *inputs, None, scaling=0.3, sliding_window=window, cu_seq_lens_q=STARTS, max_length_q=max(LENGTHS)
    )
    expected = one_by_one(*inputs, LENGTHS, window)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(out, inputs, upstream)
    for got, reference in zip(gradients, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-12, atol=1e-12)


def test_what_the_kernel_of_gpus_is_given(monkeypatch):
    """Its documented arguments: tokens first, starts in int32, (-1, 0) for causal, (W - 1, 0) for a window of W."""
    calls = []

    def kernel(query, key, value, starts, key_starts, longest, longest_key, **options):
        assert starts is key_starts
        assert (starts.dtype, longest, longest_key) == (torch.int32, max(LENGTHS), max(LENGTHS))
        assert (query.shape, key.shape) == ((sum(LENGTHS), HEADS, DIM), (sum(LENGTHS), KEY_HEADS, DIM))
        calls.append(options)
        return masked_attention(query, key, value, starts, None, 0.3)

    monkeypatch.setattr(attention, "has_kernel", lambda device, dtype: True)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    for window in (None, 4):
        packed_attention(
            nn.Module(),
            *states(),
            None,
            scaling=0.3,
            sliding_window=window,
            cu_seq_lens_q=STARTS,
            max_length_q=max(LENGTHS),
        )
    assert calls == [{"scale": 0.3, "window_size": (w, 0), "enable_gqa": True} for w in (-1, 3)]


def test_where_there_is_a_kernel():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert attention.has_kernel(gpu, torch.bfloat16)
    assert not attention.has_kernel(gpu, torch.float32)
    assert not attention.has_kernel(cpu, torch.bfloat16)


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"dropout": 0.1}])
def test_what_packed_rows_cannot_is_refused(option):
    with pytest.raises(BadInput, match=r"--trainer.packing rows"):
        packed_attention(nn.Module(), *states(), None, **option)


class Kernel:
    """Stands for PyTorch's kernel: right, but for a factor of its output."""

    def __init__(self, factor=1.0):
        self.factor, self.removed = factor, False

    def __call__(self, query, key, value, starts, key_starts, longest, longest_key, **options):
        return self.factor * masked_attention(query, key, value, starts, None, options["scale"])

    def remove(self):
        self.removed = True


@pytest.fixture
def register(monkeypatch):
    """Registers kernels as versions of FlashAttention, as packages of them do."""

    def register(**kernels):
        for name, kernel in kernels.items():
            monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, lambda kernel=kernel: kernel)

        def run(*arguments, **options):
            return kernels[current_flash_attention_impl()](*arguments, **options)

        monkeypatch.setattr(attention, "varlen_attn", run)

    yield register
    if current_flash_attention_impl():
        restore_flash_attention_impl()


SIZES = torch.device("cpu"), torch.bfloat16, HEADS, KEY_HEADS, DIM


def test_kernels_that_compute_something_else_are_given_up_aloud(register):
    wrong = Kernel(factor=1.1)
    register(FA4=wrong, FA3=Kernel())
    chosen = attention.choose_kernel(*SIZES)
    assert chosen.startswith("FlashAttention 3; 4 cannot be used here (RuntimeError: its output differs by 0.1")
    assert (current_flash_attention_impl(), wrong.removed) == ("FA3", True)
    restore_flash_attention_impl()
    right = Kernel()
    register(FA4=right, FA3=wrong)
    assert attention.choose_kernel(*SIZES) == "FlashAttention 4", "the newest is the first"
    assert current_flash_attention_impl() == "FA4"
    assert not right.removed
    restore_flash_attention_impl()
    register(FA4=wrong, FA3=wrong)
    chosen = attention.choose_kernel(*SIZES)
    assert chosen.startswith("FlashAttention 2; 4 cannot be used here (")
    assert "; 3 cannot be used here (RuntimeError: its output differs by 0.1" in chosen
    assert current_flash_attention_impl() is None


def test_a_kernel_that_is_not_installed_is_named():
    assert "FlashAttention 2; 4 cannot be used here (ModuleNotFoundError: " in attention.choose_kernel(*SIZES)


def test_a_kernel_that_is_wrong_with_a_common_prefix_is_given_up(register, monkeypatch):
    right = attention.shared_attention

    def shared(*arguments):
        out, normalizers = right(*arguments)
        return 1.1 * out, normalizers

    monkeypatch.setattr(attention, "shared_attention", shared)
    register(FA4=Kernel())
    assert "RuntimeError: its output differs by 0.1" in attention.choose_kernel(*SIZES)


@pytest.mark.long
def test_the_pinned_flash_attention_4_has_what_torch_calls(tmp_path):
    """The package is for GPUs alone, so its source is read: names of arguments, and how many results there are."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), *extras["fa4"]]
    subprocess.run(command, check=True, timeout=300)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        package = ast.parse(wheel.read("flash_attn/cute/interface.py"))
    functions = {node.name: node for node in package.body if isinstance(node, ast.FunctionDef)}
    torch_source = ast.parse(Path(_fa4.__file__).read_text())
    runs = {node.name: node for node in torch_source.body if isinstance(node, ast.FunctionDef)}
    forward, backward = runs["_fa4_run_forward"], runs["_fa4_run_backward"]
    given = {key.value for node in ast.walk(forward) if isinstance(node, ast.Dict) for key in node.keys}
    also_given = {keyword.arg for node in ast.walk(backward) if isinstance(node, ast.Call) for keyword in node.keywords}
    assert len(given) > 10
    assert len(also_given) > 5
    for name, names in (("_flash_attn_fwd", given), ("_flash_attn_bwd", also_given)):
        arguments = functions[name].args
        assert names <= {argument.arg for argument in arguments.args + arguments.kwonlyargs}
    assert ast.unparse(functions["_flash_attn_fwd"].returns) == "Tuple[torch.Tensor, torch.Tensor]"
    first = [argument.arg for argument in functions["_flash_attn_bwd"].args.args[:6]]
    assert first == ["q", "k", "v", "out", "dout", "lse"]
