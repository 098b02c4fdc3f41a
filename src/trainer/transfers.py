"""Copies tensors between host and device. During forward and backward passes all such copies go through this module.

A copy to the device is queued behind the device's earlier work, and the host does not wait. A copy to the host that is
read there waits until the device has done its earlier work. Both are counted, so that a test can limit the waits of a
pass. So are the bytes of activations that are copied to the host to be copied back, for which nothing waits.
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
    activation_bytes: int = 0
    """Bytes that were copied to the host without a wait."""


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


def queue_to_host(tensor: Tensor) -> Tensor:
    """Queues a copy of `tensor` to host memory on the current stream, and returns the copy, without its gradient. Does
    not wait for the device: the values are there when the stream has done this work."""
    COUNTS.activation_bytes += tensor.nbytes
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return on_host.copy_(tensor.detach(), non_blocking=True)
