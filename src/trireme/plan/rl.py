"""The parts of a plan that `rl` adds to the trainer: replicas, the orchestrator, tokens and staleness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trireme.config.model_facts import ModelFacts
from trireme.config.schema import Config
from trireme.plan.memory import GIB, GPU_ALLOWANCES
from trireme.plan.needs import HOST_OF_CUDA_GIB, KEPT_VERSIONS, KV_CACHE, SLAB_BYTES, SLABS, VERSIONS, Need, gib
from trireme.plan.part import Part
from trireme.plan.trainer import TrainerPart
from trireme.plan.whole import SHARED_GPU_UTILIZATION, count

READ_BYTES_PER_S = 2e12
"""Bytes per second that a GPU reads from its memory. An assumption, about that of an A100: nothing was measured."""
REPLICA_BASE_GIB = 1.4
"""Measured resident memory of a replica with its engine process, without weights and KV cache."""
ENGINE_BYTES = 3 * GIB
GRAPH_BYTES = GIB // 2
"""GPU memory of an engine in addition to weights and KV cache: CUDA's context, graphs, activations, logits; and the
graphs' part of it. These are allowances: nothing was measured on a GPU."""
SHARE_STEP = 0.001
"""Shares of a GPU are rounded up to multiples of this."""
BLOCK_TOKENS = 16
"""Tokens in a block of vLLM's KV cache, unless an engine chooses larger ones."""
RANK_GIB = 0.35
"""Measured memory of each of several ranks of a replica, with its part of shared pages, without weights and cache."""
QUEUE_BYTES = 10 * (24 * 2**20 + 2)
"""Bytes that vLLM asks to be free in /dev/shm for the answers of each of several ranks: ten chunks of 24 MiB. vLLM
touches few pages of them, so ranks that have started leave as much free for the next ones."""

WEIGHTS = "a replica's weights"
GRAPHS = "CUDA graphs"
"""The purposes of a replica's GPU memory for its weights and its CUDA graphs. A replica that sleeps has neither, unless
the run trains an adapter. The graphs then wait in host memory."""
ARRIVING = "arriving weights"
"""The purpose of a replica's memory for a version that it receives while another one is loaded. The ranks of the
replica map this memory if it is on the host. If changes travel, they turn one version into the next there."""
BASE = "the version to which changes apply"
"""The purpose of a replica's host memory for the newest version, if changes of it arrive in other memory."""
STAGING = "staging buffers"
"""The purpose of the page-locked memory through which weights pass from the host to a replica's GPUs
(`inference.carrier`)."""
ON_ITS_WAY = "a bucket on its way"
"""The purpose of an engine's GPU memory through which buckets that arrive by NCCL pass to host memory, one by one."""
NCCL = "NCCL"
FORWARD_PASSES = 3
"""The FLOPs of training on a token, in forward passes: the forward pass itself is one, and the backward pass costs
two."""
KEEP_SHARE = 0.3
"""If `recompute_share` is above this, `inference.on_update = "auto"` keeps KV caches on GPUs, except in a colocated
run."""
DEAR_SHARE = 2.0
"""A plan warns if `recompute_share` is above this. `recompute_share` is an upper bound: requests in flight are half
done on average. So if it has this value, replicas compute as long as the trainer does."""


@dataclass(frozen=True)
class InferencePart(Part):
    """The vLLM replicas' part of a plan: their actors, weights and KV caches, and the cost of updates."""

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
    def ranks(self) -> int:
        return self.config.inference.tensor_parallel

    @property
    def size_text(self) -> str:
        text = f"inference.replicas = {self.config.inference.replicas}"
        if self.ranks == 1:
            return text
        return f"{text} with inference.tensor_parallel = {self.ranks}"

    @property
    def replica_bytes(self) -> int | None:
        """Bytes of host memory of a replica on CPUs: processes, weights in the inference dtype, and KV cache. None if
        the sizes of the model are unknown. (On GPUs a replica takes a share of the GPU, see `gpu_share`.)"""
        if self.facts is None:
            return None
        return int((self._base_gib + self.config.inference.memory_gb) * GIB) + self._weight_bytes

    @property
    def _weight_bytes(self) -> int:
        """Bytes of the weights of a replica, all ranks together; 0 if the sizes of the model are unknown."""
        if self.facts:
            return self.facts.num_parameters * self.dtype_bytes
        return 0

    @property
    def _base_gib(self) -> float:
        """GiB of host memory that all processes of a replica on CPUs take without weights and KV cache."""
        return REPLICA_BASE_GIB + (RANK_GIB * self.ranks if self.ranks > 1 else 0)

    @property
    def needs(self) -> list[Need] | None:
        if self.facts is None:
            return None
        weights = self._weight_bytes
        stays = self.receives_on_gpu and self.ranks == 1
        delta = self.encoding == "delta"
        arriving: dict[str, int] = {}
        if delta or (self.transport.received and not stays):
            arriving[ARRIVING] = self.published_bytes
        if delta and self.transport.received:
            arriving[BASE] = self.published_bytes
        if self.transport.stored:
            shared = {VERSIONS: KEPT_VERSIONS * self.published_bytes}
        else:
            shared = {}
        queues = QUEUE_BYTES if self.ranks > 1 else 0
        if self.on_gpus:
            cuda = (1 + self.ranks) * int(HOST_OF_CUDA_GIB * GIB)  # the actor, and each process of its engine
            cache = self._gpu_cache(self.facts)
            gpu = {**self._engine, KV_CACHE: cache}
            resting = self.resting if self.colocated else None
            host = {"processes": cuda, STAGING: self.ranks * SLABS * SLAB_BYTES, **arriving}
            if self.colocated and not self.config.trainer.lora.on:
                host[GRAPHS] = self.ranks * GRAPH_BYTES
            need = Need(host, gpu=gpu, resting=resting, shared=shared, gpu_share=self.gpu_share, shm_free=queues)
            return [need] * self.config.inference.replicas
        base = int(self._base_gib * GIB)
        cache = int(self.config.inference.memory_gb * GIB)
        host = {"processes": base, "the replicas' weights": weights, "KV caches": cache, **arriving}
        return [Need(host, shared=shared, shm_free=queues)] * self.config.inference.replicas

    @property
    def _engine(self) -> Mapping[str, int]:
        """Bytes that one rank of a replica takes on its GPU for everything but the KV cache, by purpose."""
        if not self.on_gpus:
            return {}
        needs = {WEIGHTS: self._weight_bytes // self.ranks, GRAPHS: GRAPH_BYTES}
        needs["its workspaces"] = ENGINE_BYTES - GRAPH_BYTES
        if self.receives_on_gpu:
            needs[ARRIVING] = self.published_bytes
        if self.transport.received and not self.within_gpu:
            needs[NCCL] = GPU_ALLOWANCES[NCCL]
            if self.facts and not self.receives_on_gpu:
                needs[ON_ITS_WAY] = self.largest_bucket(self.facts, embeddings=True)
        return needs

    @property
    def resting(self) -> Mapping[str, int]:
        if self.config.trainer.lora.on:  # an update brings adapters alone, so all else stays
            return self._engine
        return {name: size for name, size in self._engine.items() if name not in (WEIGHTS, GRAPHS)}

    @property
    def turn_s(self) -> float:
        """Estimated seconds in which a replica reads its weights to decode a phase's rollouts, all at full length. It
        reads them once for a token of each sequence in its KV cache. Infinite if no sequence fits."""
        if not (self.facts and self.on_gpus and self.colocated):
            return 0.0
        config = self.config
        replicas = config.inference.replicas
        rollouts = (config.max_steps_off_policy + 1) * config.orchestrator.batch_size * config.largest_group / replicas
        fitting = self._cache_left // self._sequence_cache(self.facts)
        if config.inference.gpu_cache_gb:
            fitting = config.inference.most_gpu_sequences(self.gpu_bytes)
        together = min(fitting, config.inference.most_gpu_sequences(self.gpu_bytes), rollouts)
        if together < 1:
            return math.inf
        steps = config.inference.sampling.max_tokens * rollouts / together
        return steps * self._weight_bytes / self.ranks / READ_BYTES_PER_S

    @property
    def _engine_bytes(self) -> int:
        return sum(self._engine.values())

    def _gpu_cache(self, facts: ModelFacts) -> int:
        """Returns the bytes of KV cache on each GPU of a replica: `gpu_cache_gb` if it is set; else as much as the
        engine can use, limited by what its share of the GPU leaves, but at least enough for one sequence."""
        if self.config.inference.gpu_cache_gb:
            return int(self.config.inference.gpu_cache_gb * GIB)
        return max(min(self._cache_left, self._useful_cache(facts)), self._sequence_cache(facts))

    @property
    def _cache_left(self) -> int:
        """Bytes that are left for the KV cache in a replica's share of a GPU."""
        return int(self.gpu_bytes * self._most_share) - self._engine_bytes

    @property
    def _most_share(self) -> float:
        """The largest share of its GPU, 0 to 1, that a replica may take: the configured share, less the share that a
        resting shard keeps there."""
        return self.config.inference.gpu_memory_utilization - self.taken_share

    def _useful_cache(self, facts: ModelFacts) -> int:
        """Returns the bytes of KV cache that the engine can use on each GPU of a replica: blocks for the sequences that
        it decodes at the same time, at full length, and for prefixes (`prefix_cache`). A larger cache would only
        cost time, as vLLM looks at each block when it starts and at each update."""
        inference = self.config.inference
        return self._cache_of(facts, inference.most_gpu_sequences(self.gpu_bytes) * (1 + inference.prefix_cache))

    def _sequence_cache(self, facts: ModelFacts) -> int:
        """Returns the smallest KV cache, in bytes on each GPU of a replica, with which vLLM starts: room for one
        sequence."""
        return self._cache_of(facts, 1)

    def _cache_of(self, facts: ModelFacts, sequences: float) -> int:
        """Returns the bytes of KV cache on each GPU of a replica for `sequences` of full length: their blocks, and one
        block that vLLM keeps empty."""
        length = self.config.seq_limit(facts) or facts.max_position_embeddings
        blocks = int(sequences * -(-length // BLOCK_TOKENS)) + 1
        parts = max(1, min(self.ranks, facts.num_kv_heads))  # more ranks hold copies of a key head
        return blocks * BLOCK_TOKENS * facts.kv_values_per_token * self.dtype_bytes // parts

    @property
    def gpu_share(self) -> float:
        # What the engine cannot use is left to others on its GPU, and vLLM need not find it free when it starts.
        if self.facts is None:
            return self._most_share
        taken = self._engine_bytes + self._gpu_cache(self.facts)
        share = round(taken / self.gpu_bytes + SHARE_STEP / 2, 3)
        if self.colocated:
            return share
        if self._is_cache_bounded(self.facts):
            return min(self._most_share, share)
        return self._most_share

    def _is_cache_bounded(self, facts: ModelFacts) -> bool:
        """Returns True if the engine's share of a GPU leaves more KV cache than the engine can use. Returns False if
        `gpu_cache_gb` is set."""
        return not self.config.inference.gpu_cache_gb and self._useful_cache(facts) < self._cache_left

    @property
    def least_gpu_share(self) -> float:
        # A KV cache of its own size has no limit by a share. Else there must be room for one sequence.
        if self.facts is None or self.config.inference.gpu_cache_gb:
            return 0.0
        return (self._engine_bytes + self._sequence_cache(self.facts)) / self.gpu_bytes

    def decided(self) -> dict[str, object]:
        """Returns {key or section: value} of the values that the machines decide: `placement`, and the section
        `inference` with `on_update`, `transport`, `receive_on`, `encoding` and, on GPUs, `gpu_memory_utilization`. If
        the engine's share of a GPU leaves more KV cache than the engine can use, also decides `gpu_cache_gb`. Also
        decides it where vLLM would measure too much free memory: if the engine shares a GPU with the trainer, which
        takes some meanwhile, and if versions are received on GPUs, which need some later."""
        inference = self.config.inference
        changes: dict[str, object] = {
            "on_update": self.on_update,
            "transport": self.transport_name,
            "receive_on": "gpu" if self.receives_on_gpu else "host",
            "encoding": self.encoding,
        }
        if self.on_gpus:
            changes["gpu_memory_utilization"] = self.gpu_share
        cache = inference.gpu_cache_gb or (self._gpu_cache(self.facts) / GIB if self.facts else None)
        reserves = self.receives_on_gpu or self.transport.received or self.shares_gpu
        if self.on_gpus and self.facts and (reserves or self._is_cache_bounded(self.facts)):
            changes["gpu_cache_gb"] = cache
        if self.colocated:
            placement = "colocated"
        else:
            placement = "split"
        return {"inference": inference.model_copy(update=changes), "placement": placement}

    @property
    def max_num_seqs(self) -> int | None:
        """Sequences that a replica decodes at the same time; None: vLLM decides by its GPU."""
        return self.config.inference.sequences(on_gpus=self.on_gpus)

    @property
    def recomputed_tokens(self) -> int | None:
        """The most tokens for which all replicas together recompute KV at an update: all requests that can be in
        flight, each at full length. None if the longest sequence is unknown."""
        limit = self.config.seq_limit(self.facts)
        rollouts = self.config.groups_in_flight * self.config.largest_group
        if self.max_num_seqs is not None:
            rollouts = min(self.max_num_seqs * self.config.inference.replicas, rollouts)
        if limit:
            return rollouts * limit
        return None

    @property
    def recompute_share(self) -> float | None:
        """The FLOPs that one replica spends on recomputing KV at an update, divided by the FLOPs that one shard spends
        on training a step. None if the longest sequence is unknown. Both are upper bounds: full lengths, all requests
        in flight. Training on a token counts as three forward passes, recomputing KV for a token as one."""
        config, limit = self.config, self.config.seq_limit(self.facts)
        if self.recomputed_tokens is None or limit is None:
            return None
        trained = config.orchestrator.batch_size * config.largest_group * limit / config.trainer.mesh.processes
        return self.recomputed_tokens / config.inference.replicas / (FORWARD_PASSES * trained)

    @property
    def on_update(self) -> str:
        """`inference.on_update`, with auto decided."""
        chosen = self.config.inference.on_update
        if chosen != "auto":
            return chosen
        dear = self.recompute_share is not None and self.recompute_share > KEEP_SHARE
        if self.on_gpus and dear and not self.colocated:
            return "keep_kv"
        return "recompute_kv"

    @property
    def warnings(self) -> list[str]:
        share = self.recompute_share
        if self.on_update != "recompute_kv" or share is None or share <= DEAR_SHARE:
            return []
        return [
            f"an update computes up to {self.recomputed_tokens:,} tokens of KV cache again, on each replica up to "
            f"{share:.1f} times the arithmetic of a step's training on a shard: sampling may wait for it. "
            "--inference.on-update keep_kv keeps the cache (later tokens come from no policy exactly and are marked "
            "mixed), drain finishes answers first (for short ones); a lower --orchestrator.max-steps-off-policy or "
            "--inference.max-num-seqs, or more replicas, lower the cost of the default"
        ]

    def rows(self, device_text: str) -> list[tuple[str, str]]:
        replicas = self.config.inference.replicas
        of = f" of {self.ranks} ranks" if self.ranks > 1 else ""
        text = f"{count(replicas, 'vLLM replica')}: {count(replicas, 'actor')} with an engine{of}, {device_text}"
        if self.on_gpus and self.config.inference.on_update == "auto":
            text += f"; inference.on_update = auto: {self.on_update}"
        if self.facts:
            memory = [("memory", self._memory_text(self.facts))]
        else:
            memory = []
        return [("inference", text), *memory, ("each update", self._update_text())]

    def _memory_text(self, facts: ModelFacts) -> str:
        if self.on_gpus or self.replica_bytes is None:
            whose = "its GPU" if self.ranks == 1 else "each of its GPUs"
            share = f"{self.gpu_share:.0%} of {whose}"
            if not self.on_gpus:
                return f"a replica {share}"
            room = gib(self._gpu_cache(facts))
            if not self._is_cache_bounded(facts):
                return f"a replica {share}, of which {room} KV cache"
            inference = self.config.inference
            sequences = inference.most_gpu_sequences(self.gpu_bytes)
            return (
                f"a replica {self.gpu_share:.1%} of {whose} instead of {inference.gpu_memory_utilization:.0%}, of "
                f"which {room} KV cache: what {sequences:,} sequences of full length take, and "
                f"{inference.prefix_cache:g} times that for prefixes"
            )
        cache = int(self.config.inference.memory_gb * GIB)
        holds = cache // (facts.kv_values_per_token * self.dtype_bytes)
        return (
            f"a replica {gib(self.replica_bytes)} ({self._base_gib:g} GiB + {self.dtype_bytes} B x "
            f"parameters + KV cache {gib(cache)}, which holds {holds:,} tokens)"
        )

    def _update_text(self) -> str:
        config, lora, limit = self.config, self.config.trainer.lora, self.config.seq_limit(self.facts)
        text = "the adapters" if lora.on else "all weights"
        if self.facts:
            text += f" ({self.published_bytes / 2**20:,.2f} MiB)"
        text += f" travel by {self.transport_name}"
        if self.receives_on_gpu:
            text += " to a second buffer on each GPU of a replica"
        text += "; "
        if self.encoding == "delta":
            text += "only what changed where a replica has the version before; "
        if self.on_update == "drain":
            return f"{text}requests in flight are finished first"
        if self.on_update == "recompute_kv":
            verb = "are computed again"
        else:
            verb = "stay, of older weights"
        if self.recomputed_tokens is None:
            return f"{text}the KV caches of everything in flight {verb}; how much is unknown, as the model's limit is"
        rollouts = f"{config.groups_in_flight} groups x {config.largest_group} rollouts"
        if self.max_num_seqs is not None:
            replicas = count(config.inference.replicas, "replica")
            rollouts = f"min({self.max_num_seqs} sequences x {replicas}, {rollouts})"
        tokens = f"{text}up to {self.recomputed_tokens:,} tokens of KV cache {verb} ({rollouts} x {limit} tokens)"
        if self.on_update != "recompute_kv":
            return tokens
        return f"{tokens}, at most {self.recompute_share:.2g} times the arithmetic of a step's training"


@dataclass(frozen=True)
class OrchestratorPart(Part):
    """The orchestrator's part of a plan: its actor, and rows on rollouts, tokens and staleness."""

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

    def rows(self, device_text: str) -> list[tuple[str, str]]:
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
        bound = self.config.max_steps_off_policy
        policy = self.config.orchestrator.stale_policy
        if bound == 0:
            return "synchronous: every group is sampled with the weights that are trained on it"
        outcome = {"drop": "is dropped", "wait": "is waited for"}[policy]
        return (
            f"no group is trained on that is more than {count(bound, 'step')} old; one that would be {outcome}; "
            f"at most {self.config.groups_in_flight} groups in flight"
        )

    def _in_flight_text(self) -> str:
        """Returns a text about how many rollouts, of training and evaluation, are sampled at the same time."""
        config, options = self.config, self.config.orchestrator
        slots = f"{config.groups_in_flight} groups x {config.largest_group} rollouts of training"
        if config.deterministic:
            return f"a whole batch together: {slots}"
        if options.max_concurrent != "auto":
            return f"at most {options.max_concurrent} rollouts; at most {slots}"
        sequences = config.inference.sequences(on_gpus=self.on_gpus)
        replicas = count(config.inference.replicas, "replica")
        if sequences is None:
            first = f"a quarter more rollouts than {replicas} decode, which vLLM decides by the GPU"
        else:
            first = (
                f"at most {config.enough_rollouts(config.inference.replicas * sequences)} rollouts ({replicas} x "
                f"{sequences} sequences and a quarter more)"
            )
        return f"at first {first}, then as the replicas' KV caches allow; at most {slots}"

    def _evaluation_text(self) -> str:
        options = self.config.eval
        env = " and of ".join(env.label for env in self.config.eval_envs)
        problems = f"{options.problems or 'all'} held-out problems of {env} x {count(options.samples, 'rollout')}"
        return f"{problems}: first of all, every {count(options.every, 'step')}, and at the end"


@dataclass(frozen=True)
class ServicePart(Part):
    """The HTTP service's part of a plan. External clients send chats to the service. It needs no CPU or GPU of its own,
    because it computes nothing."""

    config: Config
    room = "service"

    def rows(self, device_text: str) -> list[tuple[str, str]]:
        options = self.config.service
        if options.port is None:
            return []
        port = options.port or "any free port"
        text = (
            f"1 actor, CPU: {options.host}, port {port}; chats take at most {options.share:.0%} of the replicas' places"
        )
        return [("service", text)]


RL_ROOMS = (TrainerPart, InferencePart, OrchestratorPart, ServicePart)
"""The rooms of a run of `rl`."""
LOOP_ROOMS = (TrainerPart, InferencePart)
"""The rooms of a user's own training loop that samples."""
EVALUATION_ROOMS = (InferencePart, OrchestratorPart)
"""The rooms of an evaluation."""
SERVED_ROOMS = (InferencePart, ServicePart)
"""The rooms of a model that is only served."""
