"""How sequences weigh: the published formulas in float64, whatever datums and minibatches their tokens are in."""

from dataclasses import replace
from typing import get_args

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.losses import POLICY, mean_log_ratios, resolve_loss, sum_log_ratios, with_sequence_ratios
from trireme.core.normalization import LossNormalization, Normalization
from trireme.core.types import Datum, ModelInput, TokenBatch

LONGEST = 16
LOW, HIGH = 0.8, 1.25
COLUMNS = ("mask", "logprobs", "advantages", "p")


def batch_of(*parts: tuple[int, dict[str, np.ndarray]]) -> TokenBatch:
    """Datums, each with the number of its sequence."""
    columns_D = [{name: values for name, values in columns.items() if name != "p"} for _, columns in parts]
    data = [Datum(ModelInput(np.zeros(len(c["mask"]))), {"target_tokens": 0 * c["mask"], **c}) for c in columns_D]
    return replace(TokenBatch.from_datums(data), sequences=np.array([number for number, _ in parts]))


def published(kind: str, loss: str, sequences: list[dict[str, np.ndarray]]) -> np.ndarray:
    """The gradient of the objective as papers write it, float64, over all tokens."""
    p_N = [torch.tensor(s["p"], dtype=torch.float64, requires_grad=True) for s in sequences]
    counted, terms = [], []
    for p, s in zip(p_N, sequences, strict=True):
        q, a, m = (torch.tensor(s[name], dtype=torch.float64) for name in ("logprobs", "advantages", "mask"))
        if loss == "gspo":
            on = (m != 0).double()
            mean = ((p - q).detach() * on).sum() / max(float(on.sum()), 1.0)
            r = (mean + p - p.detach()).exp()
        else:
            r = (p - q).exp()
        tokens = -m * torch.minimum(r * a, r.clamp(LOW, HIGH) * a)
        total = float(m.sum())
        terms.append(tokens.sum() / total if kind == "sequence_mean_token_mean" and total else tokens.sum())
        counted.append(total)
    number = sum(total > 0 for total in counted)
    divisor = {"token_mean": sum(counted), "sum": 1.0, "sequence_mean_token_sum_norm": number * LONGEST}
    torch.stack(terms).sum().div(divisor.get(kind, number) or 1.0).backward()
    return np.concatenate([p.grad.numpy() for p in p_N])


def computed(kind: LossNormalization, loss: str, minibatches: list[list[tuple[int, dict[str, np.ndarray]]]]):
    """The gradient of each sequence's tokens in order, as trainer and loop make it of datums and minibatches."""
    function, config = resolve_loss(loss, {"clip_low_threshold": LOW, "clip_high_threshold": HIGH})
    gradients, divisor = [], 0.0
    for parts in minibatches:
        batch, divisor_of_part = Normalization(kind, LONGEST).apply(batch_of(*parts), "mask")
        divisor += divisor_of_part
        logprobs = np.concatenate([columns["p"] for _, columns in parts]).astype(np.float32)
        if loss == "gspo":
            with_logprobs = replace(batch, columns={**batch.columns, POLICY: logprobs})
            batch = with_sequence_ratios(
                with_logprobs, mean_log_ratios(batch.sequences, sum_log_ratios(with_logprobs, config))
            )
        for d in range(len(batch)):
            row = slice(int(batch.offsets[d]), int(batch.offsets[d + 1]))
            p = torch.tensor(logprobs[None, row], requires_grad=True)
            function(p, {n: torch.from_numpy(c[None, row]) for n, c in batch.columns.items()}, config)[0].backward()
            gradients.append(p.grad.numpy()[0])
    return np.concatenate(gradients) / (divisor or 1.0)


def random_sequence(rng: np.random.Generator) -> dict[str, np.ndarray]:
    n = int(rng.integers(1, 9))
    mask = rng.choice([0, 1, 1, 0.5], n) * rng.choice([0, 1, 1, 1])
    q = -rng.random(n).astype(np.float32)
    advantages = np.where(mask != 0, rng.normal(), 0).astype(np.float32)
    return {"mask": mask, "logprobs": q, "p": q + rng.normal(0, 0.3, n).astype(np.float32), "advantages": advantages}


@given(st.sampled_from(get_args(LossNormalization)), st.sampled_from(["ppo", "gspo"]), st.integers(0, 2**32 - 1))
def test_any_split_of_rollouts_has_the_published_gradient(kind: LossNormalization, loss: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = [random_sequence(rng) for _ in range(rng.integers(1, 6))]
    minibatches: list[list[tuple[int, dict[str, np.ndarray]]]] = [[]]
    for number, columns in enumerate(sequences):
        if minibatches[-1] and rng.random() < 0.4:
            minibatches.append([])
        cuts = np.flatnonzero(rng.random(len(columns["mask"]) - 1) < 0.3) + 1
        split = {name: np.split(columns[name], cuts) for name in COLUMNS}
        parts = [{name: split[name][part] for name in COLUMNS} for part in range(len(cuts) + 1)]
        minibatches[-1] += [(number, part) for part in parts]
    expected = published(kind, loss, sequences)
    np.testing.assert_allclose(computed(kind, loss, minibatches), expected, rtol=2e-4, atol=1e-6)
