"""Puts the server of Tinker's clients in front of a trainer and a sampler that run."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from inference.client import SamplingClient
from service.front import ServedModels
from service.guard import Limits
from service.keys import ServiceKey, ServiceKeys
from service.tinker.catalog import Catalog, recover
from service.tinker.listening import TinkerListener
from service.tinker.serving import TinkerServer
from service.tinker.work import TrainingWorker
from trainer.handle import TrainerHandle
from trireme.config import Config
from trireme.config.model_facts import ModelFacts
from trireme.core.errors import BadInput
from trireme.process import signals

RUNS, BASE = "runs", ".tinker-base-"
MEGABYTE = 10**6
TICK_S = 0.2


def clear(directory: Path) -> None:
    """Finishes or removes what a server that was killed left in `directory`, which is locked. Raises StorageFailed."""
    for base in directory.glob(f"{BASE}*"):
        shutil.rmtree(base, ignore_errors=True)
    recover(directory / RUNS)


def serve_clients(
    config: Config,
    names: Sequence[str],
    facts: ModelFacts,
    trainer: TrainerHandle,
    sampler: SamplingClient,
    keys: list[ServiceKey],
    directory: Path,
    say: Callable[[str], None],
) -> None:
    """Serves until a signal comes. `names`: those by which clients may ask for the model, first the one that they are
    told. What they save is in `directory`. Raises Stopped, TriremeError."""
    max_len, options = config.seq_limit(facts), config.service
    if max_len is None:
        raise BadInput("the longest sequence of the model is not known: set --model.max-seq-len")
    catalog = Catalog(directory / RUNS, names[0], time.time)
    base = Path(tempfile.mkdtemp(prefix=BASE, dir=directory))
    lora = config.trainer.lora.model_copy(update={"seed": config.lora_seed}) if config.trainer.lora.on else None
    worker = TrainingWorker(trainer, catalog, names, base / "state", config.timeouts.checkpoint_s, max_len, lora)
    served = ServedModels(tuple(names), max_len, facts.vocab_size)
    places = options.models if lora else 1
    slots = config.inference.kept_loras - 1 if lora else 0  # one is the base's, with an adapter that changes nothing
    server = TinkerServer(worker, sampler, catalog, served, config.tokenizer_name, places=places, slots=slots)
    limits = Limits(int(options.max_body_mb * MEGABYTE), options.body_s, options.requests_per_minute)
    listener = TinkerListener(server, ServiceKeys(keys), limits, options.host, options.port or 0)
    listener.start()
    try:
        said = False
        while listener.is_alive():
            signals.check()
            if listener.address and not said:
                say(f"TINKER_BASE_URL={listener.address} serves {names[0]}; Ctrl-C ends it")
                said = True
            time.sleep(TICK_S)
        listener.check()
    finally:
        listener.stop()
        shutil.rmtree(base, ignore_errors=True)
