"""The loop of supervised training (`sft`). It reads like the algorithm: the trainer's methods hide the actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from trireme.checkpoint.rows import shown_step
from trireme.config.sft import SftConfig
from trireme.core.types import TokenBatch
from trireme.run.metrics import Clock, Journal
from trireme.run.rooms import Trainer
from trireme.sft.data import Examples, SftData
from trireme.train.steps import Attempt, StepRecord

EVALUATED_AT_ONCE = 256
"""Held-out examples in one call of the trainer, which plans the micro-batches within."""


def train(config: SftConfig, trainer: Trainer, data: SftData, attempt: Attempt, journal: Journal) -> None:
    """Runs the steps of an attempt; step s makes version s + 1 of the weights.

    Raises TriremeError when the trainer fails, LimitReached when a limit of the run is reached, and Stopped after a
    signal. LimitReached and Stopped are raised only between steps, where the run can be saved.
    """
    attempt.checkpoints.at_boundary(attempt.start, trainer.publish_weights(attempt.start))
    every = config.eval.every
    last = config.max_steps - 1
    for step in attempt.steps():
        attempt.checkpoints.leave_boundary()
        record = StepRecord(step)
        with record.clock("step", step=step):
            evaluation = {}
            if every and step % every == 0 and step != last:  # the row of the last step has its result instead
                evaluation = evaluate(trainer, data.test, step, record.clock)
            chosen = data.cursor.take(config.data.batch_size)
            trained = train_step(trainer, data.train, chosen, attempt, record)
            if every and step == last:
                evaluation = evaluate(trainer, data.test, step + 1, record.clock)
            with record.clock("checkpoint_stall"):
                attempt.checkpoints.at_boundary(step + 1)
        row = {
            **attempt.position(step),
            "epoch": data.cursor.consumed / data.cursor.size,
            **trained,
            **record.perf_metrics(),
            **evaluation,
            **record.time_metrics(),
            "perf/tokens_per_s": trained["num_tokens"] / record.clock.seconds["step"],
        }
        journal.write(row, {"examples": list(chosen)})
        attempt.end_step(row)


def train_step(
    trainer: Trainer, examples: Examples, chosen: Sequence[int], attempt: Attempt, record: StepRecord
) -> dict[str, float]:
    """Trains one step on the examples whose indices are in `chosen`: computes the gradient and updates the weights.
    Returns the metrics of the step."""
    batch = examples.batch(chosen)
    adam = attempt.adam_params(record.step)
    weighted, divisor = attempt.config.normalization.apply(batch, "weights")
    with record.clock("forward_backward"):
        output = trainer.forward_backward(weighted, "cross_entropy", {})
    record.add(output, divisor, [examples.places[index] for index in chosen])
    with record.clock("optim"):
        record.update(attempt.guard, partial(trainer.optim_step, adam))
    return {
        "train_mean_nll": nll_of(batch, output.logprobs) / weight_of(batch),
        "num_examples": len(batch),
        "num_tokens": len(batch.tokens),
        "num_loss_tokens": output.metrics["loss_tokens:sum"],
        "learning_rate": adam.learning_rate,
        **record.update_metrics(),
    }


def weight_of(batch: TokenBatch) -> float:
    """Returns the sum of the loss weights of a batch's tokens."""
    return float(batch.columns["weights"].sum(dtype=np.float64))


def nll_of(batch: TokenBatch, logprobs: npt.NDArray[np.float32]) -> float:
    """Returns the sum of -log p over a batch's tokens, each multiplied by its weight. `logprobs`: float32 [T]."""
    weights = batch.columns["weights"].astype(np.float64)
    return -float((logprobs[weights != 0] * weights[weights != 0]).sum())


def evaluate(trainer: Trainer, held_out: Examples | None, version: int, clock: Clock) -> dict[str, float]:
    """Returns two metrics: `test/nll`, the mean of -log p over the tokens of the held-out examples, weighted by their
    loss weights; and `test/version`, which is `version`, the version of the trainer's weights."""
    assert held_out is not None, "checked with the configuration"
    loss = weight = 0.0
    with clock("evaluation"):
        for first in range(0, len(held_out), EVALUATED_AT_ONCE):
            batch = held_out.batch(range(first, min(first + EVALUATED_AT_ONCE, len(held_out))))
            loss += nll_of(batch, trainer.forward(batch).logprobs)
            weight += weight_of(batch)
    return {"test/nll": loss / weight, "test/version": version}


def step_line(row: Mapping[str, object], max_steps: int) -> str:
    """Returns a step's line for the terminal."""
    if "test/nll" in row:
        tested = f"  test {row['test/nll']:.4f} (version {row['test/version']})"
    else:
        tested = ""
    return (
        f"step {shown_step(row):>{len(str(max_steps))}}/{max_steps}"
        f"  nll {row['train_mean_nll']:.4f}{tested}"
        f"  epoch {row['epoch']:.2f}"
        f"  lr {row['learning_rate']:.2e}"
        f"  norm {row['optim/grad_norm']:.2f}"
        f"  {row['perf/tokens_per_s']:>6.0f} tokens/s"
        f"  {row['time/step']:.2f} s"
    )
