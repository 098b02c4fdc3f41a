"""What a resume must find unchanged: the model, its tokenizer, the definition of the loss, the order of the data.

Everything else may change between a commit and its resume: shards, replicas, micro-batches, transport, batch size,
staleness bound, learning rate, limits. `--resume.force` goes on in spite of a difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from trireme.config.model_facts import ModelFacts, looks_like_path
from trireme.config.schema import Config

IRRELEVANT = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""Entries of a model's config.json that say nothing about what it computes."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")


def fixed_parts(config: Config, facts: ModelFacts) -> dict[str, Any]:
    """Nested dict of JSON values, the same for every start of a run that may go on from the same commits."""
    kl = config.trainer.kl
    return {
        "model": {name: value for name, value in facts.described.items() if name not in IRRELEVANT},
        "tokenizer": tokenizer_hashes(config.tokenizer_name),
        "loss": {
            "trainer.loss_fn": config.loss_fn,
            "trainer.loss_fn_config": config.trainer.loss_fn_config,
            "trainer.loss_normalization": config.trainer.loss_normalization,
            "orchestrator.advantage": config.orchestrator.advantage,
            **({"trainer.kl.coef": kl.coef, "trainer.kl.discount": kl.discount} if kl.coef else {}),
        },
        "data": {"seed": config.seed, "env.id": config.env.id, "env.args": config.env.args},
    }


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
