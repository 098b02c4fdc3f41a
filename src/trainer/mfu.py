"""The share of a GPU's peak that goes into the model's own arithmetic (MFU, arXiv:2204.02311).

Forward and backward pass are counted from the sizes: 6 operations for every parameter that a token is multiplied with
(4 where it is frozen, under an adapter), and for attention 12 for every pair of query and key, of which a causal model
has half. Recomputation (`trainer.checkpointing`) and padding do not count.
"""

from __future__ import annotations

from math import inf

import numpy as np
import numpy.typing as npt
import torch

from trireme.config.model_facts import ModelFacts

PEAK_TFLOPS = {"B200": 2250, "H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312, "L40S": 362, "A10G": 70}
"""Dense products in bfloat16, 10^12 operations per second, from NVIDIA's data sheets, by a part of the device's name;
the first match counts."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the operations per second of a GPU in 16 bits. For other devices and dtypes, and unknown GPUs, returns
    infinity, with which the time at the peak is 0."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return inf
    found = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for name, tflops in PEAK_TFLOPS.items() if name in found), inf)


def train_flops(facts: ModelFacts, lengths: npt.NDArray[np.int64], *, frozen: bool = False) -> float:
    """Counts the operations of forward and backward pass over sequences of these lengths, int64 [D]."""
    tokens = lengths.astype(np.float64)
    products = (4 if frozen else 6) * facts.multiplied_parameters * tokens.sum()
    return float(products + 6 * facts.attention_width * np.square(tokens).sum())
