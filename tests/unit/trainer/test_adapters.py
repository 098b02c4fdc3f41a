"""Several adapters in one model: each is trained as if it were alone, bit for bit, and is saved and published alone."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from ranks_support import run_alone, run_ranks
from safetensors.torch import load_file, save_file
from shard_support import make_rank
from torch import Tensor

# The tiny models and batches are the end-to-end tests' too.
from trainer_support import make_batch, make_config, unsharded_logprobs
from transformers import AutoModelForCausalLM

from trainer.batching import scatter_outputs
from trainer.shard import Shard
from trireme.config.trainer import ATTENTION, MLP, UNEMBED
from trireme.core.errors import BadInput
from trireme.core.types import AdamParams, TokenBatch
from trireme.core.weights import AdapterSpec, check_received

LENGTHS = (5, 9, 1, 7, 9)
ALL = (*ATTENTION, *MLP)
RATE = AdamParams(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)
SPECS = {
    "whole": AdapterSpec(8, 16.0, ALL, 1),
    "small": AdapterSpec(3, 32.0, ALL, 2),
    "attention": AdapterSpec(8, 8.0, ATTENTION, 3),
}
Make = Callable[..., Shard]


@pytest.fixture
def make(shard: Make) -> Make:
    def new(lora: Mapping[str, Any] | None = None) -> Shard:
        return shard(trainer__lora={"rank": 8, "alpha": 16} if lora is None else lora)

    return new


def add_gradient(shard: Shard, seed: int) -> float:
    return shard.forward_backward(make_batch(LENGTHS, seed=seed), "importance_sampling", {}, None).metrics["loss:sum"]


def train_new(shard: Shard, name: str, steps: int = 2) -> None:
    """Adds an adapter, and trains it."""
    shard.add_adapter(name, SPECS[name])
    shard.use_adapter(name)
    for step in range(steps):
        add_gradient(shard, step)
        shard.optim_step(RATE, 10.0)


def state(shard: Shard) -> list[Tensor]:
    tensors = []
    for parameter in shard._parameters:
        moments = shard._optimizer.state[parameter]
        gradient = [] if parameter.grad is None else [parameter.grad]
        tensors += [t.full_tensor().clone() for t in (parameter, moments["exp_avg"], moments["exp_avg_sq"], *gradient)]
        tensors.append(moments["step"].clone())
    return tensors


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def logprobs(shard: Shard, batch: TokenBatch) -> np.ndarray:
    return scatter_outputs(batch, [shard.forward(batch)])


def test_adapters_in_turn_equal_each_alone_bit_for_bit(make: Make) -> None:
    """Their passes are interleaved, also between a gradient and its update; one has a half of its batch at the end."""
    alone, losses = {}, {}
    for name, spec in SPECS.items():
        shard = make()
        shard.add_adapter(name, spec)
        shard.use_adapter(name)
        losses[name] = []
        for step in range(3):
            losses[name] += [add_gradient(shard, 10 * step), add_gradient(shard, 10 * step + 1)]
            shard.optim_step(RATE, 10.0)
        losses[name].append(add_gradient(shard, 99))
        alone[name] = state(shard)
    shard = make()
    initial = state(shard)
    for name, spec in SPECS.items():
        shard.add_adapter(name, spec)
    results: dict[str, list[float]] = {name: [] for name in SPECS}
    for step in range(3):
        for half in range(2):
            for name in SPECS:
                shard.use_adapter(name)
                results[name].append(add_gradient(shard, 10 * step + half))
        for name in reversed(SPECS):
            shard.use_adapter(name)
            shard.optim_step(RATE, 10.0)
    for name in SPECS:
        shard.use_adapter(name)
        results[name].append(add_gradient(shard, 99))
    assert results == losses
    for name, expected in alone.items():
        shard.use_adapter(name)
        assert same(state(shard), expected), name
    assert not same(alone["whole"], alone["attention"])
    shard.use_adapter("")
    assert same(state(shard), initial)


@pytest.mark.parametrize(("name", "lora"), [("small", {"rank": 3, "alpha": 32}), ("attention", {"train_mlp": False})])
def test_what_fills_an_adapter_up_stays_zero(make: Make, name: str, lora: Mapping[str, Any]) -> None:
    """A model whose LoRA layers are of that rank, or on those layers, learns the same, but for the order in which
    kernels add up."""
    batch, spec = make_batch(LENGTHS), SPECS[name]
    alone = make({"rank": 8, "alpha": 8, **lora, "seed": spec.seed})
    for step in range(4):
        add_gradient(alone, step)
        alone.optim_step(RATE, 10.0)
    expected = logprobs(alone, batch)
    shard = make()
    train_new(shard, name, steps=4)
    np.testing.assert_allclose(logprobs(shard, batch), expected, atol=2e-5)
    for parameter, tensor in zip(shard._model.named_parameters(), shard._model.parameters(), strict=True):
        if tensor.requires_grad:
            layer, _, which = parameter[0].partition(".lora_")
            whole = tensor.full_tensor()
            rank = spec.rank if layer.rpartition(".")[2] in spec.targets else 0
            assert not (whole[rank:] if which.startswith("A") else whole[:, rank:]).any(), parameter[0]
            assert rank == 0 or whole.any()


def exported(shard: Shard, name: str, path: Path) -> None:
    """Adds an adapter, trains it, and writes it in peft's form while another one is in use."""
    train_new(shard, name)
    weights = shard.publish_weights(1)
    check_received(weights.manifest, weights.source)
    shard.use_adapter("")
    shard.save_weights(path, weights.manifest.entries, weights.source, weights.manifest.adapter)
    shard.use_adapter(name)


@pytest.mark.parametrize("name", SPECS)
def test_an_adapter_is_exported_for_peft_and_begins_with_it_again(
    make: Make, model: str, tmp_path: Path, name: str
) -> None:
    """The files have its own rank and layers. Also in a model whose adapters have more of both it computes the same,
    and learns as a new one of its kind would from there, with moments of 0."""
    shard, spec, batch = make(), SPECS[name], make_batch(LENGTHS)
    exported(shard, name, tmp_path)
    expected = logprobs(shard, batch)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (spec.rank, spec.alpha)
    assert config["target_modules"] == sorted(spec.targets)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {min(t.shape) for t in tensors.values()} == {spec.rank}
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path)
    np.testing.assert_allclose(unsharded_logprobs(opened, batch).detach().numpy(), expected, atol=1e-5)
    shard.reset_optimizer()
    add_gradient(shard, 3)
    shard.optim_step(RATE, 10.0)
    learnt = logprobs(shard, batch)
    shard.add_adapter("again", SPECS[name], tmp_path)
    shard.use_adapter("again")
    np.testing.assert_array_equal(logprobs(shard, batch), expected)
    add_gradient(shard, 3)
    shard.optim_step(RATE, 10.0)
    np.testing.assert_array_equal(logprobs(shard, batch), learnt)
    wider = make({"rank": 16, "alpha": 4})
    wider.add_adapter("again", SPECS[name], tmp_path)
    wider.use_adapter("again")
    np.testing.assert_allclose(logprobs(wider, batch), expected, atol=1e-5)
    add_gradient(wider, 3)
    wider.optim_step(RATE, 10.0)
    np.testing.assert_allclose(logprobs(wider, batch), learnt, atol=1e-5)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "has rank 4 and alpha 32; expected 3 and 32": lambda path: change(path / "adapter_config.json", r=4),
    "rank 3 and alpha 7": lambda path: change(path / "adapter_config.json", lora_alpha=7),
    "has use_dora; expected plain LoRA": lambda path: change(path / "adapter_config.json", use_dora=True),
    "was trained on another base": lambda path: change(path / "base.json", digest="0" * 32),
    "expected adapter_config.json and adapter_model": lambda path: (path / "adapter_config.json").unlink(),
    "no adapter that can be read": lambda path: (path / "adapter_model.safetensors").write_bytes(b"x"),
    "the first that differs: ": lambda path: save_file({"y": torch.zeros(1)}, path / "adapter_model.safetensors"),
}
"""What is done to the files of an adapter, by the refusal."""


def test_another_adapter_is_refused(make: Make, tmp_path: Path) -> None:
    shard = make()
    (tmp_path / "whole").mkdir()
    exported(shard, "small", tmp_path / "whole")
    for number, (message, damage) in enumerate(DAMAGES.items()):
        damaged = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", damaged)
        damage(damaged)
        with pytest.raises(BadInput, match=message):
            shard.add_adapter("again", SPECS["small"], damaged)
    shard.add_adapter("again", SPECS["small"])


def test_a_state_is_of_the_adapter_that_was_in_use_at_its_begin(make: Make, tmp_path: Path) -> None:
    shard = make()
    for name in ("whole", "small"):
        train_new(shard, name, steps=1)
    expected = state(shard)
    shard.begin_save(tmp_path)
    shard.use_adapter("whole")
    add_gradient(shard, 2)
    shard.optim_step(RATE, 10.0)
    trained = state(shard)
    shard.finish_save(tmp_path)
    shard.add_adapter("again", SPECS["small"])
    shard.use_adapter("again")
    shard.load_state(tmp_path, [])
    assert same(state(shard), expected)
    shard.use_adapter("whole")
    assert same(state(shard), trained)


def test_gradients_and_moments_are_dropped_of_the_adapter_in_use_alone(make: Make) -> None:
    shard = make()
    for name in ("whole", "small"):
        shard.add_adapter(name, SPECS[name])
        shard.use_adapter(name)
        add_gradient(shard, 1)
    expected = state(shard)
    shard.use_adapter("whole")
    shard.drop_gradients()
    shard.reset_optimizer()
    with pytest.raises(Exception, match="without a gradient"):
        shard.optim_step(RATE, 1.0)
    shard.use_adapter("small")
    assert same(state(shard), expected)


def test_an_adapter_is_dropped_and_its_name_is_free(make: Make) -> None:
    shard = make()
    initial = state(shard)
    shard.add_adapter("a", SPECS["whole"])
    shard.use_adapter("a")
    add_gradient(shard, 1)
    shard.drop_adapter("a")
    assert same(state(shard), initial)
    shard.add_adapter("a", SPECS["whole"])
    shard.use_adapter("a")
    assert all(parameter.grad is None for parameter in shard._parameters)


REFUSED: dict[str, Callable[[Shard], None]] = {
    "'a' is there already.*another name": lambda s: s.add_adapter("a", SPECS["small"]),
    r"rank 9; expected 1 to 8.*trainer\.lora\.rank": lambda s: s.add_adapter("b", AdapterSpec(9, 1.0, ALL, 0)),
    "for lm_head; expected some of q_proj": lambda s: s.add_adapter("b", AdapterSpec(8, 1.0, UNEMBED, 0)),
    "for no layers": lambda s: s.add_adapter("b", AdapterSpec(8, 1.0, (), 0)),
    "'b'; expected one of '', 'a'": lambda s: s.use_adapter("b"),
    "no adapter 'b' to drop; expected one of 'a'": lambda s: s.drop_adapter("b"),
    "the first adapter cannot be dropped": lambda s: s.drop_adapter(""),
}
"""Calls by their refusals."""


def test_what_is_refused_leaves_all_as_it_is(make: Make) -> None:
    shard = make()
    shard.add_adapter("a", SPECS["whole"])
    for message, call in REFUSED.items():
        with pytest.raises(BadInput, match=message):
            call(shard)
        shard.use_adapter("a")
        add_gradient(shard, 1)
        shard.use_adapter("")


def test_a_model_that_is_trained_whole_has_no_adapters(make: Make) -> None:
    with pytest.raises(BadInput, match=r"trains the whole model.*set trainer\.lora\.rank"):
        make({}).add_adapter("a", SPECS["whole"])


def in_turn(rank: int, world_size: int, store: Any, model: str) -> dict[str, list[Tensor]]:
    """The state of two adapters that were trained in turn, over some shards."""
    config = make_config(model, trainer__lora={"rank": 8, "alpha": 16}, trainer__shards=world_size)
    shard = make_rank(config, rank, world_size, store)
    for name in ("whole", "small"):
        shard.add_adapter(name, SPECS[name])
    for step in range(2):
        for name in ("whole", "small"):
            shard.use_adapter(name)
            add_gradient(shard, step)
        for name in ("whole", "small"):
            shard.use_adapter(name)
            shard.optim_step(RATE, 10.0)
    tensors = {}
    for name in ("whole", "small"):
        shard.use_adapter(name)
        tensors[name] = [parameter.full_tensor().clone() for parameter in shard._parameters]
    dist.destroy_process_group()
    return tensors


def test_shards_each_hold_their_part_of_all_adapters(model: str) -> None:
    many = run_ranks(2, in_turn, model)
    alone = run_alone(in_turn, model)
    for rank in many:
        for name, expected in alone.items():
            for got, tensor in zip(rank[name], expected, strict=True):
                torch.testing.assert_close(got, tensor, rtol=1e-3, atol=1e-5)
