"""Serves Tinker's clients with a trainer and a sampler that are running."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from service.guard import Limits
from service.keys import ServiceKey, ServiceKeys
from service.requests import ServedModels
from service.store import Store
from service.tinker.catalog import Catalog, recover
from service.tinker.checkpoints import OwnCheckpoints
from service.tinker.listening import TinkerListener
from service.tinker.rows import FORMAT
from service.tinker.served_model import ServedTinkerModel
from service.tinker.serving import TinkerServer
from service.tinker.verbs import SamplerVerbs
from service.tinker.work import TrainingWorker
from trireme.config import Config
from trireme.config.model_facts import ModelFacts
from trireme.core.errors import BadInput, RoomFailed
from trireme.process import signals
from trireme.run.rooms import Trainer
from trireme.supervision.restarts import Restarts

RUNS = "runs"
STORE = "store"
COMMITS = "commits"
BASE = ".tinker-base-"
TICK_S = 0.2


def clear(directory: Path) -> None:
    """Completes or deletes the files that a killed server left in `directory`. The caller holds the lock of
    `directory`. Raises StorageFailed."""
    for base in directory.glob(f"{BASE}*"):
        shutil.rmtree(base, ignore_errors=True)
    recover(directory / RUNS)


def serve_clients(
    config: Config,
    names: Sequence[str],
    facts: ModelFacts,
    rooms: Callable[[], AbstractContextManager[tuple[Trainer, SamplerVerbs]]],
    keys: list[ServiceKey],
    directory: Path,
    say: Callable[[str], None],
) -> None:
    """Serves Tinker's clients until a signal comes. `names`: the names by which clients may request the model;
    `service.tinker.names` are added, and clients see the first name. `rooms()` returns a context manager that starts a
    trainer and replicas, and stops them at the end of its `with` block. If one of them is lost, all are started again
    and repeat the work since their last checkpoint. `directory` holds the clients' state. Raises Stopped,
    TriremeError."""
    max_len = config.seq_limit(facts)
    options = config.service
    names = (*names, *options.tinker.names)
    if max_len is None:
        raise BadInput("the longest sequence of the model is not known: set --model.max-seq-len")
    catalog = Catalog(directory / RUNS, names[0], time.time)
    served = ServedModels(names, max_len, facts.vocab_size)
    if config.trainer.lora.on:
        lora = config.trainer.lora.model_copy(update={"seed": config.lora_seed})
    else:
        lora = None
    places = options.models if lora else 1
    slots = config.inference.kept_loras - 1 if lora else 0  # one is the base's, with an adapter that changes nothing
    store = Store(directory / STORE, FORMAT)
    checkpoints = OwnCheckpoints(directory / COMMITS)
    offer = ServedTinkerModel(served, config.tokenizer_name, options.tinker, lora, places, slots)
    server = TinkerServer(offer, catalog, store, checkpoints)
    message = server.begin()
    if message:
        say(message)
    listener = TinkerListener(server, ServiceKeys(keys), Limits.of(options), options.host, options.port or 0)
    listener.start()
    restarts = Restarts(config.cluster.max_restarts, config.cluster.restart_window_s)
    try:
        _await_address(listener)
        message = f"TINKER_BASE_URL={listener.address} serves {names[0]}; Ctrl-C ends it"
        while True:
            base = Path(tempfile.mkdtemp(prefix=BASE, dir=directory))
            try:
                with rooms() as (trainer, sampler):
                    worker = TrainingWorker(
                        trainer, catalog, names, base / "state", config.timeouts.checkpoint_s, max_len, lora
                    )
                    _work(listener, worker, sampler, partial(say, message))
            except RoomFailed as error:
                restarts.take("the rooms", error, died=False, step=server.trained, now=time.monotonic())
                message = "the rooms serve again"
                say(f"! {error}\nThe rooms are started again, and do again what was done since their last checkpoint.")
            finally:
                shutil.rmtree(base, ignore_errors=True)
    finally:
        listener.stop()
        store.close()


def _await_address(listener: TinkerListener) -> None:
    while listener.address is None and listener.is_alive():
        signals.check()
        time.sleep(TICK_S)
    listener.check()


def _work(listener: TinkerListener, worker: TrainingWorker, sampler: SamplerVerbs, begun: Callable[[], None]) -> None:
    """Makes the server behind `listener` work with the rooms of `worker` and `sampler` until a signal or an error ends
    the work. Calls `begun` when the server is ready. Raises Stopped, or the error."""
    working = listener.work(worker, sampler)
    announced = False
    try:
        while True:
            signals.check()
            listener.check()
            if working.done():
                working.result()
            if listener.serves and not announced:
                begun()
                announced = True
            time.sleep(TICK_S)
    finally:
        working.cancel()  # before the rooms end, else what they work on would be told to have failed
