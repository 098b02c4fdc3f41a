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
from typing import Self

from rich.table import Table
from rich.text import Text

from trireme.config.checks import installed_vllm, seq_limit
from trireme.config.model_facts import ModelFacts
from trireme.config.schema import CommonConfig
from trireme.rundir import default_name

GIB = 2**30
SHARD_BASE_GIB = 0.5
"""Measured resident memory of a shard without weights."""
LOGITS_GIB = 0.2
"""What a shard holds of logits at once (`trainer.logprobs`)."""


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
        return [self._options() for _ in range(self.config.trainer.shards)]

    # --- numbers

    @property
    def shard_bytes(self) -> int | None:
        """Memory of a shard without activations: its share of 16 bytes per parameter (fp32 weight, gradient, two Adam
        moments) and 4 of the KL reference's; and the logits of a chunk of tokens."""
        if self.facts is None:
            return None
        states = self.bytes_per_parameter * self.facts.num_parameters // self.config.trainer.shards
        return int((SHARD_BASE_GIB + LOGITS_GIB) * GIB) + states

    @property
    def bytes_per_parameter(self) -> int:
        """Of a shard's state."""
        return 20 if self.config.kl_reference else 16

    # --- for people

    def render(self) -> Table:
        """The plan as a table for rich."""
        table = Table.grid(padding=(0, 2))
        for what, text in self.rows():
            table.add_row(Text(what), Text(text), style="yellow" if what == "warning" else None)
        return table

    def _run_dir_text(self) -> str:
        if self.run_dir:
            return str(self.run_dir)
        run = self.config.run
        return f"{run.output_dir}/{run.name or default_name(self.config, '<8 hex>')}"

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

    def _commits_text(self) -> str:
        options = self.config.checkpoint
        when = f"every {count(options.every, 'step')} and at the end" if options.every else "at the end"
        rest = f", every {options.keep_every}th for good" if options.keep_every else ""
        how = "while training goes on" if options.async_save else "while training waits"
        return f"{when}, {how}; the newest {options.keep_last} are kept{rest}; Ctrl-C and SIGTERM commit too"


def package_versions() -> dict[str, str]:
    """Versions of what a run stands on, read without importing it."""
    names = ("trireme", "torch", "ray", "transformers")
    vllm = (installed_vllm() or "vllm not-installed").split(" ", 1)
    return {"python": platform.python_version(), **{name: version(name) for name in names}, vllm[0]: vllm[1]}


def count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def gib(number: int) -> str:
    return f"{number / GIB:.2f} GiB"
