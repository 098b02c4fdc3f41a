"""Copies tensors between host and device. During forward and backward passes all such copies go through this module.

A copy to the device is queued behind the device's earlier work, and the host does not wait. A copy to the host waits
until the device has done its earlier work. Both are counted, so that a test can limit the waits of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass
class TransferCounts:
    """Counts the copies between host and device that this process has made so far. Each copy to the host makes the host
    wait. Tests check that a pass makes a fixed number of copies to the host, however many micro-batches it has."""

    to_device: int = 0
    waits: int = 0
    """Copies to the host, which wait for the device."""


COUNTS = TransferCounts()


def to_device(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Returns `values` as a tensor on `device`: a copy on a GPU; on a CPU a tensor that shares the memory of `values`.
    Does not wait for the device."""
    COUNTS.to_device += 1
    tensor = torch.from_numpy(values)
    if device.type == "cuda":  # a copy of other memory waits until the device has done all that was begun
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> npt.NDArray[Any]:
    """Returns the values of `tensor`, without its gradient. Waits for the device."""
    COUNTS.waits += 1
    return tensor.detach().cpu().numpy()
