"""The phases of a step of `rl`, and the order in which they take place.

`StepPhases` says what each phase does. `overlap` and `Alternation` say when the phases take place:

    overlap       replicas   |---- sample ----|---- sample ----|     the next batches while the trainer works
                  trainer         |-- train --|    |-- train --|
    Alternation   replicas   |-- sample --|   sleep   |-- sample --|     for K + 1 steps at a time
                  trainer                 |-- train --|            |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from trireme.config import Config
from trireme.core.errors import RoomFailed
from trireme.core.types import Minibatch
from trireme.core.weights import PublishedWeights
from trireme.supervision.roster import WAITS_FOR_WAKING, PartHealth
from trireme.train.kl_penalty import KlPenalty
from trireme.train.steps import Attempt, Rooms, StepRecord

TICK_S = 0.2


@dataclass(frozen=True)
class StepPhases:
    """The phases of one step, which trains on one batch."""

    config: Config
    rooms: Rooms
    penalty: KlPenalty
    attempt: Attempt
    record: StepRecord

    def sample(self, substep: int) -> Iterator[Minibatch]:
        """Yields the minibatches of a substep as their groups finish. The replicas sample whether or not this is
        called."""
        on_tick = self.attempt.check if substep == 0 else self.attempt.check_rooms  # later ones cannot be given up
        return self.record.clock.timed(
            "wait_for_batch", self.rooms.orchestrator.minibatches(self.record.step, substep, on_tick)
        )

    def finish_sampling(self) -> None:
        """Waits until all groups that the staleness bound allows are sampled. Then puts the replicas to sleep, and
        waits until they sleep. On GPUs a replica that is starting must also have ended its start and fallen asleep,
        because it takes memory that the trainer needs."""
        with self.record.clock("wait_for_batch"):
            self.rooms.orchestrator.finish_sampling(self.attempt.check)
        with self.record.clock("hand_over"):
            self.rooms.sleep(self.attempt.check)
            if self.config.cluster.device == "gpu":
                self._await_starts()

    def _await_starts(self) -> None:
        """Waits until no replica is starting, except replicas that start only when the others wake. Raises RoomFailed
        after the time that all allowed starts of a replica may take together."""
        limit_s = (1 + self.config.cluster.max_restarts) * self.config.timeouts.start_s
        started = time.monotonic()
        names = self._starting_replicas
        while names:
            self.attempt.check()
            if time.monotonic() - started > limit_s:
                raise RoomFailed(f"waited {limit_s:.0f} s for {', '.join(names)} to start before the trainer trains")
            time.sleep(TICK_S)
            names = self._starting_replicas

    @property
    def _starting_replicas(self) -> list[str]:
        begun = (PartHealth.STARTING, PartHealth.CATCHING_UP)
        parts = [part for part in self.attempt.roster.parts if part.room == "inference" and part.health in begun]
        return [part.name for part in parts if part.why != WAITS_FOR_WAKING]

    def train_on_substeps(self) -> None:
        """Runs all substeps: trains on each minibatch as soon as it is sampled, and updates the weights at the end of
        each substep."""
        for substep in range(self.config.trainer.num_substeps):
            self.train(self.sample(substep))

    def train(self, minibatches: Iterator[Minibatch]) -> None:
        """Runs one substep: trains on its `minibatches`, then updates the weights."""
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
        """Makes the new weights available to the replicas, and returns them. If an update of the KL reference is due,
        the new weights become the reference."""
        version = self.record.step + 1
        with self.record.clock("publish"):
            weights = self.rooms.trainer.publish_weights(version)
        self.penalty.end_step(version)
        return weights


StepOrder = Callable[[StepPhases], PublishedWeights]
"""Runs the phases of one step in an order; returns the new weights."""


def step_order(config: Config) -> StepOrder:
    """Returns the function that runs each step of an attempt: an `Alternation` if trainer and replicas are colocated,
    else `overlap`."""
    if config.colocated:
        return Alternation(config)
    return overlap


def overlap(step: StepPhases) -> PublishedWeights:
    """Runs one step while the replicas continue to sample: trains on each substep's minibatches and publishes the new
    weights, which it returns. The replicas' update to these weights continues during the next step."""
    step.train_on_substeps()
    weights = step.publish()
    with step.record.clock("update_replicas"):  # waits for the update before
        update_replicas(step.rooms, step.attempt, weights)
    return weights


class Alternation:
    """Runs the steps of an attempt while trainer and replicas take turns on the same devices.

    A sampling phase ends when all groups that the staleness bound allows are sampled: max_steps_off_policy + 1 batches.
    So no rollout is interrupted, and trainer and replicas alternate only once in max_steps_off_policy + 1 steps. If a
    new version has to be evaluated, the training phase ends earlier, and the next sampling phase samples the batches
    that are missing.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._sampled = 0  # batches that are sampled and not trained on

    def __call__(self, step: StepPhases) -> PublishedWeights:
        """Runs one step. If no sampled batch is left, a sampling phase comes first. Returns the new weights. If this
        step ends the training phase, also begins the replicas' update to the new weights, which wakes the replicas."""
        if not self._sampled:
            step.finish_sampling()
            self._sampled = self._config.max_steps_off_policy + 1
        step.train_on_substeps()
        self._sampled -= 1
        if self._is_awaited(step.record.step + 1):
            self._sampled = 0
        if not self._sampled:
            step.rooms.trainer.begin_free_memory()
        weights = step.publish()
        with step.record.clock("update_replicas"):
            if not self._sampled:
                step.rooms.trainer.free_memory()
                update_replicas(step.rooms, step.attempt, weights)
        return weights

    def _is_awaited(self, version: int) -> bool:
        """Returns True if `version` may have to be evaluated. The replicas then need its weights at once, even if
        sampled batches are left to train on."""
        every = self._config.eval.every
        return version == self._config.max_steps or (every > 0 and version % every == 0)


def update_replicas(rooms: Rooms, attempt: Attempt, weights: PublishedWeights) -> None:
    """Waits for the end of the replicas' update to the previous version, and of that version's evaluation if there is
    one. Then begins the replicas' update to `weights`."""

    def on_tick() -> None:
        attempt.check_rooms()
        if attempt.stop.requested():
            rooms.orchestrator.give_up_evaluation()

    rooms.orchestrator.end_version(on_tick)
    rooms.update(weights)
    rooms.orchestrator.begin_version(weights.identity, on_tick)
