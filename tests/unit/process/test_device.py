"""One place decides on what a process computes, and says what it found where it cannot."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from trireme.config.run import ClusterConfig
from trireme.core.errors import BadInput
from trireme.process import device
from trireme.process.device import VISIBLE, choose_device, find_device

TEXT = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)\n"
OLD = "The NVIDIA driver on your system is too old (found version 12020).\nPlease update"


def config_on(kind: str) -> Any:
    return SimpleNamespace(cluster=ClusterConfig.model_validate({"device": kind}))


@pytest.mark.parametrize(
    ("kind", "gpus", "deterministic", "chosen"),
    [
        ("auto", 0, False, "cpu"),
        ("auto", 2, False, "gpu"),
        ("auto", 2, True, "cpu"),
        ("cpu", 2, False, "cpu"),
        ("gpu", 0, False, "gpu"),
    ],
)
def test_gpus_are_taken_as_they_are_wanted(kind: device.Device, gpus: int, deterministic: bool, chosen: str) -> None:
    assert choose_device(kind, gpus, deterministic=deterministic) == chosen


def test_on_cpus_nothing_asks_for_a_gpu_and_one_that_torch_can_use_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked for a GPU"))
    assert find_device(config_on("cpu"), "trainer shard 0") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device(config_on("gpu"), "trainer shard 0") == "gpu"


@pytest.mark.parametrize("text", [TEXT, OPEN])
def test_a_driver_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(device, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(OLD)))
    monkeypatch.setenv(VISIBLE, "3")
    with pytest.raises(BadInput) as refused:
        find_device(config_on("gpu"), "inference replica 1")
    message = str(refused.value)
    number = "535.104.05" if text == TEXT else "580.65.06"
    for part in (
        "in inference replica 1 on ",
        f"the NVIDIA driver is {number}; PyTorch is built for CUDA 13.0; CUDA_VISIBLE_DEVICES is '3'; "
        "torch.cuda says: The NVIDIA driver on your system is too old (found version 12020). Please update\n",
        "to do: run `uv sync --no-group cpu --group gpu`",
        "--cluster.device cpu",
    ):
        assert part in message


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The installed one, or one built for CUDA that says what such a one does."""
    if torch.version.cuda is not None:
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(
            torch.cuda, "init", Mock(side_effect=AssertionError("Torch not compiled with CUDA enabled"))
        )
    monkeypatch.setattr(device, "DRIVER", tmp_path / "none")
    monkeypatch.delenv(VISIBLE, raising=False)
    message = "no NVIDIA driver is loaded; PyTorch is built without CUDA; CUDA_VISIBLE_DEVICES is not set; torch.cuda"
    with pytest.raises(BadInput, match=message):
        find_device(config_on("gpu"), "trainer shard 0")
