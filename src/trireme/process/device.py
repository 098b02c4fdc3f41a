"""Decides on which device (CPU or GPU) a process computes; no other module does.

`Plan.resolved` writes the device that the plan of the run chose into the configuration that every process gets. A
process that holds a model calls `find_device`. An actor sees only the GPUs that Ray has given it, perhaps none
(`ray_cluster.see_own_gpus`).
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

from trireme.config import CommonConfig
from trireme.config.installed import INSTALL_GPU
from trireme.core.refusals import Refusal
from trireme.process.machine import VISIBLE

Device = Literal["cpu", "gpu"]
DRIVER = Path("/proc/driver/nvidia/version")
"""The file that names the version of NVIDIA's driver, once this driver is loaded."""


def choose_device(option: Literal["auto", "cpu", "gpu"], gpus: int, *, deterministic: bool = False) -> Device:
    """Returns the device for `cluster.device` = `option` on machines with `gpus` GPUs. "auto" becomes "gpu" if there is
    a GPU and the run is not `deterministic`, else "cpu"."""
    if option == "auto":
        if gpus and not deterministic:
            return "gpu"
        return "cpu"
    return option


def find_device(config: CommonConfig, process: str) -> Device:
    """Returns the device of `cluster.device`; the plan has replaced "auto" by cpu or gpu.

    Raises BadInput, with the facts about GPUs, if the device is a GPU and PyTorch can use none in this process.
    `process`: the name of this process in the error.
    """
    device = config.cluster.device
    assert device != "auto", "see trireme.plan.whole.Plan.resolved"
    if device == "gpu":
        require_gpu(process)
    return device


def has_gpu() -> bool:
    """Returns True if PyTorch can use a GPU in this process. An actor sees only the GPUs that the plan gives it."""
    import torch

    return torch.cuda.is_available()


def own_gpu() -> str:
    """Returns the identity (UUID) of this process's GPU; "" if it has none."""
    import torch

    if has_gpu():
        return str(torch.cuda.get_device_properties(0).uuid)
    return ""


def require_gpu(process: str, key: str = "cluster.device") -> None:
    """Raises BadInput, with the facts about GPUs, if PyTorch can use no GPU in this process. `process`: the name of
    this process in the error. `key`: the option that requires a GPU, also for the error."""
    import torch

    if has_gpu():
        return
    raise Refusal(
        f"{key} = gpu, where PyTorch {torch.__version__} finds no GPU that it can use in {process} on "
        f"{os.uname().nodename}: {_gpu_facts()}",
        f"PyTorch's CUDA build, an NVIDIA driver that is recent enough for its CUDA, and a GPU for {process}",
        f"run `{INSTALL_GPU}`, look at `nvidia-smi` on that node and update the driver if it is too old; or compute on "
        f"CPUs with --{key} cpu",
    )


def _gpu_facts() -> str:
    """Returns a text on why this process can use no GPU: driver, PyTorch's CUDA, visible devices, PyTorch's error."""
    import torch

    driver = "no NVIDIA driver is loaded"
    with suppress(OSError):
        version = re.search(r"\d+(\.\d+)+", DRIVER.read_text())
        driver = f"the NVIDIA driver is {version[0] if version else 'of an unknown version'}"
    if torch.version.cuda:
        built = f"for CUDA {torch.version.cuda}"
    else:
        built = "without CUDA"
    visible = os.environ.get(VISIBLE)
    facts = [driver, f"PyTorch is built {built}", f"{VISIBLE} is {'not set' if visible is None else repr(visible)}"]
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # what PyTorch raises with CUDA, and without
        facts.append(f"torch.cuda says: {' '.join(str(error).split())}")
    return "; ".join(facts)
