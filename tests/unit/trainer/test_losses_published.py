"""Inputs and expected numbers of other projects' tests of losses (tests/conformance/numbers.toml)."""

import pytest
import torch

from trainer.losses import monitors, resolve_loss

NAN = float("nan")


def test_weighted_cross_entropy_is_the_weighted_nll():
    p = torch.tensor([-0.1, -0.5, -0.2])
    function, config = resolve_loss("cross_entropy", {})
    for weights, normalizer, expected in (([1.0, 0.0, 1.0], 2.0, 0.15), ([0.1, 0.0, 0.1], 1.0, 0.03)):
        loss, _ = function(p, {"weights": torch.tensor(weights)}, config)
        assert float(loss) / normalizer == pytest.approx(expected, abs=1e-6)


def test_the_loss_is_the_masked_sum():
    """With p = q every ratio is 1, so that the loss is minus the sum of the advantages that count: 10 of 21."""
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    p = torch.zeros(2, 3)
    function, config = resolve_loss("importance_sampling", {})
    for counted, expected in ((mask, -10.0), (torch.ones(2, 3), -21.0)):
        columns = {"logprobs": p, "advantages": values, "mask": counted}
        assert float(function(p, columns, config)[0]) == expected


def test_divergence_between_sampler_and_trainer_ignores_nan_under_the_mask():
    p = torch.tensor([0.2, 0.3, 0.5, 0.7])
    q = torch.tensor([0.1, 0.2, 0.4, NAN])
    sums = monitors(p, {"logprobs": q, "mask": torch.tensor([1.0, 1.0, 1.0, 0.0])})
    assert sums["kl_sample_train_v1:sum"] == pytest.approx(-0.3, abs=1e-6)
    assert sums["kl_sample_train_v2:sum"] == pytest.approx(0.5 * 3 * 0.01, abs=1e-6)
    assert sums["loss_tokens:sum"] == 3
