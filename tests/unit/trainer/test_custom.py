"""A loss computed from log-probabilities alone: its surrogate has its gradient."""

import numpy as np
import pytest
import torch

from trainer.custom import surrogate
from trainer.losses import resolve_loss
from trireme.core.types import Datum, ModelInput, TokenBatch

LENGTHS = (3, 1, 5)
RNG = np.random.default_rng(0)


def batch() -> TokenBatch:
    def datum(n: int) -> Datum:
        columns = {"target_tokens": RNG.integers(0, 9, n), "mask": np.ones(n)}
        columns |= {"logprobs": -RNG.random(n), "advantages": RNG.normal(size=n)}
        return Datum(ModelInput(RNG.integers(0, 9, n).astype(np.int32)), columns)

    return TokenBatch.from_datums([datum(n) for n in LENGTHS])


def built_in(name, config):
    function, full = resolve_loss(name, config)

    def loss(data, p_D):
        sums = [
            function(p, {name: c.to_torch() for name, c in datum.loss_fn_inputs.items()}, full)[0]
            for datum, p in zip(data, p_D, strict=True)
        ]
        return torch.stack(sums).sum(), {"datums:sum": float(len(data))}

    return loss


@pytest.mark.parametrize(
    ("name", "config"),
    [("importance_sampling", {}), ("ppo", {}), ("cispo", {}), ("dro", {"beta": 0.1}), ("gspo", {})],
)
def test_custom_equals_built_in(name, config):
    data, logprobs = batch(), -RNG.random(sum(LENGTHS)).astype(np.float32)
    loss = built_in(name, config)
    weighted, metrics = surrogate(data, logprobs, loss)

    p = torch.from_numpy(logprobs).requires_grad_()
    value, _ = loss([data.datum(d) for d in range(len(data))], p.split(LENGTHS))
    value.backward()
    cross_entropy, _ = resolve_loss("cross_entropy", {})
    q = torch.from_numpy(logprobs).requires_grad_()
    cross_entropy(q, {"weights": torch.from_numpy(weighted.columns["weights"])}, {})[0].backward()
    torch.testing.assert_close(q.grad, p.grad)
    assert metrics == {"datums:sum": 3.0, "loss:sum": pytest.approx(value.item())}
    assert set(weighted.columns) == {"target_tokens", "weights"}


def test_a_loss_may_compare_datums_and_ignore_some():
    weighted, _ = surrogate(
        batch(), np.zeros(sum(LENGTHS), np.float32), lambda _, p: ((p[0].sum() - p[1].sum()) * 2, {})
    )
    assert weighted.columns["weights"].tolist() == [-2, -2, -2, 2, 0, 0, 0, 0, 0]


def test_a_gradient_that_is_not_finite_names_its_datum():
    with pytest.raises(ValueError, match="datum 1 is not finite"):
        surrogate(batch(), np.zeros(sum(LENGTHS), np.float32), lambda _, p: (p[1].sum().sqrt(), {}))
