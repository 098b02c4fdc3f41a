"""`trireme launch`: the file that starts a run on a cluster, from its configuration.

    trireme launch slurm @ configs/qwen3-8b-2x8gpu.toml --nodes 2 > run.sbatch
    trireme launch rayjob sft @ sft.toml --nodes 1 --trainer.shards 8

All keys of `rl` (of `sft`, if that word follows the kind) may follow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trireme.cli.common import Parser
from trireme.config import CommonConfig, Config
from trireme.config.checks import check
from trireme.config.load import load_as
from trireme.config.model_facts import ModelFacts
from trireme.config.sft import SftConfig
from trireme.core.errors import EXIT_OK
from trireme.plan.base import PartKind
from trireme.plan.rl import RL_ROOMS
from trireme.plan.trainer import TrainerPart
from trireme.tools.launch_files import IMAGE, KINDS, launch_file, node_request

ROOMS: dict[str, tuple[type[CommonConfig], Sequence[PartKind]]] = {
    "rl": (Config, RL_ROOMS),
    "sft": (SftConfig, (TrainerPart,)),
}
"""For each command its configuration, and the parts of its plan that need machines."""


def main(argv: Sequence[str]) -> int:
    """Prints the launch file; `argv` is what follows the command's name. Raises BadInput."""
    options, words = _parser().parse_known_args(list(argv))
    command = words.pop(0) if words[:1] in (["rl"], ["sft"]) else "rl"
    schema, kinds = ROOMS[command]
    config = load_as(schema, words).config
    facts = ModelFacts.of(config, required=True)
    assert facts is not None  # it is required
    for warning in check(config, facts):
        print(f"warning: {warning}", file=sys.stderr)
    request = node_request(config, facts, kinds, options.nodes, options.gpus_per_node)
    given = (options.nodes, options.image, options.gpus_per_node)
    print(launch_file(options.kind, command, words, config, request, *given), end="")
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="trireme launch",
        description="Prints the file that starts a run on a cluster. All keys of `rl` may follow: @ files and --flags.",
        allow_abbrev=False,
    )
    parser.add_argument("kind", choices=KINDS, help="where to start it")
    parser.add_argument("--nodes", type=_positive, required=True, metavar="N", help="nodes with a part of the run")
    parser.add_argument("--gpus-per-node", type=_positive, metavar="N", help="of each (default: as few as are enough)")
    parser.add_argument("--image", default=IMAGE, help="of the repository, for Kubernetes")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError("it takes a whole number from 1 on")
    return int(text)
