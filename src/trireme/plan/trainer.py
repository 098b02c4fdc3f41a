"""The trainer's part of a plan: shards, where they are, and their memory."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.config.run import DTYPE_BYTES
from trireme.plan.base import Part, count, gib
from trireme.plan.memory import LOGITS_GIB, SHARD_BASE_GIB, ModelMemory, ShardMemory


@dataclass(frozen=True)
class TrainerPart(Part):
    """The shards of the trainer."""

    room = "trainer"
    size_key = "trainer.shards"

    @property
    def actors(self) -> list[str]:
        return [f"trainer shard {rank}" for rank in range(self.config.trainer.processes)]

    @property
    def blocks(self) -> list[int]:
        shards, block = self.config.trainer.processes, self.config.trainer.gpus_per_node or 1
        return [min(block, shards - first) for first in range(0, shards, block)]

    @property
    def size_text(self) -> str:
        options = self.config.trainer
        copies = f" x trainer.replicate = {options.replicate}" if options.replicate > 1 else ""
        return f"trainer.shards = {options.shards}{copies}"

    @property
    def memory_bytes(self) -> int | None:
        return self.shard_memory.total * self.config.trainer.processes if self.shard_memory else None

    @property
    def warnings(self) -> list[str]:
        options, found = self.config.trainer, []
        if options.packing == "packed" and (not self.on_gpus or self.config.model.dtype == "float32"):
            found.append(
                "trainer.packing = packed without GPUs or in float32: attention is computed between all tokens of a "
                "row, and masked; rows are several times faster there (auto takes them)"
            )
        if options.offload == "cpu" and not self.on_gpus:
            found.append("trainer.offload = cpu on CPUs: there is nothing to offload")
        if options.master_dtype == "bfloat16":
            found.append(
                "trainer.master_dtype = bfloat16: an update below 1/256 of a weight is lost, which at learning rates "
                "below 1e-4 are most of them; float32 keeps them all"
            )
        return found

    @property
    def shard_memory(self) -> ShardMemory | None:
        """The memory of one shard; None if the sizes of the model are unknown."""
        if self.facts is None:
            return None
        tokens = self.config.micro_batch_limit(self.facts.max_position_embeddings)
        trained = self._bytes_per_trained * self.facts.trained_parameters(self.config.trainer.lora)
        state = self._bytes_per_parameter * self.facts.num_parameters + trained
        return ModelMemory(self.facts, self.dtype_bytes, self.on_gpus).shard(self.config.trainer, tokens, state)

    @property
    def _bytes_per_trained(self) -> int:
        """Bytes of state for each number that is trained: it, its gradient and two Adam moments."""
        return 4 * DTYPE_BYTES[self.config.trainer.master_dtype]

    @property
    def _bytes_per_parameter(self) -> int:
        """Bytes of state for each parameter besides: a frozen base, in the dtype that computes, and a KL reference that
        is another model."""
        options, config = self.config.trainer, self.config
        base = self.dtype_bytes if options.lora.on else 0
        other_model = config.kl_reference is not None and not config.base_is_reference
        return base + (DTYPE_BYTES[options.master_dtype] if other_model else 0)

    def rows(self, each: str) -> list[tuple[str, str]]:
        adapters = [("adapters", self._adapters_text())] if self.config.trainer.lora.on else []
        return [("trainer", f"{self._shards_text()}, {each}"), *adapters, ("memory", self._memory_text())]

    def _shards_text(self) -> str:
        """Says how many shards and copies there are, and which options that save memory or time were chosen."""
        options = self.config.trainer
        copies = f" x {options.replicate} copies" if options.replicate > 1 else ""
        chosen = {
            "packed rows": options.packing == "packed",
            "compiled layers": options.compile,
            f"master weights in {options.master_dtype}": options.master_dtype != "float32",
        }
        text = f"{count(options.shards, 'FSDP2 shard')}{copies}: {count(options.processes, 'actor')}"
        return ", ".join([text, *(name for name, is_so in chosen.items() if is_so)])

    def _adapters_text(self) -> str:
        lora = self.config.trainer.lora
        text = f"LoRA of rank {lora.rank} and alpha {lora.alpha:g} on {', '.join(lora.target_modules)}"
        if self.facts is None:
            return text
        trained = self.facts.trained_parameters(lora)
        share = trained / self.facts.num_parameters
        return f"{text}: {trained:,} parameters are trained, {share:.2%} of the model's"

    def _memory_text(self) -> str:
        memory = self.shard_memory
        if memory is None or self.facts is None:
            return "unknown, as the model's sizes are"
        trained, each = self._bytes_per_trained, self._bytes_per_parameter
        of_state, lora = f"{trained + each} B x parameters", self.config.trainer.lora
        if lora.on:
            adapters = self.facts.trained_parameters(lora)
            of_state = f"({trained} B x {adapters:,} of adapters + {each} B x parameters)"
        state = f"{of_state} / shards = {gib(memory.state)}"
        kept = "computed twice" if memory.again else "kept"
        return (
            f"a shard up to {gib(memory.total)} ({SHARD_BASE_GIB + LOGITS_GIB:g} GiB + "
            + ("" if memory.offloaded else f"{state} + ")
            + f"gathered {gib(memory.gathered)} + {gib(memory.activations)} for {memory.tokens:,} tokens whose layers "
            + f"are {kept})"
            + (f" and in host memory {state}" if memory.offloaded else "")
        )
