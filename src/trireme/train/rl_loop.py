"""The training loop. It reads as the algorithm; the rooms behind it are actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from trireme.config import Config
from trireme.launch.rl import Rooms
from trireme.process.signals import Stop
from trireme.run.commits import Commits
from trireme.run.metrics import Clock, Journal, reduce_metrics
from trireme.supervision.roster import Roster
from trireme.train.guards import Guard
from trireme.train.kl_penalty import KlPenalty
from trireme.train.steps import loss_normalizer, step_position


class Supervision(Protocol):
    """Who watches the rooms."""

    roster: Roster

    def check(self) -> None:
        """Called often while the driver waits; raises what a room was found to have failed with."""
        ...


def train(
    config: Config,
    rooms: Rooms,
    start: int,
    learning_rate: Callable[[int], float],
    journal: Journal,
    commits: Commits,
    guard: Guard,
    stop: Stop,
    supervisor: Supervision,
) -> None:
    """Runs steps `start` to `max_steps` - 1. Step s consumes one batch with version s in the trainer and produces
    version s + 1.

    `learning_rate` gives the rate of a step. Raises TriremeError when a room fails or a limit of the run is reached,
    and Stopped after a signal, between steps or while nothing of a step has been applied.
    """
    trainer, orchestrator = rooms.trainer, rooms.orchestrator
    roster, check = supervisor.roster, supervisor.check
    kl = config.trainer.kl
    penalty = KlPenalty(trainer, kl.coef, kl.discount, kl.reference.update_every)
    weights = trainer.publish_weights(start)
    commits.begin(weights)
    orchestrator.update_weights(weights, stop.asked, check)
    for step in range(start, config.max_steps):
        roster.at_step(step)
        stop.check()
        check()  # here the run can be committed; where steps are short nothing is waited for long enough to look
        clock = Clock()
        with clock("step", step=step):
            outputs: list[Mapping[str, float]] = []
            suspects: list[str] = []
            peak_s = 0.0
            for substep in range(config.trainer.num_substeps):
                loss_tokens = sequences = 0
                on_tick = checks(check, stop.check) if substep == 0 else check  # later substeps cannot be given up
                arriving = clock.timed("wait_for_batch", orchestrator.minibatches(step, substep, on_tick))
                for minibatch in penalty(arriving):
                    with clock("forward_backward"):
                        output = trainer.forward_backward(
                            minibatch.batch, config.loss_fn, config.trainer.loss_fn_config, minibatch.provenance
                        )
                    outputs.append(output.metrics)
                    peak_s += output.peak_s
                    suspects += [minibatch.problems_D[d] for d in output.suspects]
                    loss_tokens += minibatch.num_loss_tokens
                    sequences += len(minibatch.batch)
                commits.leave_boundary()
                with clock("optim"):
                    normalizer = loss_normalizer(config.trainer.loss_normalization, loss_tokens, sequences)
                    adam = config.adam_params(learning_rate(step))
                    update = guard.update(partial(trainer.optim_step, adam, normalizer), suspects)
            with clock("publish"):
                weights = trainer.publish_weights(step + 1)
            penalty.end_step(step + 1)
            with clock("update_replicas"):
                orchestrator.update_weights(weights, stop.asked, check)  # goes on while the next batch is trained on
            released = orchestrator.release(step)
            with clock("checkpoint_stall"):
                commits.at_boundary(weights)
        row = {
            **step_position(config, step, weights.identity.attempt),
            **released.metrics,
            **optim_metrics(reduce_metrics(outputs), update, adam.learning_rate),
            **penalty.take(),
            "weights/digest": weights.identity.digest,
            "weights/bytes": weights.nbytes,
            **time_metrics(clock.seconds, released.metrics, peak_s),
            **roster.metrics(),
        }
        journal.write(row, released.trained, released.records)
        commits.seal()
        guard.check(row)
    roster.at_step(config.max_steps)


def checks(*all_of_them: Callable[[], None]) -> Callable[[], None]:
    """One function that calls all of them."""

    def call() -> None:
        for each in all_of_them:
            each()

    return call


def optim_metrics(sums: Mapping[str, float], update: Mapping[str, float], learning_rate: float) -> dict[str, float]:
    """`optim/*`: sums as means over the step's loss tokens, `ratio:max` as `ratio_max`; and the update's own."""
    tokens = max(sums["loss_tokens:sum"], 1.0)
    parts = [(*name.rpartition(":")[::2], value) for name, value in sums.items() if name != "loss_tokens:sum"]
    return {
        "optim/lr": learning_rate,
        **{f"optim/{name}": value for name, value in update.items()},
        **{f"optim/{name}": value / tokens for name, how, value in parts if how == "sum"},
        **{f"optim/{name}_{how}": value for name, how, value in parts if how != "sum"},
    }


def time_metrics(seconds: Mapping[str, float], rollout_metrics: Mapping[str, float], peak_s: float) -> dict[str, float]:
    """`time/*` of the driver, and the rates that follow from them; `perf/mfu` (`trainer.mfu`) where the peak of
    the trainer's GPUs is known."""
    step_s = seconds["step"]
    mfu = {"perf/mfu": peak_s / (seconds["forward_backward"] + seconds["optim"])} if peak_s else {}
    return {
        **{f"time/{name}": value for name, value in seconds.items()},
        "perf/tokens_per_s": rollout_metrics["perf/tokens"] / step_s,
        "perf/rollouts_per_s": rollout_metrics["perf/rollouts"] / step_s,
        "perf/trainer_idle_frac": (seconds["wait_for_batch"] + seconds["update_replicas"]) / step_s,
        "perf/inference_idle_frac": min(rollout_metrics["perf/inference_idle_s"] / step_s, 1.0),
        **mfu,
    }
