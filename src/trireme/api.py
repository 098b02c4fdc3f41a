"""Everything for a training loop of your own: a trainer, and a sampler in front of replicas (docs/own-loop.md).

    config = loop_config(["--model.name", "Qwen/Qwen3-0.6B", *sys.argv[1:]])
    with open_rooms(config, Path("logs")) as (trainer, sampler):
        sampler.update_weights(trainer.publish_weights(0))
        ...

The options are the same as for `rl`. This module handles models, devices and Ray. The loop decides what to sample, how
to train on it, and when to publish weights. Importing this module imports no Ray: the environment is prepared first.
All names here are stable.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from orchestrator.untrusted import CodeLimits, CodeResult, RunCodeFailed, run_code
from trainer.schedule import get_lr, lr_at, scale_lr
from trireme.config import Config
from trireme.config.checks import check
from trireme.config.installed import check_installed
from trireme.config.load import load
from trireme.config.model_facts import ModelFacts
from trireme.config.trainer import LoraConfig
from trireme.core.errors import BadInput, NonFiniteGradient, RoomFailed
from trireme.core.refusals import Refusal
from trireme.core.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
)
from trireme.launch.common import StartProgress, prepare_cluster
from trireme.plan.rl import LOOP_ROOMS
from trireme.plan.trainer import TrainerPart
from trireme.plan.whole import PartKind, Plan
from trireme.process.environ import Resources
from trireme.train.kl_reference import keep_reference, resolve_reference

if TYPE_CHECKING:
    from inference.handle import InferenceHandle
    from inference.sampling_client import SamplingClient
    from trainer.handle import TrainerHandle

__all__ = [
    "AdamParams",
    "BadInput",
    "CodeLimits",
    "CodeResult",
    "Config",
    "Datum",
    "ForwardBackwardOutput",
    "LoraConfig",
    "ModelInput",
    "NonFiniteGradient",
    "OptimStepResponse",
    "RoomFailed",
    "RunCodeFailed",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "TensorData",
    "get_lr",
    "loop_config",
    "lr_at",
    "new_directory",
    "open_rooms",
    "open_trainer",
    "run_code",
    "scale_lr",
]

UNREAD = Path(__file__).with_name("api.toml")


def loop_config(argv: Sequence[str]) -> Config:
    """Returns the configuration of a training loop. `argv` holds options as on a command line of `rl` (`@ FILE.toml`,
    `--key value`); environment variables set keys too. Prints warnings. Raises BadInput."""
    config = load(["@", str(UNREAD), *argv]).config
    facts = ModelFacts.of(config, required=True)
    assert facts is not None, "required"
    for warning in check(config, facts):
        print(f"warning: {warning}", file=sys.stderr)
    return resolve_reference(config.with_absolute_paths(), facts)


def new_directory(path: Path) -> Path:
    """Makes the directory `path` for the files that a loop writes, and returns it. Raises BadInput if it holds files
    already, such as files of another run: the loop would overwrite them."""
    if path.exists() and (names := sorted(entry.name for entry in path.iterdir())):
        raise Refusal(
            f"the directory {path}, which is not empty (it holds {', '.join(names[:3])}{', ..' if names[3:] else ''})",
            "a new or an empty directory",
            "choose another --run.name or --run.output-dir, or delete that directory",
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def open_rooms(
    config: Config, logs: Path, rooms: Sequence[PartKind] = LOOP_ROOMS
) -> Iterator[tuple[TrainerHandle, SamplingClient]]:
    """Context manager: starts a trainer and `inference.replicas` replicas, yields the trainer and a sampler that uses
    the replicas, and stops all of them at the end of its `with` block. Trainer and replicas load `model.name`, but the
    replicas sample only after the first published weights.

    `logs`: the directory for the actors' logs. `rooms`: the rooms to reserve CPUs, GPUs and memory for, among them
    trainer and inference. Raises BadInput, RoomFailed.
    """
    check_installed()
    with _opened(config, rooms, logs.absolute()) as (trainer, inference):
        from inference.sampling_client import SamplingClient

        assert inference is not None
        replicas = inference.replica_set()
        sampler = SamplingClient(replicas, inference.router_factory(replicas), config.tokenizer_name)
        try:
            yield trainer, sampler
        finally:
            sampler.close()


@contextmanager
def open_trainer(config: Config, logs: Path) -> Iterator[TrainerHandle]:
    """Context manager: starts a trainer, as `open_rooms` does, for a loop that samples nothing. Yields the trainer, and
    stops it at the end of its `with` block."""
    with _opened(config, [TrainerPart], logs.absolute()) as (trainer, _):
        yield trainer


@contextmanager
def _opened(
    config: Config, rooms: Sequence[PartKind], logs: Path
) -> Iterator[tuple[TrainerHandle, InferenceHandle | None]]:
    """Context manager: starts the shards and, in parallel, the replicas if `rooms` has them. Yields handles of the
    trainer and of the replicas (None if there are none), and stops both at the end of its `with` block."""
    plan = Plan(config, ModelFacts.of(config, required=True), Resources.of_this_machine(), rooms)
    prepare_cluster(config, plan)
    from inference.handle import InferenceHandle
    from trainer.handle import TrainerHandle
    from trireme.launch.starting import await_ready, joined, reserve_places

    keep_reference(config)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    progress = StartProgress(console)
    logs.mkdir(parents=True, exist_ok=True)
    with joined(plan) as plan, ExitStack() as ending:
        places = reserve_places(plan, progress, console, ending).rooms
        config = plan.resolved(config)
        if "inference" in places:
            inference = InferenceHandle.start(config, places["inference"], logs)
        else:
            inference = None
        if inference:
            ending.callback(inference.stop)
        trainer = TrainerHandle.start(
            config, places["trainer"], logs, taken_share=plan.taken_share, offloads=plan.offloads
        )
        ending.callback(trainer.stop)
        starting = [trainer.ready_refs()]
        if inference:
            starting.append(inference.ready_refs())
        await_ready(starting, plan, logs, progress)
        console.print("; ".join(filter(None, trainer.shown())))
        yield trainer, inference
