"""The trainer's part of a plan: shards, where they are, and their memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from trireme.config.model_facts import ModelFacts
from trireme.config.run import DTYPE_BYTES
from trireme.plan.memory import (
    GIB,
    GPU_ALLOWANCES,
    SHARD_BASE_GIB,
    ShardMemory,
    bytes_per_parameter,
    bytes_per_trained,
    gpu_room,
    host_room,
    shard_memory,
)
from trireme.plan.needs import (
    ASSUMED_GPU,
    BUFFERS,
    HOST_OF_CUDA_GIB,
    KEPT_VERSIONS,
    SLAB_BYTES,
    SLABS,
    VERSIONS,
    Need,
    gib,
)
from trireme.plan.part import Part
from trireme.plan.whole import count

MOVED_BYTES_PER_S = 20e9
"""Bytes per second between page-locked host memory and a GPU. An assumption for PCIe 4: nothing was measured."""
MOMENTS = 2
"""The number of moments that AdamW has of each weight."""
ON_THEIR_WAY = "buckets on their way"
COPIES = "copies for checkpoints"
HOST_ACTIVATIONS = "activations in host memory"
SHARED_SLABS = "memory shared with replicas"
SHARES = "shares of two versions of the weights"
"""The purpose of a rank's host memory for published weights if no object store has them: the rank keeps its own buckets
of both versions."""
SENT = "the version to which the next changes apply"
"""The purpose of host memory for a copy of the newest version, in the rank of a machine that broadcasts changes."""


@dataclass(frozen=True)
class TrainerPart(Part):
    """The trainer's part of a plan: its shards and their memory."""

    room = "trainer"
    size_key = "trainer.shards"

    @property
    def actors(self) -> list[str]:
        return [f"trainer shard {rank}" for rank in range(self.config.trainer.mesh.processes)]

    @property
    def block(self) -> int:
        return self.config.trainer.gpus_per_node or 1

    @property
    def size_text(self) -> str:
        options = self.config.trainer
        if options.replicate > 1:
            copies = f" x trainer.replicate = {options.replicate}"
        else:
            copies = ""
        return f"trainer.shards = {options.shards}{copies}"

    @property
    def needs(self) -> list[Need] | None:
        memory = self.shard_memory
        if memory is None or self.facts is None:
            return None
        of_tensors = {"state": memory.state, "gathered layers": memory.gathered, "activations": memory.activations}
        of_tensors["logits"] = memory.logits
        host = {"processes": int(SHARD_BASE_GIB * GIB), "freed tensors": memory.freed, **of_tensors}
        gpu = {}
        if self.on_gpus:
            if memory.offloaded:
                offloaded = {"state": of_tensors.pop("state")}
            else:
                offloaded = {}
            host = {"processes": int(HOST_OF_CUDA_GIB * GIB), **offloaded}
            gpu = {**of_tensors, **GPU_ALLOWANCES}
        host |= {COPIES: self._copies}
        if memory.host_activations:
            host |= {HOST_ACTIVATIONS: memory.host_activations}
        share = KEPT_VERSIONS * -(-self.published_bytes // self.config.trainer.mesh.processes)
        parts = {VERSIONS: share} if self.transport.stored else {}
        host |= {} if parts else {SHARES: share}
        if self.on_gpus and self.transport.received:  # each rank has two for any bucket, on its GPU
            gpu |= {ON_THEIR_WAY: BUFFERS * self.largest_bucket(self.facts, embeddings=True)}
            of_layers = of_embeddings = {}
        else:
            of_layers = {ON_THEIR_WAY: self._send_buffers(self.facts, embeddings=False)}
            of_embeddings = {ON_THEIR_WAY: self._send_buffers(self.facts, embeddings=True)}
        if self.within_gpu:
            gpu |= {SHARED_SLABS: SLABS * SLAB_BYTES}
        elif self.transport.slabs and not self.on_gpus:
            host |= {SHARED_SLABS: SLABS * SLAB_BYTES}
        if self.encoding == "delta" and self.transport.received:  # one rank of each machine sends
            shared = {SENT: self.published_bytes}
        else:
            shared = {}
        resting = self.resting if self.colocated else None
        need = partial(Need, gpu=gpu, resting=resting, parts=parts, shared=shared)
        first = need({**host, "loading": self._loading(host), **of_embeddings})
        rest = [need({**host, **of_layers})] * (self.config.trainer.mesh.processes - 1)
        if rest and not self.facts.tied_embeddings:
            rest[-1] = need({**host, **of_embeddings})
        return [first, *rest]

    @property
    def resting(self) -> Mapping[str, int]:
        memory = self.shard_memory
        if memory is None or not self.on_gpus:
            return {}
        # Between two steps there are no gradients, which have half the bytes of the moments.
        gone = self._moment_bytes * 3 // 2 if self.saved_s else self._moment_bytes // 2
        state = {} if memory.offloaded else {"state": memory.state - gone}
        slabs = {SHARED_SLABS: SLABS * SLAB_BYTES} if self.within_gpu else {}
        return {**state, **GPU_ALLOWANCES, **slabs}

    @property
    def _moment_bytes(self) -> int:
        """Bytes of AdamW's moments of a shard; 0 if the sizes of the model are unknown."""
        if self.facts is None:
            return 0
        trained = self.facts.trained_parameters(self.config.trainer.lora)
        return MOMENTS * DTYPE_BYTES[self.config.trainer.master_dtype] * trained // self.config.trainer.mesh.parts

    @property
    def turn_s(self) -> float:
        if self.saved_s:
            return 2 * self._moment_bytes / MOVED_BYTES_PER_S
        return 0.0

    def _send_buffers(self, facts: ModelFacts, *, embeddings: bool) -> int:
        """Returns the bytes of the buffers in host memory through which a rank sends its buckets. `embeddings`: True if
        the buckets contain the embeddings, or an output matrix that is not tied to them."""
        largest = self.largest_bucket(facts, embeddings=embeddings)
        if self.on_gpus and largest:  # PyTorch gives page-locked memory in powers of two
            largest = 1 << (largest - 1).bit_length()
        return BUFFERS * largest

    @property
    def _copies(self) -> int:
        """Bytes of a shard's copies of weights and moments, from which checkpoints are written (`trainer.snapshot`)."""
        assert self.facts is not None
        trained = self.facts.trained_parameters(self.config.trainer.lora)
        return 3 * DTYPE_BYTES[self.config.trainer.master_dtype] * trained // self.config.trainer.mesh.parts

    def _loading(self, host: Mapping[str, int]) -> int:
        """Returns the additional bytes of host memory that shard 0 needs while it loads the model's files. `host`:
        {purpose: planned bytes} of shard 0's host memory.

        Only a model with experts needs any, because experts are stacked in memory; all other tensors are copied out of
        mapped files. The estimate is the bytes of all files of the model, less the bytes in `host` that are not yet
        used during loading: copies for checkpoints, and gradients and moments if the state is in host memory.
        """
        assert self.facts is not None
        if self.facts.num_chosen:
            stored = self.facts.stored_bytes
        else:
            stored = 0
        return max(0, stored - host[COPIES] - 3 * host.get("state", 0) // 4)

    @property
    def warnings(self) -> list[str]:
        options = self.config.trainer
        texts = []
        if options.packing == "packed" and (not self.on_gpus or self.config.model.dtype == "float32"):
            texts.append(
                "trainer.packing = packed without GPUs or in float32: attention is computed between all tokens of a "
                "row, and masked; rows are several times faster there (auto takes them)"
            )
        if options.offload == "cpu" and not self.on_gpus:
            texts.append("trainer.offload = cpu on CPUs: there is nothing to offload")
        if options.checkpointing == "offload" and not self.on_gpus:
            texts.append("trainer.checkpointing = offload on CPUs: host memory holds all activations anyway")
        elif self.shard_memory and self.shard_memory.host_activations:
            texts.append(
                f"trainer.checkpointing = offload was never run on a GPU: {gib(self.shard_memory.host_activations)} go "
                "to host memory and back in each full micro-batch, which may take longer than computing layers twice "
                "(scripts/gpu_check.py --part trainer measures both)"
            )
        if options.master_dtype == "bfloat16":
            texts.append(
                "trainer.master_dtype = bfloat16: an update below 1/256 of a weight is lost, which at learning rates "
                "below 1e-4 are most of them; float32 keeps them all"
            )
        return texts

    @property
    def shard_memory(self) -> ShardMemory | None:
        """The memory of one shard; None if the sizes of the model are unknown."""
        if self.facts is None:
            return None
        return shard_memory(self.config, self.facts, on_gpus=self.on_gpus, room=self._room)

    @property
    def _room(self) -> int:
        """Bytes that a shard may fill on the node with the least memory."""
        if not self.on_gpus:
            return host_room(min(node.memory_bytes for node in self.resources.nodes), self.config)
        gpus = [node.smallest_gpu for node in self.resources.nodes if node.smallest_gpu]
        gpu = min(gpus, key=lambda gpu: gpu.free_bytes, default=ASSUMED_GPU)
        return gpu_room(gpu.free_bytes, gpu.memory_bytes, self.taken_share)

    def rows(self, device_text: str) -> list[tuple[str, str]]:
        if self.config.trainer.lora.on:
            adapters = [("adapters", self._adapters_text())]
        else:
            adapters = []
        return [("trainer", f"{self._shards_text()}, {device_text}"), *adapters, ("memory", self._memory_text())]

    def _shards_text(self) -> str:
        """Returns a text on the number of shards, the number of copies of the model (`trainer.replicate`), and the
        chosen options that save memory or time."""
        options = self.config.trainer
        if options.replicate > 1:
            copies = f" x {options.replicate} copies"
        else:
            copies = ""
        chosen = {
            "packed rows": options.packing == "packed",
            "compiled layers": options.compiles(on_gpus=self.on_gpus),
            f"master weights in {options.master_dtype}": options.master_dtype != "float32",
            f"gradients summed in {options.reduce_dtype}": options.reduce_dtype != "float32",
        }
        text = f"{count(options.shards, 'FSDP2 shard')}{copies}: {count(options.mesh.processes, 'actor')}"
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
        trained = bytes_per_trained(self.config)
        per_parameter = bytes_per_parameter(self.config, self.dtype_bytes)
        of_state = f"{trained + per_parameter} B x parameters"
        lora = self.config.trainer.lora
        if lora.on:
            adapters = self.facts.trained_parameters(lora)
            of_state = f"({trained} B x {adapters:,} of adapters + {per_parameter} B x parameters)"
        state = f"{of_state} / shards = {gib(memory.state)}"
        layers_text = "computed twice" if memory.again else "kept"
        moved = memory.host_layers(memory.tokens)
        if moved:
            layers_text += f", {moved} of {memory.movable_layers} in host memory ({gib(memory.host_activations)})"
        return (
            f"a shard up to {gib(memory.total)} ({gib(memory.base)} + "
            + ("" if memory.offloaded else f"{state} + ")
            + f"gathered {gib(memory.gathered)} + {gib(memory.activations)} for {memory.tokens:,} tokens whose layers "
            + f"are {layers_text})"
            + (f" and in host memory {state}" if memory.offloaded else "")
            + self._away_text
        )

    @property
    def _away_text(self) -> str:
        """Returns a text about AdamW's moments if they are in host memory during sampling phases, else ""."""
        if not self.saved_s:
            return ""
        text = f", of which AdamW's moments ({gib(self._moment_bytes)}) are in host memory while the replicas sample: "
        if math.isinf(self.saved_s):
            return f"{text}with them the KV cache would be too small for one sequence"
        return f"{text}this moves them in about {self.turn_s:.1f} s and saves about {self.saved_s:.1f} s more"
