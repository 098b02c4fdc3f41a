"""Losses against exact numbers, against closed forms by autograd, and their behaviour at masked tokens."""

import json
from pathlib import Path

import pytest
import torch

from trainer.losses import LOSS_FNS, monitors, resolve_loss
from trireme.errors import BadInput

VECTORS = json.loads((Path(__file__).parents[1] / "oracles" / "vectors.json").read_text())


def columns(q, advantages, mask=None):
    q = torch.tensor(q, dtype=torch.float32)
    return {
        "logprobs": q,
        "advantages": torch.tensor(advantages, dtype=torch.float32),
        "mask": torch.ones_like(q) if mask is None else torch.tensor(mask, dtype=torch.float32),
    }


def gradient(name, p, cols, config=None):
    function, full = resolve_loss(name, config or {})
    p = torch.tensor(p, dtype=torch.float32, requires_grad=True)
    loss, metrics = function(p, cols, full)
    loss.backward()
    return p.grad, float(loss.detach()), metrics


@pytest.mark.parametrize(("name", "key"), [("importance_sampling", "importance_sampling"), ("ppo", "ppo_0.8_1.2")])
def test_gradients_of_the_vectors(name, key):
    oracle = VECTORS["loss_gradients_wrt_p"]
    grad, _, _ = gradient(name, oracle["p"], columns(oracle["q"], oracle["A"]))
    assert grad.tolist() == pytest.approx(oracle[key], abs=1e-6)


def test_monitors_of_the_vectors():
    datums = VECTORS["trajectory_to_data"]["datums"]
    flat = {key: [value for d in datums for value in d[key]] for key in ("logprobs", "advantages", "mask")}
    oracle = VECTORS["kl_monitors"]
    sums = monitors(
        torch.tensor([value for row in oracle["trainer_logprobs"] for value in row]),
        columns(flat["logprobs"], flat["advantages"], flat["mask"]),
    )
    assert sums["loss_tokens:sum"] == 5
    for name in ("kl_sample_train_v1", "kl_sample_train_v2", "entropy"):
        assert sums[f"{name}:sum"] / sums["loss_tokens:sum"] == pytest.approx(oracle[name], abs=1e-6)
    assert sums["ratio:max"] == pytest.approx(torch.tensor(0.1).exp().item())


def test_importance_sampling_is_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    p, q, a = (torch.randn(50, generator=generator) for _ in range(3))
    m = (torch.rand(50, generator=generator) < 0.5).float()
    grad, loss, _ = gradient("importance_sampling", p.tolist(), columns(q.tolist(), a.tolist(), m.tolist()))
    expected = -m * (p - q).exp() * a
    assert loss == pytest.approx(expected.sum().item(), rel=1e-5)
    torch.testing.assert_close(grad, expected)


def test_ppo_cuts_the_gradient_only_where_the_clamp_binds():
    ratios = torch.tensor([0.5, 0.5, 1.0, 1.1, 2.0, 2.0])
    advantages = [1.0, -1.0, 1.0, -1.0, 1.0, -1.0]
    grad, loss, metrics = gradient("ppo", ratios.log().tolist(), columns([0.0] * 6, advantages))
    assert grad.tolist() == pytest.approx([-0.5, 0, -1.0, 1.1, 0, 2.0], abs=1e-6)
    assert loss == pytest.approx(-(0.5 - 0.8 + 1.0 - 1.1 + 1.2 - 2.0), abs=1e-6)
    assert metrics["clipped:sum"] == 2


def test_ppo_thresholds_are_absolute_ratios():
    wide, _, _ = gradient("ppo", [1.0], columns([0.0], [1.0]), {"clip_low_threshold": 0, "clip_high_threshold": 4})
    narrow, _, _ = gradient("ppo", [1.0], columns([0.0], [1.0]))
    assert wide.item() == pytest.approx(-torch.tensor(1.0).exp().item())
    assert narrow.item() == 0


@pytest.mark.parametrize("name", LOSS_FNS)
def test_masked_tokens_do_not_count_whatever_they_hold(name):
    cols = columns([0.0, float("-inf"), -500.0], [1.0, 3.0, 7.0], [1, 0, 0])
    grad, loss, metrics = gradient(name, [0.0, -1.0, 500.0], cols)
    assert grad.tolist() == [-1.0, 0.0, 0.0]
    assert (loss, metrics["clipped:sum"]) == (-1.0, 0)
    sums = monitors(torch.tensor([0.0, -1.0, 500.0]), cols)
    assert (sums["kl_sample_train_v1:sum"], sums["ratio:max"], sums["entropy:sum"]) == (0, 1, 0)


def test_unknown_loss_and_keys_name_the_known_ones():
    with pytest.raises(BadInput, match="importance_sampling, ppo"):
        resolve_loss("reinforce", {})
    with pytest.raises(BadInput, match=r"clip_low_treshold.*clip_low_threshold"):
        resolve_loss("ppo", {"clip_low_treshold": 0.7})
    with pytest.raises(BadInput, match="known: none"):
        resolve_loss("importance_sampling", {"clip_low_threshold": 0.8})
    with pytest.raises(BadInput, match=r"0\.8 and 1\.2"):
        resolve_loss("ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.1})
