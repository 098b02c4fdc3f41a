"""Slabs of host memory (`trireme.transports.slabs`): files without a name, which other processes of this user can map.
A copy has ended when its call returns."""

from __future__ import annotations

import os
import weakref
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor


def make(nbytes: int) -> tuple[Tensor, str]:
    file = os.memfd_create("slab")
    os.truncate(file, nbytes)
    handle = f"/proc/{os.getpid()}/fd/{file}"
    memory = np.memmap(handle, np.uint8, "r+", shape=(nbytes,))
    weakref.finalize(memory, os.close, file)
    return torch.from_numpy(memory), handle


def open(handle: str, nbytes: int) -> Tensor:
    """Maps the memory of another process, and returns it, uint8 [nbytes] (`SlabMemory.open`). `handle`: from `make` in
    that process. The mapping is private: other processes do not see what this process writes to the tensor. Raises
    OSError if that process has ended."""
    return torch.from_numpy(np.memmap(handle, np.uint8, "c", shape=(nbytes,)))


def close(opened: Tensor) -> None:
    """Does nothing: the mapping ends with the last reference to the tensor."""


def copy(source: Tensor, target: Tensor, timeout_s: float) -> bool:
    target.copy_(source)
    return True


def on_stream() -> nullcontext[None]:
    return nullcontext()
