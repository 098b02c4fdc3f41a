"""`trireme doctor`: examines all nodes of a cluster before a run, and prints the faults and the commands that mend
them.

    trireme doctor --cluster.address 10.0.0.1:6379              examines for what any run needs
    trireme doctor @ config.toml --nodes node1,node2,node3      for this run of `rl`; also names the missing nodes
    trireme doctor sft @ sft.toml --json                        for this run of `sft`; prints JSON for programs

Without the address of a cluster (in --cluster.address or RAY_ADDRESS) it examines this machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from trireme.cli.common import Parser
from trireme.config import CommonConfig, Config
from trireme.config.load import load_as
from trireme.config.model_facts import ModelFacts
from trireme.config.sft import SftConfig
from trireme.core.errors import BadInput
from trireme.core.finite_json import to_json
from trireme.doctor.examination import Declared, Examination, Expected, absolute
from trireme.doctor.facts import Questions, collect
from trireme.doctor.findings import findings
from trireme.doctor.report import as_json, render
from trireme.plan.rl import RL_ROOMS
from trireme.plan.trainer import TrainerPart
from trireme.plan.whole import PartKind, Plan
from trireme.process.environ import cluster_address, prepare_ray_environment
from trireme.process.machine import this_machine

ADDRESS = "--cluster.address"
COMMANDS: dict[str, tuple[type[CommonConfig], Sequence[PartKind]]] = {
    "rl": (Config, RL_ROOMS),
    "sft": (SftConfig, (TrainerPart,)),
}
"""The configuration of each command, and the parts of its plan that take memory of nodes."""
PIPE_WIDTH = 160
"""The width of the tables, in characters, where there is no terminal."""


def main(argv: Sequence[str], console: Console) -> None:
    """Runs the command with the arguments `argv`. Raises BadInput if a run would be refused."""
    options, config = parse(argv)
    if config:
        address = cluster_address(config)
    else:
        address = options.address or os.environ.get("RAY_ADDRESS")
    examination, head = _examine(config, address)
    if config:
        expected = _expected(config, examination)
    else:
        expected = Expected()
    problems = findings(examination, replace(expected, head=head, nodes=options.nodes))
    if options.json:
        print(to_json(as_json(examination, problems), indent=1))
    else:
        terminal = Console(markup=False, highlight=False, width=None if console.is_terminal else PIPE_WIDTH)
        for part in render(examination, problems):
            terminal.print(part)
    errors = [finding.node for finding in problems if finding.fatal]
    if errors:
        nodes = ", ".join(dict.fromkeys(errors))
        raise BadInput(
            f"{len(errors)} of {len(problems)} findings would stop a run ({nodes}): follow the column `what to type`"
        )


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, CommonConfig | None]:
    """Parses the arguments. Returns (the options of the command, the configuration of the run that is to start). The
    configuration is None if the arguments have only options of the command. Raises BadInput."""
    command = argv[0] if argv and argv[0] in COMMANDS else "rl"
    parser = Parser(
        prog="trireme doctor",
        usage="trireme doctor [rl|sft] [@ FILE] [--KEY VALUE ...] [--nodes A,B,C] [--json]",
        description="Examines all nodes of a cluster. All keys of `rl` may follow, or after `sft` its keys.",
        epilog="Exit code 0: a run would start, perhaps with warnings; 2: it would be refused.",
        allow_abbrev=False,
    )
    parser.add_argument(ADDRESS, dest="address", metavar="HOST:PORT", help="of the cluster")
    parser.add_argument("--nodes", type=_names, default=(), metavar="A,B,C", help="names of the nodes that it needs")
    parser.add_argument("--json", action="store_true", help="for programs")
    options, keys = parser.parse_known_args(argv[argv[:1] == [command] :])
    if not keys:
        return options, None
    if options.address:
        keys += [ADDRESS, options.address]
    return options, load_as(COMMANDS[command][0], keys).config.with_absolute_paths()


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or text.isdigit():
        raise argparse.ArgumentTypeError("names or addresses of nodes: --nodes a,b,c")
    return names


def _examine(config: CommonConfig | None, address: str | None) -> tuple[Examination, str]:
    """Examines the cluster at `address`; None: this machine. Returns the examination, and the address at which further
    nodes would join the cluster."""
    if address is None:
        machine = this_machine()
        facts = collect(Questions(model=config.model.name if config else ""))
        node = Declared(machine.name, "127.0.0.1", facts.host, True, machine.cpus, machine.num_gpus, 0)
        return Examination([node], facts, {machine.name: facts}), "HEAD:6379"
    prepare_ray_environment(address, 1, False)
    from trireme.launch.doctor import examine, join_address  # imports Ray, which reads the variables
    from trireme.process.ray_cluster import connected

    with connected(address, config):
        return examine(config), join_address()


def _expected(config: CommonConfig, examination: Examination) -> Expected:
    """Returns what the run needs of the nodes that answered. If its plan does not fit these nodes, the result's
    `refusal` says why. For `sft` the plan leaves out the data, which takes no memory of nodes."""
    if not examination.facts:
        return Expected(output_dir=absolute(config.run.directory), model=config.model.name)
    parts = COMMANDS[config.command][1]
    plan = Plan(config, ModelFacts.of(config, required=False), examination.resources(), parts)
    expected = Expected.of(config, plan)
    try:
        plan.check_resources()
    except BadInput as error:
        return replace(expected, refusal=str(error))
    return expected
