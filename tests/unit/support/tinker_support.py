"""A Tinker server on rooms that are small enough for a test: a model that knows how often each token comes, trained for
real, and a sampler of it. The server, its port and the client are the real ones."""

from __future__ import annotations

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

from service.front import ServedModels
from service.guard import Limits
from service.keys import ServiceKey, ServiceKeys
from service.tinker.catalog import Catalog
from service.tinker.listening import TinkerListener
from service.tinker.serving import TinkerServer
from service.tinker.work import TrainingWorker
from trireme.checkpoint.files import FileRecord, write_bytes
from trireme.core.errors import NonFiniteGradient
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

KEY = "tml-0123456789abcdef"
BASE_MODEL = "tests/unigram"
VOCABULARY = 12
MAX_LEN = 16
END = 0
"""The token that ends a sequence."""
DEADLINE_S = 20.0


@dataclass(frozen=True)
class Written:
    """Files that are written."""

    files: list[FileRecord]

    def wait(self, timeout_s: float) -> list[FileRecord]:
        return self.files


@dataclass(frozen=True, eq=False)
class Weights:
    """What is published."""

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
        self.calls.append(loss_fn)
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
        self.seconds = 0.0
        """What a sample takes."""
        self._threads = ThreadPoolExecutor(8)

    def update_weights(self, weights: Any) -> list[Any]:
        self.theta, self.updates = weights.theta, self.updates + 1
        return []

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Future[SampleResponse]:
        return self._threads.submit(
            self._sample, prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs
        )

    def _sample(
        self, prompt: ModelInput, count: int, params: SamplingParams, include: bool, topk: int
    ) -> SampleResponse:
        theta = self.theta
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
    """A server that listens."""

    url: str
    server: TinkerServer
    trainer: UnigramTrainer
    sampler: UnigramSampler


@contextmanager
def tinker_server(
    root: Path, trainer: UnigramTrainer | None = None, now: Any = time.monotonic, base: str = BASE_MODEL
) -> Iterator[Served]:
    """Serves a model of the name `base` on a free port of this machine; what is saved stays below `root`."""
    trainer, sampler = trainer or UnigramTrainer(), UnigramSampler()
    catalog = Catalog(root / "runs", base, time.time)
    state = root / f"base-{time.monotonic_ns()}"
    worker = TrainingWorker(trainer, catalog, (base,), state, DEADLINE_S, MAX_LEN)
    models = ServedModels((base,), MAX_LEN, VOCABULARY)
    server = TinkerServer(worker, sampler, catalog, models, base, now)
    limits = Limits(body_bytes=2**24, body_s=5.0, per_minute=None)
    listener = TinkerListener(server, ServiceKeys([ServiceKey("client", KEY)]), limits, "127.0.0.1", 0)
    listener.start()
    until = time.monotonic() + DEADLINE_S
    while listener.address is None:
        listener.check()
        assert time.monotonic() < until, "the server did not begin to listen"
        time.sleep(0.01)
    try:
        yield Served(listener.address, server, trainer, sampler)
    finally:
        listener.stop()
        listener.check()
