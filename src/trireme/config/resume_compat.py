"""The parts of a run's configuration that must be unchanged at a resume: the model, its tokenizer, its LoRA adapters,
the definition of the loss, the order of the data.

Everything else may change between a checkpoint and its resume: shards, replicas, micro-batches, transport, batch size,
max_steps_off_policy, learning rate, limits. `--resume.force` resumes in spite of a difference.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from trireme.config.model_facts import ModelFacts
from trireme.config.schema import CommonConfig, Config
from trireme.core.finite_json import JsonObject
from trireme.core.model_files import file_digests, model_file
from trireme.core.redaction import redact_values
from trireme.core.tokenizer import looks_like_path

IRRELEVANT = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""Entries of a model's config.json that do not change its results."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")


def fixed_parts(config: Config, facts: ModelFacts) -> JsonObject:
    """Returns the values that must not change when a run of `rl` is resumed, such as the model, the loss and the order
    of the data, as a nested dict of JSON values. A resume is refused if they differ from the values in the checkpoint,
    unless `--resume.force` is given."""
    alone = len(config.env) == 1  # else names and weights are in the order of the problems too
    envs = [
        {"id": env.id, "args": redact_values(env.args)} | ({} if alone else {"name": env.label, "weight": env.weight})
        for env in config.env
    ]
    kl, reference = config.trainer.kl, config.trainer.kl.reference
    penalty: JsonObject = {}
    if kl.coef:
        penalty = {"trainer.kl.coef": kl.coef, "trainer.kl.discount": kl.discount}
        name = reference.load_checkpoint_path or reference.base_model
        if name and not config.base_is_reference:  # whose weights are compared when adapters are loaded
            penalty["weights of trainer.kl.reference"] = reference_weights(name)
    if reference.update_every:
        penalty["trainer.kl.reference.update_every"] = reference.update_every
    return {
        **common_parts(config, facts),
        "loss": {
            "trainer.loss_fn": config.loss_fn,
            "trainer.loss_fn_config": config.trainer.loss_fn_config,
            "trainer.loss_normalization": config.normalization.kind,
            "orchestrator.advantage": config.orchestrator.advantage,
            **penalty,
        },
        "data": {"seed": config.seed, "env": envs, "renderer": config.renderer.model_dump()},
    }


def common_parts(config: CommonConfig, facts: ModelFacts) -> JsonObject:
    """Returns the values that must not change when a run of any kind is resumed: the model, the tokenizer and, if
    adapters are trained, the LoRA options. The weights of the adapters' base are not included: they are compared when
    adapters are loaded."""
    files = {file: model_file(config.tokenizer_name, file) for file in TOKENIZER_FILES}
    parts: JsonObject = {
        "model": {name: value for name, value in facts.described.items() if name not in IRRELEVANT},
        "tokenizer": {file: xxhash.xxh3_128_hexdigest(path.read_bytes()) for file, path in files.items() if path},
    }
    lora = config.trainer.lora
    if lora.on:
        numbers = {"trainer.lora.rank": lora.rank, "trainer.lora.alpha": lora.alpha}
        parts["lora"] = {**numbers, "trainer.lora.targets": list(lora.target_modules)}
    return parts


def reference_weights(name: str) -> str | dict[str, str]:
    """Returns a value that identifies a model's weights. For a model on the hub, this is its name. For a local
    directory, it is {file: digest} of the safetensors files, independent of the directory's path. The digest of a large
    file covers only some pieces of it, because reading all weights of a large model takes minutes."""
    if not looks_like_path(name):
        return name
    digests = file_digests(Path(name).expanduser())
    return {file: digest for file, digest in digests.items() if file.endswith(".safetensors")}
