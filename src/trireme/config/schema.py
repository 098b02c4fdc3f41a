"""Every option of a run: its type, default and meaning. Each section has a file; each value lives once, and derived
values are properties.

`docs/configuration.md` is generated from the schema.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import ceil
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveInt

from trireme.config.inference import InferenceConfig, SamplingConfig
from trireme.config.losses import find_loss
from trireme.config.model_facts import ModelFacts
from trireme.config.orchestrator import (
    SEVERAL,
    EnvConfig,
    EvalConfig,
    HeldOutConfig,
    OrchestratorConfig,
    RendererConfig,
)
from trireme.config.run import (
    READ_BYTES_PER_S,
    CheckpointConfig,
    ClusterConfig,
    CommonTimeouts,
    MlflowConfig,
    ModelConfig,
    ResumeConfig,
    RolloutsConfig,
    RunConfig,
    TimeoutsConfig,
    TraceConfig,
    TrackioConfig,
    WandbConfig,
)
from trireme.config.section import NonNegativeInt, Section
from trireme.config.service import ServiceConfig
from trireme.config.trainer import CommonTrainer, ReferenceConfig, TrainerConfig
from trireme.config.trainer import KlConfig as KlConfig  # these three: where users' loops import them from
from trireme.config.trainer import LoraConfig as LoraConfig
from trireme.config.trainer import OptimConfig as OptimConfig
from trireme.core.normalization import Normalization
from trireme.core.tokenizer import looks_like_path
from trireme.core.types import AdamParams

ANSWER_S = 60.0
"""Seconds that are added to the deadline of a call if a replica has a deadline in it, so that the replica's more
precise message comes first."""
MOST_MINIBATCHES = 8
ROLLOUTS_OF_A_SHARD = 16
"""With `trainer.num_minibatches = auto` a substep has at most MOST_MINIBATCHES parts, and a part has at least
ROLLOUTS_OF_A_SHARD rollouts for each shard."""


class CommonConfig(Section, ABC):
    """The keys of any kind of run: everything that the trainer, checkpoints and the run directory read."""

    command: ClassVar[str]
    """The program that reads it."""

    max_steps: NonNegativeInt = 100
    """Training steps, counted from the first start of the run."""
    seed: int = 0
    """Seed of data order, initialisation and evaluations, and in deterministic mode of all sampling."""
    deterministic: bool = False
    """Repeat a run bit for bit on CPUs; slower."""
    clean: bool = False
    """Empty the run directory before starting."""
    run: RunConfig = RunConfig()
    resume: ResumeConfig = ResumeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    model: ModelConfig
    trainer: CommonTrainer = CommonTrainer()
    cluster: ClusterConfig = ClusterConfig()
    timeouts: CommonTimeouts = CommonTimeouts()
    trace: TraceConfig = TraceConfig()
    tensorboard: bool = False
    """Write files for TensorBoard to `tensorboard/` in the run directory (extra `tensorboard`)."""
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    trackio: TrackioConfig = TrackioConfig()

    @property
    @abstractmethod
    def label(self) -> str:
        """A word for the data that the run trains on; the run's default name begins with it."""

    def default_name(self, suffix: str) -> str:
        """Returns a name for a run without a configured name, made of its label, its model and `suffix`."""
        return f"{self.label}-{Path(self.model.name).name}-{suffix}"

    @property
    def max_steps_off_policy(self) -> int:
        """The maximum difference in steps between the weights that sampled a group and the weights that train on it."""
        return 0

    @property
    def env_variables(self) -> tuple[str, ...]:
        """Names of the environment variables that workers and programs of environments get."""
        return ()

    @property
    def num_replicas(self) -> int:
        """Number of vLLM replicas."""
        return 0

    def start_deadline_s(self, facts: ModelFacts | None) -> float:
        """Returns the start deadline, in seconds, of rooms and of processes that replace lost ones: `timeouts.start_s`,
        plus the time to read the model and its KL reference at READ_BYTES_PER_S. Without `facts`, returns only
        `timeouts.start_s`."""
        models = 2 if self.loads_reference else 1  # nothing is known of the reference: it counts like the model
        return self.timeouts.start_s + (models * facts.stored_bytes / READ_BYTES_PER_S if facts else 0.0)

    @property
    def transport(self) -> str:
        """The transport of published weights: a key of `trireme.core.transport.TRANSPORTS`; "auto" until the plan has
        decided."""
        return "object_store"

    @property
    def encoding(self) -> str:
        """The form in which weights travel: "dense" (whole) or "delta" (only the changes since the version before).
        "auto" until the plan has decided."""
        return "dense"

    @property
    def kl_reference(self) -> ReferenceConfig | None:
        """The reference policy that the trainer keeps in addition to the model; None without a KL penalty."""
        return None

    @property
    def base_is_reference(self) -> bool:
        """True if the reference policy is the frozen base of the trained adapters, not a second model."""
        reference = self.kl_reference
        named = reference and (reference.load_checkpoint_path or reference.base_model)
        return self.trainer.lora.on and reference is not None and named in (None, self.model.name)

    @property
    def loads_reference(self) -> bool:
        """True if the reference policy is a second model, which the trainer loads in addition to the trained one."""
        return self.kl_reference is not None and not self.base_is_reference

    @property
    def lora_seed(self) -> int:
        """Seed for the initial values of adapters."""
        if self.trainer.lora.seed is None:
            return self.seed
        return self.trainer.lora.seed

    def seq_limit(self, facts: ModelFacts | None) -> int | None:
        """Returns the longest sequence of the run in tokens: as configured, else the model's limit. None if both are
        unknown."""
        return self.model.max_seq_len or (facts.max_position_embeddings if facts else None)

    @property
    def normalization(self) -> Normalization:
        """The weighting of token losses within a substep."""
        return Normalization(self.trainer.loss_normalization or "token_mean", self.model.max_seq_len)

    @property
    def tokenizer_name(self) -> str:
        """The directory of the tokenizer, or its name on the hub."""
        return self.model.tokenizer or self.model.name

    def with_absolute_paths(self) -> Self:
        """Returns a copy in which local directories of models are absolute, because actors may work in another
        directory."""
        names = {key: getattr(self.model, key) for key in ("name", "tokenizer", "start")}
        local = {key: str(Path(n).expanduser().absolute()) for key, n in names.items() if n and looks_like_path(n)}
        return self.model_copy(update={"model": self.model.model_copy(update=local)})

    def adam_params(self, learning_rate: float) -> AdamParams:
        """Returns the parameters of AdamW for a step with `learning_rate`."""
        return AdamParams(
            learning_rate=learning_rate, max_grad_norm=self.trainer.max_grad_norm, **self.trainer.optim.model_dump()
        )


class Config(CommonConfig):
    """One run of `rl`."""

    command = "rl"
    max_steps: PositiveInt = 100
    """Training steps, counted from the first start of the run."""
    deterministic: bool = False
    """Repeat a run bit for bit on CPUs: needs max_steps_off_policy = 0; slower."""
    placement: Literal["auto", "split", "colocated"] = "auto"
    """split: trainer and replicas have devices of their own, and work at the same time. colocated: they have the same
    devices, and take turns: all groups that max_steps_off_policy allows are sampled, then the replicas sleep while the
    trainer trains on them (on GPUs as many shards as ranks of replicas). auto: colocated where there are too few GPUs
    for a split, else split."""
    trainer: TrainerConfig = TrainerConfig()
    orchestrator: OrchestratorConfig
    env: Annotated[tuple[EnvConfig, ...], SEVERAL, Field(min_length=1)]
    renderer: RendererConfig = RendererConfig()
    eval: EvalConfig = EvalConfig()
    inference: InferenceConfig
    service: ServiceConfig = ServiceConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()

    @property
    def label(self) -> str:
        return "+".join(env.label for env in self.env)

    @property
    def max_steps_off_policy(self) -> int:
        return self.orchestrator.max_steps_off_policy

    @property
    def num_replicas(self) -> int:
        return self.inference.replicas

    @property
    def kl_reference(self) -> ReferenceConfig | None:
        if self.trainer.kl.coef:
            return self.trainer.kl.reference
        return None

    @property
    def loss_fn(self) -> str:
        """Name of the loss."""
        return self.trainer.loss_fn or ("ppo" if self.orchestrator.max_steps_off_policy else "importance_sampling")

    @property
    def normalization(self) -> Normalization:
        kind = self.trainer.loss_normalization or find_loss(self.loss_fn).normalization
        return Normalization(kind, self.inference.sampling.max_tokens)

    @property
    def transport(self) -> str:
        return self.inference.transport

    @property
    def encoding(self) -> str:
        return self.inference.encoding

    @property
    def groups_per_substep(self) -> int:
        return self.orchestrator.batch_size // self.trainer.num_substeps

    @property
    def groups_per_minibatch(self) -> tuple[int, int]:
        """The limits for the number of groups in a minibatch: (minimum, maximum). Only the last minibatch of a substep
        may have fewer groups than the minimum."""
        whole = self.groups_per_substep
        parts = self.trainer.num_minibatches
        if parts != "auto":
            return whole // parts, whole // parts
        if self.deterministic:  # which groups have finished depends on speed
            return whole, whole
        for_all_shards = ceil(ROLLOUTS_OF_A_SHARD * self.trainer.mesh.data_parallel / self.smallest_group)
        return min(max(ceil(whole / MOST_MINIBATCHES), for_all_shards), whole), whole

    @property
    def colocated(self) -> bool:
        """True if trainer and replicas take turns on the same devices. Read this only after the plan has replaced
        `placement = auto`; before that, this is False for `auto`."""
        return self.placement == "colocated"

    @property
    def groups_in_flight(self) -> int:
        """The maximum number of groups in flight: dispatched, and not yet part of an acknowledged step. A step is
        acknowledged when all live replicas have its weights."""
        return (self.max_steps_off_policy + 1) * self.orchestrator.batch_size

    @property
    def env_variables(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for env in self.env for name in env.variables))

    def group_size(self, env: EnvConfig) -> int:
        """Returns the number of rollouts per problem in the environment `env`."""
        return env.group_size or self.orchestrator.group_size

    @property
    def patience_s(self) -> float:
        """Seconds for which requests and updates wait when no replica is left. This is enough time to recognise that a
        lost replica is dead, to start its successor, and to load the newest weights there."""
        return self.timeouts.heartbeat_s + self.timeouts.start_s + self.timeouts.update_s

    @property
    def update_deadline_s(self) -> float:
        """Seconds within which all replicas must have an update. This leaves time for a replica to finish the previous
        update first, and for the last replica to be lost and replaced (`patience_s`)."""
        return 2 * self.timeouts.update_s + self.patience_s + ANSWER_S

    @property
    def batch_deadline_s(self) -> float:
        """Seconds within which a batch of rollouts, or an evaluation, must be complete: `timeouts.batch_s`. By default
        this is long enough for one group to fail at its time limits (of rollouts and of rewards) and for a second group
        to be sampled in its place."""
        return self.timeouts.batch_s or 4 * self.orchestrator.generation_timeout_s + self.patience_s

    @property
    def largest_group(self) -> int:
        """The most rollouts per problem in any environment."""
        return max(map(self.group_size, self.env))

    @property
    def smallest_group(self) -> int:
        """The fewest rollouts per problem in any environment."""
        return min(map(self.group_size, self.env))

    @property
    def eval_envs(self) -> tuple[EnvConfig, ...]:
        """The environments that evaluations sample: the ones in `eval.env`, or all of the run's environments if
        `eval.env` is empty."""
        return tuple(map(self._held_out, self.eval.env)) or self.env

    def _held_out(self, held_out: HeldOutConfig) -> EnvConfig:
        base = next((env for env in self.env if env.label == held_out.name), self.env[0])
        if held_out.id is not None:
            return EnvConfig(**held_out.model_dump(), close_s=base.close_s, variables=base.variables)
        return base.model_copy(update={"args": base.args | held_out.args, "name": held_out.name or base.name})

    @property
    def eval_sampling(self) -> SamplingConfig:
        """The sampling options of evaluations."""
        overrides = {"max_tokens": self.eval.max_tokens, "temperature": self.eval.temperature}
        return self.inference.sampling.model_copy(update={k: v for k, v in overrides.items() if v is not None})

    def enough_rollouts(self, places: int) -> int:
        """Returns how many concurrent rollouts keep the replicas busy. `places`: the number of sequences that the
        replicas can decode at the same time. The result is a quarter more than `places`, so that no replica idles while
        answers travel; it is at least the size of one group. This is the initial value of `max_concurrent = auto`."""
        return max(places + places // 4, self.largest_group)
