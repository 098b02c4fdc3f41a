"""The loop of supervised training. It reads as the algorithm; the trainer behind it is a group of actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TextIO

import numpy as np

from trireme.config.sft import SftConfig
from trireme.core.errors import LimitReached
from trireme.core.types import AdamParams, ForwardBackwardOutput, OptimStepResponse, TokenBatch
from trireme.core.weights import PublishedWeights
from trireme.process.signals import GraceOver, Stop, Stopped
from trireme.run.commits import Commits, SavingTrainer
from trireme.run.metrics import Clock, Sink
from trireme.sft.data import Examples, SftData
from trireme.train.guards import RefusedSteps
from trireme.train.steps import loss_normalizer, step_position

EVALUATED_AT_ONCE = 256
"""Held-out examples in one call of the trainer, which plans the micro-batches within."""


class Trainer(SavingTrainer, Protocol):
    """What is needed of the trainer."""

    def forward_backward(
        self, batch: TokenBatch, loss_fn: str, loss_fn_config: Mapping[str, float], /
    ) -> ForwardBackwardOutput: ...

    def forward(self, batch: TokenBatch, /) -> ForwardBackwardOutput: ...

    def optim_step(self, adam: AdamParams, normalizer: float) -> OptimStepResponse: ...

    def publish_weights(self, version: int) -> PublishedWeights: ...


class Rows:
    """What a run writes about each step: a row for every sink, and in `trained.jsonl` which examples it trained on."""

    def __init__(self, sinks: Sequence[Sink], witness: Sink) -> None:
        self._sinks, self._witness = sinks, witness

    def write(self, row: Mapping[str, Any], trained: Sequence[int]) -> None:
        self._witness.write({"step": row["step"], "attempt": row["attempt"], "examples": list(trained)})
        for sink in self._sinks:
            sink.write(row)


def train(
    config: SftConfig,
    trainer: Trainer,
    data: SftData,
    start: int,
    learning_rate: Callable[[int], float],
    rows: Rows,
    commits: Commits,
    guard: RefusedSteps,
    stop: Stop,
) -> None:
    """Runs steps `start` to `max_steps` - 1; step s makes version s + 1 of the weights.

    Raises TriremeError when the trainer fails or a limit of the run is reached, and Stopped after a signal: these two
    between steps, with the boundary there to be committed.
    """
    weights = trainer.publish_weights(start)
    commits.begin(weights)
    version, attempt = start, weights.identity.attempt
    try:
        for step in range(start, config.max_steps):
            stop.check()
            commits.leave_boundary()
            clock = Clock()
            with clock("step", step=step):
                evaluation = evaluate(trainer, data.test, step, clock) if is_due(config, step) else {}
                chosen = data.cursor.take(config.data.batch_size)
                trained = train_step(config, trainer, data.train, chosen, learning_rate(step), guard, clock)
                version = step + 1
                if version == config.max_steps and config.eval.every:
                    evaluation = evaluate(trainer, data.test, version, clock)
                with clock("checkpoint_stall"):
                    if commits.due(version):
                        commits.at_boundary(trainer.publish_weights(version))
            row = {
                **step_position(config, step, attempt),
                "epoch": data.cursor.consumed / data.cursor.size,
                **trained,
                **evaluation,
                **{f"time/{name}": seconds for name, seconds in clock.seconds.items()},
                "perf/tokens_per_s": trained["num_tokens"] / clock.seconds["step"],
            }
            rows.write(row, chosen)
            commits.seal()
            guard.check(row)
    except GraceOver:
        raise
    except (Stopped, LimitReached):
        commits.arrive(trainer.publish_weights(version))
        raise


def train_step(
    config: SftConfig,
    trainer: Trainer,
    examples: Examples,
    chosen: Sequence[int],
    learning_rate: float,
    guard: RefusedSteps,
    clock: Clock,
) -> dict[str, float]:
    """One update by the examples `chosen`; its metrics."""
    batch = examples.batch(chosen)
    weight = weight_of(batch)
    with clock("forward_backward"):
        output = trainer.forward_backward(batch, "cross_entropy", {})
    suspects = [examples.places[chosen[d]] for d in output.suspects]
    normalizer = loss_normalizer(config.trainer.loss_normalization, weight, len(batch))
    with clock("optim"):
        step = partial(trainer.optim_step, config.adam_params(learning_rate), normalizer)
        update = guard.update(step, suspects)
    busy_s = clock.seconds["forward_backward"] + clock.seconds["optim"]
    return {
        "train_mean_nll": output.metrics["loss:sum"] / weight,
        "num_examples": len(batch),
        "num_tokens": len(batch.tokens),
        "num_loss_tokens": output.metrics["loss_tokens:sum"],
        "learning_rate": learning_rate,
        "optim/grad_norm": update["grad_norm"],
        "optim/refused": update["refused"],
        **({"perf/mfu": output.peak_s / busy_s} if output.peak_s else {}),
    }


def weight_of(batch: TokenBatch) -> float:
    """The sum of a batch's weights."""
    return float(batch.columns["weights"].sum(dtype=np.float64))


def is_due(config: SftConfig, step: int) -> bool:
    """Whether the weights that `step` begins with are evaluated: not in the last step, whose row has its result's."""
    every = config.eval.every
    return every > 0 and step % every == 0 and step + 1 < config.max_steps


def evaluate(trainer: Trainer, held_out: Examples | None, version: int, clock: Clock) -> dict[str, float]:
    """`test/nll`: the mean loss of the held-out examples' tokens, by weight, under the weights of `version`."""
    assert held_out is not None, "checked with the configuration"
    loss = weight = 0.0
    with clock("evaluation"):
        for first in range(0, len(held_out), EVALUATED_AT_ONCE):
            batch = held_out.batch(range(first, min(first + EVALUATED_AT_ONCE, len(held_out))))
            logprobs = trainer.forward(batch).logprobs.astype(np.float64)
            counted = batch.columns["weights"] > 0
            loss -= float((logprobs[counted] * batch.columns["weights"][counted]).sum())
            weight += weight_of(batch)
    return {"test/nll": loss / weight, "test/version": version}


class SftConsole:
    """A line per step."""

    def __init__(self, max_steps: int, out: TextIO) -> None:
        self._max_steps, self._out = max_steps, out

    def write(self, row: Mapping[str, Any]) -> None:
        tested = f"  test {row['test/nll']:.4f} (version {row['test/version']})" if "test/nll" in row else ""
        print(
            f"step {row['step'] + 1:>{len(str(self._max_steps))}}/{self._max_steps}"
            f"  nll {row['train_mean_nll']:.4f}{tested}"
            f"  epoch {row['epoch']:.2f}"
            f"  lr {row['learning_rate']:.2e}"
            f"  norm {row['optim/grad_norm']:.2f}"
            f"  {row['perf/tokens_per_s']:>6.0f} tokens/s"
            f"  {row['time/step']:.2f} s",
            file=self._out,
            flush=True,
        )

    def close(self) -> None:
        self._out.flush()
