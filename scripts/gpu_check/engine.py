"""vLLM as replicas use it: loading, weights and adapters that arrive in flight, sleep, and tokens per second."""

from __future__ import annotations

import os
import time

from gpu_check.checks import Check, Context, Failed, Figures
from gpu_check.ipc import to_second_buffer, within_device
from gpu_check.rooms import (
    GPU_SHARE,
    STALE,
    open_rooms,
    refuse_stale_decoding,
    take_turns,
    tokens_per_second,
    update_in_flight,
)
from gpu_check.shapes import make_model

SYSTEM = ("vllm", "ray", "torch", "transformers", "pydantic", "peft", "xxhash", "numba", "psutil", "rich")
"""The packages that replicas need in addition to the trainer's."""
FAULTS = "TRIREME_FAULTS"
RANK = 8
EAGER = "--inference.engine-args.enforce-eager"
SAMPLED_S = 2.0
"""Longer than the driver's samples of a GPU's use."""
FREED = 0.5
"""Share of its memory that a sleeping engine must give back, at least."""


def _in_flight(context: Context) -> Figures:
    """Starts a trainer and a replica (on one GPU: both on it), and updates all weights while it samples."""
    shape, requests, tokens = ("0.6b", 256, 256) if context.on_gpu else ("small", 8, 64)
    with open_rooms(context, shape) as (rooms, start_s):
        updates = update_in_flight(rooms, context, requests // 8)
        speed = tokens_per_second(rooms, context, requests, tokens)
    return {"start, s": start_s, **updates, **speed}


def _stale(context: Context) -> Figures:
    """Gives decode steps other weights than were loaded, which the replica must see, whatever CUDA graphs do."""
    os.environ[FAULTS] = STALE
    with open_rooms(context, "small") as (rooms, start_s):
        del os.environ[FAULTS]
        return {"start, s": start_s, **refuse_stale_decoding(rooms)}


def _experts(context: Context) -> Figures:
    """Does the same with experts, which kernels for GPUs may pack, and keeps KV caches over updates."""
    with open_rooms(context, "small with experts", "--inference.on-update", "keep_kv") as (rooms, start_s):
        return {"start, s": start_s, **update_in_flight(rooms, context, 8)}


def _adapters(context: Context) -> Figures:
    """Does the same with LoRA adapters."""
    shape = "0.6b" if context.on_gpu else "small"
    flags = ["--trainer.lora.rank", str(RANK), *([EAGER, "true"] if context.on_gpu else [])]
    with open_rooms(context, shape, *flags) as (rooms, start_s):
        return {"start, s": start_s, **update_in_flight(rooms, context, 8)}


def _turns(context: Context) -> Figures:
    """Does updates of a replica that sleeps while the trainer trains (`placement` = colocated)."""
    shape, turns = ("0.6b", 10) if context.on_gpu else ("small", 3)
    with open_rooms(context, shape, "--placement", "colocated") as (rooms, start_s):
        return {"start, s": start_s, **take_turns(rooms, context, turns)}


def _sleep(context: Context) -> Figures:
    """Has vLLM free the GPU and take it again; its greedy answers must be the same."""
    import torch
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.inputs import TokensPrompt

    model = make_model(context.directory / "sleeps", "0.6b", context.device)
    args = EngineArgs(
        model=model, dtype="bfloat16", max_model_len=512, skip_tokenizer_init=True, enforce_eager=True,
        enable_sleep_mode=True, gpu_memory_utilization=GPU_SHARE,
    )  # fmt: skip
    engine = LLM.from_engine_args(args)

    def answer() -> list[int]:
        params = SamplingParams(max_tokens=16, temperature=0.0, detokenize=False)
        return list(engine.generate([TokensPrompt(prompt_token_ids=[5, 7, 11])], params)[0].outputs[0].token_ids)

    before = answer()
    free = torch.cuda.mem_get_info()[0]
    total = torch.cuda.mem_get_info()[1]
    started = time.monotonic()
    engine.sleep(level=1)
    asleep = time.monotonic()
    freed = torch.cuda.mem_get_info()[0] - free
    engine.wake_up()
    awake = time.monotonic()
    if freed < (least := FREED * GPU_SHARE * total):
        raise Failed(f"asleep it gave back {freed / 2**30:.1f} GiB, expected {least / 2**30:.1f} at least")
    after = answer()
    if after != before:
        raise Failed(f"awake again it answers {after}, before it slept {before}")
    return {"freed, GiB": freed / 2**30, "to sleep, s": asleep - started, "to wake, s": awake - asleep}


def _computes(context: Context) -> Figures:
    """Has the GPU compute for a while, and asks the driver if it does."""
    import torch

    from inference.stalls import gpus_compute

    matrix = torch.randn(8192, 8192, device="cuda")
    end = time.monotonic() + SAMPLED_S
    while time.monotonic() < end:
        matrix @ matrix
        torch.cuda.synchronize()
    (busy,) = gpus_compute(1)
    if not busy:
        raise Failed("the driver says that a GPU is idle on which products were computed")
    time.sleep(SAMPLED_S)
    return {"busy during products": busy, "busy after a pause, which others may use": gpus_compute(1)[0]}


CHECKS: tuple[Check, ...] = (
    Check("weights within a device", within_device, SYSTEM[2:]),
    Check("weights to a second buffer", to_second_buffer, SYSTEM),
    Check("updates in flight", _in_flight, SYSTEM),
    Check("decode steps of other weights", _stale, SYSTEM),
    Check("experts in flight", _experts, SYSTEM),
    Check("adapters in flight", _adapters, SYSTEM),
    Check("trainer and replica in turns", _turns, SYSTEM),
    Check("a GPU that computes", _computes, ("vllm", "torch"), only_gpu="there is no driver to ask"),
    Check("sleep", _sleep, ("vllm", "torch", "transformers"), only_gpu="vLLM's CPU build does nothing when it sleeps"),
)
