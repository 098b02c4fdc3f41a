"""A bucket that arrives on a GPU. Groups over TCP, real ones, are in test_broadcast.py."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference import receiving
from inference.receiving import Broadcast


class Group:
    """Stands for a group of GPUs, and logs what happens on its stream."""

    def __init__(self, place: torch.Tensor) -> None:
        self.place = place
        self.log: list[str] = []
        self._on_stream = False

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        self._on_stream = True
        yield
        self._on_stream = False
        self.log.append(f"copied: {self.place.tolist()}")

    def allocate(self, place: torch.Tensor, device: str) -> torch.Tensor:
        assert self._on_stream
        assert device == "cuda"
        self.log.append("allocated")
        return torch.zeros(len(place), dtype=torch.uint8)

    def broadcast(self, buffer: torch.Tensor, timeout_s: float) -> None:
        assert self._on_stream
        self.log.append("received")
        buffer.fill_(7)


def test_a_bucket_arrives_on_the_stream_of_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the engine's stream it would wait for the steps in progress, and the next steps for it."""
    arriving: Any = object.__new__(Broadcast)
    arriving.given_up = threading.Event()
    arriving._deadline = 0.0
    place = torch.zeros(3, dtype=torch.uint8)
    group: Any = Group(place)
    monkeypatch.setattr(receiving, "torch", SimpleNamespace(empty_like=group.allocate))
    arriving._receive_bucket(SimpleNamespace(collective=group), place)
    assert group.log == ["allocated", "received", "copied: [7, 7, 7]"]
    buffer: Any = SimpleNamespace(device=torch.device("cuda"), fill_=lambda _: None, tolist=list)
    group = Group(buffer)
    arriving._receive_bucket(SimpleNamespace(collective=group), buffer)
    assert group.log == ["received", "copied: []"], "in the second buffer"
