"""Losses and advantages against verl's, on 200 random batches.

`tests/oracles/verl.json` has the numbers that verl's functions gave for these batches, in float64: their source is in
the file. Under the mask this project's functions get NaN, and verl's, which its means over sequences do not bear there,
got 0.

What differs is by definition: verl's `std` is that of a sample (it divides by n - 1, here by n); `dual clip` is off;
`seq-mean-token-sum-norm` is not divided by the number of sequences there.
"""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from orchestrator.advantages import compute_advantages
from trainer.losses import DATUM, resolve_loss
from trireme.core.normalization import Normalization
from trireme.core.types import Datum, ModelInput, TokenBatch

VERL = Path(__file__).parents[2] / "oracles" / "verl.json"
BATCHES, LENGTH = 200, 6
CLIP = {"ppo": (0.2, 0.28), "gspo": (0.05, 0.08), "cispo": (0.4, 0.5)}
MAX_RATIO = 1.25
MODES = {
    "token_mean": "token-mean",
    "sequence_mean_token_mean": "seq-mean-token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "sequence_mean_token_sum_norm": "seq-mean-token-sum-norm",
}
CASES = [*(("ppo", mode) for mode in MODES), ("gspo", "sequence_mean_token_mean")]
CASES += [("cispo", "token_mean"), ("importance_sampling", "token_mean")]
Floats = npt.NDArray[np.float64]


def random_batch(seed: int) -> dict[str, Floats]:
    """Up to five sequences as rows; some tokens, and in some batches a whole sequence, have mask 0."""
    rng = np.random.RandomState(seed)  # the one generator whose numbers never change
    rows = rng.randint(2, 6)
    mask = (rng.rand(rows, LENGTH) < 0.7).astype(np.float64)
    mask[0, 0] = 1
    mask[-1] *= rng.rand() < 0.7
    q = -3 * rng.rand(rows, LENGTH)
    p = q + 0.4 * rng.randn(rows, LENGTH)
    return {"mask": mask, "logprobs": q, "p": p, "advantages": rng.randn(rows, LENGTH) * mask}


def random_rewards(seed: int) -> list[Floats]:
    """Rewards of two groups; in some batches one is constant."""
    rng = np.random.RandomState(seed)
    groups = [np.round(rng.rand(rng.randint(2, 9)) * rng.choice([1, 1000]), 1) for _ in range(2)]
    return [groups[0], groups[1] * 0 + 0.7 if rng.rand() < 0.2 else groups[1]]


def summary(value: float, numbers: Floats) -> list[float]:
    """A value, and two numbers that depend on all of `numbers` and their order."""
    weighted = numbers.ravel() @ np.cos(np.arange(numbers.size))
    return [float(f"{x:.9g}") for x in (value, weighted, np.abs(numbers).sum())]


def computed(loss: str, mode: str, batch: dict[str, Floats]) -> tuple[float, Floats]:
    """Value and gradient as the trainer makes them, with NaN under the mask."""
    names = ("mask", "logprobs", "advantages")
    hidden = {name: np.where((batch["mask"] != 0) | (name == "mask"), batch[name], np.nan) for name in names}
    rows = range(len(batch["mask"]))
    columns_D = [
        {"target_tokens": np.zeros(LENGTH, int), **{name: hidden[name][row] for name in names}} for row in rows
    ]
    data = [Datum(ModelInput([0] * LENGTH), columns) for columns in columns_D]
    weighted, divisor = Normalization(mode, LENGTH).apply(TokenBatch.from_datums(data), "mask")
    columns = {name: torch.from_numpy(column) for name, column in weighted.columns.items()}
    columns[DATUM] = torch.arange(len(data)).repeat_interleave(LENGTH)
    thresholds = (
        {"max_ratio": MAX_RATIO}
        if loss == "importance_sampling"
        else {"clip_low_threshold": 1 - CLIP[loss][0], "clip_high_threshold": 1 + CLIP[loss][1]}
    )
    function, config = resolve_loss(loss, thresholds)
    p = torch.tensor(np.where(batch["mask"] != 0, batch["p"], np.nan), dtype=torch.float32, requires_grad=True)
    value, _ = function(p.flatten(), columns, config)
    value.backward()
    return float(value.detach()) / divisor, p.grad.numpy().astype(np.float64) / divisor


@pytest.mark.parametrize(("loss", "mode"), CASES)
def test_a_loss_and_its_gradient_are_verls(loss: str, mode: str) -> None:
    recorded = json.loads(VERL.read_text())["losses"][f"{loss} {mode}"]
    assert len(recorded) == BATCHES
    first = 1 if loss == "importance_sampling" else 0  # whose value verl takes with p for r, so only gradients agree
    for seed, numbers in enumerate(recorded):
        batch = random_batch(seed)
        number = np.count_nonzero(batch["mask"].any(-1)) if mode == "sequence_mean_token_sum_norm" else 1
        expected = [x / number for x in numbers]
        results = summary(*computed(loss, mode, batch))
        assert results[first:] == pytest.approx(expected[first:], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("mean", "mean"), ("std", "std"), ("rloo", "leave_one_out"), ("rloo vectorized", "leave_one_out")],
)
def test_advantages_are_verls(name: str, kind: str) -> None:
    recorded = json.loads(VERL.read_text())["advantages"][name]
    assert len(recorded) == BATCHES
    for seed, numbers in enumerate(recorded):
        advantages = []
        for rewards in random_rewards(seed):
            n = len(rewards)
            sample = np.sqrt((n - 1) / n) if kind == "std" else 1.0
            advantages.append(compute_advantages(rewards.tolist(), kind).astype(np.float64) * sample)
        assert summary(0.0, np.concatenate(advantages)) == pytest.approx(numbers, rel=1e-4, abs=1e-4)
