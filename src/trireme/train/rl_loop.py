"""The training loop of `rl`. It reads as the algorithm; the rooms behind its verbs are actors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from trireme.config import Config
from trireme.core.types import StepSummary
from trireme.core.weights import PublishedWeights
from trireme.run.metrics import Journal
from trireme.train.kl_penalty import KlPenalty
from trireme.train.steps import Attempt, Rooms, StepRecord


def train(config: Config, rooms: Rooms, attempt: Attempt, journal: Journal) -> None:
    """Runs the steps of an attempt. Step s trains version s of the weights on one batch, which makes version s + 1.

    Raises TriremeError when a room fails or a limit of the run is reached, and Stopped after a signal: between steps,
    or while nothing of a step has been applied.
    """
    kl = config.trainer.kl
    penalty = KlPenalty(rooms.trainer, kl.coef, kl.discount, kl.reference.update_every)
    weights = rooms.trainer.publish_weights(attempt.start)
    attempt.commits.at_boundary(attempt.start, weights)
    update_replicas(rooms, attempt, weights)
    for step in attempt.steps():
        record = StepRecord(step)
        with record.clock("step", step=step):
            weights, released = train_step(config, rooms, penalty, attempt, record)
        row = {
            **attempt.position(step),
            **released.metrics,
            "optim/lr": attempt.learning_rate(step),
            **record.update_metrics(),
            **record.optim_metrics(),
            **penalty.take(),
            "weights/digest": weights.identity.digest,
            "weights/bytes": weights.nbytes,
            **record.time_metrics(),
            **rates(record.clock.seconds, released.metrics),
            **record.mfu_metrics(),
            **attempt.roster.metrics(),
        }
        journal.write(row, {"groups": released.trained}, released.records)
        attempt.end_step(row)


def train_step(
    config: Config, rooms: Rooms, penalty: KlPenalty, attempt: Attempt, record: StepRecord
) -> tuple[PublishedWeights, StepSummary]:
    """Trains on one batch, and gives the new weights to the replicas, which sample the next batches meanwhile."""
    trainer = rooms.trainer
    orchestrator = rooms.orchestrator
    step = record.step
    clock = record.clock
    adam = attempt.adam_params(step)
    for substep in range(config.trainer.num_substeps):
        on_tick = attempt.check if substep == 0 else attempt.check_rooms  # later substeps cannot be given up
        arriving = clock.timed("wait_for_batch", orchestrator.minibatches(step, substep, on_tick))
        for minibatch in penalty(arriving):
            with clock("forward_backward"):
                output = trainer.forward_backward(
                    minibatch.batch, config.loss_fn, config.trainer.loss_fn_config, minibatch.provenance
                )
            record.add(output, minibatch.divisor, minibatch.problems_D)
        attempt.commits.leave_boundary()
        with clock("optim"):
            record.update(attempt.guard, partial(trainer.optim_step, adam))
    with clock("publish"):
        weights = trainer.publish_weights(step + 1)
    penalty.end_step(step + 1)
    with clock("update_replicas"):  # waits for the update before; this one continues during the next step
        update_replicas(rooms, attempt, weights)
    released = orchestrator.release(step)
    with clock("checkpoint_stall"):
        attempt.commits.at_boundary(step + 1, weights)
    return weights, released


def update_replicas(rooms: Rooms, attempt: Attempt, weights: PublishedWeights) -> None:
    """Begins to bring the replicas to `weights` once the version before them, and its evaluation, have ended."""

    def on_tick() -> None:
        attempt.check_rooms()
        if attempt.stop.requested():
            rooms.orchestrator.give_up_evaluation()

    rooms.orchestrator.end_version(on_tick)
    rooms.orchestrator.begin_version(weights.identity.version, rooms.update(weights), on_tick)


def rates(seconds: Mapping[str, float], rollouts: Mapping[str, float]) -> dict[str, float]:
    """Returns `perf/*` of a step, from the driver's clock and the orchestrator's metrics of its rollouts."""
    step_s = seconds["step"]
    return {
        "perf/tokens_per_s": rollouts["perf/tokens"] / step_s,
        "perf/rollouts_per_s": rollouts["perf/rollouts"] / step_s,
        "perf/trainer_idle_frac": (seconds["wait_for_batch"] + seconds["update_replicas"]) / step_s,
        "perf/inference_idle_frac": min(rollouts["perf/inference_idle_s"] / step_s, 1.0),
    }
