"""Finds the weights of the KL reference, and keeps them from being pruned."""

from __future__ import annotations

from pathlib import Path

from trireme.checkpoint.manifest import MANIFEST
from trireme.checkpoint.store import KEEP
from trireme.config import Config
from trireme.config.model_facts import ModelFacts
from trireme.config.resume_compat import IRRELEVANT
from trireme.core.refusals import Refusal
from trireme.core.tokenizer import looks_like_path

INFERENCE = "inference"


def resolve_reference(config: Config, facts: ModelFacts) -> Config:
    """Returns the configuration with local paths of the KL reference made absolute, and the path of a checkpoint
    replaced by the directory of its weights. Raises BadInput unless the reference exists and has the vocabulary of the
    model."""
    reference = config.trainer.kl.reference
    if reference.base_model is None:
        return config
    names = {
        "base_model": reference.base_model,
        "load_checkpoint_path": reference.load_checkpoint_path and str(weights_of(reference.load_checkpoint_path)),
    }
    for key, name in names.items():
        if name is not None:
            _check(f"trainer.kl.reference.{key}", name, config, facts)
    local = {key: str(Path(n).expanduser().absolute()) for key, n in names.items() if n and looks_like_path(n)}
    kl = config.trainer.kl.model_copy(update={"reference": reference.model_copy(update={**names, **local})})
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"kl": kl})})


def weights_of(path: str) -> Path:
    """Returns the directory of the Hugging Face weights in the checkpoint at `path`; `path` itself if no checkpoint is
    there."""
    directory = Path(path).expanduser()
    if (directory / MANIFEST).exists():
        return directory / INFERENCE
    return directory


def keep_reference(config: Config) -> None:
    """Marks the checkpoint that holds the reference's weights, so that the run that wrote the checkpoint does not prune
    it. Does nothing if the weights are in no checkpoint. Raises BadInput if the checkpoint cannot be marked."""
    path = config.trainer.kl.reference.load_checkpoint_path
    if path is None or not (Path(path).parent / MANIFEST).exists():
        return
    try:
        (Path(path).parent / KEEP).touch()
    except OSError as error:
        raise Refusal(
            f"trainer.kl.reference.load_checkpoint_path = {path}: no file can be written to its checkpoint ({error})",
            f"a checkpoint directory that can be written: a file {KEEP} there keeps the run that made the checkpoint "
            "from pruning it",
            f"make {Path(path).parent} writable, or copy {path} elsewhere and set the key to the copy",
        ) from None


def _check(key: str, name: str, config: Config, facts: ModelFacts) -> None:
    model = config.model_copy(update={"model": config.model.model_copy(update={"name": name})})
    try:
        reference = ModelFacts.of(model, required=True)
    except Exception as error:
        error.add_note(f"This is what {key} names.")
        raise
    assert reference is not None, "required"
    if reference.vocab_size != facts.vocab_size:
        raise Refusal(
            f"{key} = {name} with a vocabulary of {reference.vocab_size} tokens",
            f"the {facts.vocab_size} tokens of {facts.name}: policy and reference read the same tokens",
            "choose a reference of the same family",
        )
    computed = [{(key, repr(value)) for key, value in f.described.items()} for f in (reference, facts)]
    other = sorted({key for key, _ in computed[0] ^ computed[1]} - IRRELEVANT)
    if other and (every := config.trainer.kl.reference.update_every):
        raise Refusal(
            f"trainer.kl.reference.update_every = {every} with {key} = {name}, whose config.json differs"
            f" from that of {facts.name} in {', '.join(other)}",
            "a reference of the model's own architecture: it will hold the model's weights",
            f"take {config.model.name}, or leave update_every out",
        )
