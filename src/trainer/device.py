"""The device on which a trainer process computes."""

from __future__ import annotations

import os

import torch

from trireme.config import CommonConfig
from trireme.config.installed import INSTALL_GPU
from trireme.config.refusals import Refusal


def find_device(config: CommonConfig) -> torch.device:
    """Returns the device of `cluster.device`, for which the plan has chosen cpu or gpu if it was auto.

    Raises BadInput when it is a GPU and PyTorch can use none in this process.
    """
    device = config.cluster.device
    assert device != "auto", "see trireme.plan.base.Plan.with_device"
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise Refusal(
            f"cluster.device = gpu, but PyTorch {torch.__version__} finds no GPU that it can use in a trainer shard "
            f"(CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)})",
            "PyTorch's CUDA build, an NVIDIA driver that is recent enough for it, and a GPU for each shard",
            f"run `{INSTALL_GPU}` and look at `nvidia-smi` on each node, or compute on CPUs with --cluster.device cpu",
        ).error()
    return torch.device("cuda")
