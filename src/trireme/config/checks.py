"""Checks of several keys against each other, and of keys against the model, before any actor starts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from trireme.config.model_facts import ModelFacts
from trireme.config.schema import CommonConfig, Config
from trireme.config.sft import SftConfig
from trireme.config.trainer_checks import trainer_refusals
from trireme.core.extras import require
from trireme.core.own_packages import hidden_modules
from trireme.core.refusals import Refusal, refuse
from trireme.core.tokenizer import without_tokenizer
from trireme.core.weights import AFTER_CANARY, SHORTEST_CANARY
from trireme.renderers import unknown_renderer

FAST_TOKENS_PER_S = 10_000
"""Tokens that a fast replica decodes in a second."""
LONG_STEP_DAYS = 0.5
"""Days of a step from which on a configuration is probably a mistake."""
MOST_PROCESSES = 10_000
"""The most processes of the trainer, and the most of all replicas."""
MOST_ROLLOUTS = 1_000_000
"""The most rollouts of a step. Each rollout has an object in the orchestrator's memory, and the problems are built
before the rooms start."""
EXACT_SAMPLERS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def check(config: CommonConfig, facts: ModelFacts | None) -> list[str]:
    """Returns the warnings of a configuration that can work. Raises BadInput, with all reasons, for one that cannot.

    `facts` None (a dry run without a hub) leaves out checks that depend on the model's sizes.
    """
    specific: list[Refusal] = []
    warnings: list[str] = []
    if isinstance(config, SftConfig):
        specific = [*_held_out_data(config), *_rendering(config)]
    elif isinstance(config, Config):
        specific = [*_batch(config), *_groups(config), *_names(config), *_eval_envs(config), *_rendering(config)]
        specific += [*_lengths(config, facts), *_concurrency(config), *_timeouts(config)]
        specific += [*_ranks(config, facts), *_service(config), *_fewest_replicas(config), *_colocated(config)]
        specific += [*_encoding(config)]
        warnings = [*_distribution_warnings(config), *_staleness_warnings(config), *_timeout_warnings(config)]
        warnings += [*_size_warnings(config)]
        warnings += hidden_modules([place for env in (*config.env, *config.eval_envs) for place in env.path])
    if config.model.tokenizer:
        key = "model.tokenizer"
    else:
        key = "model.name"
    common = [*_within_model(config, facts), *trainer_refusals(config, facts)]
    common += [*without_tokenizer(key, config.tokenizer_name), *_counts(config)]
    refuse([*specific, *common, *_deterministic(config), *_resume(config)])
    return warnings


def _counts(config: CommonConfig) -> Iterator[Refusal]:
    """Yields a refusal for each number of processes or rollouts that is too large for any cluster. The check runs
    before planning, because the plan has an entry for each process, and each problem of a batch is built at the
    start."""
    processes = f"{MOST_PROCESSES:,} processes"
    rollouts = f"{MOST_ROLLOUTS:,} rollouts of a step"
    limits = [("trainer.shards * trainer.replicate", config.trainer.mesh.processes, MOST_PROCESSES, processes)]
    if isinstance(config, Config):
        ranks = config.inference.replicas * config.inference.tensor_parallel
        step = config.orchestrator.batch_size * config.largest_group
        limits += [
            ("inference.replicas * inference.tensor_parallel", ranks, MOST_PROCESSES, processes),
            ("orchestrator.batch_size * orchestrator.group_size", step, MOST_ROLLOUTS, rollouts),
        ]
    for name, number, limit, label in limits:
        if number > limit:
            flag = name.split()[0].replace("_", "-")
            yield Refusal(f"{name} = {number:,}", f"at most {label}", f"lower --{flag}")


def check_trackers(config: CommonConfig) -> None:
    """Raises BadInput for a tracker that could record nothing of the run, because its package, its account or the
    address of its server is missing. Raises it also for an MLflow address that contains a password."""
    refuse([*_trackers(config)])


def _trackers(config: CommonConfig) -> Iterator[Refusal]:
    if config.tensorboard:
        require("tensorboard", extra="tensorboard", what_for="--tensorboard")
    if config.trackio.project:
        require("trackio", extra="trackio", what_for="--trackio.project")
    if config.wandb.project and config.wandb.mode == "online" and not _has_wandb_key():
        yield Refusal(
            "wandb.mode = online without an API key of Weights & Biases",
            "the variable WANDB_API_KEY, or the key that `wandb login` writes",
            "uv run --no-sync wandb login, or --wandb.mode offline, which needs no account",
        )
    if config.mlflow.experiment:
        require("mlflow", extra="mlflow", what_for="--mlflow.experiment")
        uri = config.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            yield Refusal(
                f"mlflow.experiment = {config.mlflow.experiment} without a server",
                "the address of an MLflow server",
                "set --mlflow.tracking-uri http://HOST:5000, or the variable MLFLOW_TRACKING_URI",
            )
    if "@" in (config.mlflow.tracking_uri or ""):
        yield Refusal(
            "mlflow.tracking_uri with a name and a password, which the run would record",
            "an address without them",
            "set the variables MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        )


def _has_wandb_key() -> bool:
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    # Not `wandb.login`: it asks the server for the user's name even with verify=False, and without a network it waits
    # for minutes.
    host = wandb_setup.singleton().settings.base_url
    return wbauth.authenticate_session(host=host, source="trireme", prompt=False, update_session=False) is not None


def _batch(config: Config) -> Iterator[Refusal]:
    size = config.orchestrator.batch_size
    substeps = config.trainer.num_substeps
    minibatches = config.trainer.num_minibatches
    parts = substeps * (1 if minibatches == "auto" else minibatches)
    if size % parts == 0:
        return
    sizes = [n for n in (size // parts * parts, (size // parts + 1) * parts) if n]
    if minibatches == "auto":
        product = "num_substeps"
    else:
        product = "num_substeps * num_minibatches"
    yield Refusal(
        f"orchestrator.batch_size = {size} with trainer.num_substeps = {substeps} and "
        f"trainer.num_minibatches = {minibatches}",
        f"a batch_size divisible by {product} = {parts}",
        f"set --orchestrator.batch-size to {' or '.join(map(str, sizes))}, or change the number of parts",
    )


def _service(config: Config) -> Iterator[Refusal]:
    """Refuses a service in a run with `deterministic` or with updates that drain. The chats of a service arrive at any
    time: answers then depend on timing, and an update would have to wait for them."""
    port = f"service.port = {config.service.port} with"
    if config.service.port is None:
        return
    if config.deterministic:
        yield Refusal(
            f"{port} deterministic = true",
            "no service: which requests share a step of an engine decides the last bits of their answers",
            "leave --service.port out, or serve a checkpoint with the command `inference`",
        )
    if config.inference.on_update == "drain":
        yield Refusal(
            f"{port} inference.on_update = drain",
            "recompute_kv or keep_kv: an update that drains would wait for the chats in flight, however long they are",
            "--inference.on-update recompute_kv, or leave --service.port out",
        )


def _colocated(config: Config) -> Iterator[Refusal]:
    """Refuses `placement = colocated` together with updates that keep KV caches."""
    if config.colocated and config.inference.on_update == "keep_kv":
        yield Refusal(
            "placement = colocated with inference.on_update = keep_kv",
            "recompute_kv (auto takes it) or drain: replicas that sleep give the memory of their caches to the trainer",
            "leave --inference.on-update out",
        )


def _ranks(config: Config, facts: ModelFacts | None) -> Iterator[Refusal]:
    """Refuses a number of ranks (inference.tensor_parallel) over which vLLM cannot divide the attention heads."""
    ranks = config.inference.tensor_parallel
    if facts and facts.num_heads and ranks not in (fit := facts.rank_counts):
        yield Refusal(
            f"inference.tensor_parallel = {ranks} for {facts.name}, which has {facts.num_heads} attention heads, and "
            f"{facts.num_kv_heads} of keys and values",
            f"a number of ranks that divides them: {', '.join(map(str, fit))}",
            f"set --inference.tensor-parallel to {max(n for n in fit if n < ranks)}",
        )


def _encoding(config: Config) -> Iterator[Refusal]:
    """Refuses `inference.encoding = delta` with the transport ipc."""
    if config.inference.encoding == "delta" and config.transport == "ipc":
        yield Refusal(
            "inference.encoding = delta with inference.transport = ipc",
            "object_store or broadcast: memory is copied faster than changes are found",
            "leave one of them out",
        )


def _groups(config: Config) -> Iterator[Refusal]:
    for env in config.env:
        if config.group_size(env) == 1:
            yield Refusal(
                f"orchestrator.group_size = 1 with orchestrator.advantage = {config.orchestrator.advantage}"
                if env.group_size is None
                else f"group_size = 1 of environment {env.label}",
                "at least 2 rollouts per problem: advantages compare those of a group, one alone has advantage 0",
                f"set {'--orchestrator.group-size' if env.group_size is None else 'it'} to 2 or more (8 is usual)",
            )
            return


def _names(config: Config) -> Iterator[Refusal]:
    """Refuses environments with equal names: names distinguish environments in metrics and in ids of problems."""
    env_labels = [env.label for env in config.env]
    held_out = [env.label for env in config.eval_envs]
    for section, labels in (("env", env_labels), ("eval.env", held_out if config.eval.env else [])):
        twice = [label for label, n in Counter(labels).items() if n > 1]
        if twice:
            yield Refusal(
                f"{section} has {labels.count(twice[0])} environments of the name {twice[0]!r}",
                "a different name for each environment: metrics are kept by name",
                f"give one of them another: `{section}.{labels.index(twice[0])}.name = ...`",
            )
        if "all" in labels:
            yield Refusal(
                f"{section} has an environment of the name 'all'",
                "another name: env/all/* are the metrics of all environments together",
                f"set `{section}.{labels.index('all')}.name`",
            )


def _eval_envs(config: Config) -> Iterator[Refusal]:
    """Refuses an entry of `eval.env` if the run has several environments, and the entry has neither an id nor the name
    of one of them."""
    labels = [env.label for env in config.env]
    for n, held_out in enumerate(config.eval.env):
        if held_out.id is None and len(labels) > 1 and held_out.name not in labels:
            yield Refusal(
                f"eval.env.{n} without `id`, with the name {held_out.name!r}",
                f"the name of one of the run's environments ({', '.join(labels)}), or an id of its own",
                f"set `eval.env.{n}.name` to one of them, or `eval.env.{n}.id`",
            )


def _fewest_replicas(config: Config) -> Iterator[Refusal]:
    if config.cluster.min_replicas > config.inference.replicas:
        yield Refusal(
            f"cluster.min_replicas = {config.cluster.min_replicas} with "
            f"inference.replicas = {config.inference.replicas}",
            "at most as many as inference.replicas",
            f"set --cluster.min-replicas to {config.inference.replicas} or less, or ask for more replicas",
        )


def _rendering(config: Config | SftConfig) -> Iterator[Refusal]:
    name = config.renderer.name
    expected = unknown_renderer(name)
    if expected:
        yield Refusal(f"renderer.name = {name}", expected, "correct it")


def _lengths(config: Config, facts: ModelFacts | None) -> Iterator[Refusal]:
    limit = config.seq_limit(facts)
    answers = {
        "inference.sampling.max_tokens": config.inference.sampling.max_tokens,
        "eval.max_tokens": config.eval.max_tokens or 0,
    }
    shortest = SHORTEST_CANARY + AFTER_CANARY
    if limit and limit < shortest:
        yield Refusal(
            f"sequences of at most {limit} tokens",
            f"at least {shortest}, which a replica computes to prove new weights",
            f"set --model.max-seq-len {shortest} or more",
        )
    for key, answer in answers.items():
        if limit and answer >= limit:
            yield Refusal(
                f"{key} = {answer} with sequences of at most {limit} tokens",
                "an answer shorter than the sequence, which holds the prompt too",
                f"lower --{key.replace('_', '-')}, or raise --model.max-seq-len",
            )


def _within_model(config: CommonConfig, facts: ModelFacts | None) -> Iterator[Refusal]:
    length = config.model.max_seq_len
    if facts and length and length > facts.max_position_embeddings:
        yield Refusal(
            f"model.max_seq_len = {length}",
            f"at most {facts.max_position_embeddings}, the max_position_embeddings of {facts.name}",
            f"set it to {facts.max_position_embeddings} or less, or take a model with a longer context",
        )


def _deterministic(config: CommonConfig) -> Iterator[Refusal]:
    if config.deterministic and config.max_steps_off_policy:
        yield Refusal(
            f"deterministic = true with orchestrator.max_steps_off_policy = {config.max_steps_off_policy}",
            "max_steps_off_policy = 0: how far a rollout has come when weights arrive is a matter of timing",
            "add --orchestrator.max-steps-off-policy 0, or leave --deterministic out",
        )
    if config.deterministic and config.cluster.device == "gpu":
        yield Refusal(
            "deterministic = true with cluster.device = gpu",
            "CPUs: the kernels of GPUs do not repeat bit for bit",
            "add --cluster.device cpu, or leave --deterministic out",
        )


def _resume(config: CommonConfig) -> Iterator[Refusal]:
    if config.clean and config.resume.requested:
        yield Refusal(
            "--clean together with --resume",
            "one of them: --clean empties the run directory, --resume continues from what it holds",
            "leave one out; with --resume nothing is overwritten, what is superseded moves to branches/",
        )
    if config.resume.latest == "auto" and config.run.name is None:
        yield Refusal(
            "--resume auto without --run.name",
            "the name of the run, by which the same command finds it again",
            "add --run.name NAME, or take --resume, which takes the newest run of this environment and model",
        )
    if config.run.url and config.run.name is None and config.resume.requested and config.resume.dir is None:
        yield Refusal(
            f"--resume without --run.name, and run.output_dir = {config.run.output_dir}",
            "the name of the run in object storage: which one was started last is not known there",
            "add --run.name NAME",
        )
    if config.resume.latest == "auto" and config.resume.step is not None and config.resume.dir is None:
        yield Refusal(
            f"--resume auto with --resume.step {config.resume.step}",
            "one of them: each repetition of the command would go back to that step, and never come further",
            "leave --resume.step out, or name the run to fork from with --resume.dir too",
        )
    if config.resume.force and not config.resume.requested:
        yield Refusal(
            "--resume.force alone", "something to resume", "add --resume, --resume.step N or --resume.dir PATH"
        )


def _concurrency(config: Config) -> Iterator[Refusal]:
    options = config.orchestrator
    limit = options.max_concurrent
    group = config.largest_group
    batch = options.batch_size * config.largest_group
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
    rollout_s = config.orchestrator.generation_timeout_s
    batch_s = config.timeouts.batch_s
    if batch_s is not None and rollout_s >= batch_s:
        yield Refusal(
            f"orchestrator.generation_timeout_s = {rollout_s:g} with timeouts.batch_s = {batch_s:g}",
            "a limit for one rollout below the deadline for a whole batch: else the run stops for a batch whose "
            "rollouts are all within their limit",
            "lower --orchestrator.generation-timeout-s, or raise --timeouts.batch-s or leave it out",
        )


def _staleness_warnings(config: Config) -> Iterator[str]:
    """Warns that stale_policy = drop discards groups with long answers more often than others. With
    max_steps_off_policy = 0 no group gets too old, so there is no warning."""
    bound = config.orchestrator.max_steps_off_policy
    longer = f"a problem with an answer that takes longer than {bound} of the trainer's steps"
    if bound and config.orchestrator.stale_policy == "drop":
        yield (
            f"orchestrator.stale_policy = drop with max_steps_off_policy = {bound}: {longer} is given up for good. So "
            "long answers are trained on less often than they are sampled, and those that always take longer never "
            "(off_policy/dropped counts them); wait, the default, trains on every problem"
        )


def _size_warnings(config: Config) -> Iterator[str]:
    """Warns if a step may take days even if every replica is fast."""
    size = config.orchestrator.batch_size
    group = config.largest_group
    longest = config.inference.sampling.max_tokens
    tokens = size * group * longest
    days = tokens / (config.inference.replicas * FAST_TOKENS_PER_S) / 86400
    if days > LONG_STEP_DAYS:
        yield (
            f"orchestrator.batch_size = {size:,}: a step samples up to {tokens:,} tokens ({size:,} groups of {group} "
            f"rollouts of {longest:,} tokens), which takes {days:,.1f} days where each replica decodes "
            f"{FAST_TOKENS_PER_S:,} tokens a second"
        )


def _timeout_warnings(config: Config) -> Iterator[str]:
    timeouts = config.timeouts
    rollout_s = config.orchestrator.generation_timeout_s
    answer_s = min(rollout_s, config.inference.answer_s)
    if timeouts.batch_s is not None and 2 * rollout_s > timeouts.batch_s:
        yield (
            f"orchestrator.generation_timeout_s = {rollout_s:g}: a rollout that hangs fails after that time; if a "
            f"batch waits for it, timeouts.batch_s = {timeouts.batch_s:g} may end the run before a group in its place "
            "has been sampled"
        )
    if config.inference.on_update == "drain" and timeouts.update_s < answer_s:
        yield (
            f"inference.on_update = drain with timeouts.update_s = {timeouts.update_s:g}: an update waits until the "
            f"answers in flight are finished, which may take up to {answer_s:g} s (the smaller of inference.answer_s "
            "and orchestrator.generation_timeout_s); beyond its deadline the run stops. Raise --timeouts.update-s, or "
            "take recompute_kv or keep_kv, which interrupt answers"
        )


def _distribution_warnings(config: Config) -> Iterator[str]:
    """Warns of options with which trainer and sampler compute different probabilities although their weights are the
    same."""
    lora = config.trainer.lora
    for name, off in EXACT_SAMPLERS.items():
        value = getattr(config.inference.sampling, name)
        if value != off:
            yield (
                f"inference.sampling.{name} = {value:g}: the trainer cannot match this distribution, so its "
                f"log-probabilities and the sampler's differ even at age 0 ({off:g} switches it off)"
            )
    if lora.on and lora.dropout:
        yield (
            f"trainer.lora.dropout = {lora.dropout:g}: gradients are those of an adapter with some of its inputs "
            "dropped, tokens are sampled with all of them, so ratios scatter around 1 even at age 0 (0 switches it off)"
        )


def _held_out_data(config: SftConfig) -> Iterator[Refusal]:
    data = config.data
    every = config.eval.every
    if data.test is not None and data.test_examples:
        yield Refusal(
            f"data.test = {data.test} with data.test_examples = {data.test_examples}",
            "one of them: a file of its own, or a part of the training data",
            "leave one out",
        )
    held_out = data.test is not None or data.test_examples > 0
    if every and not held_out:
        yield Refusal(
            f"eval.every = {every} without held-out data",
            "examples that are not trained on",
            "add --data.test FILE or --data.test-examples N, or leave --eval.every out",
        )
    if held_out and not every:
        yield Refusal(
            "held-out data (data.test or data.test_examples) with eval.every = 0",
            "how often it is evaluated",
            "add --eval.every N, or leave the held-out data out",
        )
