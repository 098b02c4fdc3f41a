"""What any run will occupy, worked out before anything starts: devices, processes, threads, the memory of a shard."""

from __future__ import annotations

import math
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Self, TypeVar

from rich.table import Table
from rich.text import Text

from trireme.config.checks import installed_vllm, seq_limit
from trireme.config.computing import computing_warnings
from trireme.config.lora import lora_parameters, lora_targets
from trireme.config.model_facts import ModelFacts
from trireme.config.schema import CommonConfig
from trireme.plan.memory import GIB, LOGITS_GIB, SHARD_BASE_GIB, ShardMemory
from trireme.run.rundir import default_name

AnyConfig = TypeVar("AnyConfig", bound=CommonConfig)
BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Resources:
    """What there is over all nodes; `source` says where, as part of a sentence ("this machine")."""

    nodes: int
    cpus: int
    gpus: int
    memory_bytes: int
    source: str

    @classmethod
    def of_this_machine(cls) -> Resources:
        """The cores and GPUs that this process may use, and the machine's memory."""
        cpus = len(os.sched_getaffinity(0))
        return cls(1, cpus, _visible_gpus(os.environ), _memory_bytes(), "this machine")


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _visible_gpus(environ: Mapping[str, str]) -> int:
    """NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible."""
    present = len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()])
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    return (
        present if chosen is None else min(present, len([c for c in chosen.split(",") if c.strip() not in ("", "-1")]))
    )


@dataclass(frozen=True)
class CommonPlan(ABC):
    """Of a run of any kind. Each kind says which actors it has and what it does."""

    config: CommonConfig
    facts: ModelFacts | None
    resources: Resources
    run_dir: Path | None
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        config: CommonConfig,
        facts: ModelFacts | None,
        resources: Resources,
        run_dir_path: Path | None,
        warnings: Sequence[str] = (),
    ) -> Self:
        """The plan of a run; `warnings` are those of its checks. A dry run has no directory yet."""
        return cls(config, facts, resources, run_dir_path, tuple(warnings))

    @property
    @abstractmethod
    def actor_names(self) -> list[str]:
        """All actors, those that hold a model first."""

    @property
    @abstractmethod
    def gpus_needed(self) -> int: ...

    @abstractmethod
    def check_resources(self) -> None:
        """Raises BadInput when the run needs what there is not."""

    @abstractmethod
    def rows(self) -> list[tuple[str, str]]:
        """The plan as (what, text) pairs."""

    # --- devices and places

    @property
    def on_gpus(self) -> bool:
        """Whether models compute on GPUs."""
        device = self.config.cluster.device
        automatic = device == "auto" and self.resources.gpus > 0 and not self.config.deterministic
        return device == "gpu" or automatic

    @property
    def device(self) -> str:
        return "GPU" if self.on_gpus else "CPU"

    @property
    def threads(self) -> int:
        """Threads for each process that computes: with a core or less for each, one is fastest and repeatable."""
        if self.config.deterministic:  # how a sum is split over threads decides its last bits
            return 1
        return max(1, self.resources.cpus // len(self.actor_names))

    @property
    def cpus_per_actor(self) -> float:
        """Ray's CPU share of an actor: 1 where there are enough cores. Else so little that all find a place however the
        cores are spread over the nodes: n nodes with c cores in all hold at least c / share - n actors."""
        actors, has = len(self.actor_names), self.resources
        return 1.0 if has.cpus >= actors else math.floor(100 * has.cpus / (actors + has.nodes)) / 100

    def _options(self) -> dict[str, float]:
        """Ray resources of an actor that holds a model."""
        return {"num_cpus": self.cpus_per_actor, "num_gpus": 1.0 if self.on_gpus else 0.0}

    @property
    def trainer_options_R(self) -> list[dict[str, float]]:
        """Ray resources of each trainer shard."""
        return [self._options() for _ in range(self.config.trainer.processes)]

    @property
    def trainer_blocks(self) -> list[int]:
        """Shards, rank after rank, that are on one node: how many in each block."""
        shards, block = self.config.trainer.processes, self.config.trainer.gpus_per_node or 1
        return [min(block, shards - first) for first in range(0, shards, block)]

    @property
    def common_warnings(self) -> list[str]:
        """Those of its checks, and of how the trainer computes where it does."""
        return [*self.notes, *computing_warnings(self.config, on_gpus=self.on_gpus)]

    # --- numbers

    @property
    def inference_dtype_bytes(self) -> int:
        """Of a number in the dtype in which trainer and replicas compute."""
        dtype = self.config.model.dtype
        return (2 if self.on_gpus else 4) if dtype == "auto" else BYTES_OF_DTYPE[dtype]

    @property
    def shard_memory(self) -> ShardMemory | None:
        """None when the model's sizes are unknown."""
        if self.facts is None:
            return None
        return ShardMemory.of(
            self.config.trainer,
            self.facts,
            self.config.micro_batch_limit(self.facts.max_position_embeddings),
            self.bytes_per_parameter * self.facts.num_parameters + self.bytes_per_trained * self.trained_parameters,
            self.inference_dtype_bytes,
            on_gpus=self.on_gpus,
        )

    @property
    def trained_parameters(self) -> int:
        """Of LoRA adapters; else of the model. 0 when the model's sizes are unknown."""
        if self.facts is None:
            return 0
        lora = self.config.trainer.lora
        return lora_parameters(lora, self.facts) if lora.on else self.facts.num_parameters

    @property
    def bytes_per_trained(self) -> int:
        """Of the state, for each number that is trained: it, its gradient and two Adam moments."""
        return 4 * BYTES_OF_DTYPE[self.config.trainer.master_dtype]

    @property
    def bytes_per_parameter(self) -> int:
        """Of the state besides: a frozen base, in the dtype that computes, and a KL reference that is another model."""
        options, config = self.config.trainer, self.config
        base = self.inference_dtype_bytes if options.lora.on else 0
        other_model = config.kl_reference is not None and not config.base_is_reference
        return base + (BYTES_OF_DTYPE[options.master_dtype] if other_model else 0)

    # --- for people

    def render(self) -> Table:
        """The plan as a table for rich."""
        table = Table.grid(padding=(0, 2))
        for what, text in self.rows():
            table.add_row(Text(what), Text(text), style="yellow" if what == "warning" else None)
        return table

    def _written_text(self) -> str:
        run = self.config.run
        where = self.run_dir or f"{run.output_dir}/{run.name or default_name(self.config, '<8 hex>')}"
        return f"{where}: config.json, metrics.jsonl, trained.jsonl, STATUS, checkpoints/, logs/, trace/"

    def _resources_text(self) -> str:
        has = self.resources
        needs = f"needs {count(self.gpus_needed, 'GPU')}, " if self.on_gpus else ""
        return (
            f"{needs}{has.source} has {has.gpus} GPUs, {count(has.cpus, 'core')}, {gib(has.memory_bytes)} of memory "
            f"on {count(has.nodes, 'node')}; models compute on {self.device}s"
        )

    def _model_text(self) -> str:
        facts = self.facts
        if facts is None:
            return f"{self.config.model.name}: model not reachable, sizes unknown"
        tied = "tied" if facts.tied_embeddings else "untied"
        return (
            f"{facts.name}: {facts.architecture}, {facts.num_parameters:,} parameters ({facts.num_layers} layers, "
            f"hidden {facts.hidden_size}, vocabulary {facts.vocab_size}, {tied} embeddings), "
            f"sequences of at most {seq_limit(self.config, facts)} tokens"
        )

    def _trainer_text(self) -> str:
        """Shards, copies, and what of memory and speed was chosen."""
        options = self.config.trainer
        text = count(options.shards, "FSDP2 shard") + (
            f" x {options.replicate} copies" if options.replicate > 1 else ""
        )
        chosen = {
            "packed rows": options.packing == "packed",
            "compiled layers": options.compile,
            f"master weights in {options.master_dtype}": options.master_dtype != "float32",
        }
        return ", ".join(
            [f"{text}: {count(options.processes, 'actor')}", *(name for name, is_so in chosen.items() if is_so)]
        )

    def _shard_memory_text(self) -> str:
        memory = self.shard_memory
        if memory is None:
            return "unknown, as the model's sizes are"
        state = f"{self._state_text()} / shards = {gib(memory.state)}"
        kept = "computed twice" if memory.again else "kept"
        return (
            f"a shard up to {gib(memory.total)} ({SHARD_BASE_GIB + LOGITS_GIB:g} GiB + "
            + (f"gathered {gib(memory.gathered)}" if memory.offloaded else f"{state} + gathered {gib(memory.gathered)}")
            + f" + {gib(memory.activations)} for {memory.tokens:,} tokens whose layers are {kept})"
            + (f" and in host memory {state}" if memory.offloaded else "")
        )

    def _state_text(self) -> str:
        trained, each = self.bytes_per_trained, self.bytes_per_parameter
        if self.config.trainer.lora.on:
            return f"({trained} B x {self.trained_parameters:,} of adapters + {each} B x parameters)"
        return f"{trained + each} B x parameters"

    def _rows_of_adapters(self) -> list[tuple[str, str]]:
        lora = self.config.trainer.lora
        if not lora.on:
            return []
        text = f"LoRA of rank {lora.rank} and alpha {lora.alpha:g} on {', '.join(lora_targets(lora))}"
        if self.facts is None:
            return [("adapters", text)]
        share = self.trained_parameters / self.facts.num_parameters
        return [("adapters", f"{text}: {self.trained_parameters:,} parameters are trained, {share:.2%} of the model's")]

    def _commits_text(self) -> str:
        options = self.config.checkpoint
        when = f"every {count(options.every, 'step')} and at the end" if options.every else "at the end"
        rest = f", every {options.keep_every}th for good" if options.keep_every else ""
        how = "while training goes on" if options.async_save else "while training waits"
        return f"{when}, {how}; the newest {options.keep_last} are kept{rest}; Ctrl-C and SIGTERM commit too"

    def _recovery_text(self) -> str:
        options = self.config.cluster
        if not options.max_restarts:
            return "no part that dies is started again: the run fails then"
        often = f"at most {count(options.max_restarts, 'time')} in {options.restart_window_s:,g} s"
        return f"a part that dies is started again, {often}; a shard costs the steps since the newest commit"


def with_device(config: AnyConfig, plan: CommonPlan) -> AnyConfig:
    """The configuration for rooms, with the device that models compute on in place of auto."""
    device = "gpu" if plan.on_gpus else "cpu"
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": device})})


def package_versions() -> dict[str, str]:
    """Versions of what a run stands on, read without importing it."""
    names = ("trireme", "torch", "ray", "transformers")
    vllm = (installed_vllm() or "vllm not-installed").split(" ", 1)
    return {"python": platform.python_version(), **{name: version(name) for name in names}, vllm[0]: vllm[1]}


def count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def gib(number: int) -> str:
    return f"{number / GIB:.2f} GiB"
