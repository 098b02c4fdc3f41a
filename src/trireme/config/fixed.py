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
from trireme.config.schema import CommonConfig, Config, EnvConfig, LoraConfig

IRRELEVANT = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""Entries of a model's config.json that say nothing about what it computes."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")


def fixed_parts(config: Config, facts: ModelFacts) -> dict[str, Any]:
    """Nested dict of JSON values, the same for every start of a run that may go on from the same commits."""
    kl = config.trainer.kl
    return {
        **common_parts(config, facts),
        "loss": {
            "trainer.loss_fn": config.loss_fn,
            "trainer.loss_fn_config": config.trainer.loss_fn_config,
            "trainer.loss_normalization": config.trainer.loss_normalization,
            "orchestrator.advantage": config.orchestrator.advantage,
            **({"trainer.kl.coef": kl.coef, "trainer.kl.discount": kl.discount} if kl.coef else {}),
            **({"trainer.kl.reference.update_every": refresh} if (refresh := kl.reference.update_every) else {}),
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
