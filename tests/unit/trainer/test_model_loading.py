"""A model's values reach the shard as they are stored, read once and cast once; what follows from the memory that is
free changes no bit, or is kept over resumes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from model_support import SMALL
from shard_support import save
from trainer_support import make_batch
from transformers import AutoConfig, AutoModelForCausalLM

from trainer import mesh, model
from trainer.model import Sharding, load_source
from trireme.core.types import AdamParams
from trireme.plan import memory

LENGTHS = (5, 9, 1, 7, 9)


def stored(path, family, dtype, wide=()):
    """A model of this family in files of this dtype; parameters whose names end with one of `wide` in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if not name.endswith(tuple(wide) or "none"):
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(path)
    return str(path)


def mapped(source):
    """Returns for each parameter True if its bytes are still those of the mapped file."""
    files = [line.split() for line in open("/proc/self/maps") if line.rstrip().endswith(".safetensors")]  # noqa: SIM115
    spans = [[int(edge, 16) for edge in line[0].split("-")] for line in files]
    return [any(low <= p.data_ptr() < high for low, high in spans) for p in source.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parameters_stay_in_the_files_as_they_are_stored(tmp_path, dtype):
    source = load_source(stored(tmp_path, "qwen3", dtype))
    assert {p.dtype for p in source.parameters()} == {dtype}
    assert all(mapped(source)), "no copy of the model in memory"


def test_what_is_stored_in_several_dtypes_is_not_rounded(tmp_path):
    source = load_source(stored(tmp_path, "qwen3", torch.bfloat16, wide=("norm.weight",)))
    assert {p.dtype for p in source.parameters()} == {torch.float32}


def test_a_buffer_that_would_be_rounded_is_not(tmp_path):
    """Gemma 3 multiplies embeddings by the root of the hidden size, a buffer in the dtype of the weights."""
    name = stored(tmp_path, "gemma3_text", torch.bfloat16)
    source, exact = load_source(name), AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    assert {b.dtype for b in source.buffers() if b.is_floating_point()} == {torch.float32}
    for (name, buffer), (_, expected) in zip(source.named_buffers(), exact.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_the_shard_has_the_values_of_the_files(shard, tmp_path, family):
    name = stored(tmp_path, family, torch.bfloat16)
    one, exact = shard(name), AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    expected = dict(exact.named_parameters())
    for name, parameter in one._model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter.full_tensor(), expected[name]), name


def trained(one):
    out = one.forward_backward(make_batch(LENGTHS), "importance_sampling", {}, None)
    gradient = [p.grad.full_tensor().clone() for p in one._parameters]
    one.optim_step(AdamParams(1e-2), 8.0)
    return out.logprobs, gradient


def test_layers_that_are_computed_twice_give_the_same_bits(shard, monkeypatch):
    """So an attempt with another amount of free memory continues as the one before."""
    once = shard()
    monkeypatch.setattr(mesh, "host_room", lambda _memory, _config: 0)
    twice = shard()
    assert (once._sharding.memory.kept_tokens > 9, twice._sharding.memory.kept_tokens) == (True, 0)
    (p, gradient), (other_p, other_gradient) = trained(once), trained(twice)
    np.testing.assert_array_equal(p, other_p)
    assert all(torch.equal(g, o) for g, o in zip(gradient, other_gradient, strict=True))


@pytest.mark.parametrize(("saved", "now", "then"), [(True, True, True), (False, True, False), (False, False, False)])
def test_gradients_are_summed_as_the_run_has_summed_them(shard, monkeypatch, tmp_path, saved, now, then):
    one = with_whole(shard, monkeypatch, saved)
    save(one, tmp_path / "trainer")
    other = with_whole(shard, monkeypatch, now)
    assert other.load_state(tmp_path / "trainer", []) == ""
    assert other._sharding.whole is then
    save(other, tmp_path / "again")
    third = with_whole(shard, monkeypatch, True)
    third.load_state(tmp_path / "again", [])
    assert third._sharding.whole is then, "it holds for all that follow"


def with_whole(shard, monkeypatch, whole):
    monkeypatch.setattr(memory.ModelMemory, "stays_whole", lambda *_: whole)
    return shard()


def test_a_shard_beside_a_replica_asks_for_what_that_leaves(shard, monkeypatch):
    arguments = {}
    one = shard()
    monkeypatch.setattr(one._mesh, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (60 * memory.GIB, 80 * memory.GIB))
    monkeypatch.setattr(mesh, "gpu_room", lambda *numbers: arguments.setdefault("of", numbers) and 7)
    monkeypatch.setattr(mesh.torch, "tensor", lambda value, device: torch.full((), value))
    assert one._mesh.smallest_room(one._config, 0.4) == 7
    assert arguments["of"] == (60 * memory.GIB, 80 * memory.GIB, 0.4)
    limits = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    one._mesh.leave_room(0.0)
    one._mesh.leave_room(0.4)
    assert limits == [(pytest.approx(0.6 - 2 / 80), torch.device("cuda"))]
    assert memory.gpu_room(80 * memory.GIB, 80 * memory.GIB, 0.4) == pytest.approx(
        0.85 * limits[0][0] * 80 * memory.GIB
    )


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("", "logits are computed by kernels"),
        ("no compiler", "logits are computed without kernels: no compiler"),
    ],
)
def test_on_a_gpu_logits_are_computed_by_kernels_or_it_is_said_why_not(shard, monkeypatch, reason, text):
    """Not run on a GPU: the trial's result is made up."""
    one = shard()
    assert one._sharding.head == "", "on CPUs there is no choice"
    trials = []
    monkeypatch.setattr(model, "why_unfused", lambda *arguments: trials.append(arguments) or reason)
    monkeypatch.setattr(model, "choose_kernel", lambda *_: "")
    gpu = SimpleNamespace(
        device=torch.device("cuda"), dp_size=1, smallest_room=lambda *_: 2**40, leave_room=lambda _: None
    )
    sharding = Sharding(one._config, one._facts, gpu, 0.0)
    assert (sharding.head, sharding._fused) == (text, not reason)
    assert trials == [(gpu.device, torch.float32, torch.float32, one._facts.vocab_size)]
