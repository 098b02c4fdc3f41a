"""The parts of a plan that `rl` adds to the trainer: replicas, the orchestrator, tokens and staleness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trireme.config.model_facts import ModelFacts
from trireme.config.schema import Config
from trireme.plan.base import SHARED_GPU_UTILIZATION, Part, count
from trireme.plan.memory import GIB
from trireme.plan.needs import ASSUMED_GPU, HOST_OF_CUDA_GIB, VERSIONS, Need, gib
from trireme.plan.trainer import TrainerPart

REPLICA_BASE_GIB = 1.4
"""Measured resident memory of a replica with its engine process, without weights and KV cache."""
ENGINE_BYTES = 3 * GIB
"""What an engine takes of a GPU beside weights and KV cache: CUDA's context, graphs, activations, logits. It is an
allowance: nothing was measured on a GPU."""
SPARE_GIB = 0.6
"""Measured memory of a spare that it does not share with other processes."""


@dataclass(frozen=True)
class InferencePart(Part):
    """The vLLM replicas."""

    config: Config
    room = "inference"
    size_key = "inference.replicas"

    @property
    def actors(self) -> list[str]:
        return [f"inference replica {n}" for n in range(self.config.inference.replicas)]

    @property
    def may_share_gpu(self) -> bool:
        return self.config.inference.gpu_memory_utilization <= SHARED_GPU_UTILIZATION

    @property
    def size_text(self) -> str:
        return f"inference.replicas = {self.config.inference.replicas}"

    @property
    def replica_bytes(self) -> int | None:
        """Memory of a replica on CPUs: weights in the inference dtype and the KV cache. (On GPUs it is a set share.)
        None if the sizes of the model are unknown."""
        if self.facts is None:
            return None
        weights = self.facts.num_parameters * self.dtype_bytes
        return int((REPLICA_BASE_GIB + self.config.inference.memory_gb) * GIB) + weights

    @property
    def needs(self) -> list[Need] | None:
        if self.facts is None:
            return None
        spare = {"a spare": int(SPARE_GIB * GIB)} if self.config.inference.spare else {}
        weights = self.facts.num_parameters * self.dtype_bytes
        arriving, shared = {"arriving weights": self.published_bytes}, {VERSIONS: 2 * self.published_bytes, **spare}
        if self.on_gpus:
            cuda = (1 + self.ranks) * int(HOST_OF_CUDA_GIB * GIB)  # the actor, and each process of its engine
            cache = self._gpu_cache(self.facts)
            gpu = {"a replica's weights": weights // self.ranks, "its workspaces": ENGINE_BYTES, "its KV cache": cache}
            return [Need({"processes": cuda, **arriving}, gpu, shared)] * self.config.inference.replicas
        base, cache = int(REPLICA_BASE_GIB * GIB), int(self.config.inference.memory_gb * GIB)
        host = {"processes": base, "the replicas' weights": weights, "KV caches": cache, **arriving}
        return [Need(host, {}, shared)] * self.config.inference.replicas

    def _gpu_cache(self, facts: ModelFacts) -> int:
        """Bytes of KV cache on each GPU of a replica: what `gpu_cache_gb` says, else what its share of the GPU leaves,
        but enough for one sequence."""
        if self.config.inference.gpu_cache_gb:
            return int(self.config.inference.gpu_cache_gb * GIB)
        known = [node.smallest_gpu for node in self.resources.nodes if node.smallest_gpu]
        memory = min((gpu.memory_bytes for gpu in known), default=ASSUMED_GPU.memory_bytes)
        share = int(memory * self.config.inference.gpu_memory_utilization)
        left = share - ENGINE_BYTES - facts.num_parameters * self.dtype_bytes // self.ranks
        longest = self.config.seq_limit(facts) or 0
        return max(left, longest * facts.kv_values_per_token * self.dtype_bytes // self.ranks)

    def sharing_gpu(self) -> dict[str, Any]:
        """Fixes the KV cache: vLLM would measure what its share leaves while the trainer takes memory too."""
        cache = self.config.inference.gpu_cache_gb or (self._gpu_cache(self.facts) / GIB if self.facts else None)
        return {"inference": self.config.inference.model_copy(update={"gpu_cache_gb": cache})}

    @property
    def max_num_seqs(self) -> int:
        """Sequences that a replica decodes at the same time."""
        return self.config.inference.sequences(on_gpus=self.on_gpus)

    @property
    def recomputed_tokens(self) -> int | None:
        """The most tokens whose KV is computed again at an update: all that can be in flight, at full length. None if
        the limit of the model is unknown."""
        limit = self.config.seq_limit(self.facts)
        rollouts = self.config.groups_in_flight * self.config.largest_group
        return min(self.max_num_seqs * self.config.inference.replicas, rollouts) * limit if limit else None

    def rows(self, each: str) -> list[tuple[str, str]]:
        replicas = self.config.inference.replicas
        spare = f"; a spare without one on each node, {SPARE_GIB} GiB" if self.config.inference.spare else ""
        text = f"{count(replicas, 'vLLM replica')}: {count(replicas, 'actor')} with an engine, {each}{spare}"
        memory = [("memory", self._memory_text(self.facts))] if self.facts else []
        return [("inference", text), *memory, ("each update", self._update_text())]

    def _memory_text(self, facts: ModelFacts) -> str:
        if self.on_gpus or self.replica_bytes is None:
            of_which = f", of which {gib(self._gpu_cache(facts))} KV cache" if self.on_gpus else ""
            return f"a replica {self.config.inference.gpu_memory_utilization:.0%} of its GPU{of_which}"
        cache = int(self.config.inference.memory_gb * GIB)
        holds = cache // (facts.kv_values_per_token * self.dtype_bytes)
        return (
            f"a replica {gib(self.replica_bytes)} ({REPLICA_BASE_GIB} GiB + {self.dtype_bytes} B x "
            f"parameters + KV cache {gib(cache)}, which holds {holds:,} tokens)"
        )

    def _update_text(self) -> str:
        config, lora, limit = self.config, self.config.trainer.lora, self.config.seq_limit(self.facts)
        what = "the adapters" if lora.on else "all weights"
        if self.facts:
            what += f" ({self.facts.trained_parameters(lora) * self.dtype_bytes / 2**20:,.2f} MiB)"
        what += f" travel by {config.transport}; "
        if self.recomputed_tokens is None:
            again = "the KV cache of everything in flight is computed again"
            return f"{what}{again}; how much is unknown, as the model's limit is"
        return (
            f"{what}up to {self.recomputed_tokens:,} tokens of KV cache are computed again (min({self.max_num_seqs} "
            f"sequences x {count(config.inference.replicas, 'replica')}, {config.groups_in_flight} groups x "
            f"{config.largest_group} rollouts) x {limit} tokens)"
        )


@dataclass(frozen=True)
class OrchestratorPart(Part):
    """The orchestrator, and what it samples."""

    config: Config
    room = "orchestrator"

    @property
    def actors(self) -> list[str]:
        return ["orchestrator"]

    @property
    def tokens_per_step(self) -> int:
        """The most tokens that a step samples and trains on."""
        config = self.config
        return config.orchestrator.batch_size * config.largest_group * config.inference.sampling.max_tokens

    def rows(self, each: str) -> list[tuple[str, str]]:
        config = self.config
        return [
            ("orchestrator", f"1 actor, CPU: env {config.label}, loss {config.loss_fn}"),
            ("tokens", self._tokens_text()),
            ("staleness", self._staleness_text()),
            ("in flight", self._in_flight_text()),
            *([("evaluation", self._evaluation_text())] if config.eval.every else []),
        ]

    def _tokens_text(self) -> str:
        config, steps = self.config, self.config.max_steps
        return (
            f"{config.orchestrator.batch_size} problems x {config.largest_group} rollouts x up to "
            f"{config.inference.sampling.max_tokens} tokens = up to {self.tokens_per_step:,} per step, "
            f"{self.tokens_per_step * steps:,} in {steps} steps"
        )

    def _staleness_text(self) -> str:
        bound, policy = self.config.max_steps_off_policy, self.config.orchestrator.stale_policy
        if bound == 0:
            return "synchronous: every group is sampled with the weights that are trained on it"
        what = {"requeue": "is sampled afresh", "drop": "is dropped", "wait": "is waited for, in order"}[policy]
        return (
            f"no group is trained on that is more than {count(bound, 'step')} old; one that would be {what}; "
            f"at most {self.config.groups_in_flight} groups in flight"
        )

    def _in_flight_text(self) -> str:
        """Says how many rollouts are sampled at the same time, of training and evaluation together."""
        config, options = self.config, self.config.orchestrator
        slots = f"{config.groups_in_flight} groups x {config.largest_group} rollouts of training"
        if config.deterministic:
            return f"a whole batch together: {slots}"
        if options.max_concurrent != "auto":
            return f"at most {options.max_concurrent} rollouts; at most {slots}"
        first = config.enough_rollouts(config.training_replicas, on_gpus=self.on_gpus)
        return (
            f"at first at most {first} rollouts ({count(config.training_replicas, 'replica')} x "
            f"{config.inference.sequences(on_gpus=self.on_gpus)} sequences and a quarter more), then as the replicas' "
            f"KV caches allow; at most {slots}"
        )

    def _evaluation_text(self) -> str:
        options, env = self.config.eval, " and of ".join(env.label for env in self.config.eval_envs)
        problems = f"{options.problems or 'all'} held-out problems of {env} x {count(options.samples, 'rollout')}"
        own = f", by {count(options.replicas, 'replica')} of its own" if options.replicas else ""
        return f"{problems}: first of all, every {count(options.every, 'step')}, and at the end{own}"


RL_ROOMS = (TrainerPart, InferencePart, OrchestratorPart)
"""The rooms of a run of `rl`."""
LOOP_ROOMS = (TrainerPart, InferencePart)
"""The rooms of a loop of one's own that samples."""
EVALUATION_ROOMS = (InferencePart, OrchestratorPart)
"""The rooms of an evaluation."""
