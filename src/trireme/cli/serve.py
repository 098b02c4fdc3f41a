"""The command `trireme serve`: a server for clients of Tinker, which train and sample on this machine or cluster.

    trireme serve @ examples/sort.toml
    trireme serve --model.name Qwen/Qwen3-0.6B --trainer.shards 2 --inference.replicas 2

The command reads these options of `rl`: the model, shards, replicas, deadlines, and `service.*`. The run directory
holds the states that clients save; the next server with the same run.name finds them there.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rich.console import Console

from trireme.api import open_rooms
from trireme.cli.common import planned
from trireme.config import Config
from trireme.config.load import load
from trireme.core.refusals import Refusal
from trireme.launch.common import prepare_cluster
from trireme.plan.serve import SERVE_ROOMS
from trireme.run.rundir import locked

UNREAD = Path(__file__).with_name("serve.toml")


def main(argv: list[str], console: Console) -> None:
    """Serves clients until a signal comes. `argv`: the arguments. Raises Stopped, TriremeError."""
    loaded = load(["@", str(UNREAD), *argv])
    config = loaded.config
    _refuse_what_is_not_served(config)
    plan = planned(loaded, SERVE_ROOMS, console)
    if plan is None:
        return
    assert plan.facts is not None, "required"
    name = config.model.name
    absolute = config.with_absolute_paths()
    directory = Path(config.run.output_dir).expanduser().absolute() / (config.run.name or "tinker")

    prepare_cluster(absolute, plan)
    from trireme.launch import service, tinker  # imports Ray, for which the environment is prepared first

    service.check_port(config)
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        keys = service.keys_of(config, directory, console.print, prefix="tml")
        tinker.clear(directory)
        rooms = partial(open_rooms, absolute, directory / "logs", SERVE_ROOMS)
        tinker.serve_clients(absolute, (name, absolute.model.name), plan.facts, rooms, keys, directory, console.print)


def _refuse_what_is_not_served(config: Config) -> None:
    """Raises BadInput for options that this server does not support."""
    if config.run.url:
        raise Refusal(
            f"run.output_dir = {config.run.output_dir} with `trireme serve`",
            "a local directory, because `trireme serve` keeps what clients save on this machine",
            "give a local path as --run.output-dir",
        )
    if "lm_head" in config.trainer.lora.target_modules and config.trainer.lora.on:
        raise Refusal(
            "trainer.lora with an adapter for lm_head and `trireme serve`",
            "adapters for other layers: a replica has only one adapter of the output matrix, for all requests",
            "leave --trainer.lora.train-unembed out",
        )
