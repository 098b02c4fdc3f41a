"""A Tinker server on rooms that are small enough for a test: a model that knows how often each token comes, trained for
real, and a sampler of it. The server, its port and the client are the real ones."""

import asyncio
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from waiting import wait_for

from service.guard import Limits
from service.keys import ServiceKey, ServiceKeys
from service.requests import ServedModels
from service.store import Store
from service.tinker.catalog import Catalog
from service.tinker.checkpoints import OwnCheckpoints
from service.tinker.listening import TinkerListener
from service.tinker.rows import FORMAT
from service.tinker.served_model import ServedTinkerModel
from service.tinker.serving import TinkerServer
from service.tinker.work import TrainingWorker
from trireme.checkpoint.files import FileRecord, write_bytes
from trireme.cli.serve import UNREAD
from trireme.config.load import load
from trireme.config.model_facts import ModelFacts
from trireme.config.service import TinkerConfig
from trireme.config.trainer import LoraConfig
from trireme.core.errors import NonFiniteGradient, RoomFailed
from trireme.core.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TokenBatch,
)
from trireme.core.weights import AdapterSpec
from trireme.launch import tinker
from trireme.process.faults import fault_point

KEY = "tml-0123456789abcdef"
BASE_MODEL = "tests/unigram"
VOCABULARY = 12
MAX_LEN = 16
END = 0
"""The token that ends a sequence."""
DEADLINE_S = 20.0


@dataclass(frozen=True)
class Written:
    files: list[FileRecord]

    def wait(self, timeout_s: float) -> list[FileRecord]:
        return self.files


@dataclass(frozen=True, eq=False)
class Weights:
    theta: npt.NDArray[np.float64]


@dataclass
class UnigramTrainer:
    """A model whose logits are the same at each place. Its optimiser is momentum, so it has a state."""

    theta: npt.NDArray[np.float64] = field(default_factory=lambda: np.linspace(-1.0, 1.0, VOCABULARY))
    momentum: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(VOCABULARY))
    gradient: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(VOCABULARY))
    calls: list[str] = field(default_factory=list)
    hold: threading.Event | None = None
    """No update is done before it is set."""
    specs: dict[str, AdapterSpec] = field(default_factory=dict)
    """Of the adapters that were added and not dropped. Each is a model of its own, which begins as the first does."""
    used: str = ""
    waiting: dict[str, tuple[Any, Any, Any]] = field(default_factory=dict)
    base: npt.NDArray[np.float64] | None = None

    def add_adapter(self, name: str, spec: AdapterSpec, start: Path | None = None) -> None:
        if self.base is None:
            self.base = self.theta.copy()
        assert name not in self.specs
        self.specs[name] = spec
        first = np.frombuffer((start / "model.bin").read_bytes()) if start else self.base
        self.waiting[name] = first.copy(), np.zeros(VOCABULARY), np.zeros(VOCABULARY)

    def use_adapter(self, name: str) -> None:
        if name != self.used:
            self.waiting[self.used] = self.theta, self.momentum, self.gradient
            self.theta, self.momentum, self.gradient = self.waiting.pop(name)
            self.used = name

    def drop_adapter(self, name: str) -> None:
        if name == self.used:
            self.use_adapter("")
        del self.waiting[name], self.specs[name]

    def logprobs(self) -> npt.NDArray[np.float64]:
        shifted = self.theta - self.theta.max()
        return shifted - np.log(np.exp(shifted).sum())

    def forward(self, data: Sequence[Datum]) -> ForwardBackwardOutput:
        self.calls.append("forward")
        return self._output(data, {})

    def _output(self, data: Sequence[Datum], metrics: Mapping[str, float]) -> ForwardBackwardOutput:
        targets_D = [datum.loss_fn_inputs["target_tokens"].data for datum in data]
        offsets = np.cumsum([0, *map(len, targets_D)]).astype(np.int64)
        return ForwardBackwardOutput(self.logprobs()[np.concatenate(targets_D)].astype(np.float32), offsets, metrics)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> ForwardBackwardOutput:
        self.calls.append(f"{self.used}:{loss_fn}" if self.used else loss_fn)
        TokenBatch.of(data)  # refuses datums that do not go together, as the real trainer does
        probabilities, loss = np.exp(self.logprobs()), 0.0
        for datum in data:
            columns = {name: column.data for name, column in datum.loss_fn_inputs.items()}
            p = self.logprobs()[columns["target_tokens"]]
            if loss_fn == "cross_entropy":
                weights = columns["weights"]
                loss -= float(weights @ p)
            else:
                weights = columns["mask"] * np.exp(p - columns["logprobs"]) * columns["advantages"]
                loss -= float(weights.sum())
            for token, weight in zip(columns["target_tokens"], weights, strict=True):
                self.gradient += weight * (probabilities - np.eye(VOCABULARY)[token])
        return self._output(data, {"loss:sum": loss})

    def optim_step(self, adam_params: AdamParams) -> OptimStepResponse:
        self.calls.append("optim_step")
        if self.hold:
            assert self.hold.wait(DEADLINE_S), "the test did not let the update go"
        if fault_point("test.optim_step"):
            raise RoomFailed("trainer shard 0 died")
        gradient, self.gradient = self.gradient, np.zeros(VOCABULARY)
        if not np.isfinite(gradient).all():
            raise NonFiniteGradient("the gradient is not finite")
        self.momentum = adam_params.beta1 * self.momentum + gradient
        self.theta = self.theta - adam_params.learning_rate * self.momentum
        return OptimStepResponse({"grad_norm": float(np.linalg.norm(gradient))})

    def drop_gradients(self) -> None:
        self.gradient = np.zeros(VOCABULARY)

    def reset_optimizer(self) -> None:
        self.momentum = np.zeros(VOCABULARY)

    def publish_weights(self, version: int) -> Any:
        return Weights(self.theta.copy())

    def save_weights(self, path: Path, published: Any) -> Written:
        return Written([write_bytes(path, "model.bin", published.theta.tobytes())])

    def save_state(self, path: Path) -> Written:
        return Written([write_bytes(path, "state.bin", np.stack([self.theta, self.momentum]).tobytes())])

    def load_state(self, path: Path, identities: Sequence[Any]) -> str:
        self.theta, self.momentum = np.frombuffer((path / "state.bin").read_bytes()).reshape(2, VOCABULARY).copy()
        self.drop_gradients()
        return ""


class UnigramSampler:
    """Samples from the weights that it holds, in threads; it notices weights that change under a sample."""

    def __init__(self) -> None:
        self.theta: npt.NDArray[np.float64] | None = None
        self.updates = 0
        self.slots: dict[str, npt.NDArray[np.float64]] = {}
        self.most_slots = 0
        self.seconds = 0.0
        """What a sample takes."""
        self._threads = ThreadPoolExecutor(8)

    def update_weights(self, weights: Any) -> list[Any]:
        self.theta, self.updates = weights.theta, self.updates + 1
        return []

    def load_adapter(self, name: str, weights: Any) -> None:
        assert name not in self.slots
        self.slots[name] = weights.theta
        self.most_slots = max(self.most_slots, len(self.slots))

    def drop_adapter(self, name: str) -> None:
        del self.slots[name]

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        adapter: str = "",
    ) -> Future[SampleResponse]:
        arguments = (prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs, adapter)
        return self._threads.submit(self._sample, *arguments)

    def _sample(
        self, prompt: ModelInput, count: int, params: SamplingParams, include: bool, topk: int, adapter: str
    ) -> SampleResponse:
        if fault_point("test.sample"):
            raise RoomFailed("replica 0 died")
        theta = self.slots[adapter] if adapter else self.theta
        assert theta is not None, "no weights were loaded"
        time.sleep(self.seconds)
        table = UnigramTrainer(theta).logprobs()
        sequences = [self._sequence(table, params, (params.seed or 0) + number) for number in range(count)]
        best = np.argsort(-table)[:topk]
        logprobs = [None, *(float(table[token]) for token in prompt.to_ints()[1:])] if include else None
        row = [(int(token), float(table[token])) for token in best]
        likeliest = [None, *([row] * (prompt.length - 1))] if topk else None
        return SampleResponse(sequences, logprobs, likeliest)

    @staticmethod
    def _sequence(table: npt.NDArray[np.float64], params: SamplingParams, seed: int) -> SampledSequence:
        drawn = np.random.default_rng(seed).choice(VOCABULARY, size=params.max_tokens or MAX_LEN, p=np.exp(table))
        ends = [place for place, token in enumerate(drawn) if token in (END, *params.stop_token_ids)]
        tokens = drawn[: ends[0] + 1 if ends else None].astype(np.int32)
        return SampledSequence(tokens, table[tokens].astype(np.float32), "stop" if ends else "length", ())


@dataclass
class Served:
    url: str
    server: TinkerServer
    trainer: UnigramTrainer
    sampler: UnigramSampler
    catalog: Catalog
    listener: TinkerListener
    root: Path
    lora: LoraConfig | None

    def work(self) -> None:
        """Has the server work with its rooms, from now on or again: new ones, where they were lost."""
        wait_for(lambda: not self.server.ready, "the end of the rooms before")
        base = self.root / f"base-{time.monotonic_ns()}" / "state"
        worker = TrainingWorker(
            self.trainer, self.catalog, (self.server.offer.base_model,), base, DEADLINE_S, MAX_LEN, self.lora
        )
        self.working = self.listener.work(worker, self.sampler)
        wait_for(lambda: self.server.ready or self.working.done(), "the server to work")


@contextmanager
def tinker_server(
    root: Path,
    trainer: UnigramTrainer | None = None,
    now: Any = time.monotonic,
    lora: LoraConfig | None = None,
    places: int = 1,
    slots: int = 0,
    snapshots: int = 4,
    commit_s: float = 60.0,
    keys: Sequence[ServiceKey] = (ServiceKey("client", KEY),),
    base: str = BASE_MODEL,
    boot: str | None = None,
) -> Iterator[Served]:
    """Serves a model of the name `base` on a free port of this machine; what is saved stays below `root`. `lora`:
    adapters, so many at once. `boot`: the name of the machine's start. At the end it raises what ended it."""
    trainer, sampler = trainer or UnigramTrainer(), UnigramSampler()
    catalog = Catalog(root / "runs", base, time.time)
    store, checkpoints = Store(root / "store", FORMAT, boot), OwnCheckpoints(root / "commits")
    options = TinkerConfig(snapshots=snapshots, commit_s=commit_s)
    offer = ServedTinkerModel(ServedModels((base,), MAX_LEN, VOCABULARY), base, options, lora, places, slots)
    server = TinkerServer(offer, catalog, store, checkpoints, now)
    server.begin()
    limits = Limits(body_bytes=2**24, body_s=5.0, per_minute=None)
    listener = TinkerListener(server, ServiceKeys(keys), limits, "127.0.0.1", 0)
    listener.start()
    wait_for(lambda: listener.address is not None or not listener.is_alive(), "the server to listen")
    listener.check()
    assert listener.address is not None
    served = Served(listener.address, server, trainer, sampler, catalog, listener, root, lora)
    try:
        served.work()
        yield served
        if served.working.done():
            served.working.result()
    finally:
        end_clients()
        served.working.cancel()
        listener.stop()
        store.close()
        listener.check()


def end_clients() -> None:
    """Ends what clients of Tinker's package, which has an event loop of its own, leave in this process: those without a
    session, which it shares and never closes, and sessions, which would be kept for as long as tests run."""
    package = sys.modules.get("tinker.lib.internal_client_holder")
    loop = package._internal_client_holder_thread_singleton.loop_if_started() if package else None
    if package is None or loop is None:
        return
    shared = package.sessionless_holder_cache._holders
    for holder in shared.values():
        holder.close()
    shared.clear()
    for task in asyncio.all_tasks(loop):
        if "_session_heartbeat" in repr(task.get_coro()):
            loop.call_soon_threadsafe(task.cancel)


def serve_in_process(directory: Path, port: int) -> None:
    """Serves by the command's own function until this process ends. What the trainer did is in the file `calls`."""
    config = load(["@", str(UNREAD), "--model.name", "./assets/sort-base", "--model.max-seq-len", str(MAX_LEN)]).config
    commit_s, names = float(os.environ.get("COMMIT_S", "60")), os.environ.get("FURTHER_NAMES", "").split()
    service = config.service.model_copy(update={"port": port, "tinker": TinkerConfig(commit_s=commit_s, names=names)})
    config = config.model_copy(update={"service": service})
    facts = ModelFacts.of(config, required=True)
    assert facts is not None

    @contextmanager
    def rooms() -> Iterator[tuple[Any, Any]]:
        yield UnigramTrainer(), UnigramSampler()

    def say(text: str) -> None:
        if match := re.search(r"TINKER_BASE_URL=(\S+)", text):
            (directory / "address.new").write_text(match[1])
            (directory / "address.new").rename(directory / "address")

    (directory / f"started-{os.getpid()}").touch()
    tinker.clear(directory)
    tinker.serve_clients(config, (BASE_MODEL,), facts, rooms, [ServiceKey("client", KEY)], directory, say)
