"""The part of a replica that lives in vLLM's engine process: checking what arrives, and loading it.

vLLM imports this module in the engine process because the replica names `WorkerExtension` as its
`worker_extension_cls`. All of it runs between two forward steps.
"""

from __future__ import annotations

import ctypes
import logging
import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from inference.adapter import take_adapter
from inference.weight_files import WeightFiles
from trireme.core.errors import WeightsRefused
from trireme.core.weights import WeightsManifest, check_received
from trireme.process.faults import fault_point
from trireme.transports.packing import tensor_of

# At every update it warns of each module for which a checkpoint has no tensors: rotary embeddings, a tied output head.
# That all weights are what they should be is proved by the canary. (A filter: vLLM sets all levels again as it starts.)
logging.getLogger(layerwise.__name__).addFilter(lambda record: record.levelno >= logging.ERROR)


def load_weights(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], model_config: Any) -> None:
    """Loads one version whole: fused groups (q, k, v; gate and up) must be loaded together."""
    # Linear weights are packed for the CPU at load and their parameters become empty, so model.load_weights alone
    # would raise half-way. Layerwise reloading restores the parameters, loads, packs, and copies into place.
    initialize_layerwise_reload(model)
    model.load_weights(tensors)  # type: ignore[operator]
    finalize_layerwise_reload(model, model_config)
    if fault_point("inference.repack") != "skip":
        repack_output_heads(model)
        repack_experts(model)


def repack_output_heads(model: torch.nn.Module) -> None:
    """Packs the output matrix again from its weight.

    With tied embeddings the output head has no weight of its own in a checkpoint, so layerwise reloading passes it
    over, and on CPUs its packed copy would keep the weights of the first load: logprobs wrong by nats, and no error.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def repack_experts(model: torch.nn.Module) -> None:
    """On CPUs, packs the stacked matrices of experts again.

    vLLM packs them when it makes the kernel, at the first load. At later ones it copies the plain weights into the
    packed tensors, and the kernel takes them for packed: logprobs wrong by nats, and no error.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def corrupt_one_weight(model: torch.nn.Module) -> None:
    """Changes one weight of the final norm, on which every logit depends (for tests of the canary)."""
    norms = [p for name, p in model.named_parameters() if name.endswith("norm.weight") and "layers" not in name]
    norms[-1].data[0] += 1.0


class WorkerExtension:
    """Calls that the replica makes in the engine process, beside vLLM's own. Mixed into vLLM's Worker."""

    model_runner: Any
    vllm_config: Any
    received: tuple[WeightsManifest, list[npt.NDArray[np.uint8]]] | None = None

    def receive_weights(self, pickled_files: bytes) -> str | None:
        """Checks what arrived against its digest; the reason to refuse it, None if it is what was published.

        What was checked stays mapped, and is in memory by then: the pause in which it is loaded needs to fetch nothing.
        """
        files: WeightFiles = pickle.loads(pickled_files)
        manifest, buckets = files.manifest, files.open()
        if fault_point("inference.received") == "corrupt":
            entry = manifest.entries[len(manifest.entries) // 2]
            buckets[entry.bucket][entry.offset] ^= 1
        try:
            check_received(manifest, buckets)
        except WeightsRefused as refused:
            return str(refused)
        self.received = manifest, buckets
        return None

    def take_weights(self) -> None:
        """Loads what was received, while the scheduler is paused."""
        assert self.received is not None
        manifest, buckets = self.received
        tensors = ((entry.name, tensor_of(entry, buckets)) for entry in manifest.entries)
        runner = self.model_runner
        with set_current_vllm_config(self.vllm_config):
            if manifest.adapter:
                take_adapter(runner, dict(tensors), manifest.adapter)
            else:
                load_weights(runner.get_model(), tensors, self.vllm_config.model_config)
            if fault_point("inference.loaded") == "corrupt":
                corrupt_one_weight(runner.get_model())
            torch.accelerator.synchronize()
        self.received = None

    def free_memory(self) -> None:
        """Gives the memory in which weights were loaded back to the system: some milliseconds, when requests go on.

        They are loaded layer by layer into new memory, between which requests allocate what lives longer. The C library
        keeps what is freed there for later, a little more after each update: 1 GiB grew by 250 MiB in 30 updates of
        200 MiB, of which no byte was in use.
        """
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
        if malloc_trim:
            malloc_trim(0)
