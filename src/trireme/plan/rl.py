"""What a run will occupy and do, worked out before anything starts: processes, devices, memory, tokens, staleness."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.config.checks import check_cpu_build, check_gpu_build, seq_limit
from trireme.config.refusals import Refusal
from trireme.config.schema import Config
from trireme.plan.base import CommonPlan, Resources, count, gib, package_versions
from trireme.plan.memory import GIB
from trireme.process.environ import cluster_address

__all__ = ["Plan", "Resources"]

REPLICA_BASE_GIB = 1.4
"""Measured resident memory of a replica with its engine process, without weights and KV cache."""
SPARE_GIB = 0.6
"""Measured memory of a spare that it shares with nobody."""
SHARED_GPU_UTILIZATION = 0.5
"""The most that a replica may take of a GPU that it shares with the trainer."""


@dataclass(frozen=True)
class Plan(CommonPlan):
    """Of a run of `rl`."""

    config: Config

    # --- devices and places

    @property
    def models(self) -> int:
        """Processes that hold a model: shards and replicas."""
        return self.config.trainer.processes + self.config.inference.replicas

    @property
    def shares_gpu(self) -> bool:
        """One shard and one replica share the GPU when there are not two, and the replica takes at most half of it."""
        fits = self.config.inference.gpu_memory_utilization <= SHARED_GPU_UTILIZATION
        return self.on_gpus and self.models == 2 and self.resources.gpus < 2 and fits

    @property
    def gpus_needed(self) -> int:
        return (1 if self.shares_gpu else self.models) if self.on_gpus else 0

    @property
    def actor_names(self) -> list[str]:
        trainer = [f"trainer shard {r}" for r in range(self.config.trainer.processes)]
        inference = [f"inference replica {n}" for n in range(self.config.inference.replicas)]
        return [*trainer, *inference, "orchestrator"]

    def _options(self) -> dict[str, float]:
        gpus = (0.5 if self.shares_gpu else 1.0) if self.on_gpus else 0.0
        return {"num_cpus": self.cpus_per_actor, "num_gpus": gpus}

    @property
    def inference_options_N(self) -> list[dict[str, float]]:
        """Ray resources of each replica."""
        return [self._options() for _ in range(self.config.inference.replicas)]

    @property
    def added_replica_options(self) -> dict[str, float]:
        """Ray resources of a replica that is added to a run. On CPUs that this run alone uses all shares may be taken;
        they count nothing."""
        own = cluster_address(self.config) is None and not self.on_gpus
        return {**self._options(), "num_cpus": 0.0} if own else self._options()

    @property
    def orchestrator_options(self) -> dict[str, float]:
        return {"num_cpus": self.cpus_per_actor, "num_gpus": 0.0}

    def check_resources(self) -> None:
        """Raises BadInput when the run needs more GPUs than there are, or GPUs with vLLM's CPU build, or replicas on
        CPUs with its CUDA build. Too few cores are only a warning."""
        if self.gpus_needed <= self.resources.gpus:
            if self.on_gpus:
                check_gpu_build()
            elif self.inference_options_N:
                check_cpu_build()
            return
        ways = ["lower --trainer.shards or --inference.replicas", "use a larger cluster", "--cluster.device cpu"]
        if self.models == 2 and self.resources.gpus == 1:
            ways.insert(0, f"let both share it: --inference.gpu-memory-utilization {SHARED_GPU_UTILIZATION - 0.1:g}")
        options, replicas = self.config.trainer, self.config.inference.replicas
        copies = f" x trainer.replicate = {options.replicate}" if options.replicate > 1 else ""
        raise Refusal(
            f"trainer.shards = {options.shards}{copies} and inference.replicas = {replicas}, "
            f"which need {self.gpus_needed} GPUs",
            f"at most {self.resources.gpus} GPUs, which is what {self.resources.source} has",
            "; or ".join(ways),
        ).error()

    # --- numbers

    @property
    def groups_in_flight(self) -> int:
        """Slots: the most groups between dispatch and the acknowledgement of the step that trained on them."""
        return (self.config.orchestrator.max_steps_off_policy + 1) * self.config.orchestrator.batch_size

    @property
    def max_num_seqs(self) -> int:
        return self.config.inference.sequences(on_gpus=self.on_gpus)

    @property
    def rollouts_per_step(self) -> int:
        return self.config.orchestrator.batch_size * self.config.largest_group

    @property
    def tokens_per_step(self) -> int:
        """The most tokens that a step samples and trains on."""
        return self.rollouts_per_step * self.config.inference.sampling.max_tokens

    @property
    def recomputed_tokens(self) -> int | None:
        """The most tokens whose KV is computed again at an update: all that can be in flight, at full length."""
        limit = seq_limit(self.config, self.facts)
        rollouts = self.groups_in_flight * self.config.largest_group
        return min(self.max_num_seqs * self.config.inference.replicas, rollouts) * limit if limit else None

    @property
    def replica_bytes(self) -> int | None:
        """Memory of a replica on CPUs: weights in the inference dtype and the KV cache. (On GPUs it is a set share.)"""
        if self.facts is None:
            return None
        weights = self.facts.num_parameters * self.inference_dtype_bytes
        return int((REPLICA_BASE_GIB + self.config.inference.memory_gb) * GIB) + weights

    @property
    def warnings(self) -> list[str]:
        found = self.common_warnings
        has, where = self.resources, self.resources.source
        if self.gpus_needed > has.gpus:
            found.append(
                f"needs {count(self.gpus_needed, 'GPU')}, {where} has {has.gpus}: "
                "start it where they are, or give --cluster.address"
            )
        if self.models > has.cpus and not self.on_gpus:
            found.append(f"{self.models} processes compute on {has.cpus} cores of {where}: it works, slower")
        shard, replica = self.shard_memory, self.replica_bytes
        if shard and replica and not self.on_gpus:
            total = shard.total * self.config.trainer.processes + replica * self.config.inference.replicas
            if self.config.inference.spare:  # one on each node that has a replica
                total += int(SPARE_GIB * GIB) * min(has.nodes, self.config.inference.replicas)
            if total > has.memory_bytes:
                found.append(f"needs about {gib(total)} of memory, {where} has {gib(has.memory_bytes)}")
        return found

    # --- for people

    def rows(self) -> list[tuple[str, str]]:
        """The plan as (what, text) pairs."""
        return [
            *self._rows_of_rooms(),
            ("resources", self._resources_text()),
            ("packages", ", ".join(f"{name} {number}" for name, number in package_versions().items())),
            ("model", self._model_text()),
            *self._rows_of_adapters(),
            ("tokens", self._tokens_text()),
            ("memory", self._memory_text()),
            ("staleness", self._staleness_text()),
            ("in flight", self._in_flight_text()),
            ("each update", f"{self._travelling_text()} by {self.config.transport}; {self._update_text()}"),
            *self._rows_of_evaluation(),
            ("commits", self._commits_text()),
            ("recovery", self._recovery_text()),
            ("written to", self._written_text()),
            *(("warning", text) for text in self.warnings),
        ]

    def _rows_of_rooms(self) -> list[tuple[str, str]]:
        config = self.config
        share = "half a GPU each, shared" if self.shares_gpu else "one GPU each" if self.on_gpus else "CPU"
        each = f"{share}, {count(self.threads, 'thread')} each"
        replicas = config.inference.replicas
        spare = f"; a spare without one on each node, {SPARE_GIB} GiB" if config.inference.spare else ""
        return [
            ("trainer", f"{self._trainer_text()}, {each}"),
            ("orchestrator", f"1 actor, CPU: env {config.label}, loss {config.loss_fn}"),
            (
                "inference",
                f"{count(replicas, 'vLLM replica')}: {count(replicas, 'actor')} with an engine, {each}{spare}",
            ),
        ]

    def _rows_of_evaluation(self) -> list[tuple[str, str]]:
        options, env = self.config.eval, " and of ".join(env.label for env in self.config.eval_envs)
        if not options.every:
            return []
        problems = f"{options.problems or 'all'} held-out problems of {env} x {count(options.samples, 'rollout')}"
        own = f", by {count(options.replicas, 'replica')} of its own" if options.replicas else ""
        return [("evaluation", f"{problems}: first of all, every {count(options.every, 'step')}, and at the end{own}")]

    def _tokens_text(self) -> str:
        orchestrator, steps = self.config.orchestrator, self.config.max_steps
        return (
            f"{orchestrator.batch_size} problems x {self.config.largest_group} rollouts x up to "
            f"{self.config.inference.sampling.max_tokens} tokens = up to {self.tokens_per_step:,} per step, "
            f"{self.tokens_per_step * steps:,} in {steps} steps"
        )

    def _memory_text(self) -> str:
        shard = self._shard_memory_text()
        if self.facts is None or self.replica_bytes is None:
            return shard
        if self.on_gpus:
            return f"{shard}; a replica {self.config.inference.gpu_memory_utilization:.0%} of its GPU"
        cache = int(self.config.inference.memory_gb * GIB)
        holds = cache // (self.facts.kv_values_per_token * self.inference_dtype_bytes)
        return (
            f"{shard}; a replica {gib(self.replica_bytes)} ({REPLICA_BASE_GIB} GiB + {self.inference_dtype_bytes} B x "
            f"parameters + KV cache {gib(cache)}, which holds {holds:,} tokens)"
        )

    def _staleness_text(self) -> str:
        bound, policy = self.config.orchestrator.max_steps_off_policy, self.config.orchestrator.stale_policy
        if bound == 0:
            return "synchronous: every group is sampled with the weights that are trained on it"
        what = {"requeue": "is sampled afresh", "drop": "is dropped", "wait": "is waited for, in order"}[policy]
        return (
            f"no group is trained on that is more than {count(bound, 'step')} old; one that would be {what}; "
            f"at most {self.groups_in_flight} groups under way"
        )

    def _in_flight_text(self) -> str:
        """How many rollouts are sampled at once, training and evaluation together."""
        config, options = self.config, self.config.orchestrator
        slots = f"{self.groups_in_flight} groups x {config.largest_group} rollouts of training under way"
        if config.deterministic:
            return f"a whole batch at once: {slots}"
        if options.max_concurrent != "auto":
            return f"at most {options.max_concurrent} rollouts; at most {slots}"
        first = config.enough_rollouts(config.training_replicas, on_gpus=self.on_gpus)
        return (
            f"at first at most {first} rollouts ({count(config.training_replicas, 'replica')} x {self.max_num_seqs} "
            f"sequences and a quarter more), then as the replicas' KV caches allow; at most {slots}"
        )

    def _travelling_text(self) -> str:
        """What the trainer publishes."""
        what = "the adapters" if self.config.trainer.lora.on else "all weights"
        size = self.trained_parameters * self.inference_dtype_bytes
        return f"{what} ({size / 2**20:,.2f} MiB) travel" if size else f"{what} travel"

    def _update_text(self) -> str:
        if self.recomputed_tokens is None:
            return (
                "the KV cache of everything in flight is computed again; how much is unknown, as the model's limit is"
            )
        return (
            f"up to {self.recomputed_tokens:,} tokens of KV cache are computed again (min({self.max_num_seqs} "
            f"sequences x {count(self.config.inference.replicas, 'replica')}, {self.groups_in_flight} groups x "
            f"{self.config.largest_group} rollouts) x {seq_limit(self.config, self.facts)} tokens)"
        )
