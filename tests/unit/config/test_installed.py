"""What the installed build of vLLM needs beside it. (plan/test_whole.py refuses builds for other devices.)"""

import importlib.util

import pytest

from trireme.config import installed
from trireme.config.installed import check_build
from trireme.core.errors import BadInput


def test_without_flashinfer_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM imports it for its sampler, unless a variable says no."""
    monkeypatch.setattr(installed, "installed_vllm", lambda: "vllm 0.32.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv(installed.FLASHINFER_SAMPLER)
    with pytest.raises(BadInput, match=r"no FlashInfer(.|\n)*--group gpu(.|\n)*VLLM_USE_FLASHINFER_SAMPLER=0"):
        check_build(on_gpus=True)
    monkeypatch.setenv(installed.FLASHINFER_SAMPLER, "0")
    check_build(on_gpus=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv(installed.FLASHINFER_SAMPLER, "1")
    check_build(on_gpus=True)
