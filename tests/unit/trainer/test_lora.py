"""LoRA in the trainer: adapters against peft on an unsharded model, the base as reference, and what a checkpoint
holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from ranks_support import run_alone, run_ranks
from shard_support import make_rank, published_tensors, save
from torch import Tensor

# The tiny models and batches are the end-to-end tests' too.
from trainer_support import make_batch, make_config, make_model
from trainer_support import unsharded_logprobs as expected
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.batching import scatter_outputs
from trainer.lora import start_values
from trainer.shard import Shard
from trireme.core.base_digest import base_digest
from trireme.core.errors import BadInput, CheckpointInvalid
from trireme.core.types import AdamParams, TokenBatch
from trireme.core.weights import Adapter, PublishedWeights, check_received, weights_digest

LENGTHS = (5, 9, 1, 7, 9)
MODELS = {"tied": ("qwen3", True), "untied": ("llama", False)}
EVERYTHING = {"rank": 8, "alpha": 16, "train_unembed": True}
LORA: dict[str, dict[str, Any]] = {"tied": {"rank": 8, "alpha": 16}, "untied": EVERYTHING}
Make = Callable[..., Shard]


@pytest.fixture(scope="module")
def base_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: make_model(tmp_path_factory.mktemp(name), *kind) for name, kind in MODELS.items()}


@pytest.fixture
def models(base_models: dict[str, str]) -> dict[str, str]:
    """A copy, which a test may change."""
    return dict(base_models)


@pytest.fixture(params=list(MODELS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(shard: Callable[..., Shard], models: dict[str, str]) -> Make:
    def new(kind: str, lora: dict[str, Any] | None = None, **options: Any) -> Shard:
        return shard(models[kind], trainer__lora=LORA[kind] if lora is None else lora, **options)

    return new


def trained(shard: Shard, steps: int = 2) -> Shard:
    """The same after some updates: B is zero no more."""
    for seed in range(steps):
        shard.forward_backward(make_batch(LENGTHS, seed=seed), "importance_sampling", {}, None)
        shard.optim_step(AdamParams(learning_rate=1e-2), 10.0)
    return shard


def logprobs(shard: Shard, batch: TokenBatch, which: Any = "policy") -> np.ndarray:
    return scatter_outputs(batch, [shard.forward(batch, which)])


def saved(shard: Shard, path: Path) -> PublishedWeights:
    """Publishes, and writes what was published as a checkpoint does."""
    published = shard.publish_weights(1)
    shard.save_weights(path, published.manifest.entries, published.source)
    return published


def test_peft_opens_and_computes_the_same(make: Make, kind: str, models: dict[str, str], tmp_path: Path) -> None:
    shard, batch = trained(make(kind)), make_batch(LENGTHS)
    saved(shard, tmp_path)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models[kind]), tmp_path)
    got = logprobs(shard, batch)
    np.testing.assert_allclose(got, expected(model, batch).detach().numpy(), atol=1e-5)
    merged = model.merge_and_unload()
    np.testing.assert_allclose(got, expected(merged, batch).detach().numpy(), rtol=1e-5, atol=1e-5)
    by_itself = AutoModelForCausalLM.from_pretrained(tmp_path)  # finds its base
    np.testing.assert_allclose(got, expected(by_itself, batch).detach().numpy(), atol=1e-5)
    assert np.abs(got - logprobs(make(kind, {}), batch)).max() > 1e-2, "nothing was learnt"
    assert AutoTokenizer.from_pretrained(tmp_path).vocab_size == model.config.vocab_size


def test_gradients_are_those_of_peft(make: Make, kind: str, models: dict[str, str], tmp_path: Path) -> None:
    """After an update, so that both A and B have one; whatever the micro-batches."""
    shard, batch = trained(make(kind), 1), make_batch(LENGTHS, seed=5)
    saved(shard, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(models[kind])
    model = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    p = expected(model, batch)
    columns = {name: torch.from_numpy(c) for name, c in batch.columns.items()}
    (-(columns["mask"] * columns["advantages"] * (p - columns["logprobs"]).exp()).sum()).backward()
    gradients = {n.removeprefix("base_model.model."): q.grad for n, q in model.named_parameters() if q.requires_grad}
    for micro_batch_tokens in (1, 20, 10_000):
        shard._config = make_config(
            models[kind], trainer__lora=LORA[kind], trainer__micro_batch_tokens=micro_batch_tokens
        )
        shard.forward_backward(batch, "importance_sampling", {}, None)
        got = {name: q.grad.to_local() for name, q in shard._model.named_parameters() if q.grad is not None}
        assert got.keys() == gradients.keys()
        for name, gradient in got.items():
            assert (gradient - gradients[name]).abs().max() <= 1e-5 * gradients[name].abs().max(), name
        shard._optimizer.zero_grad()


def test_only_adapters_are_trained_and_only_they_are_published(make: Make, kind: str, models: dict[str, str]) -> None:
    shard = make(kind)
    base = {n: p.full_tensor().clone() for n, p in shard._model.named_parameters() if not p.requires_grad}
    first = shard.publish_weights(0)
    second = trained(shard).publish_weights(1)
    for name, before in base.items():
        assert torch.equal(shard._model.get_parameter(name).full_tensor(), before), name
    assert {p.requires_grad for p in shard._optimizer.state} == {True}
    assert len(shard._optimizer.state) == len(second.manifest.entries)
    assert {e.name.rpartition(".lora_")[2] for e in second.manifest.entries} == {"A.weight", "B.weight"}
    assert second.nbytes == 4 * sum(p.numel() for p in shard._parameters)
    assert second.manifest.adapter == Adapter(base_digest(models[kind]), 8, 16)
    check_received(second.manifest, second.source)
    assert first.identity.digest != second.identity.digest


def test_the_digest_covers_base_and_scale(make: Make) -> None:
    published = make("tied").publish_weights(0)
    other_scale = make("tied", {"rank": 8, "alpha": 8}).publish_weights(0)
    assert published.identity.digest != weights_digest(published.manifest.entries)
    assert [e.hash for e in published.manifest.entries] == [e.hash for e in other_scale.manifest.entries]
    assert published.identity.digest != other_scale.identity.digest


def test_adapters_start_as_pefts_do(make: Make) -> None:
    """A uniform within 1 / sqrt(inputs), B zero."""
    shard = make("tied")
    source = {n.replace(".base_layer.", "."): p for n, p in shard._model.named_parameters()}
    source |= dict(shard._model.named_buffers())
    values = start_values(shard._model, source, 0)
    for name, tensor in values.items():
        if ".lora_A." in name:
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < float(tensor.abs().max()) <= bound
        if ".lora_B." in name:
            assert not tensor.any()


def test_the_reference_is_the_base(make: Make, kind: str) -> None:
    batch = make_batch(LENGTHS)
    shard = make(kind, trainer__kl={"coef": 0.1})
    base = logprobs(shard, batch)
    np.testing.assert_array_equal(logprobs(shard, batch, "reference"), base)  # KL of the policy with itself: 0
    trained(shard)
    np.testing.assert_array_equal(logprobs(shard, batch, "reference"), base)
    assert np.abs(logprobs(shard, batch) - base).max() > 1e-2
    assert shard._reference is None, "no second model"


def test_dropout_is_for_gradients_only(make: Make) -> None:
    batch = make_batch(LENGTHS)
    shard = trained(make("untied", {**EVERYTHING, "dropout": 0.5}))
    exact = logprobs(shard, batch)
    dropped = [scatter_outputs(batch, [shard.forward_backward(batch, "ppo", {}, None)]) for _ in range(2)]
    np.testing.assert_array_equal(logprobs(shard, batch), exact)
    assert np.abs(dropped[0] - exact).max() > 1e-4
    assert np.abs(dropped[0] - dropped[1]).max() > 1e-4


def test_a_frozen_base_is_kept_in_the_inference_dtype(make: Make, kind: str) -> None:
    shard = make(kind, model__dtype="bfloat16")
    dtypes = {p.requires_grad: p.dtype for p in shard._model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    full = make(kind, {}, model__dtype="bfloat16")
    batch = make_batch(LENGTHS)
    whole = logprobs(full, batch)
    adapted = make(kind, model__dtype="bfloat16")
    np.testing.assert_array_equal(logprobs(adapted, batch), whole)
    published = trained(adapted).publish_weights(0)
    assert {e.dtype for e in published.manifest.entries} == {"BF16"}


def test_a_checkpoint_on_another_base_is_refused(make: Make, models: dict[str, str], tmp_path: Path) -> None:
    shard = trained(make("tied"))
    save(shard, tmp_path / "state")
    other = AutoModelForCausalLM.from_pretrained(models["tied"])
    with torch.no_grad():
        other.model.norm.weight[0] += 1e-3
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(models["tied"]).save_pretrained(tmp_path / "other")
    models["tied"] = str(tmp_path / "other")
    resumed = make("tied")
    reason = f"a base model with digest.*model.name has digest {base_digest(models['tied'])}"
    with pytest.raises(CheckpointInvalid, match=reason):
        resumed.load_state(tmp_path / "state", [])


def test_targets_that_the_model_does_not_have(models: dict[str, str]) -> None:
    from trainer.lora import add_adapters
    from trireme.config.trainer import LoraConfig

    model = AutoModelForCausalLM.from_pretrained(models["tied"])
    with pytest.raises(BadInput, match=r"trainer.lora.targets has query, which Qwen3.*it has .*q_proj"):
        add_adapters(model, LoraConfig(rank=8, targets=["query"]), torch.float32, torch.float32)


def test_the_digest_of_a_base_is_that_of_its_tensors(models: dict[str, str], tmp_path: Path) -> None:
    """However they are split into files; nothing but safetensors is taken."""
    model = AutoModelForCausalLM.from_pretrained(models["untied"])
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert base_digest(str(tmp_path / "parts")) == base_digest(models["untied"])
    assert base_digest(models["tied"]) != base_digest(models["untied"])
    with torch.no_grad():
        model.lm_head.weight[3, 4] += 1e-4
    model.save_pretrained(tmp_path / "other")
    assert base_digest(str(tmp_path / "other")) != base_digest(models["untied"])
    next((tmp_path / "parts").glob("*00002*")).unlink()
    with pytest.raises(BadInput, match="lacks model-00002"):
        base_digest(str(tmp_path / "parts"))
    with pytest.raises(BadInput, match="safetensors format"):
        base_digest(str(tmp_path))


LONG = (30, 3, 3, 4, 5, 29, 7, 1)
WAYS = {
    "2 shards": (2, {"trainer__micro_batch_tokens": 24}),
    "3 shards, packed, layers computed twice": (3, {"trainer__packing": "packed", "trainer__checkpointing": True}),
    "2 copies, offloaded": (2, {"trainer__replicate": 2, "trainer__offload": "cpu"}),
}


def two_steps(
    rank: int, world_size: int, store: Any, model: str, options: dict[str, Any], save_to: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """The gradients of the second step (in the first, A has none), the adapters after it, and the base's logprobs."""
    shards = world_size // options.get("trainer__replicate", 1)
    config = make_config(model, trainer__lora=EVERYTHING, trainer__kl={"coef": 0.1}, trainer__shards=shards, **options)
    shard = make_rank(config, rank, world_size, store)
    for seed in range(2):
        shard.forward_backward(make_batch(LONG, seed=seed), "importance_sampling", {}, None)
        named = [(name, p) for name, p in shard._model.named_parameters() if p.requires_grad]
        gradients = {name: p.grad.full_tensor().clone() for name, p in named}
        shard.optim_step(AdamParams(learning_rate=1e-2), 40.0)
    save(shard, save_to)
    after, reference = published_tensors(shard), shard.forward(make_batch(LONG), "reference")
    dist.destroy_process_group()
    return gradients, after, reference


@pytest.mark.parametrize("way", WAYS)
def test_shards_and_layouts_change_nothing(models: dict[str, str], make: Make, way: str, tmp_path: Path) -> None:
    processes, options = WAYS[way]
    ranks = run_ranks(processes, two_steps, models["untied"], options, tmp_path / "many")
    gradients, after, reference = run_alone(two_steps, models["untied"], {}, tmp_path / "one")
    for got, _, _ in ranks:
        assert got.keys() == gradients.keys()
        for name, unsharded in gradients.items():
            assert (got[name] - unsharded).norm() <= 1e-5 * unsharded.norm() + 1e-9, name
    for name, unsharded in after.items():
        assert (ranks[0][1][name] - unsharded).norm() <= 1e-4 * unsharded.norm() + 1e-9, name
    batch = make_batch(LONG)
    np.testing.assert_allclose(
        scatter_outputs(batch, [output for _, _, output in ranks]), scatter_outputs(batch, [reference]), atol=1e-5
    )
    numbers = 3 * sum(tensor.numel() for tensor in after.values())
    assert sum(file.stat().st_size for file in (tmp_path / "one").iterdir()) < 4 * numbers + 200_000, "adapters alone"
    resharded = make("untied", trainer__kl={"coef": 0.1})
    resharded.load_state(tmp_path / "many", [])
    for name, tensor in published_tensors(resharded).items():
        assert torch.equal(tensor, ranks[0][1][name]), name


def test_dropped_inputs_are_the_same_when_layers_are_computed_twice(make: Make) -> None:
    batch = make_batch(LENGTHS)

    def gradients(**options: Any) -> list[Tensor]:
        shard = trained(make("untied", {**EVERYTHING, "dropout": 0.3}, **options), 1)
        torch.manual_seed(5)
        shard.forward_backward(batch, "importance_sampling", {}, None)
        return [p.grad.to_local().clone() for p in shard._parameters]

    for once, twice in zip(gradients(), gradients(trainer__checkpointing=True), strict=True):
        torch.testing.assert_close(twice, once, rtol=1e-4, atol=1e-5)


def in_bfloat16(rank: int, world_size: int, store: Any, model: str) -> tuple[Any, dict[str, Tensor]]:
    """Each datum alone in its micro-batch, so that no rounding depends on the number of ranks."""
    options = {"model__dtype": "bfloat16", "trainer__micro_batch_tokens": 1, "trainer__shards": world_size}
    config = make_config(model, trainer__lora=EVERYTHING, **options)
    shard = make_rank(config, rank, world_size, store)
    shard.forward_backward(make_batch(LONG), "importance_sampling", {}, None)
    shard.optim_step(AdamParams(learning_rate=1e-2), 40.0)
    output = shard.forward(make_batch(LONG))
    dtypes = {name: p.full_tensor().dtype for name, p in shard._model.named_parameters()}
    dist.destroy_process_group()
    return output, {name: dtype for name, dtype in dtypes.items() if "layers.0.mlp.up_proj" in name}


def test_a_base_in_low_precision_beside_adapters_in_float32(models: dict[str, str]) -> None:
    """Gathered together, though their dtypes differ."""
    batch = make_batch(LONG)
    ranks = run_ranks(2, in_bfloat16, models["untied"])
    alone, dtypes = run_alone(in_bfloat16, models["untied"])
    assert sorted(map(str, dtypes.values())) == ["torch.bfloat16", "torch.float32", "torch.float32"]
    got, reference = scatter_outputs(batch, [output for output, _ in ranks]), scatter_outputs(batch, [alone])
    np.testing.assert_allclose(got, reference, atol=0.05)  # gradients are added up in another order


def test_attention_beside_experts(tmp_path: Path, make: Make, models: dict[str, str]) -> None:
    models["experts"] = make_model(tmp_path / "model", "qwen3_moe", True)
    batch, lora = make_batch(LENGTHS), {"rank": 8, "alpha": 16, "train_mlp": False}
    shard = trained(make("experts", lora))
    published = saved(shard, tmp_path / "adapter")
    assert {e.name.split(".")[5] for e in published.manifest.entries} == {"self_attn"}
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models["experts"]), tmp_path / "adapter")
    np.testing.assert_allclose(logprobs(shard, batch), expected(model, batch).detach().numpy(), atol=1e-5)
