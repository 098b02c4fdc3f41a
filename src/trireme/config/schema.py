"""Every option of a run: its type, default and meaning. Each value lives once; what follows from others is a property.

`docs/configuration.md` is generated from this file.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
)

from trireme.config.losses import LossFnType
from trireme.core.transport import TRANSPORTS
from trireme.core.types import AdamParams, LossNormalization, SamplingParams
from trireme.renderers import unknown_renderer

NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number in each dtype."""
if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal["auto", *TRANSPORTS]


class Section(BaseModel):
    """Unknown keys are errors, values never change after parsing."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), validate_default=True)


class RunConfig(Section):
    name: str | None = Field(None, description="Name of the run; none = `<env>-<model>-<8 hex>`.")
    output_dir: str = Field("outputs", description="The run directory is `output_dir/name`.")


class ResumeConfig(Section):
    latest: bool = Field(
        False,
        json_schema_extra={"flag": "resume"},
        description="Go on from the newest commit that verifies; spelled `--resume`.",
    )
    step: Annotated[int, Field(ge=-1)] | None = Field(
        None,
        description="Go on from the commit of this step; -1 = the newest. What came after it moves to `branches/`.",
    )
    dir: str | None = Field(
        None,
        description="Fork: a new run that goes on from a commit of the run in this directory, which stays as it is.",
    )
    force: bool = Field(False, description="Go on although model, tokenizer, loss or data order differ.")

    @property
    def wanted(self) -> bool:
        return self.latest or self.step is not None or self.dir is not None


class CheckpointConfig(Section):
    every: NonNegativeInt = Field(20, description="Steps between commits; 0 = only at the end and on a signal.")
    keep_last: PositiveInt = Field(3, description="Newest commits that are kept.")
    keep_every: PositiveInt | None = Field(None, description="Commits of steps divisible by this are kept for good.")
    async_save: bool = Field(True, description="Go on training while a commit is written.")
    grace_s: PositiveFloat = Field(60.0, description="SIGTERM, Ctrl-C: seconds within which the run commits and ends.")
    max_missed: NonNegativeInt = Field(
        0, description="Commits in a row that may fail (a full disk) before the run stops; the old ones stay."
    )


class ModelConfig(Section):
    name: str = Field(description="A Hugging Face model: a local directory or a name on the hub.")
    tokenizer: str | None = Field(None, description="Directory or hub name of the tokenizer; none = `model.name`.")
    start: str | None = Field(
        None,
        description="What environments know as the model that the run starts from, such as an answerer that does not "
        "learn; none = `model.name`. `trireme eval` of a commit sets it to that of the run.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Dtype of inference; auto = bfloat16 on GPUs, float32 on CPUs."
    )
    max_seq_len: PositiveInt | None = Field(
        None, description="Longest sequence (prompt and answer) in tokens; none = the model's own limit."
    )
    attn: Literal["auto", "eager", "sdpa"] = Field("auto", description="Attention of the trainer; auto = sdpa.")

    def dtype_bytes(self, *, on_gpus: bool) -> int:
        """Returns the bytes of a number in the dtype in which trainer and replicas compute."""
        return (2 if on_gpus else 4) if self.dtype == "auto" else DTYPE_BYTES[self.dtype]


class OptimConfig(Section):
    beta1: Share = Field(0.9, description="AdamW: decay of the running mean of gradients.")
    beta2: Share = Field(0.95, description="AdamW: decay of the running mean of squared gradients.")
    eps: PositiveFloat = Field(1e-12, description="AdamW: added to the denominator.")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW: decoupled weight decay.")


class ReferenceConfig(Section):
    base_model: str | None = Field(
        None, description="The reference: a Hugging Face model, a local directory or a name on the hub."
    )
    load_checkpoint_path: str | None = Field(
        None,
        description="Take its weights from here instead: a Hugging Face directory, or a commit of a run, which is then "
        "kept for good.",
    )
    update_every: NonNegativeInt = Field(
        0, description="Steps after which the reference becomes the policy as it is then; 0 = never."
    )


class KlConfig(Section):
    coef: NonNegativeFloat = Field(
        0.0,
        validation_alias=AliasChoices("coef", "kl_penalty_coef"),
        description="Penalty, in the advantages, for moving away from the reference; 0 = none.",
    )
    discount: Share = Field(
        0.0,
        validation_alias=AliasChoices("discount", "kl_discount_factor"),
        description="A token also answers for the penalties that follow it, discounted by this; 0 = only for its own.",
    )
    reference: ReferenceConfig = ReferenceConfig()
    alarm: PositiveFloat = Field(
        0.01, description="Warn, once per stretch, when kl_sample_train_v2 between sampler and trainer exceeds this."
    )
    stop: PositiveFloat | None = Field(
        None, description="Stop the run, after a commit, when it exceeds this; none = never."
    )


class LoraConfig(Section):
    rank: PositiveInt | None = Field(
        None,
        validation_alias=AliasChoices("rank", "lora_rank"),
        description="Train adapters of this rank on frozen weights: 1, 8, 16, 32, 64, 128, 256, 320 or 512, what vLLM "
        "takes; none = train all weights.",
    )
    alpha: PositiveFloat = Field(
        32.0,
        validation_alias=AliasChoices("alpha", "lora_alpha"),
        description="What an adapter adds is scaled by alpha / rank.",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        validation_alias=AliasChoices("dropout", "lora_dropout"),
        description="Share of an adapter's inputs that is dropped while gradients are computed, and only then.",
    )
    targets: list[str] = Field(
        [],
        validation_alias=AliasChoices("targets", "lora_target_modules"),
        description="Names of the linear layers with an adapter (`q_proj`, ...); empty = as the next three say.",
    )
    train_attn: bool = Field(True, description="Adapters for q_proj, k_proj, v_proj, o_proj.")
    train_mlp: bool = Field(True, description="Adapters for gate_proj, up_proj, down_proj.")
    train_unembed: bool = Field(
        False, description="An adapter for lm_head; not for models whose output matrix is that of their embeddings."
    )
    seed: int | None = Field(None, description="Seed of the adapters' first values; none = the run's seed.")

    @property
    def on(self) -> bool:
        """Whether adapters are trained, and not all weights."""
        return self.rank is not None


class CommonTrainer(Section):
    """What every kind of training has."""

    shards: PositiveInt = Field(
        1,
        json_schema_extra={"flag": "trainer-gpus"},
        description="Number of FSDP2 shards, one process each (one GPU each where there are GPUs).",
    )
    replicate: PositiveInt = Field(
        1,
        description="Copies of the model, each spread over `shards` processes (HSDP); there are shards x replicate of "
        "them in all.",
    )
    gpus_per_node: PositiveInt | None = Field(
        None,
        description="So many processes, rank after rank, are always on one node; none = Ray packs all actors on as few "
        "nodes as it can.",
    )
    loss_normalization: LossNormalization = Field(
        "token_mean",
        description="What the gradient of a substep is divided by: its loss tokens, its sequences, or nothing.",
    )
    learning_rate: PositiveFloat | Literal["auto"] = Field(
        "auto", description="Peak learning rate; auto = by hidden size, for Qwen and Llama models."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after the warm-up: constant, or falling to 0 at max_steps."
    )
    warmup_steps: NonNegativeInt = Field(0, description="Steps over which the learning rate rises linearly.")
    max_grad_norm: PositiveFloat = Field(1.0, description="The gradient's norm is clipped to this.")
    optim: OptimConfig = OptimConfig()
    lora: LoraConfig = LoraConfig()
    max_refused_steps: PositiveInt = Field(
        3, description="Stop, after a commit, when the gradients of this many steps in a row were not finite."
    )
    micro_batch_tokens: PositiveInt | None = Field(
        None,
        description="Tokens (with padding) that a shard computes at once; bounds memory only. none = 16384, or by "
        "`micro_batch_size`.",
    )
    micro_batch_size: PositiveInt | None = Field(
        None, description="Sequences that a shard computes at once, however long, instead of `micro_batch_tokens`."
    )
    packing: Literal["auto", "rows", "packed"] = Field(
        "auto",
        description="How a micro-batch is laid out: as rows of about equal length, padded; or packed, one sequence "
        "after the other, none of which sees another. auto = packed on GPUs in 16 bits, else rows.",
    )
    checkpointing: bool | Literal["auto"] = Field(
        "auto",
        description="Keep only the input of each decoder layer, and compute the layer again in the backward pass; "
        "auto = for micro-batches whose activations exceed 4 GiB on a CPU, 24 GiB on a GPU.",
    )
    compile: bool = Field(
        False, description="torch.compile each decoder layer: faster steps, after a minute or so of compiling."
    )
    offload: Literal["none", "cpu"] = Field(
        "none", description="cpu: weights, gradients and AdamW's state of a GPU's shard live in host memory."
    )
    master_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Dtype of the trained weights, their gradients and AdamW's moments. bfloat16 halves their memory, "
        "and loses every update below 1/256 of a weight.",
    )

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the trainer's device mesh by dimension, outermost first; `trainer.mesh` says what each is for."""
        return {"replicate": self.replicate, "shard": self.shards}

    @property
    def processes(self) -> int:
        """Number of trainer processes."""
        return math.prod(self.mesh.values())


class TrainerConfig(CommonTrainer):
    loss_fn: LossFnType | Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = Field(
        None,
        description="Loss, or one of your own as `package.module:function`; none = `importance_sampling` if "
        "max_steps_off_policy is 0, else `ppo`.",
    )
    loss_fn_config: dict[str, float] = Field(
        {},
        description="Parameters of the loss: `clip_low_threshold` and `clip_high_threshold` (ppo 0.8 and 1.2, "
        "cispo 0 and 4, gspo 0.9997 and 1.0004), `beta` (dro, required), `max_ratio` (off), `mask_ratio_low` and "
        "`mask_ratio_high` (off).",
    )
    kl: KlConfig = KlConfig()
    num_substeps: PositiveInt = Field(1, description="Optimiser updates per step; groups are split evenly over them.")
    num_minibatches: PositiveInt = Field(
        1, description="Parts of a substep that are trained on as soon as their groups have finished (streaming)."
    )


class OrchestratorConfig(Section):
    batch_size: PositiveInt = Field(
        validation_alias=AliasChoices("batch_size", "groups_per_batch"),
        description="Problems (groups) per training step.",
    )
    group_size: PositiveInt = Field(
        8,
        validation_alias=AliasChoices("group_size", "rollouts_per_example"),
        description="Rollouts per problem.",
    )
    max_steps_off_policy: NonNegativeInt = Field(
        1, description="No group older than this many steps is trained on; 0 = synchronous, strictly on-policy."
    )
    stale_policy: Literal["requeue", "drop", "wait"] = Field(
        "requeue",
        description="What happens to a group that would get too old: its problem is sampled afresh, it is dropped, "
        "or the batch waits for it (strictly first in, first out).",
    )
    max_requeues: NonNegativeInt = Field(
        2, description="requeue: how often a problem is sampled afresh before the batch waits for it."
    )
    advantage: Literal["mean", "std", "leave_one_out"] = Field(
        "mean", description="Reward minus the group's mean; divided by its deviation; or minus the mean of the others."
    )
    remove_constant_reward_groups: bool = Field(
        False, description="Groups whose rewards are all equal are replaced by others."
    )
    max_filtered_batches: PositiveInt = Field(
        10, description="Stop after this many batches' worth of filtered groups in a row without a usable one."
    )
    overlong_filter: bool = Field(False, description="Answers cut by length do not count in the loss.")
    max_concurrent: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="Most rollouts in flight; auto = at first what the replicas decode at once and a quarter more, "
        "then as their KV caches and preemptions allow.",
    )
    generation_timeout_s: PositiveFloat = Field(
        600.0, description="Limit for one rollout over all its turns, in seconds, from its first on."
    )
    max_prompt_len: PositiveInt | None = Field(None, description="Longer prompts are refused before sampling.")
    retries: NonNegativeInt = Field(2, description="How often a failed rollout is tried again.")
    workers: PositiveInt = Field(
        2, description="Processes in which environments compute what takes long; started when one first does."
    )
    min_viable_group: Share = Field(0.75, description="Share of a group's rollouts that must succeed.")
    max_failure_rate: Share = Field(
        0.25, description="The run stops when more than this share of recent rollouts failed after all retries."
    )


class EnvConfig(Section):
    id: str = Field(
        description="Environment: a built-in name (`sort`), `verifiers:<taskset>` or `package.module:Dataset`."
    )
    args: dict[str, Any] = Field({}, description="Arguments of the dataset.")
    name: str | None = Field(None, description="Name in metrics; none = from the id.")
    weight: PositiveFloat = Field(
        1.0, description="With several environments: this one's share of the problems, relative to the others'."
    )
    group_size: PositiveInt | None = Field(
        None, description="Rollouts per problem of this environment; none = orchestrator.group_size."
    )

    @property
    def label(self) -> str:
        return self.name or self.id.partition(":")[0].rpartition(".")[2]


def _renderer_name(name: str) -> str:
    if expected := unknown_renderer(name):
        raise ValueError(f"expected {expected}")
    return name


class RendererConfig(Section):
    name: Annotated[str, AfterValidator(_renderer_name)] = Field(
        "auto",
        description="How chat messages become tokens: as the tokenizer's `chat_template` says, `role_colon` "
        "(`User: ...`, for base models), `qwen3`, `renderers:FORMAT` (of the package renderers), or "
        "`package.module:Class`; auto = qwen3 where it writes what the template does, else such a format, else the "
        "template, and role_colon without one.",
    )
    strip_thinking_from_history: bool = Field(
        True,
        description="A query takes the thinking before it out of the prompt, so that it begins a new training "
        "sequence; false = thinking stays, and all turns are one sequence.",
    )
    compact_every: PositiveInt | None = Field(
        None, description="Thinking goes out of the prompt after this many turns instead of with each query."
    )
    enable_thinking: bool | None = Field(
        None,
        description="false: prompts ask for an answer without thinking, by an empty block of it; for templates with "
        "this switch, such as Qwen3's. none = as the template does by itself.",
    )


class HeldOutConfig(Section):
    id: str | None = Field(
        None, description="Environment of evaluations; none = the run's own, with several that which has this `name`."
    )
    args: dict[str, Any] = Field({}, description="Arguments of its dataset; of the run's own: laid over `env.args`.")
    name: str | None = Field(None, description="Name in metrics; none = from the id, or that of the run's own.")


def _in_a_row(given: Any) -> Any:
    """The entries of a list of tables, from any form in which it may come: one table alone is a list of one, and the
    layers of a configuration number the entries (`{"0": ..., "1": ...}`)."""
    if isinstance(given, Mapping) and all(str(name).isdigit() for name in given):
        return [given.get(str(n), {}) for n in range(max(map(int, given), default=-1) + 1)]
    return [given] if isinstance(given, Mapping | Section) else given


class EvalConfig(Section):
    every: NonNegativeInt = Field(
        0, description="Steps between evaluations; there is one before the first step and one at the end too. 0 = off."
    )
    env: Annotated[tuple[HeldOutConfig, ...], BeforeValidator(_in_a_row)] = ()
    problems: PositiveInt | None = Field(
        128, description="Held-out problems in an evaluation, the same in each: the first ones; none = all."
    )
    samples: PositiveInt = Field(1, description="Rollouts per problem; several give avg@k and pass@k.")
    max_tokens: PositiveInt | None = Field(
        None, description="Longest answer in an evaluation, in tokens; none = inference.sampling.max_tokens."
    )
    temperature: PositiveFloat | None = Field(
        None, description="Sampling temperature of evaluations; none = inference.sampling.temperature."
    )
    replicas: NonNegativeInt = Field(
        0,
        description="Of inference.replicas, those that evaluate and do nothing else: updates and training do not wait "
        "for an evaluation then; 0 = all replicas do both, and the next update waits.",
    )


class SamplingConfig(Section):
    max_tokens: PositiveInt = Field(description="Longest answer, in tokens.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature; the trainer divides logits by it too.")
    top_p: Share = Field(1.0, description="Nucleus sampling; below 1 the trainer cannot match the distribution.")
    top_k: int = Field(-1, description="Sample from the k likeliest only; -1 = off. The trainer cannot match it.")
    min_p: Share = Field(0.0, description="Cut below this share of the likeliest; the trainer cannot match it.")
    repetition_penalty: PositiveFloat = Field(1.0, description="1 = off. The trainer cannot match it.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        description="Strings that end an answer wherever they come to stand in it, beside what the environment says.",
    )

    def params(self, seed: int, stop: tuple[int | str, ...], room: int) -> SamplingParams:
        """For one request, whose answer has room for `room` tokens. `stop`: all that ends it."""
        own = {"max_tokens": min(self.max_tokens, room), "stop": stop}
        return SamplingParams(**(vars(self) | own), seed=seed)  # model_dump takes ten times as long


class InferenceConfig(Section):
    replicas: PositiveInt = Field(
        1,
        json_schema_extra={"flag": "inference-gpus"},
        description="Number of vLLM replicas (one GPU each where there are GPUs).",
    )
    transport: TransportName = Field("auto", description="How weights travel to the replicas; auto = object_store.")
    on_update: Literal["recompute_kv", "keep_kv", "drain"] = Field(
        "recompute_kv",
        description="What happens to requests in flight when new weights come: their KV cache is computed again under "
        "the new weights; it is kept (shorter pause; the tokens after it come from no policy exactly, and are marked "
        "mixed); or they are finished first, while new ones wait.",
    )
    max_updating: PositiveInt | None = Field(
        None, description="Replicas that take new weights at the same time; none = all, 1 = one after the other."
    )
    sampling: SamplingConfig
    max_model_len: PositiveInt | None = Field(None, description="Context of the engine; none = model.max_seq_len.")
    memory_gb: PositiveFloat = Field(0.25, description="KV cache of a replica on CPUs, in GiB.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="Share of a GPU's memory that a replica may take."
    )
    max_num_seqs: PositiveInt | None = Field(
        None, description="Sequences that a replica decodes at once; none = 256 on GPUs, 64 on CPUs."
    )
    spare: bool = Field(
        False,
        description="A process more on each node with replicas, which has all of vLLM imported, no engine and no GPU, "
        "and becomes the successor of a replica that is lost there.",
    )
    engine_args: dict[str, Any] = Field({}, description="Further arguments of vLLM's AsyncEngineArgs.")

    def sequences(self, *, on_gpus: bool) -> int:
        """Sequences that a replica decodes at once."""
        return self.max_num_seqs or (256 if on_gpus else 64)


class ClusterConfig(Section):
    address: str | None = Field(None, description="Address of a running Ray cluster; none = start one here.")
    device: Literal["auto", "cpu", "gpu"] = Field(
        "auto", description="Where models compute; auto = on GPUs if the cluster has any, else on CPUs."
    )
    max_restarts: NonNegativeInt = Field(
        3,
        description="How often the same part of a run (a replica; the trainer, with the orchestrator) is started again "
        "after its death within restart_window_s; then the run stops with exit code 3. 0 = never: it fails.",
    )
    restart_window_s: PositiveFloat = Field(3600.0, description="Seconds in which max_restarts are counted.")


class CommonTimeouts(Section):
    start_s: PositiveFloat = Field(600.0, description="Deadline for all rooms to start.")
    step_s: PositiveFloat = Field(1800.0, description="Deadline for a batch of rollouts, and for each trainer call.")
    checkpoint_s: PositiveFloat = Field(1800.0, description="Deadline for a commit to be written, or read.")
    heartbeat_s: PositiveFloat = Field(
        60.0, description="A process that answers nothing for so long is taken for dead, and killed."
    )


class TimeoutsConfig(CommonTimeouts):
    update_s: PositiveFloat = Field(
        300.0,
        description="Deadline for a replica to take new weights (drain: with its wait for requests in flight), and for "
        "a step of its engine.",
    )


class TraceConfig(Section):
    max_mb: NonNegativeInt = Field(
        64, description="Megabytes of trace that each process writes (what it did when; `docs/seeing.md`); 0 = none."
    )


class RolloutsConfig(Section):
    every: NonNegativeInt = Field(
        1, description="Steps between records of rollouts, files to read in `rollouts/`; 0 = none."
    )
    sample: NonNegativeInt = Field(
        2, description="Groups picked at random for a record, beside the step's best and its worst."
    )


class WandbConfig(Section):
    project: str | None = Field(None, description="Weights & Biases project; none = off.")
    name: str | None = Field(None, description="Name of the W&B run; none = the run's name.")
    mode: Literal["online", "offline"] = Field("online", description="offline needs no account.")
    entity: str | None = Field(None, description="W&B team or user.")
    tags: list[str] = Field([], description="W&B tags.")


class CommonConfig(Section, ABC):
    """What a run of any kind has: all that the trainer, commits and the run directory read."""

    command: ClassVar[str]
    """The program that takes it."""

    max_steps: NonNegativeInt = Field(100, description="Training steps, counted from the first start of the run.")
    seed: int = Field(0, description="Seed of data order, sampling and initialisation.")
    deterministic: bool = Field(False, description="Repeat a run bit for bit on CPUs; slower.")
    clean: bool = Field(False, description="Empty the run directory before starting.")
    run: RunConfig = RunConfig()
    resume: ResumeConfig = ResumeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    model: ModelConfig
    trainer: CommonTrainer = CommonTrainer()
    cluster: ClusterConfig = ClusterConfig()
    timeouts: CommonTimeouts = CommonTimeouts()
    trace: TraceConfig = TraceConfig()
    wandb: WandbConfig = WandbConfig()

    @property
    @abstractmethod
    def label(self) -> str:
        """What the run is about: the beginning of its default name."""

    @property
    def max_steps_off_policy(self) -> int:
        """How many steps old what is trained on may be."""
        return 0

    @property
    def num_replicas(self) -> int:
        return 0

    @property
    def transport(self) -> str:
        """The key of `trireme.core.transport.TRANSPORTS` by which published weights travel."""
        return "object_store"

    @property
    def kl_reference(self) -> ReferenceConfig | None:
        """The reference policy that the trainer keeps beside the model; none where nothing asks for it."""
        return None

    @property
    def base_is_reference(self) -> bool:
        """Whether the reference policy is the frozen base under the trained adapters, which is no second model."""
        reference = self.kl_reference
        named = reference and (reference.load_checkpoint_path or reference.base_model)
        return self.trainer.lora.on and reference is not None and named in (None, self.model.name)

    @property
    def lora_seed(self) -> int:
        return self.seed if self.trainer.lora.seed is None else self.trainer.lora.seed

    @property
    def max_seq_len(self) -> int | None:
        """Longest sequence as configured; none = the model's limit."""
        return self.model.max_seq_len

    @property
    def tokenizer_name(self) -> str:
        return self.model.tokenizer or self.model.name

    def micro_batch_limit(self, model_limit: int) -> int:
        """The most tokens that a shard computes at once, unless one sequence alone has more. `model_limit`: the longest
        sequence of the model."""
        options = self.trainer
        if options.micro_batch_size:
            return options.micro_batch_size * (self.max_seq_len or model_limit)
        return options.micro_batch_tokens or 16384

    def adam_params(self, learning_rate: float) -> AdamParams:
        """AdamW's parameters with the learning rate of a step."""
        return AdamParams(
            learning_rate=learning_rate, max_grad_norm=self.trainer.max_grad_norm, **self.trainer.optim.model_dump()
        )


class Config(CommonConfig):
    """One run of `rl`."""

    command = "rl"
    max_steps: PositiveInt = Field(100, description="Training steps, counted from the first start of the run.")
    deterministic: bool = Field(
        False, description="Repeat a run bit for bit on CPUs: needs max_steps_off_policy = 0; slower."
    )
    trainer: TrainerConfig = TrainerConfig()
    orchestrator: OrchestratorConfig
    env: Annotated[tuple[EnvConfig, ...], BeforeValidator(_in_a_row), Field(min_length=1)]
    renderer: RendererConfig = RendererConfig()
    eval: EvalConfig = EvalConfig()
    inference: InferenceConfig
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
        return self.trainer.kl.reference if self.trainer.kl.coef else None

    @property
    def max_seq_len(self) -> int | None:
        return min((n for n in (self.model.max_seq_len, self.inference.max_model_len) if n), default=None)

    @property
    def loss_fn(self) -> str:
        return self.trainer.loss_fn or ("ppo" if self.orchestrator.max_steps_off_policy else "importance_sampling")

    @property
    def transport(self) -> str:
        return "object_store" if self.inference.transport == "auto" else self.inference.transport

    @property
    def groups_per_minibatch(self) -> int:
        return self.orchestrator.batch_size // (self.trainer.num_substeps * self.trainer.num_minibatches)

    @property
    def groups_in_flight(self) -> int:
        """The most groups between dispatch and the acknowledgement of the step that trained on them."""
        return (self.max_steps_off_policy + 1) * self.orchestrator.batch_size

    def group_size(self, env: EnvConfig) -> int:
        """Rollouts per problem of one of the run's environments."""
        return env.group_size or self.orchestrator.group_size

    @property
    def patience_s(self) -> float:
        """How long requests and updates wait when no replica is left: until a lost one is found to be dead, has a
        successor, and that one has taken the newest weights."""
        return self.timeouts.heartbeat_s + self.timeouts.start_s + self.timeouts.update_s

    @property
    def largest_group(self) -> int:
        return max(map(self.group_size, self.env))

    @property
    def eval_envs(self) -> tuple[EnvConfig, ...]:
        """The environments of evaluations, whose held-out problems they take: all of the run's own unless `eval.env`
        names some."""
        return tuple(map(self._held_out, self.eval.env)) or self.env

    def _held_out(self, given: HeldOutConfig) -> EnvConfig:
        if given.id is not None:
            return EnvConfig(**given.model_dump())
        own = next((env for env in self.env if env.label == given.name), self.env[0])
        return EnvConfig(id=own.id, args=own.args | given.args, name=given.name or own.name)

    @property
    def eval_sampling(self) -> SamplingConfig:
        """How evaluations sample."""
        own = {"max_tokens": self.eval.max_tokens, "temperature": self.eval.temperature}
        return self.inference.sampling.model_copy(update={k: v for k, v in own.items() if v is not None})

    @property
    def training_replicas(self) -> int:
        """Those that sample what is trained on: the first of all, the others are reserved for evaluations."""
        return self.inference.replicas - self.eval.replicas

    def enough_rollouts(self, replicas: int, *, on_gpus: bool) -> int:
        """A quarter more than so many replicas decode at once waits there, so that none runs dry while answers travel:
        `max_concurrent = auto` at first."""
        decoded = replicas * self.inference.sequences(on_gpus=on_gpus)
        return max(decoded + decoded // 4, self.largest_group)
