"""Adapters that clients request, within the limits of this server's trainer and replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from service.requests import RequestRefused
from service.tinker.bodies import LoraBody
from trireme.config.trainer import ATTENTION, MLP, UNEMBED, LoraConfig
from trireme.core.weights import AdapterSpec

STATES = "tinker://<model>/weights/<name>"


def spec_of(wish: LoraBody | None, lora: LoraConfig) -> AdapterSpec:
    """Returns the adapter that a client requests in `wish`: its rank, and the layers of `lora` that the client wants to
    train. `lora`: the server's settings, whose seed is used if the client gives none. Raises RequestRefused if the
    server cannot train such an adapter."""
    assert lora.rank is not None
    assert lora.seed is not None
    if wish is None:
        raise RequestRefused(f"create_model without a lora_config; expected one with a rank of 1 to {lora.rank}")
    if not 1 <= wish.rank <= lora.rank:
        raise RequestRefused(
            f"lora_config.rank = {wish.rank}; expected 1 to {lora.rank}, or a server with a larger trainer.lora.rank"
        )
    parts = ((wish.train_attn, ATTENTION), (wish.train_mlp, MLP), (wish.train_unembed, UNEMBED))
    unwanted = {name for trained, names in parts if not trained for name in names}
    targets = tuple(name for name in lora.target_modules if name not in unwanted)
    if not targets:
        raise RequestRefused(
            f"lora_config without {', '.join(sorted(unwanted))}; expected some of "
            f"{', '.join(lora.target_modules)}: only these layers can have an adapter here"
        )
    return AdapterSpec(wish.rank, lora.alpha, targets, lora.seed if wish.seed is None else wish.seed)


def record_of(spec: AdapterSpec, lora: LoraConfig) -> dict[str, object]:
    """Returns the record of an adapter, which is saved with its training run (`SavedRun.lora`). The record has the
    adapter's own rank, alpha, layers and seed, and also the rank and layers in the server's settings `lora`. The
    server's rank and layers matter because the adapter's saved states are padded to them."""
    return {**asdict(spec), "of_rank": lora.rank, "of_targets": list(lora.target_modules)}


def exported_spec(path: str, record: Mapping[str, Any] | None) -> AdapterSpec:
    """Returns the adapter in `record`, for weights that were saved at `path` for samplers or for download. The saved
    files have only this adapter's rank and layers, so any server that trains at least this rank and these layers can
    load them. Raises RequestRefused for weights of a whole model (`record` None)."""
    if record is None:
        raise RequestRefused(f"{path} has the weights of a whole model; expected a state ({STATES}) to train from")
    return _spec_in(record)


def recorded_spec(path: str, record: Mapping[str, Any] | None, lora: LoraConfig | None) -> AdapterSpec | None:
    """Returns the adapter in `record`, for the state saved at `path`; None for the state of a whole model (`record`
    None). `lora`: the server's settings for adapters (None: the server trains whole models). Raises RequestRefused if a
    server with these settings cannot load the state."""
    if record is None and lora is None:
        return None
    if record is None:
        raise RequestRefused(f"{path} is a state of the whole model; load it with a server without trainer.lora")
    rank = record["of_rank"]
    targets = tuple(record["of_targets"])
    if lora is None or (rank, targets) != (lora.rank, lora.target_modules):
        raise RequestRefused(
            f"{path} is the state of an adapter of a server with trainer.lora.rank = {rank} and adapters for "
            f"{', '.join(targets)}; load it with such a one"
        )
    return _spec_in(record)


def _spec_in(record: Mapping[str, Any]) -> AdapterSpec:
    return AdapterSpec(record["rank"], record["alpha"], tuple(record["targets"]), record["seed"])
