"""Slabs on a GPU, by stand-ins for CUDA: what is called with what, and when a copy counts as ended. The signatures are
those of the bindings; without a driver the real calls say so. `scripts/gpu_check` runs the real thing."""

import ctypes
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from cuda.bindings import runtime

from trireme.core.errors import RoomFailed
from trireme.process.device import has_gpu
from trireme.transports import cuda_slabs

SUCCESS = runtime.cudaError_t.cudaSuccess


class Driver:
    """Stands for the bindings of CUDA: memory of this process, with handles that name its address."""

    cudaError_t = runtime.cudaError_t
    cudaIpcMemHandle_t = runtime.cudaIpcMemHandle_t
    cudaIpcMemLazyEnablePeerAccess = runtime.cudaIpcMemLazyEnablePeerAccess
    cudaGetErrorString = staticmethod(runtime.cudaGetErrorString)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        self.calls.append(("malloc", size))
        return SUCCESS, 4096

    def cudaIpcGetMemHandle(self, devPtr: int) -> tuple[Any, ...]:
        handle = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), bytes(range(64)), 64)
        return SUCCESS, handle

    def cudaIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, ...]:
        self.calls.append(("open", ctypes.string_at(handle.getPtr(), 64), flags))
        return SUCCESS, 8192

    def cudaIpcCloseMemHandle(self, devPtr: int) -> tuple[Any, ...]:
        self.calls.append(("close", devPtr))
        return (SUCCESS,)


class Stream:
    """Stands for a stream; events on it answer what the test says."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.answers = [True]

    def wait_stream(self, other: str) -> None:
        self.log.append(f"after {other}")

    def record(self, stream: Any) -> None:
        assert stream is self
        self.log.append("event")

    def query(self) -> bool:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.log.append("ended" if answer else "runs")
        return answer


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    made = Stream()

    @contextmanager
    def current(entered: Stream) -> Iterator[None]:
        assert entered is made
        made.log.append("enter")
        yield
        made.log.append("leave")

    cuda = SimpleNamespace(
        Stream=lambda: made, Event=lambda: made, current_stream=lambda: "the current", stream=current
    )
    cuda_slabs._stream.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(cuda_slabs, "torch", SimpleNamespace(cuda=cuda))
        yield made
    cuda_slabs._stream.cache_clear()


def copied(stream: Stream, timeout_s: float) -> bool:
    source: Any = torch.arange(5, dtype=torch.uint8)
    target = SimpleNamespace(copy_=lambda given, non_blocking: stream.log.append(f"copy {given.tolist()}"))
    return cuda_slabs.copy(source, target, timeout_s)  # type: ignore[arg-type]


def test_a_copy_begins_after_what_fills_its_source_and_ends_with_its_event(stream: Stream) -> None:
    stream.answers = [False, False, True]
    assert copied(stream, 60.0)
    began = ["after the current", "enter", "copy [0, 1, 2, 3, 4]", "leave", "event"]
    assert stream.log == [*began, "runs", "runs", "ended"]


def test_a_copy_that_does_not_end_is_given_up(stream: Stream) -> None:
    stream.answers = [False]
    assert not copied(stream, 0.01)


def test_a_handle_names_memory_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(cuda_slabs, "runtime", driver)
    monkeypatch.setattr(cuda_slabs, "_tensor_at", lambda address, nbytes: SimpleNamespace(data_ptr=lambda: address))
    made, handle = cuda_slabs.make(2**26)
    assert made.data_ptr() == 4096
    opened = cuda_slabs.open(handle, 2**26)
    assert opened.data_ptr() == 8192
    cuda_slabs.close(opened)
    assert driver.calls == [("malloc", 2**26), ("open", bytes(range(64)), 1), ("close", 8192)]


def test_memory_of_cuda_is_described_to_pytorch() -> None:
    """By https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 3."""
    description = cuda_slabs._RawMemory(4096, 100).__cuda_array_interface__
    assert description == {"shape": (100,), "typestr": "|u1", "data": (4096, False), "strides": None, "version": 3}


@pytest.mark.skipif(has_gpu(), reason="it has a driver")  # reason: with a driver and a GPU both calls would succeed
def test_without_a_driver_cuda_itself_says_why() -> None:
    with pytest.raises(RoomFailed, match="CUDA gives no memory of 100 bytes for another process: "):
        cuda_slabs.make(100)
    with pytest.raises(RoomFailed, match="CUDA gives no memory of another process: "):
        cuda_slabs.open("00" * 64, 100)


def test_the_bindings_have_what_is_called() -> None:
    for name in ("cudaMalloc", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"):
        real = list(inspect.signature(getattr(runtime, name)).parameters)
        stand_in = list(inspect.signature(getattr(Driver, name)).parameters)
        assert stand_in == ["self", *real], name


def test_a_handle_has_the_bytes_of_cudas_header() -> None:
    header = Path(triton.__file__).parent / "backends" / "nvidia" / "include" / "driver_types.h"
    match = re.search(r"#define CUDA_IPC_HANDLE_SIZE (\d+)", header.read_text())
    assert int(match[1]) == cuda_slabs.HANDLE_BYTES
