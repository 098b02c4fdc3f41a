"""Slabs of a GPU's memory (`trireme.transports.slabs`), which other processes can open on the same GPU. Not run on a
GPU yet.

The slabs are raw allocations of CUDA, for two reasons. PyTorch's allocator may have expandable segments, which have no
handle. It also divides an allocation among tensors, but a handle names a whole allocation.

Each process sees one GPU. Copies have a stream of their own, and an event shows their end.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from cuda.bindings import runtime
from torch import Tensor

from trireme.core.errors import RoomFailed
from trireme.transports.collective import pause_between_looks

HANDLE_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE of driver_types.h."""


def make(nbytes: int) -> tuple[Tensor, str]:
    """Allocates GPU memory. Returns the memory, uint8 [nbytes], and a handle by which other processes open it
    (`SlabMemory.make`). Raises RoomFailed if the GPU has not enough memory."""
    (address,) = _checked(runtime.cudaMalloc(nbytes), f"memory of {nbytes} bytes for another process")
    (handle,) = _checked(runtime.cudaIpcGetMemHandle(address), "handle of that memory")
    return _tensor_at(address, nbytes), ctypes.string_at(handle.getPtr(), HANDLE_BYTES).hex()


def open(handle: str, nbytes: int) -> Tensor:
    """Maps the GPU memory of another process, and returns it, uint8 [nbytes] (`SlabMemory.open`). `handle`: from `make`
    in that process. Raises RoomFailed if that process has ended, or is on another GPU or in another container."""
    copied = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(copied.getPtr(), bytes.fromhex(handle), HANDLE_BYTES)
    opened = runtime.cudaIpcOpenMemHandle(copied, runtime.cudaIpcMemLazyEnablePeerAccess)
    (address,) = _checked(opened, "memory of another process")
    return _tensor_at(address, nbytes)


def close(opened: Tensor) -> None:
    runtime.cudaIpcCloseMemHandle(opened.data_ptr())  # an error would mean that it is closed already


def copy(source: Tensor, target: Tensor, timeout_s: float) -> bool:
    started = time.monotonic()
    copies = _stream()
    copies.wait_stream(torch.cuda.current_stream())  # which has filled the source
    with torch.cuda.stream(copies):
        target.copy_(source, non_blocking=True)
    end = torch.cuda.Event()
    end.record(copies)
    while not end.query():
        waited_s = time.monotonic() - started
        if waited_s > timeout_s:
            return False
        time.sleep(pause_between_looks(waited_s))
    return True


def on_stream() -> AbstractContextManager[object]:
    return torch.cuda.stream(_stream())


@cache
def _stream() -> torch.cuda.Stream:
    """Returns the stream of the copies. It is on the device that is current where this is first called: for a rank of
    several, call it first in the engine's own thread. In a `with` block of `on_stream` that device is current too."""
    return torch.cuda.Stream()


class _RawMemory:
    """Describes `nbytes` bytes of GPU memory at `address` by the CUDA array interface, so that PyTorch can use them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _tensor_at(address: int, nbytes: int) -> Tensor:
    return torch.as_tensor(_RawMemory(address, nbytes), device="cuda")


def _checked(outcome: tuple[Any, ...], label: str) -> tuple[Any, ...]:
    """Returns the values in `outcome`, the result of a CUDA call, without the error code. If the call failed, raises
    RoomFailed with a message that CUDA gives no `label`."""
    error, *values = outcome
    if error != runtime.cudaError_t.cudaSuccess:
        (_, text) = runtime.cudaGetErrorString(error)
        raise RoomFailed(f"CUDA gives no {label}: {text.decode()}")
    return tuple(values)
