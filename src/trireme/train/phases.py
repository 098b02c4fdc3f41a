"""The phases of a step of `rl`, and the order in which they take place.

`StepPhases` says what each phase does, a function below it when. `overlap` is the only order so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from trireme.config import Config
from trireme.core.types import Minibatch
from trireme.core.weights import PublishedWeights
from trireme.train.kl_penalty import KlPenalty
from trireme.train.steps import Attempt, Rooms, StepRecord


@dataclass(frozen=True)
class StepPhases:
    """The phases of one step, which trains on one batch."""

    config: Config
    rooms: Rooms
    penalty: KlPenalty
    attempt: Attempt
    record: StepRecord

    def sample(self, substep: int) -> Iterator[Minibatch]:
        """Yields the minibatches of a substep as they are sampled. The replicas do not wait for this call."""
        on_tick = self.attempt.check if substep == 0 else self.attempt.check_rooms  # later ones cannot be given up
        return self.record.clock.timed(
            "wait_for_batch", self.rooms.orchestrator.minibatches(self.record.step, substep, on_tick)
        )

    def train(self, minibatches: Iterator[Minibatch]) -> None:
        """Updates the weights by the minibatches of a substep."""
        trainer = self.rooms.trainer
        record = self.record
        for minibatch in self.penalty(minibatches):
            with record.clock("forward_backward"):
                output = trainer.forward_backward(
                    minibatch.batch, self.config.loss_fn, self.config.trainer.loss_fn_config, minibatch.provenance
                )
            record.add(output, minibatch.divisor, minibatch.problems_D)
        self.attempt.checkpoints.leave_boundary()
        with record.clock("optim"):
            record.update(self.attempt.guard, partial(trainer.optim_step, self.attempt.adam_params(record.step)))

    def publish(self) -> PublishedWeights:
        """Makes the new weights available to the replicas."""
        version = self.record.step + 1
        with self.record.clock("publish"):
            weights = self.rooms.trainer.publish_weights(version)
        self.penalty.end_step(version)
        return weights


def overlap(step: StepPhases) -> PublishedWeights:
    """Runs one step while the replicas continue to sample: trains on each substep's minibatches and publishes the new
    weights, which it returns. The replicas' update to these weights continues during the next step."""
    for substep in range(step.config.trainer.num_substeps):
        step.train(step.sample(substep))
    weights = step.publish()
    with step.record.clock("update_replicas"):  # waits for the update before
        update_replicas(step.rooms, step.attempt, weights)
    return weights


def update_replicas(rooms: Rooms, attempt: Attempt, weights: PublishedWeights) -> None:
    """Begins the replicas' update to `weights`, after the update before it, and the evaluation of that version, have
    ended."""

    def on_tick() -> None:
        attempt.check_rooms()
        if attempt.stop.requested():
            rooms.orchestrator.give_up_evaluation()

    rooms.orchestrator.end_version(on_tick)
    rooms.update(weights)
    rooms.orchestrator.begin_version(weights.identity, on_tick)
