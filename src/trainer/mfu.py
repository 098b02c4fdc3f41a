"""The share of a GPU's peak that goes into the model's own arithmetic (MFU, arXiv:2204.02311).

Forward and backward pass are counted from the sizes: 6 operations for every parameter that a token is multiplied with
(4 where the parameter is frozen, under an adapter); and for attention 12 operations, for every number of a head's
query, for every pair of query and key. A causal model has half of all pairs, and a window only the pairs within it.
Shared prefixes count once. Recomputation (`trainer.checkpointing`), padding and the states of recurrent layers do not
count.
"""

from __future__ import annotations

from collections import Counter
from math import inf

import numpy as np
import numpy.typing as npt
import torch

from trireme.config.model_facts import ModelFacts

PEAK_TFLOPS = {"B200": 2250, "H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312, "L40S": 362, "A10G": 70}
"""Dense products in bfloat16, 10^12 operations per second, from NVIDIA's data sheets, by a part of the device's name;
the first match counts."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Returns a GPU's peak arithmetic rate in 16 bits, in operations per second. Returns infinity for unknown GPUs,
    other devices and other dtypes, so that a number of operations divided by this rate is 0 seconds."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return inf
    device_name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for name, tflops in PEAK_TFLOPS.items() if name in device_name), inf)


def train_flops(
    facts: ModelFacts, lengths: npt.NDArray[np.int64], shared: npt.NDArray[np.int64], *, frozen: bool = False
) -> float:
    """Returns the number of operations of a forward and a backward pass over sequences of `lengths` tokens, int64 [D].
    The first `shared` tokens of each sequence, int64 [D], do not count: they are computed with another sequence.
    `frozen`: the model is frozen under an adapter."""
    tokens = lengths.astype(np.float64)
    prefixes = shared.astype(np.float64)
    products = (4 if frozen else 6) * facts.multiplied_parameters * (tokens - prefixes).sum()
    layers = Counter(facts.windows)
    pairs = sum(number * (_pairs(tokens, window) - _pairs(prefixes, window)).sum() for window, number in layers.items())
    return float(products + 12 * facts.num_heads * facts.head_dim * pairs)


def _pairs(tokens: npt.NDArray[np.float64], window: int | None) -> npt.NDArray[np.float64]:
    """Returns the number of pairs of query and key in each causal sequence of `tokens` tokens, float64 [D]: half of all
    pairs, without the pairs that are further apart than `window`."""
    beyond = np.maximum(0, tokens - window) if window else 0
    return (np.square(tokens) - np.square(beyond)) / 2
