"""The build of vLLM that plans of GPUs need."""

import pytest

from trireme.config import installed


@pytest.fixture
def gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "installed_vllm", lambda: "vllm 0.32.0")
