"""How the trainer computes: what of it does not go together, and what has a price that is easily overlooked."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.config.refusals import Refusal
from trireme.config.schema import CommonConfig


def computing_refusals(config: CommonConfig) -> Iterator[Refusal]:
    if config.trainer.packing == "packed" and config.model.attn != "auto":
        yield Refusal(
            f"trainer.packing = packed with model.attn = {config.model.attn}",
            "no other attention: packed rows have one of their own, which knows where sequences end",
            "leave --model.attn out, or set --trainer.packing rows",
        )


def computing_warnings(config: CommonConfig, *, on_gpus: bool) -> Iterator[str]:
    """`on_gpus`: models compute on GPUs."""
    options = config.trainer
    if options.packing == "packed" and (not on_gpus or config.model.dtype == "float32"):
        yield (
            "trainer.packing = packed without GPUs or in float32: attention is computed between all tokens of a row, "
            "and masked; rows are several times faster there (auto takes them)"
        )
    if options.offload == "cpu" and not on_gpus:
        yield "trainer.offload = cpu on CPUs: there is nothing to offload"
    if options.master_dtype == "bfloat16":
        yield (
            "trainer.master_dtype = bfloat16: an update below 1/256 of a weight is lost, which at learning rates below "
            "1e-4 are most of them; float32 keeps them all"
        )
