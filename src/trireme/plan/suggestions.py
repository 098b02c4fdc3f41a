"""Suggestions for a plan that needs more memory than there is: flags with which it fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trireme.plan.memory import GPU_ALLOWANCES

if TYPE_CHECKING:
    from trireme.plan.whole import Plan

ADAPTER_RANK = 32
"""The suggested rank of adapters instead of training all weights."""
SMALLEST_MICRO_BATCH = 1024
"""Tokens of the micro-batch that is suggested, unless a sequence is longer."""
Sections = Mapping[str, Mapping[str, Any]]
"""{section: {key: new value}} of a changed configuration."""


def suggestions(plan: Plan) -> list[str]:
    """Returns a text with flags and their cost for each change that alone makes `plan` fit. Changes that cost least in
    speed come first, then changes that need more devices, then changes that affect learning. If no single change
    suffices, returns one text with the flags that make `plan` fit together. If no combination suffices either, returns
    an empty list."""
    alone = []
    together = plan
    together_flags = []
    for sections, cost in _changes(plan):
        flags = _flags(sections)
        if _fits(_changed(plan, sections)):
            alone.append(f"{flags} ({cost})")
        if not _fits(together):
            together = _changed(together, sections)
            together_flags.append(flags)
    if alone:
        return alone
    if _fits(together):
        return [" ".join(together_flags)]
    return []


def _changes(plan: Plan) -> Iterator[tuple[Sections, str]]:
    """Yields each change of the configuration that may save memory, with a text on its cost."""
    config = plan.config
    trainer = config.trainer
    inference = getattr(config, "inference", None)
    if plan.on_gpus:
        idle = plan.resources.gpus - plan.gpus_needed
    else:
        idle = 0
    if inference and not plan.on_gpus:
        yield {"inference": {"memory_gb": inference.memory_gb / 4}}, "fewer sequences at the same time"
    if inference and plan.on_gpus:
        share = _free_share(plan)
        if max(part.least_gpu_share for part in plan.parts) <= share < inference.gpu_memory_utilization:
            if inference.gpu_cache_gb:
                cost = "nothing, as gpu_cache_gb is set"
            else:
                cost = "fewer sequences at the same time"
            yield {"inference": {"gpu_memory_utilization": share}}, cost
    if trainer.checkpointing is not True:
        yield {"trainer": {"checkpointing": True}}, "a forward pass more for each backward pass"
    tokens = max(SMALLEST_MICRO_BATCH, config.seq_limit(plan.facts) or 0)
    if tokens < trainer.micro_batch_tokens:
        yield {"trainer": {"micro_batch_tokens": tokens}}, "smaller products"
    if inference and inference.replicas > 1 and not plan.shares_gpu:
        yield {"inference": {"replicas": 1}}, "slower sampling"
    if inference and plan.facts and plan.shares_gpu:  # a rank for each shard
        shards = trainer.mesh.processes
        counts = [
            count for count in plan.facts.rank_counts if shards % count == 0 and count > inference.tensor_parallel
        ]
        if counts:
            replicas = shards // min(counts)
            yield {"inference": {"tensor_parallel": min(counts), "replicas": replicas}}, "fewer replicas"
    elif inference and plan.facts:
        limit = inference.tensor_parallel + idle // inference.replicas
        ranks = max((count for count in plan.facts.rank_counts if count <= limit), default=0)
        if ranks > inference.tensor_parallel:
            yield {"inference": {"tensor_parallel": ranks}}, "GPUs that are there"
    times = idle // trainer.mesh.processes
    if times:
        more: dict[str, dict[str, Any]] = {"trainer": {"shards": trainer.shards * (1 + times)}}
        if inference and plan.shares_gpu:
            more["inference"] = {"replicas": inference.replicas * (1 + times)}
        yield more, "GPUs that are there"
    if plan.on_gpus and trainer.offload != "cpu":
        yield {"trainer": {"offload": "cpu"}}, "copies over PCIe in every pass, updates by the CPU"
    if not trainer.lora.on and plan.facts and plan.facts.linear_widths:
        lora = trainer.lora.model_copy(update={"rank": ADAPTER_RANK})
        yield {"trainer": {"lora": lora}}, "adapters are trained, not all weights"
    if trainer.master_dtype != "bfloat16":
        yield {"trainer": {"master_dtype": "bfloat16"}}, "updates below 1/256 of a weight are lost"


def _free_share(plan: Plan) -> float:
    """Returns the share of a GPU that a replica finds free when it starts, on the machine where this share is smallest;
    rounded down to tenths."""
    shares = [1.0]
    for machine in plan.machines:
        gpu = machine.node.smallest_gpu
        if gpu:
            beside = max((sum(need.gpu.values()) for need in machine.beside_replicas), default=0)
            taken = GPU_ALLOWANCES["CUDA context"] + beside
            shares.append((gpu.free_bytes - taken) / gpu.memory_bytes)
    return math.floor(10 * min(shares)) / 10


def _fits(plan: Plan) -> bool:
    has_places = plan.gpus_needed <= plan.resources.gpus and not plan.turns_refusal
    return has_places and not plan.shortages(hopeless=False)


def _changed(plan: Plan, sections: Sections) -> Plan:
    changed = {name: getattr(plan.config, name).model_copy(update=values) for name, values in sections.items()}
    return replace(plan, config=plan.config.model_copy(update=changed))


def _flags(sections: Sections) -> str:
    flags = []
    for section, values in sections.items():
        for key, value in values.items():
            if key == "lora":
                flags.append(f"--{section}.lora.rank {value.rank}")
            elif value is not None:
                flags.append(f"--{section}.{key.replace('_', '-')} {_text(value)}")
    return " ".join(flags)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
