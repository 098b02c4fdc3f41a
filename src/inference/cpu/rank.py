"""Adds steps that vLLM omits in a rank on CPUs. Without them an engine dies, leaves memory behind, or computes wrong
logprobs."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def ask_for_tiles() -> None:
    """Asks Linux for permission to use AMX tiles, which vLLM's attention in bfloat16 uses on processors that have them.

    Gain: without the permission, the process is killed by SIGILL. oneDNN also asks for it when it first multiplies
    matrices, but small models multiply no matrices with oneDNN.
    """
    torch.cpu._init_amx()


def forget_rank_memory() -> None:
    """Removes the names in /dev/shm of the shared memory that the ranks use for collective operations; the memory
    itself stays usable.

    Gain: a killed engine leaves nothing in /dev/shm.
    """
    for path in Path("/dev/shm").glob(f"*{os.environ['VLLM_DIST_IDENT']}-*cpushm*"):
        path.unlink(missing_ok=True)  # another rank may be faster


def pack_experts(layer: torch.nn.Module) -> None:
    """Packs stacked experts again after an update. vLLM packs them only at the first load, when it makes the kernel.
    Later it copies plain weights into the packed tensors, and the kernel reads the plain weights as if they were
    packed.

    Gain: right logprobs of experts after an update.
    """
    assert isinstance(layer, RoutedExperts)
    kernel = layer.quant_method.moe_kernel
    assert kernel is not None, "made at the first load"
    kernel.fused_experts.process_weights_after_loading(layer)
