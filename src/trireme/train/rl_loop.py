"""The training loop of `rl`. It reads as the algorithm; the rooms behind its verbs are actors."""

from __future__ import annotations

from collections.abc import Mapping

from trireme.config import Config
from trireme.run.metrics import Journal
from trireme.train.kl_penalty import KlPenalty
from trireme.train.phases import StepPhases, step_order, update_replicas
from trireme.train.steps import Attempt, Rooms, StepRecord


def train(config: Config, rooms: Rooms, attempt: Attempt, journal: Journal) -> None:
    """Runs the steps of an attempt. Step s trains version s of the weights on one batch, which makes version s + 1.

    Raises TriremeError when a room fails or a limit of the run is reached. Raises Stopped after a signal: between
    steps, or within a step that has not changed the weights yet.
    """
    kl = config.trainer.kl
    penalty = KlPenalty(rooms.trainer, kl.coef, kl.discount, kl.reference.update_every)
    run_step = step_order(config)
    weights = rooms.trainer.publish_weights(attempt.start)
    attempt.checkpoints.at_boundary(attempt.start, weights)
    update_replicas(rooms, attempt, weights)
    for step in attempt.steps():
        record = StepRecord(step)
        with record.clock("step", step=step):
            weights = run_step(StepPhases(config, rooms, penalty, attempt, record))
            released = rooms.orchestrator.release(step)
            with record.clock("checkpoint_stall"):
                attempt.checkpoints.at_boundary(step + 1, weights)
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
            **record.perf_metrics(),
            **attempt.roster.metrics(),
        }
        journal.write(row, {"groups": released.trained}, released.records)
        attempt.end_step(row)


def rates(seconds: Mapping[str, float], rollouts: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics `perf/*` of a step: tokens and rollouts per second, and the shares of the step in which
    trainer and replicas were idle. `seconds`: from the driver's clock; `rollouts`: the orchestrator's metrics."""
    step_s = seconds["step"]
    idle_s = seconds["wait_for_batch"] + seconds.get("hand_over", 0.0) + seconds["update_replicas"]
    return {
        "perf/tokens_per_s": rollouts["perf/tokens"] / step_s,
        "perf/rollouts_per_s": rollouts["perf/rollouts"] / step_s,
        "perf/trainer_idle_frac": idle_s / step_s,
        "perf/inference_idle_frac": min(rollouts["perf/inference_idle_s"] / step_s, 1.0),
    }
