"""Adapters in one pass of the base: each gets what it gets alone, whatever the others are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks_support import run_ranks

# The tiny models and batches are the end-to-end tests' too.
from trainer_support import VOCAB, make_batch, make_config, make_model

from trainer.batching import scatter_outputs
from trainer.merging import merge
from trainer.shard import Shard
from trireme.config.trainer import ATTENTION, MLP
from trireme.core.errors import BadInput, NonFiniteGradient
from trireme.core.types import AdamParams, AdapterPass, TokenBatch
from trireme.core.weights import AdapterSpec
from trireme.transports.packing import Packer

ALL = (*ATTENTION, *MLP)
SPECS = {
    "whole": AdapterSpec(8, 16.0, ALL, 1),
    "small": AdapterSpec(3, 32.0, ALL, 2),
    "attention": AdapterSpec(5, 8.0, ATTENTION, 3),
    "mlp": AdapterSpec(1, 4.0, ("up_proj",), 4),
}
LOSSES: Mapping[str, Mapping[str, float]] = {
    "importance_sampling": {"max_ratio": 2.0},
    "ppo": {"clip_low_threshold": 0.9},
    "gspo": {},
    "cross_entropy": {},
    "dro": {"beta": 0.1},
}
FLOAT32, BFLOAT16 = 1e-5, 0.02
"""Largest relative difference of a gradient, in its norm. In bfloat16 each product is rounded to 2^-8."""


def batch_of(loss_fn: str, lengths: Sequence[int], seed: int) -> TokenBatch:
    batch = make_batch(lengths, seed=seed)
    if loss_fn != "cross_entropy":
        return batch
    weights = batch.columns["mask"].astype(np.float32)
    columns = {"target_tokens": batch.columns["target_tokens"], "weights": weights}
    return TokenBatch(batch.tokens, batch.offsets, columns, batch.temperatures)


def end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def new_shard(model: str, rank: int = 0, world_size: int = 1, store: Any = None, **options: Any) -> Shard:
    store = store or dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    config = make_config(model, trainer__lora={"rank": 8, "alpha": 16}, trainer__shards=world_size, **options)
    shard = Shard(config, rank, store, Packer(np.copy, rank, world_size))
    for name, spec in SPECS.items():  # B is 0 at first
        shard.add_adapter(name, spec)
        shard.use_adapter(name)
        shard.forward_backward(make_batch((5, 9, 1)), "importance_sampling", {}, None)
        shard.optim_step(AdamParams(learning_rate=1e-2), 1.0)
    return shard


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", True)


@pytest.fixture(scope="module", params=["rows", "small micro-batches", "computed twice"])
def shard(model: str, request: pytest.FixtureRequest) -> Iterator[Shard]:
    options = {
        "rows": {},
        "small micro-batches": {"trainer__micro_batch_tokens": 24},
        "computed twice": {"trainer__checkpointing": True},
    }
    end_group()
    yield new_shard(model, **options[request.param])
    end_group()


def together(shard: Shard, passes: Sequence[AdapterPass]) -> list[tuple[np.ndarray, Mapping[str, float], Any]]:
    batch, shares = merge(passes)
    outputs = shard.compute_together(batch, shares)
    return [
        (scatter_outputs(each.batch, [out]), out.metrics, out.suspects)
        for each, out in zip(passes, outputs, strict=True)
    ]


def gradient(shard: Shard, name: str) -> torch.Tensor:
    """The gradient that an adapter has, which is dropped."""
    shard.use_adapter(name)
    parts = [p.grad.full_tensor().flatten() for p in shard._parameters if p.grad is not None]
    shard.drop_gradients()
    return torch.cat(parts).double() if parts else torch.zeros(0)


def assert_same(shard: Shard, passes: Sequence[AdapterPass], bound: float = FLOAT32, logprobs: float = 1e-5) -> None:
    """Each has what it has alone."""
    for name in SPECS:
        shard.use_adapter(name)
        shard.drop_gradients()
    found = together(shard, passes)
    gradients = {each.adapter: gradient(shard, each.adapter) for each in passes}
    for each, (p, metrics, _) in zip(passes, found, strict=True):
        shard.use_adapter(each.adapter)
        assert each.loss_fn
        alone = shard.forward_backward(each.batch, each.loss_fn, each.loss_fn_config, None)
        np.testing.assert_allclose(p, scatter_outputs(each.batch, [alone]), atol=logprobs)
        assert metrics.keys() == alone.metrics.keys()
        for name, value in alone.metrics.items():
            assert metrics[name] == pytest.approx(value, rel=bound, abs=10 * bound), name
        wanted = gradient(shard, each.adapter)
        assert float((gradients[each.adapter] - wanted).norm()) <= bound * float(wanted.norm())


PASSES = st.lists(
    st.tuples(
        st.sampled_from(sorted(SPECS)),
        st.sampled_from(sorted(LOSSES)),
        st.lists(st.integers(2, 14), min_size=1, max_size=4),
        st.integers(0, 1000),
    ),
    min_size=2,
    max_size=4,
    unique_by=lambda each: each[0],
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=PASSES)
def test_each_gets_what_it_gets_alone(shard: Shard, drawn: list[tuple[str, str, list[int], int]]) -> None:
    """Adapters of any ranks and layers, losses and numbers of datums; one of them is in the model meanwhile."""
    assert_same(
        shard, [AdapterPass(a, batch_of(loss, lengths, s), loss, LOSSES[loss]) for a, loss, lengths, s in drawn]
    )


@pytest.fixture
def rows(model: str) -> Iterator[Shard]:
    end_group()
    yield new_shard(model)
    end_group()


def test_what_is_not_finite_stays_with_its_own_adapter(rows: Shard) -> None:
    bad = make_batch((5, 9), seed=1)
    bad.columns["logprobs"][7] = np.nan
    good = AdapterPass("small", make_batch((9, 7), seed=2), "ppo")
    found = together(rows, [AdapterPass("whole", bad, "ppo"), good])
    assert [suspects for _, _, suspects in found] == [(1,), ()]
    kept = gradient(rows, "small")
    rows.use_adapter("whole")
    with pytest.raises(NonFiniteGradient):
        rows.optim_step(AdamParams(), 1.0)
    rows.use_adapter("small")
    rows.forward_backward(good.batch, "ppo", {}, None)
    wanted = gradient(rows, "small")
    assert float((kept - wanted).norm()) <= FLOAT32 * float(wanted.norm())


def test_gradients_add_up_and_log_probabilities_alone_leave_them(rows: Shard) -> None:
    passes = [AdapterPass(name, make_batch((5, 9), seed=3), "ppo") for name in ("whole", "attention")]
    together(rows, passes)
    once = {each.adapter: gradient(rows, each.adapter) for each in passes}
    for _ in range(2):
        found = together(rows, passes)
    looked = together(rows, [AdapterPass(each.adapter, each.batch) for each in passes])
    for each, (p, _, _), (again, metrics, _) in zip(passes, found, looked, strict=True):
        np.testing.assert_allclose(again, p, atol=1e-5)
        assert metrics == {}
        torch.testing.assert_close(gradient(rows, each.adapter), 2 * once[each.adapter], rtol=1e-4, atol=1e-4)


def test_what_is_refused_changes_nothing(rows: Shard) -> None:
    batch = make_batch((5,))
    with pytest.raises(BadInput, match="an adapter 'unknown'"):
        together(rows, [AdapterPass("unknown", batch, "ppo"), AdapterPass("small", batch, "ppo")])
    outside = TokenBatch(batch.tokens + VOCAB, batch.offsets, batch.columns, batch.temperatures)
    with pytest.raises(BadInput, match="the model's vocabulary"):
        together(rows, [AdapterPass("whole", outside, "ppo"), AdapterPass("small", batch, "ppo")])
    assert not len(gradient(rows, "small"))


def test_in_bfloat16_they_are_the_same_to_its_rounding(model: str) -> None:
    one = new_shard(model, model__dtype="bfloat16")
    passes = [AdapterPass(name, make_batch((9, 7), seed=4), "importance_sampling") for name in ("whole", "small")]
    assert_same(one, passes, BFLOAT16, logprobs=0.05)
    end_group()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"trainer__packing": "packed"}, "when another adapter in the pass is not finite"),
        ({"deterministic": True, "orchestrator__max_steps_off_policy": 0}, "in deterministic mode"),
    ],
)
def test_a_model_shows_if_adapters_can_share_a_pass(model: str, options: Mapping[str, Any], why: str) -> None:
    """Packed rows without a kernel multiply what they mask by 0, so they are refused."""
    one = new_shard(model, **options)
    before = [parameter.full_tensor().clone() for parameter in one._parameters]
    said, vocabulary = one.together_terms()
    assert why in said if why else not said
    assert vocabulary == VOCAB
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(one._parameters, before, strict=True))
    assert all(parameter.grad is None for parameter in one._parameters)
    end_group()


def test_a_layer_that_reorders_tokens_is_found(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = new_shard(model)
    layer: Any = next(module for name, module in one._model.named_modules() if name.endswith("1.mlp"))
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: forward(x.flip(0)).flip(0))
    assert "when another adapter is in the pass" in one.together_terms()[0]
    end_group()


def over_ranks(rank: int, world_size: int, store: Any, model: str) -> tuple[str, list[torch.Tensor], list[float]]:
    """Why adapters cannot share a pass, the gradients of three that did, and their losses."""
    one = new_shard(model, rank, world_size, store)
    why, _ = one.together_terms()
    passes = [AdapterPass(name, make_batch((9, 4, 6), seed=5), "ppo") for name in ("whole", "small", "mlp")]
    found = [AdapterPass(each.adapter, each.batch, "ppo") for each in passes]
    batch, shares = merge(found)
    outputs = one.compute_together(batch, shares)
    gradients = [gradient(one, each.adapter) for each in passes]
    end_group()
    return why, gradients, [output.metrics.get("loss:sum", 0.0) for output in outputs]


def test_shards_add_up_the_gradients_of_each_adapter(model: str) -> None:
    end_group()
    many = run_ranks(2, over_ranks, model)
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    _, wanted, losses = over_ranks(0, 1, store, model)
    np.testing.assert_allclose(np.sum([said for _, _, said in many], 0), losses, rtol=1e-3)
    for why, gradients, _ in many:
        assert why == ""
        for got, expected in zip(gradients, wanted, strict=True):
            assert float((got - expected).norm()) <= 1e-3 * float(expected.norm())
