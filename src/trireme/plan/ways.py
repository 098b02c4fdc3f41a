"""Ways out for a plan that needs more memory than there is: changes of the configuration with which it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trireme.plan.base import Plan

ADAPTER_RANK = 32
"""The rank of adapters that is offered in place of training all weights."""
SMALLEST_MICRO_BATCH = 1024
"""Tokens of the smallest micro-batch that is offered, unless a sequence is longer."""


def ways_out(plan: Plan) -> list[str]:
    """Returns flags with which `plan` fits, each alone: first those that cost least in speed, then those that need more
    devices, then those that change what is learned. If none is enough, several of them together, if these are."""
    found: dict[str, str] = {}
    together, all_flags = plan, dict[str, str]()
    for sections, cost in _changes(plan):
        flags = _flags(sections)
        key = flags.partition(" ")[0]
        alone, both = (replace(one, config=_with(one.config, sections)) for one in (plan, together))
        if key not in found and _fits(alone):
            found[key] = f"{flags} ({cost})"
        if not _fits(together) and both.gpus_needed <= plan.resources.gpus:
            together, all_flags[key] = both, flags
    return list(found.values()) or ([" ".join(all_flags.values())] if _fits(together) else [])


def _fits(plan: Plan) -> bool:
    return plan.gpus_needed <= plan.resources.gpus and not plan.shortages(hopeless=False)


def _changes(plan: Plan) -> Iterator[tuple[dict[str, Mapping[str, Any]], str]]:
    """Yields changes {section: {key: value}} and what each costs."""
    config, options = plan.config, plan.config.trainer
    inference = getattr(config, "inference", None)
    if inference and not plan.on_gpus:
        for part in (2, 4, 8):
            yield {"inference": {"memory_gb": inference.memory_gb / part}}, "fewer sequences at the same time"
    if inference and plan.on_gpus:
        least = max(part.least_gpu_share for part in plan.parts)
        cost = "nothing, as gpu_cache_gb is set" if inference.gpu_cache_gb else "fewer sequences at the same time"
        for share in (tenths / 10 for tenths in range(9, 0, -1)):
            if least <= share < inference.gpu_memory_utilization:
                yield {"inference": {"gpu_memory_utilization": share}}, cost
    if options.checkpointing is not True:
        yield {"trainer": {"checkpointing": True}}, "a forward pass more for each backward pass"
    tokens = options.micro_batch_tokens or 16384
    least = max(SMALLEST_MICRO_BATCH, config.seq_limit(plan.facts) or 0)
    while (tokens := tokens // 2) >= least:
        yield {"trainer": {"micro_batch_tokens": tokens, "micro_batch_size": None}}, "smaller products"
    if inference:
        for replicas in range(inference.replicas - 1, 0, -1):
            yield {"inference": {"replicas": replicas}}, "slower sampling"
    if inference and plan.on_gpus and plan.facts:
        for ranks in (n for n in plan.facts.rank_counts if n > inference.tensor_parallel):
            yield {"inference": {"tensor_parallel": ranks}}, "GPUs that are there"
    if plan.on_gpus:
        for shards in (options.shards * times for times in (2, 4, 8, 16)):
            yield {"trainer": {"shards": shards}}, "GPUs that are there"
        yield {"trainer": {"offload": "cpu"}}, "copies over PCIe in every pass, updates by the CPU"
    if not options.lora.on and plan.facts and plan.facts.linear_widths:
        lora = options.lora.model_copy(update={"rank": ADAPTER_RANK})
        yield {"trainer": {"lora": lora}}, "adapters are trained, not all weights"
    if options.master_dtype != "bfloat16":
        yield {"trainer": {"master_dtype": "bfloat16"}}, "updates below 1/256 of a weight are lost"


def _with(config: Any, sections: Mapping[str, Mapping[str, Any]]) -> Any:
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def _flags(sections: Mapping[str, Mapping[str, Any]]) -> str:
    flags = []
    for section, values in sections.items():
        for key, value in values.items():
            if key == "lora":
                flags.append(f"--{section}.lora.rank {value.rank}")
            elif value is not None:
                flags.append(f"--{section}.{key.replace('_', '-')} {_shown(value)}")
    return " ".join(flags)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
