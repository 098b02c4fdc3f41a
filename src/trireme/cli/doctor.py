"""`trireme doctor`: examines all nodes of a cluster before a run, and says what is wrong and what to type.

    trireme doctor --cluster.address 10.0.0.1:6379              a cluster, as any run needs it
    trireme doctor @ config.toml --nodes node1,node2,node3      as a run of `rl` needs it; names the missing nodes
    trireme doctor sft @ sft.toml --json                        as a run of `sft` needs it; for programs

Without a cluster's address (RAY_ADDRESS counts too) it examines this machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from trireme.config import CommonConfig, Config
from trireme.config.load import load_as
from trireme.config.model_facts import ModelFacts
from trireme.config.sft import SftConfig
from trireme.core.errors import BadInput
from trireme.core.finite_json import to_json
from trireme.core.refusals import Refusal
from trireme.doctor.examination import Declared, Examination, Expected, absolute
from trireme.doctor.facts import Questions, collect
from trireme.doctor.finding import Finding
from trireme.doctor.findings import findings
from trireme.doctor.report import as_json, render
from trireme.plan.base import PartKind, Plan
from trireme.plan.rl import RL_ROOMS
from trireme.plan.trainer import TrainerPart
from trireme.process.environ import Resources, cluster_address, prepare_ray_environment
from trireme.process.machine import this_machine

ADDRESS = "--cluster.address"
ROOMS: dict[str, Sequence[PartKind]] = {"rl": RL_ROOMS, "sft": (TrainerPart,)}
"""The parts of a plan that take memory of nodes, by the command."""
PIPE_WIDTH = 160
"""Columns of the tables where there is no terminal."""


def examine_nodes(argv: Sequence[str], console: Console) -> None:
    """Runs the command; `argv` is what follows its name. Raises BadInput if a run would be refused."""
    kind = argv[0] if argv and argv[0] in ROOMS else "rl"
    options, keys = _parser().parse_known_args(argv[argv[:1] == [kind] :])
    config = _config(kind, keys)
    address = cluster_address(config) if config else _address(keys)
    found, expected = _examine(config, address)
    expected = replace(expected, **_nodes(options.nodes))
    wrong = findings(found, expected)
    if options.json:
        print(to_json(as_json(found, wrong), indent=1))
    else:
        shown = Console(highlight=False, width=None if console.is_terminal else PIPE_WIDTH)
        for part in render(found, wrong):
            shown.print(part)
    if errors := [finding for finding in wrong if finding.fatal]:
        raise BadInput(_summary(errors, wrong))


def _summary(errors: Sequence[Finding], wrong: Sequence[Finding]) -> str:
    nodes = ", ".join(dict.fromkeys(finding.node for finding in errors))
    return f"{len(errors)} of {len(wrong)} findings would stop a run ({nodes}): do what stands under `what to type`"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trireme doctor",
        usage="trireme doctor [rl|sft] [@ FILE] [--KEY VALUE ...] [--nodes N] [--json]",
        description="Examines all nodes of a cluster. All keys of `rl` may follow, or after `sft` its keys.",
        epilog="Exit code 0: a run would start, perhaps with warnings; 2: it would be refused.",
        allow_abbrev=False,
    )
    parser.add_argument("--nodes", metavar="N", help="how many nodes there should be, or their names: a,b,c")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _nodes(given: str | None) -> dict[str, Any]:
    """Reads --nodes: a number, or names."""
    if given is None:
        return {}
    if given.isdigit():
        return {"count": int(given)}
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names:
        raise Refusal(f"--nodes {given}", "how many nodes there should be, or their names", "--nodes a,b,c").error()
    return {"nodes": names}


def _config(kind: str, keys: Sequence[str]) -> CommonConfig | None:
    """Returns the configuration of the run that is to start; None if none is given, or only an address."""
    if not keys or (keys[0].partition("=")[0] == ADDRESS and not any(word.startswith("@") for word in keys)):
        return None
    schema: type[CommonConfig] = SftConfig if kind == "sft" else Config
    return load_as(schema, list(keys)).config.with_absolute_paths()


def _address(keys: Sequence[str]) -> str | None:
    if not keys:
        return os.environ.get("RAY_ADDRESS")
    _, equals, value = keys[0].partition("=")
    given = [value, *keys[1:]] if equals else list(keys[1:])
    if len(given) != 1 or not given[0]:
        raise Refusal(" ".join(keys), f"{ADDRESS} HOST:PORT alone, or a configuration: @ FILE", "correct it").error()
    return given[0]


def _examine(config: CommonConfig | None, address: str | None) -> tuple[Examination, Expected]:
    """Examines the cluster at `address`, or this machine without one."""
    output_dir = absolute(config.run.directory) if config else ""
    model = config.model.name if config else ""
    head, stopped_by_ray = "HEAD:6379", False
    if address is None:
        here = this_machine()
        facts = collect(Questions(output_dir, model=model))
        alone = Declared(here.name, "127.0.0.1", facts.host, True, here.cpus, here.num_gpus, 0)
        found = Examination([alone], facts, {here.name: facts})
    else:
        prepare_ray_environment(address, 1, False)
        from trireme.launch.doctor import examine, has_dashboard, join_address  # imports Ray, which reads the variables
        from trireme.process.ray_cluster import connected

        with connected(address, config):
            found = examine(config)
            head, stopped_by_ray = join_address(), has_dashboard()
    if config is None:
        return found, Expected(head=head)
    expected = _expected(config, found)
    return found, replace(expected, head=head, grace_s=expected.grace_s if stopped_by_ray else 0.0)


def _expected(config: CommonConfig, found: Examination) -> Expected:
    """Returns what the run expects of the nodes that answered, and why its plan does not fit them if it does not."""
    if not found.facts:
        return Expected(output_dir=absolute(config.run.directory), model=config.model.name)
    plan = _plan(config, found.resources())
    expected = Expected.of(config, plan)
    try:
        plan.check_resources()
    except BadInput as error:
        return replace(expected, refusal=str(error))
    return expected


def _plan(config: CommonConfig, resources: Resources) -> Plan:
    """Returns the plan of the run on these nodes. Without the data of `sft`, which takes no memory of nodes."""
    return Plan(config, ModelFacts.of(config, required=False), resources, ROOMS[config.command])
