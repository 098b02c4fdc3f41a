"""Starts an engine on CPUs without work that only other devices, or other machines, need."""

from __future__ import annotations

from inference.cpu.kernels import multiply_by_few_kernels

CPU_ENVIRONMENT = {
    # the engine process runs the model itself: two processes a replica instead of three
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # "auto" would bind every replica of a machine to the same cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def prepare_cpu_start() -> None:
    """Patches vLLM in this process, and in processes forked from it, so that engines on CPUs start and compute faster.
    Call it before the first engine starts; further calls change nothing."""
    from inference.cpu.adapters import multiply_by_adapter  # it imports vLLM, which takes seconds

    multiply_by_few_kernels()
    multiply_by_adapter()
    _compile_nothing()
    _inspect_models_here()
    _stay_on_the_only_node()


def _compile_nothing() -> None:
    """Makes torch compile nothing in this process. Models run eagerly, yet vLLM would compile the function that
    computes the ranks of sampled tokens.

    Gain: 18 CPU seconds of the first start on a machine (`inference.cpu`).
    """
    import torch

    torch.compiler.set_stance("force_eager")


def _inspect_models_here() -> None:
    """Patches vLLM to inspect a model's class in this process. Unpatched, vLLM starts a new process for that, so as not
    to initialise CUDA here.

    Gain: 9 CPU seconds of a first start, because no other process imports vLLM (`inference.cpu`).
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda fn: fn()


def _stay_on_the_only_node() -> None:
    """Patches vLLM not to move memory if this process may use only one NUMA node. Unpatched, vLLM makes Linux move the
    process's pages to the NUMA node that vLLM chooses. Before Linux moves any page, it runs a thread on each core.

    Gain: 3 to 4 s of an engine's start where other processes keep the cores busy (commit e9c63bf).
    """
    import torch
    from vllm.utils.cpu_resource_utils import get_memory_affinity

    if len(get_memory_affinity()) == 1:
        torch.ops._C.init_cpu_memory_env = lambda _nodes: None  # type: ignore[attr-defined]
