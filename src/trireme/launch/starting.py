"""Starts whatever needs actors: a run, an evaluation, a service, a training loop of a user.

    prepare_cluster(config, plan)                  refuses what this machine lacks; sets what Ray reads at its import
    with joined(plan) as plan:                     starts Ray here or joins it; checks the plan against its machines
        places = reserve_places(plan, ..., ending) a place for each actor; the nodes with places are examined
        TrainerHandle.start(places.rooms[...])     the rooms start in parallel; `ending` gets the calls that stop them
        await_ready(starting, plan, logs, progress) each has loaded its model, or the error names the late room
        publish_weights, load_state                the first weights, unless replicas keep the weights that they loaded

`prepare_cluster` (`trireme.launch.common`) comes before the import of this module, which imports Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ray.util.placement_group import PlacementGroup, placement_group_table
from rich.console import Console

from trireme.core.actors import ActorOptions, Ref
from trireme.launch.doctor import check_nodes
from trireme.plan.whole import Plan
from trireme.process import waits
from trireme.process.environ import Resources, cluster_address
from trireme.process.ray_cluster import Progress, actor_nodes, cluster_resources, nodes_of, ray_cluster, reserve

NODES_S = 120.0
"""Seconds in which nodes of a cluster have to report their resources, before actors start there: a process starts on
each and imports this project, perhaps on a busy machine or from a network's file system."""


Starting = tuple[Sequence[Ref[object]], Sequence[str]]
"""References that are ready when the actors of a room have started, and the actors' names."""


@contextmanager
def joined(plan: Plan) -> Iterator[Plan]:
    """Context manager: starts Ray on this machine, or joins the cluster that the configuration names. Stops Ray, or
    leaves the cluster, at the end of the `with` block. Yields the plan, completed with the resources of the machines.
    Raises BadInput if the plan needs more than the machines have."""
    with ray_cluster(plan.config, plan.resources) as resources:
        plan = replace(plan, resources=resources)
        plan.check_resources()
        yield plan


def check_replicas(plan: Plan, target: int, added: int) -> None:
    """Checks that the machines can hold `target` replicas in total, `added` of them new. Raises BadInput if they cannot
    hold the total, or if the free resources do not suffice for the new ones. Raises RoomFailed if nodes of a cluster do
    not report their resources."""
    joined = cluster_address(plan.config) is not None
    if joined:
        now = cluster_resources(NODES_S)
    else:
        now = Resources.of_this_machine()
    replace(plan, resources=now).check_replicas(target, added)


@dataclass(frozen=True)
class ReservedPlaces:
    """The places in the cluster that are reserved for all actors of a plan."""

    group: PlacementGroup
    rooms: Mapping[str, list[ActorOptions]]
    """Ray's options of each actor in its place, by room."""

    @property
    def text(self) -> str:
        """The number of nodes with places, as words ("2 nodes")."""
        count = len(set(placement_group_table(self.group)["bundles_to_node_id"].values()))
        if count == 1:
            return "1 node"
        return f"{count} nodes"


def reserve_places(plan: Plan, progress: Progress, console: Console, ending: ExitStack) -> ReservedPlaces:
    """Reserves a place in the cluster for each actor of `plan`. If the run joined a cluster, also examines the nodes
    with these places. `ending` gives the places back. Raises BadInput if other runs leave too little memory on these
    nodes, or if the nodes cannot work together; RoomFailed after `timeouts.place_s`."""
    group, options = reserve(plan.options, plan.config.timeouts.place_s, progress, ending, plan.places)
    places = ReservedPlaces(group, plan.by_room(options))
    if cluster_address(plan.config):
        nodes = zip(plan.actor_names, actor_nodes(options), strict=True)
        placed = {name: node for name, node in nodes if node}  # none where its node was lost meanwhile
        replace(plan, resources=cluster_resources(NODES_S), placed=placed).check_resources()
        check_nodes(plan, nodes_of(places.rooms), console)
    return places


def await_ready(rooms: Sequence[Starting], plan: Plan, log_dir: Path, on_tick: Progress) -> None:
    """Waits until all rooms have started, and calls `on_tick` meanwhile. `rooms`: for each room, the `ready_refs()` of
    its handle. After the time that the plan allows for a start, raises RoomFailed that names the late actors and
    `log_dir`."""
    refs = [ref for room_refs, _ in rooms for ref in room_refs]
    names = [name for _, room_names in rooms for name in room_names]
    waits.get_all(refs, owners=names, timeout_s=plan.start_s, log=log_dir, on_tick=on_tick, limit=plan.start_text)
