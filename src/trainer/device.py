"""Where the trainer computes."""

from __future__ import annotations

import os

import torch

from trireme.config import CommonConfig
from trireme.config.checks import INSTALL_GPU
from trireme.config.refusals import Refusal


def device_of(config: CommonConfig) -> torch.device:
    """The device of `cluster.device`, in whose place the plan has put one of both if it was auto. Raises BadInput when
    it is a GPU and this process has none that PyTorch can use."""
    device = config.cluster.device
    assert device != "auto", "see trireme.plan.base.Plan.with_device"
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise Refusal(
            f"cluster.device = gpu, and no GPU that PyTorch {torch.__version__} can use in a trainer shard "
            f"(CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)})",
            "PyTorch's CUDA build, an NVIDIA driver that is not too old for it, and a GPU for each shard",
            f"run `{INSTALL_GPU}` and look at `nvidia-smi` on each node, or compute on CPUs with --cluster.device cpu",
        ).error()
    return torch.device("cuda")
