"""Measures how close an asynchronous run comes to the speed of its slower stage.

    python scripts/bench/overlap.py [--steps 8] [--alone 4]

The rooms are a real run's (Ray, vLLM on CPU, an FSDP2 shard over gloo, the orchestrator), each model on a core
of its own. Three phases in the same processes:

  alone    generation and training side by side, neither knowing of the other. Generation: fixed weights, always more
           requests in flight than the replica decodes at once. Training: forward_backward and optim_step, one batch
           after the other, of the same shapes as the run's batches; nothing is published.
  coupled  the driver's loop with max_steps_off_policy = 1: batches, updates, publishing, back-pressure
  alone    again, against drift of the machine

The ratio is rollouts/s of the run over the lesser of the two rates alone. Prompts and lengths are the same in all
phases; counting tokens removes the remaining chance in the mean length of an answer (each rate is in rollouts of the
run's mean length). The last line of the output is the result as one JSON object. Leave the machine alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, count, cycle, islice
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import psutil
from _common import Result
from _rooms import Rate, Task, check_pinned, let_actors_import_benchmarks, pin
from counting import CountingDataset, CountingEnv, make_model

if TYPE_CHECKING:
    from trainer.handle import TrainerHandle
    from trireme.config import Config
    from trireme.core.types import Datum, TokenBatch
    from trireme.core.weights import PublishedWeights
    from trireme.launch.rl import RlRun
    from trireme.launch.run import Core
    from trireme.run.rundir import RunDir
    from trireme.supervision.supervisor import Supervisor

TASK = Task(hidden=256, layers=4, batch_size=32, group_size=8, sequences=32, prompt=64, median=64, sigma=0.5)
TARGET = 0.93
WARM_UP = 2
"""Steps of training alone before the measured ones: until long and short rollouts are mixed as they are later."""
FIRST = 2
REST = 1
"""Steps of the run before the measured ones, and after them: in the last one nothing is left to sample."""
RECORDED = 8
"""Batches that training alone repeats."""


class Generation:
    """Rollouts without end: `played` and their `tokens` so far."""

    def __init__(self, config: Config, sampler: Any) -> None:
        self._config = config
        self._sampler = sampler
        self._envs = enumerate(env for group in groups(config) for env in group)
        self._closed = False
        self.played = self.tokens = 0

    async def keep_in_flight(self, requests: int) -> None:
        await asyncio.gather(*(self._play() for _ in range(requests)))

    async def _play(self) -> None:
        from trireme.core.types import SampleRequest

        while not self._closed:
            i, env = next(self._envs)
            prompt, stop = await env.initial_observation()
            sampling = self._config.inference.sampling
            params = sampling.params(i, tuple(stop), sampling.max_tokens)
            group = i // self._config.orchestrator.group_size
            sampled = await self._sampler.sample(
                SampleRequest(f"alone-{i}", np.asarray(prompt, np.int32), params, f"alone-{group}")
            )
            self.played += 1
            self.tokens += len(sampled.tokens)

    def end(self) -> None:
        """Finishes the requests in flight and starts no others."""
        self._closed = True


class Training:
    """Steps without end on some batches."""

    def __init__(self, config: Config, trainer: TrainerHandle) -> None:
        self._config = config
        self._trainer = trainer
        self._batches = cycle([batch_of(config, index) for index in range(RECORDED)])

    def step(self) -> tuple[int, int]:
        """Trains on the next batch: its rollouts, and their tokens."""
        trainer = self._trainer
        config = self._config
        batch = next(self._batches)
        tokens = int(np.count_nonzero(batch.columns["mask"]))
        trainer.forward_backward(batch, config.loss_fn, config.trainer.loss_fn_config)
        trainer.optim_step(config.adam_params(float(config.trainer.learning_rate)), float(tokens))
        return len(batch), tokens


def groups(config: Config) -> Iterator[tuple[CountingEnv, ...]]:
    """The environments of each problem of the run, in order, again and again."""
    from orchestrator.env import EnvContext

    dataset = CountingDataset(EnvContext(None, config.seed, config.orchestrator.group_size), **config.env[0].args)
    return (dataset.envs(index % len(dataset)) for index in count())


def batch_of(config: Config, index: int) -> TokenBatch:
    """Batch `index` of the run, as the orchestrator would make it."""
    from trireme.core.types import TokenBatch

    size = config.orchestrator.batch_size
    envs = chain.from_iterable(islice(groups(config), index * size, (index + 1) * size))
    return TokenBatch.from_datums([datum(env) for env in envs])


def datum(env: CountingEnv) -> Datum:
    from trireme.core.types import Datum, ModelInput

    tokens = [*env.prompt, *range(1, env.length + 1)]
    answered = np.arange(1, len(tokens)) >= len(env.prompt)
    columns: dict[str, npt.NDArray[Any]] = {
        "target_tokens": np.asarray(tokens[1:]),
        "mask": answered,
        "logprobs": np.zeros(len(answered)),
        "advantages": answered * (env.length % 2 - 0.5),
        "versions": np.where(answered, 0, -1),
    }
    return Datum(ModelInput.from_ints(tokens[:-1]), columns)


@dataclass(frozen=True)
class Alone:
    """Both stages side by side over the same time."""

    generation: Rate
    training: Rate


async def alone(bench: Bench, weights: PublishedWeights, steps: int) -> Alone:
    """Lets both continue, the replica with `weights`, until `steps` batches are trained on."""
    config = bench.training.config
    inference = bench.training.inference
    replicas = inference.replica_set()
    sampler = inference.router_factory(replicas)()
    await replicas.update(weights)
    generation = Generation(config, sampler)
    training = Training(config, bench.core.trainer)
    sequences = config.inference.sequences(on_gpus=False)
    assert sequences is not None, "on CPUs it is known"
    in_flight = asyncio.create_task(generation.keep_in_flight(2 * sequences))
    for _ in range(WARM_UP):
        await asyncio.to_thread(training.step)
    since = time.monotonic()
    played = generation.played
    tokens = generation.tokens
    trained = [await asyncio.to_thread(training.step) for _ in range(steps)]
    seconds = time.monotonic() - since
    measured = Alone(
        generation=Rate(seconds, generation.played - played, generation.tokens - tokens),
        training=Rate(seconds, sum(n for n, _ in trained), sum(t for _, t in trained)),
    )
    generation.end()
    await in_flight
    return measured


@dataclass(frozen=True)
class Bench:
    """A run with started rooms."""

    training: RlRun
    run: RunDir
    core: Core
    supervisor: Supervisor

    def coupled(self) -> list[dict[str, Any]]:
        """The run, to its end: the rows of its metrics."""
        from rich.console import Console

        from trireme.launch.run import train_and_commit

        train_and_commit(
            self.training, self.run, self.core, self.supervisor, (), Console(markup=False, highlight=False)
        )
        return [json.loads(line) for line in (self.run.root / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def started(config: Config) -> Iterator[Bench]:
    """The rooms of a run, as `rl` starts them."""
    from rich.console import Console

    from trireme.config.model_facts import ModelFacts
    from trireme.launch.rl import RlRun
    from trireme.launch.run import attempt, supervised
    from trireme.plan.base import Plan, Resources
    from trireme.plan.rl import RL_ROOMS
    from trireme.process.ray_cluster import ray_cluster
    from trireme.run.rundir import RunDir
    from trireme.supervision.roster import Roster

    facts = ModelFacts.of(config, required=True)
    assert facts is not None
    plan = Plan(config, facts, Resources.of_this_machine(), RL_ROOMS)
    training = RlRun(config, facts, plan)
    console = Console(markup=False, highlight=False)
    with (
        RunDir.open(config, training.fixed) as run,
        ray_cluster(config, plan.resources),
        supervised(training, run, Roster(time.time), console) as (supervisor, directory),
        attempt(training, run, supervisor, directory, console) as core,
    ):
        yield Bench(training, run, core, supervisor)


@dataclass(frozen=True)
class Measured:
    """The stages alone, before the run and after it, and the rows of the run."""

    alone: Sequence[Alone]
    rows: Sequence[Mapping[str, Any]]


def measure(config: Config, steps: int) -> Measured:
    driver = psutil.Process()
    with started(config) as bench:
        pin(driver)
        publish = bench.core.trainer.publish_weights
        before = asyncio.run(alone(bench, publish(0), steps))
        rows = bench.coupled()
        after = asyncio.run(alone(bench, publish(config.max_steps), steps))
        check_pinned(driver)
    return Measured((before, after), rows)


def result(measured: Measured, task: Task, parameters: int, load_before: float) -> Result:
    rows, last = measured.rows, len(measured.rows) - 1 - REST
    run = Rate.of_rows(rows, FIRST, last)
    generation = mean(phase.generation.tokens_per_s for phase in measured.alone) / run.mean_length
    training = mean(phase.training.tokens_per_s for phase in measured.alone) / run.mean_length
    ratio = run.rollouts_per_s / min(generation, training)
    parts = ("step", "wait_for_batch", "forward_backward", "optim", "publish", "update_replicas")
    detail = {
        "generation_alone_rollouts_per_s": round(generation, 2),
        "training_alone_rollouts_per_s": round(training, 2),
        "mean_length": round(run.mean_length, 2),
        "measured_steps": last - FIRST + 1,
        "measured_s": round(run.seconds, 1),
        "step_s": {part: round(mean(r[f"time/{part}"] for r in rows[FIRST : last + 1]), 3) for part in parts},
        "inference_idle_frac": round(mean(r["perf/inference_idle_frac"] for r in rows[FIRST : last + 1]), 3),
        "groups_evicted": rows[last]["ledger/dropped"],
        "parameters": parameters,
        "task": asdict(task),
        "load_before": round(load_before, 2),
    }
    return Result(
        name="overlap",
        value=round(run.rollouts_per_s, 2),
        unit="rollouts/s of the asynchronous run (max_steps_off_policy = 1)",
        ratio=round(ratio, 3),
        target=TARGET,
        holds=ratio >= TARGET,
        against="the lesser of generation's and training's rates side by side, uncoupled, on the same cores",
        detail=detail,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of the run (default: 8)")
    parser.add_argument("--alone", type=int, default=4, help="training steps of each phase alone (default: 4)")
    parser.add_argument("--batch-size", type=int, default=TASK.batch_size, help="smaller ones only try the script")
    args = parser.parse_args()
    if min(args.steps, args.alone, args.batch_size) < 1:
        parser.error("--steps, --alone and --batch-size: expected at least 1 of each")

    from trireme.config import Config
    from trireme.process.environ import prepare_ray_environment

    let_actors_import_benchmarks()
    prepare_ray_environment(None, 1, deterministic=False)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        model = Path(directory) / "model"
        parameters = make_model(model, hidden=TASK.hidden, layers=TASK.layers)
        place = {"run": {"output_dir": directory, "name": "run"}, "max_steps": FIRST + args.steps + REST}
        task = replace(TASK, batch_size=args.batch_size)
        measured = measure(Config.model_validate(task.config(model) | place), args.alone)
    result(measured, task, parameters, load_before).print()


if __name__ == "__main__":
    main()
