"""What a resume must find unchanged: the model, its tokenizer, its LoRA adapters, the definition of the loss, the order
of the data.

Everything else may change between a commit and its resume: shards, replicas, micro-batches, transport, batch size,
staleness bound, learning rate, limits. `--resume.force` goes on in spite of a difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from trireme.config.lora import lora_targets
from trireme.config.model_facts import ModelFacts, looks_like_path
from trireme.config.schema import CommonConfig, Config, EnvConfig, KlConfig, LoraConfig

IRRELEVANT = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""Entries of a model's config.json that say nothing about what it computes."""

REFERENCE_WEIGHTS = "weights of trainer.kl.reference"

SAMPLES, SAMPLE_BYTES = 64, 2**16
"""What is read of each file of a reference's weights: 4 MiB."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")


def fixed_parts(config: Config, facts: ModelFacts) -> dict[str, Any]:
    """Nested dict of JSON values, the same for every start of a run that may go on from the same commits."""
    return {
        **common_parts(config, facts),
        "loss": {
            "trainer.loss_fn": config.loss_fn,
            "trainer.loss_fn_config": config.trainer.loss_fn_config,
            "trainer.loss_normalization": config.trainer.loss_normalization,
            "orchestrator.advantage": config.orchestrator.advantage,
            **kl_parts(config.trainer.kl, config.base_is_reference),
        },
        "data": {
            "seed": config.seed,
            "env": [data_of(env, alone=len(config.env) == 1) for env in config.env],
            "renderer": config.renderer.model_dump(),
        },
    }


def common_parts(config: CommonConfig, facts: ModelFacts) -> dict[str, Any]:
    """Those of a run of any kind."""
    return {
        "model": {name: value for name, value in facts.described.items() if name not in IRRELEVANT},
        "tokenizer": tokenizer_hashes(config.tokenizer_name),
        **adapter_parts(config.trainer.lora),
    }


def kl_parts(kl: KlConfig, is_base: bool) -> dict[str, Any]:
    """The penalty and what it is for moving away from; nothing without one. `is_base`: from the base of adapters."""
    reference = kl.reference
    found: dict[str, Any] = {}
    if kl.coef:
        found = {"trainer.kl.coef": kl.coef, "trainer.kl.discount": kl.discount}
        name = reference.load_checkpoint_path or reference.base_model
        if name and not is_base:  # which is the model's own, whose weights are compared when adapters are loaded
            found[REFERENCE_WEIGHTS] = weights_fingerprint(name)
    if reference.update_every:
        found["trainer.kl.reference.update_every"] = reference.update_every
    return found


def weights_fingerprint(name: str) -> str:
    """Tells the weights of a model from others without reading all of them, which takes minutes for a large one: of a
    local directory, xxh3-128 (32 hex digits) of the sizes of its safetensors files and of what stands at their begin
    and at evenly spread places, wherever the directory lies; of a model on the hub, its name."""
    if not looks_like_path(name):
        return name
    seen = xxhash.xxh3_128()
    for file in sorted(Path(name).expanduser().glob("*.safetensors")):
        size = file.stat().st_size
        seen.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            for sample in range(SAMPLES):
                stream.seek(sample * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
                seen.update(stream.read(SAMPLE_BYTES))
    return seen.hexdigest()


def adapter_parts(lora: LoraConfig) -> dict[str, Any]:
    """What LoRA adapters are; nothing where all weights are trained. Their base is compared when they are loaded."""
    if not lora.on:
        return {}
    targets = list(lora_targets(lora))
    return {"lora": {"trainer.lora.rank": lora.rank, "trainer.lora.alpha": lora.alpha, "trainer.lora.targets": targets}}


def data_of(env: EnvConfig, alone: bool) -> dict[str, Any]:
    """What the order of the problems follows from; with several environments also their names and weights."""
    own = {"id": env.id, "args": env.args}
    return own if alone else own | {"name": env.label, "weight": env.weight}


def tokenizer_hashes(name: str) -> dict[str, str]:
    """xxh3-128 of each file that defines the tokenizer: a local directory, or a model on the hub."""
    found = {file: _find(name, file) for file in TOKENIZER_FILES}
    return {file: xxhash.xxh3_128_hexdigest(path.read_bytes()) for file, path in found.items() if path}


def _find(name: str, file: str) -> Path | None:
    if looks_like_path(name):
        path = Path(name).expanduser() / file
        return path if path.is_file() else None
    import huggingface_hub as hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hub.hf_hub_download(name, file))
    except (EntryNotFoundError, LocalEntryNotFoundError):
        return None
