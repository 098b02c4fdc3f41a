"""Layers whose activations wait in host memory: the same bits as layers that keep them, fewer bytes on the device."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from trainer_support import make_batch, make_model

from memory import ACTIVATIONS, HOST, LiveBytes
from trainer import mesh
from trainer.host_activations import HostActivations
from trainer.transfers import COUNTS
from trireme.core.types import AdamParams

LAYERS = 5
LENGTHS = (30, 28, 30, 29)
BUDGET = 64


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    families = ("qwen3", "qwen3_moe")
    return {name: make_model(tmp_path_factory.mktemp("model"), name, True, LAYERS) for name in families}


def trained(one):
    """Returns log-probabilities and gradients of two steps, the second with adapters that differ from 0."""
    batch = make_batch(LENGTHS)
    for offset in batch.offsets[:-1]:
        batch.tokens[offset : offset + 16] = 7
    results = []
    for _ in range(2):
        output = one.forward_backward(batch, "ppo", {}, None)
        results += [torch.from_numpy(output.logprobs), *(p.grad.full_tensor().clone() for p in one._parameters)]
        one.optim_step(AdamParams(1e-2), 40.0)
    return results


WAYS = {
    "rows": {},
    "packed": {"trainer__packing": "packed"},
    "shared prefixes": {"trainer__share_prefixes": "on"},
    "experts": {"trainer__packing": "packed"},
    "bfloat16": {"model__dtype": "bfloat16", "trainer__packing": "packed"},
    "adapters": {"trainer__lora": {"rank": 4, "alpha": 8}, "trainer__packing": "packed"},
    "adapters with dropout": {"trainer__lora": {"rank": 4, "alpha": 8, "dropout": 0.3}},
    "weights freed after each layer": {"trainer__reshard_after_forward": True},
    "compiled": {"trainer__compile": True, "trainer__packing": "packed"},
}


@pytest.mark.parametrize("way", [pytest.param(n, marks=pytest.mark.long) if n == "compiled" else n for n in WAYS])
def test_a_step_has_the_same_bits(shard, models, monkeypatch, way):
    options = {"trainer__micro_batch_tokens": BUDGET, **WAYS[way]}
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = models["qwen3_moe" if way == "experts" else "qwen3"]
    torch.manual_seed(0)
    expected = trained(shard(model, trainer__checkpointing=False, **options))
    monkeypatch.setattr(mesh, "host_room", lambda *_: 0)
    one = shard(model, trainer__checkpointing="offload", **options)
    assert one._sharding.memory.host_layers(BUDGET) == LAYERS - 2
    before = COUNTS.activation_bytes
    torch.manual_seed(0)
    results = trained(one)
    assert COUNTS.activation_bytes > before
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


SHAPE = (2, 32, 64)
NBYTES = 4 * 2 * 32 * 64


class Layer(torch.nn.Module):
    """Saves five tensors of NBYTES, one of them twice, and its weight, a tensor of all layers, and two numbers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, hidden, positions):
        first = (hidden.transpose(0, 1) * positions).transpose(0, 1).sin()
        second = (first @ self.weight).exp().view(-1, 64)
        return second.mul(second.flip(0)).view(SHAPE) * hidden.mean().cos()


def gradients(layers, host, wrap=lambda layer: layer.forward):
    """Computes a pass of `layers`, by `host` if there is one. Returns the gradients of input and weights."""
    torch.manual_seed(0)
    hidden = torch.randn(SHAPE, requires_grad=True)
    positions = torch.randn(32, 2, 64)
    out = hidden
    for number, layer in enumerate(layers):
        forward = wrap(layer)
        out = host.run(layer, number, forward, out, positions) if host else forward(out, positions)
    return torch.autograd.grad(out.sum(), [hidden, *(layer.weight for layer in layers)])


def recomputed(layer):
    return partial(checkpoint, layer.forward, use_reentrant=False)


def counted(number, on_host):
    """Returns the most bytes that `number` layers hold on the device and on the host, with the activations of the first
    `on_host` on the host; and what they hold there after the pass."""
    layers = [Layer() for _ in range(number)]
    host = HostActivations(torch.device("cpu"), lambda tokens: on_host) if on_host else None
    with LiveBytes() as count:
        with count.moment("pass"):
            result = gradients(layers, host)
        del result
        return count.peaks["pass"].device, count.peaks["pass"].host, count._now[HOST], count._now[ACTIVATIONS]


def test_bytes_alive_for_each_layer():
    """A layer more takes device memory where layers are kept, and host memory alone where they are not."""
    weight = 4 * 64 * 64
    kept = [counted(number, 0) for number in (6, 8)]
    moved = [counted(number, number - 2) for number in (6, 8)]
    saved = (kept[1][0] - kept[0][0]) // 2
    assert saved == 5 * NBYTES + 2 * 4
    assert moved[1][0] - moved[0][0] == 2 * (weight + weight), "weights and their gradients"
    assert moved[1][0] - 8 * (weight + weight) < 3 * saved, "two layers, and gradients on their way"
    assert [counts[1] for counts in moved] == [4 * 5 * NBYTES, 6 * 5 * NBYTES]
    assert counted(8, 3)[1] == 3 * 5 * NBYTES
    assert [counts[2:] for counts in (*kept, *moved)] == 2 * [(0, 6 * weight), (0, 8 * weight)], "nothing but weights"


class LateStream:
    """A stream whose copies are made as late as possible: when another stream waits for them."""

    def __init__(self):
        self.copies = []

    def wait_stream(self, stream):
        pass

    def record_event(self):
        return self, len(self.copies)

    def wait_event(self, event):
        stream, number = event
        for position in range(number):
            if stream.copies[position]:
                into, values = stream.copies[position]
                into.copy_(values)
                stream.copies[position] = None


class LateStreams(TorchDispatchMode):
    """PyTorch's functions for streams. In a stream's block, copies are put off, and their targets are NaN."""

    Stream = LateStream

    def current_stream(self):
        return LateStream()

    def stream(self, stream):
        self.into = stream
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.into.copies.append(args[:2])
            return args[0].fill_(torch.nan)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wrap", [lambda layer: layer.forward, recomputed], ids=["eager", "recomputed"])
@pytest.mark.parametrize("on_host", [1, 3, 4, 5, 6])
def test_the_device_waits_for_each_copy_before_it_needs_the_values(monkeypatch, on_host, wrap):
    """Also where all layers move, and where a forward pass has no backward pass."""
    layers = [Layer() for _ in range(6)]
    expected = gradients(layers, None)
    streams = LateStreams()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda device: streams)
        host = HostActivations(torch.device("cpu"), lambda tokens: on_host)
    hidden = torch.randn(SHAPE, requires_grad=True)
    for number, layer in enumerate(layers[:3]):
        hidden = host.run(layer, number, layer.forward, hidden, torch.ones(32, 2, 64))
    for _ in range(2):
        results = gradients(layers, host, wrap)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
