"""Losses against exact numbers, against closed forms by autograd, and their behaviour at masked tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_fences import ALL

from trainer.losses import DATUM, monitors, on_rows, resolve_loss, surrogate
from trireme.config.losses import LOSSES
from trireme.core.errors import BadInput
from trireme.core.types import Datum, ModelInput, TokenBatch

VECTORS = json.loads((Path(__file__).parents[2] / "oracles" / "vectors.json").read_text())


def columns(q, advantages, mask=None):
    q = torch.tensor(q, dtype=torch.float32)
    return {
        "logprobs": q,
        "advantages": torch.tensor(advantages, dtype=torch.float32),
        "mask": torch.ones_like(q) if mask is None else torch.tensor(mask, dtype=torch.float32),
    }


def gradient(name, p, cols, config=None):
    """Gradient, value and metrics of a loss. Rows [D, L] are D datums, one after the other."""
    function, full = resolve_loss(name, config or {})
    p = torch.tensor(p, dtype=torch.float32, requires_grad=True)
    flat = {name: column.flatten() for name, column in cols.items()}
    if p.dim() == 2:
        flat[DATUM] = torch.arange(len(p), dtype=torch.int32).repeat_interleave(p.shape[1])
    loss, metrics = function(p.flatten(), flat, full)
    loss.backward()
    return p.grad, float(loss.detach()), metrics


VECTOR_KEYS = {
    "importance_sampling": ("importance_sampling", {}),
    "ppo": ("ppo_0.8_1.2", {}),
    "cispo": ("cispo_0_4", {}),
    "dro": ("dro_beta_0.05_mask_0_1", {"beta": 0.05}),
}


@pytest.mark.parametrize("name", VECTOR_KEYS)
def test_gradients_of_the_vectors(name):
    oracle = VECTORS["loss_gradients_wrt_p"]
    key, config = VECTOR_KEYS[name]
    mask = [0, 1] if "mask" in key else None
    grad, _, _ = gradient(name, oracle["p"], columns(oracle["q"], oracle["A"], mask), config)
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


GENERATOR = torch.Generator().manual_seed(0)
P, Q, A = (torch.randn(4, 50, generator=GENERATOR) for _ in range(3))
M = (torch.rand(4, 50, generator=GENERATOR) < 0.5).float()
BETA, LOW, HIGH = 0.3, 0.7, 1.5


def closed_forms():
    """Name, parameters, and what value and gradient must be, written out."""
    r = (P - Q).exp()
    inside = ~((r > HIGH) & (A > 0)) & ~((r < LOW) & (A < 0))  # where the smaller is not the clamped constant
    s = (((P - Q) * M).sum(-1, keepdim=True) / M.sum(-1, keepdim=True)).exp().expand_as(P)
    s_inside = ~((s > HIGH) & (A > 0)) & ~((s < LOW) & (A < 0))
    clip = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}
    return {
        "importance_sampling": ({}, -(M * r * A).sum(), -M * r * A),
        "ppo": (clip, -(M * torch.minimum(r * A, r.clamp(LOW, HIGH) * A)).sum(), -M * r * A * inside),
        "cispo": (clip, -(M * r.clamp(LOW, HIGH) * P * A).sum(), -M * r.clamp(LOW, HIGH) * A),
        "dro": ({"beta": BETA}, -(M * (P * A - BETA / 2 * (P - Q) ** 2)).sum(), -M * (A - BETA * (P - Q))),
        "gspo": (clip, -(M * torch.minimum(s * A, s.clamp(LOW, HIGH) * A)).sum(), -M * s * A * s_inside),
    }


@pytest.mark.parametrize("name", closed_forms())
def test_value_and_gradient_are_the_closed_form(name):
    config, value, expected = closed_forms()[name]
    grad, loss, _ = gradient(name, P.tolist(), columns(Q.tolist(), A.tolist(), M.tolist()), config)
    assert loss == pytest.approx(value.item(), rel=1e-5)
    torch.testing.assert_close(grad, expected)


def test_gspo_is_that_of_the_paper_where_a_sequence_has_one_advantage():
    """Equation 5 of arXiv:2507.18071, by autograd, times the number of tokens that the normaliser divides by again."""
    advantages, count = A[:, :1].expand_as(A), M.sum(-1)
    p = P.clone().requires_grad_()
    s = (((p - Q) * M).sum(-1) / count).exp()
    (-count * torch.minimum(s * A[:, 0], s.clamp(LOW, HIGH) * A[:, 0])).sum().backward()
    config = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}
    grad, _, _ = gradient("gspo", P.tolist(), columns(Q.tolist(), advantages.tolist(), M.tolist()), config)
    torch.testing.assert_close(grad, p.grad)


def test_cross_entropy_is_weighted_and_passes_over_weight_zero():
    p = torch.tensor([-1.0, float("-inf"), -2.0], requires_grad=True)
    function, full = resolve_loss("cross_entropy", {})
    loss, metrics = function(p, {"weights": torch.tensor([0.5, 0.0, 2.0])}, full)
    loss.backward()
    assert (loss.item(), metrics) == (4.5, {"loss_tokens:sum": 2.0})
    assert p.grad.tolist() == [-0.5, 0.0, -2.0]


RATIO_LOSSES = ("importance_sampling", "ppo", "cispo", "gspo")


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_a_truncated_ratio_keeps_its_direction(name):
    wide = {"clip_low_threshold": 0, "clip_high_threshold": 1e9} if name != "importance_sampling" else {}
    ratios = torch.tensor([[1.0], [7.0]])
    cols = columns([[0.0], [0.0]], [[1.0], [1.0]])
    grad, _, metrics = gradient(name, ratios.log().tolist(), cols, {**wide, "max_ratio": 3.0})
    assert grad.flatten().tolist() == pytest.approx([-1.0, -3.0], rel=1e-5)
    assert metrics["truncated_frac:sum"] == 1


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_what_is_clipped_is_decided_before_the_ratio_is_truncated(name):
    """Also when `max_ratio` is below the threshold, behind which no truncated ratio would ever be."""
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "max_ratio": 1.1}
    cols = columns([[0.0]] * 4, [[1.0], [-1.0], [1.0], [-1.0]])
    grad, loss, metrics = gradient(name, torch.tensor([[5.0], [5.0], [1.15], [0.5]]).log().tolist(), cols, config)
    assert grad.flatten().tolist() == pytest.approx([0, 1.1, -1.1, 0])
    assert loss == pytest.approx(-1.2 + 1.1 - 1.1 + 0.8)
    assert (metrics["clip_frac:sum"], metrics["truncated_frac:sum"]) == (2, 2)


@pytest.mark.parametrize("name", RATIO_LOSSES)
@pytest.mark.parametrize("distance", [-200.0, 200.0])
def test_a_ratio_beyond_the_range_of_floats_is_no_nan(name, distance):
    """Where it is clipped, the gradient is 0, and where there is no advantage; elsewhere the step is refused."""
    advantages = [[1.0], [0.0]] if distance > 0 else [[-1.0], [0.0]]
    grad, loss, _ = gradient(name, [[distance]] * 2, columns([[0.0]] * 2, advantages))
    assert grad[1].item() == 0
    if name in ("ppo", "gspo") or distance < 0:
        assert grad[0].item() == 0
        assert np.isfinite(loss)
    elif name == "cispo":
        assert grad[0].item() == pytest.approx(-4)
    else:
        assert grad[0].item() == -np.inf


@pytest.mark.parametrize("name", [*RATIO_LOSSES, "dro"])
def test_tokens_whose_ratio_is_outside_the_range_are_as_if_masked(name):
    config = {"beta": 0.1} if name == "dro" else {}
    ratios, advantages, q = torch.tensor([0.1, 0.9, 1.1, 9.0]).log().tolist(), [1.0, 2.0, -1.0, 3.0], [0.0] * 4
    by_range = gradient(name, ratios, columns(q, advantages), {**config, "mask_ratio_low": 0.5, "mask_ratio_high": 2.0})
    by_mask = gradient(name, ratios, columns(q, advantages, [0, 1, 1, 0]), config)
    torch.testing.assert_close(by_range[0], by_mask[0])
    assert by_range[1] == by_mask[1]
    assert (by_range[2]["ratio_masked_frac:sum"], by_mask[2]["ratio_masked_frac:sum"]) == (2, 0)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_thresholds_may_be_given_token_by_token(name):
    ratios, advantages, q = torch.tensor([2.0, 2.0]).log().tolist(), [1.0, 1.0], [0.0, 0.0]
    cols = columns(q, advantages) | {
        "clip_low_threshold": torch.tensor([0.0, 0.0]),
        "clip_high_threshold": torch.tensor([1.5, 3.0]),
    }
    _, loss, metrics = gradient(name, ratios, cols)
    assert metrics["clip_frac:sum"] == 1
    if name != "cispo":
        assert loss == pytest.approx(-(1.5 + 2.0))


@pytest.mark.parametrize("name", LOSSES)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_flat_datums_have_the_gradient_of_each_alone(name, lengths, seed):
    """Also where datums have unequal lengths, and where no token of one counts."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    p, q, advantages = (torch.randn(total, generator=generator) for _ in range(3))
    mask = (torch.rand(total, generator=generator) < 0.5).float()
    flat = {"logprobs": q, "advantages": advantages, "mask": mask, "weights": mask * 2}
    config = {"beta": 0.1} if name == "dro" else {}
    alone = [
        gradient(name, part.tolist(), dict(zip(flat, parts, strict=True)), config)
        for part, *parts in zip(p.split(lengths), *(column.split(lengths) for column in flat.values()), strict=True)
    ]
    numbered = {**flat, DATUM: torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))}
    grad, loss, _ = gradient(name, p.tolist(), numbered, config)
    torch.testing.assert_close(grad, torch.cat([part for part, _, _ in alone]))
    assert loss == pytest.approx(sum(value for _, value, _ in alone), rel=1e-5, abs=1e-5)


def test_a_loss_of_ones_own_gets_padded_rows():
    shapes = []

    def own(p, columns, config):
        shapes.append({name: column.tolist() for name, column in columns.items()})
        return (p * columns["weights"] * config["factor"]).sum(), {"longest:max": float(p.shape[1])}

    p = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    columns = {"weights": torch.tensor([1.0, 2.0, 3.0, 4.0]), "versions": torch.tensor([5, 6, 7, 8], dtype=torch.int32)}
    loss = on_rows(own, torch.tensor([0, 3, 4, 5]), (2, 3))
    value, metrics = loss(p, {**columns, DATUM: torch.tensor([0, 1, 1, 1])}, {"factor": 2.0})
    value.backward()
    assert shapes == [{"weights": [[1, 0, 0], [2, 3, 4]], "versions": [[5, 0, 0], [6, 7, 8]]}]
    assert (float(value.detach()), metrics) == (60.0, {"longest:max": 3.0})
    assert p.grad.tolist() == [2, 4, 6, 8]


def squared(p, columns, config):
    return (columns["mask"] * (p - config["centre"]) ** 2).sum(), {
        "distance:max": float((p.detach() - config["centre"]).max())
    }


def test_a_loss_of_ones_own_by_its_import_path():
    grad, _, metrics = gradient(
        f"{__name__}:squared", [1.0, 2.0], columns([0.0] * 2, [0.0] * 2, [1, 0]), {"centre": 0.5}
    )
    assert (grad.tolist(), metrics) == ([1.0, 0.0], {"distance:max": 1.5})
    for path in ("nowhere.at_all:loss", f"{__name__}:nothing", f"{__name__}:BETA"):
        with pytest.raises(BadInput, match=path):
            resolve_loss(path, {})


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_masked_tokens_do_not_count_whatever_they_hold(name):
    config = {"beta": 0.1} if name == "dro" else {}
    cols = columns([0.0, float("-inf"), -500.0], [1.0, float("nan"), 7.0], [1, 0, 0])
    grad, loss, metrics = gradient(name, [0.0, -1.0, 500.0], cols, config)
    assert grad.tolist() == [-1.0, 0.0, 0.0]
    assert loss == (0 if name in ("cispo", "dro") else -1.0)
    assert not any(metrics.values())
    sums = monitors(torch.tensor([0.0, -1.0, 500.0]), cols)
    assert (sums["kl_sample_train_v1:sum"], sums["ratio:max"], sums["entropy:sum"]) == (0, 1, 0)


def test_unknown_loss_and_keys_name_the_known_ones():
    with pytest.raises(BadInput, match=r"importance_sampling, ppo, cispo, dro, gspo"):
        resolve_loss("reinforce", {})
    with pytest.raises(BadInput, match=r"clip_low_treshold.*\n.*clip_low_threshold"):
        resolve_loss("ppo", {"clip_low_treshold": 0.7})
    with pytest.raises(BadInput, match="parameters of cross_entropy: none"):
        resolve_loss("cross_entropy", {"clip_low_threshold": 0.8})


@pytest.mark.parametrize(
    ("name", "config", "says"),
    [
        ("ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.1}, "0.8 and 1.2"),
        ("ppo", {"mask_ratio_low": 1.2}, "mask_ratio_low = 1.2"),
        ("cispo", {"max_ratio": 0.5}, "max_ratio = 0.5"),
        ("dro", {}, "without beta"),
        ("dro", {"beta": -1.0}, "beta = -1"),
        ("dro", {"beta": 0.1, "max_ratio": 2.0}, "parameters of dro: beta, mask_ratio_low, mask_ratio_high"),
        ("ppo", {"clip_high_threshold": float("nan")}, "clip_high_threshold = nan"),
    ],
)
def test_parameters_that_cannot_work_are_refused(name, config, says):
    with pytest.raises(BadInput, match=says):
        resolve_loss(name, config)


CUSTOM_LENGTHS = (3, 1, 5)
CUSTOM_RNG = np.random.default_rng(0)


def batch() -> TokenBatch:
    def datum(n: int) -> Datum:
        columns = {"target_tokens": CUSTOM_RNG.integers(0, 9, n), "mask": np.ones(n)}
        columns |= {"logprobs": -CUSTOM_RNG.random(n), "advantages": CUSTOM_RNG.normal(size=n)}
        return Datum(ModelInput(CUSTOM_RNG.integers(0, 9, n).astype(np.int32)), columns)

    return TokenBatch.from_datums([datum(n) for n in CUSTOM_LENGTHS])


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
    data, logprobs = batch(), -CUSTOM_RNG.random(sum(CUSTOM_LENGTHS)).astype(np.float32)
    loss = built_in(name, config)
    weighted, metrics = surrogate(data, logprobs, loss)

    p = torch.from_numpy(logprobs).requires_grad_()
    value, _ = loss([data.datum(d) for d in range(len(data))], p.split(CUSTOM_LENGTHS))
    value.backward()
    cross_entropy, _ = resolve_loss("cross_entropy", {})
    q = torch.from_numpy(logprobs).requires_grad_()
    cross_entropy(q, {"weights": torch.from_numpy(weighted.columns["weights"])}, {})[0].backward()
    torch.testing.assert_close(q.grad, p.grad)
    assert metrics == {"datums:sum": 3.0, "loss:sum": pytest.approx(value.item())}
    assert set(weighted.columns) == {"target_tokens", "weights"}


def test_the_loss_of_the_page_is_the_policy_gradient():
    (fence,) = [fence for fence in ALL if "def reinforce(" in fence.text]
    namespace = {}
    exec(fence.text, namespace)
    data = batch()
    weighted, metrics = surrogate(data, np.full(sum(CUSTOM_LENGTHS), -1.0, np.float32), namespace["reinforce"])
    np.testing.assert_allclose(weighted.columns["weights"], data.columns["advantages"])
    assert metrics == {"datums:sum": 3.0, "loss:sum": pytest.approx(data.columns["advantages"].sum(), rel=1e-5)}


def test_a_gradient_that_is_not_finite_names_its_datum():
    with pytest.raises(ValueError, match="datum 1 is not finite"):
        surrogate(batch(), np.zeros(sum(CUSTOM_LENGTHS), np.float32), lambda _, p: (p[1].sum().sqrt(), {}))


# ---- inputs and expected numbers of other projects' tests (tests/conformance/numbers.toml)


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
