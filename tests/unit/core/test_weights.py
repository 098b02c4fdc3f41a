"""The canary: what a replica's log-probabilities may differ by."""

import numpy as np
import pytest

from trireme.core.errors import WeightsRefused
from trireme.core.types import WeightIdentity
from trireme.core.weights import (
    EXACT,
    GROWTH,
    LEAST,
    ROUNDED,
    Canary,
    Drift,
    PublishedWeights,
    WeightsManifest,
    check_canary,
    check_decoding,
)

LOGPROBS = np.linspace(-9, -1, 8, dtype=np.float32)


def published(bound):
    canary = Canary(np.arange(9, dtype=np.int32), LOGPROBS, bound)
    return PublishedWeights(WeightsManifest(WeightIdentity(1, 7, "d"), (), canary), ())


def off_by(*differences):
    return LOGPROBS + np.asarray(differences, np.float32)


def test_drift_is_the_mean_and_the_largest_absolute_difference():
    drift = check_canary(published(ROUNDED).manifest, off_by(0.5, 0, 0, 0, 0, 0, 0, -0.25))
    assert (drift.mean, drift.largest) == pytest.approx((0.75 / 8, 0.5), abs=1e-6)


@pytest.mark.parametrize(
    "differences",
    [(0.11,) * 8, (0.6, 0, 0, 0, 0, 0, 0, 0), (0, 0, np.nan, 0, 0, 0, 0, 0)],
    ids=["mean", "largest", "nan"],
)
def test_beyond_either_bound_weights_are_refused_with_the_numbers(differences):
    manifest = published(Drift(0.1, 0.5)).manifest
    with pytest.raises(
        WeightsRefused, match=r"version 7: .* on average and .* at most, expected no more than 0.1 and 0.5:"
    ):
        check_canary(manifest, off_by(*differences))


def test_in_float32_the_bound_is_1e_4_whatever_was_found_first():
    later = published(EXACT).bounded_by(Drift(9e-5, 9e-5), Drift(9e-5, 9e-5))
    assert later.manifest.canary.bound == EXACT == Drift(1e-4, 1e-4)
    with pytest.raises(WeightsRefused):
        check_canary(published(EXACT).manifest, off_by(2e-4, 0, 0, 0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("first", "largest", "bound"),
    [
        (0.02, 0.02, GROWTH * 0.02),
        (0.004, 0.004, 0.05),
        (0.012, 0.012, 0.06),
        (0.012, 0.03, 0.15),
        (0.012, 0.09, ROUNDED.mean),
        (0.1, 0.1, GROWTH * 0.1),  # a first drift that was large is not cut by the bound of a first update
    ],
)
def test_the_bound_follows_a_drift_that_grows_up_to_that_of_a_first_update(first: float, largest: float, bound: float):
    later = published(ROUNDED).bounded_by(Drift(first, 0.06), Drift(largest, 0.06))
    assert later.manifest.canary.bound == Drift(pytest.approx(bound), LEAST.largest)


@pytest.mark.parametrize(
    ("moved", "refused"),
    [
        ((0.09, 0.09, 0.09, 0.4), False),
        ((0.09, 0.09, 0.12, 0.4), True),
        ((0.0, 0.0, 0.0, 0.6), True),
        ((0.0, 0.0, 0.0, np.nan), True),
    ],
    ids=["one token with other experts", "median", "largest", "nan"],
)
def test_decode_steps_may_differ_from_a_prefill_by_the_bounds_of_the_canary(moved, refused):
    manifest = published(Drift(0.1, 0.5)).manifest
    prefilled = LOGPROBS[:4]
    if not refused:
        check_decoding(manifest, prefilled - np.float32(moved), prefilled)
        return
    with pytest.raises(
        WeightsRefused, match=r"version 7: logprobs of 4 tokens in decode steps .* no more than 0.1 and 0.5:"
    ):
        check_decoding(manifest, prefilled - np.float32(moved), prefilled)
