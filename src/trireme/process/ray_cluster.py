"""Ray for the time of a run, and places for its actors."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import Any

import psutil
import ray
from ray._private import services as ray_services
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from trireme.config import CommonConfig
from trireme.core.errors import BadInput, RoomFailed
from trireme.plan.base import Plan, Resources
from trireme.process import waits
from trireme.process.environ import cluster_address

Progress = Callable[[list[str], float], None]
SHUTDOWN_S = 15.0
REACH_S = 5.0
LONGEST_TEMP_DIR = 28
"""Ray puts unix sockets some 60 characters below its directory, and the system allows 107 for the path of one."""


OBITUARY = "A worker died or was killed"


def _without_obituaries() -> None:
    """Ray prints a page for each process that was killed, whatever `log_to_driver` says, and has no option against it;
    and what others raised for whom nobody waits any more, because one died. Who died is said by whoever waited for it,
    in a line."""
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    printed = ray._private.worker.print_to_stdstream

    def print_others(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        if not is_obituary(data):
            printed(data, ignore_prefix)

    ray._private.worker.print_to_stdstream = print_others


def is_obituary(data: Mapping[str, Any]) -> bool:
    """Whether Ray is about to print that a process was killed."""
    return any(line.startswith(OBITUARY) for line in data["lines"])


@contextmanager
def ray_cluster(config: CommonConfig, plan: Plan) -> Iterator[Resources]:
    """Ray for the time of a run: the cluster at `cluster_address`, or one started here that leaves nothing behind."""
    _without_obituaries()
    address = cluster_address(config)
    if address is None:
        with _local_cluster(plan):
            yield plan.resources
        return
    _refuse_unless_reachable(address)
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    try:
        yield cluster_resources()
    finally:
        ray.shutdown()


def _refuse_unless_reachable(address: str) -> None:
    """Raises BadInput when `address` is host:port and nothing listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdigit():  # "auto", "ray://...": Ray's own to resolve
        return
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise BadInput(
            f"cluster.address = {address}: no Ray cluster answers there ({error}). "
            "Start one with `ray start --head`, or leave the key out to start one on this machine."
        ) from None


@contextmanager
def _local_cluster(plan: Plan) -> Iterator[None]:
    base = tempfile.gettempdir()
    directory = tempfile.mkdtemp(prefix="trireme-", dir=base if len(base) <= LONGEST_TEMP_DIR else "/tmp")
    before = _children()
    os.environ["TMPDIR"] = directory  # for what actors and engines leave when they are killed (vLLM's sockets)
    try:
        _start_ray(plan.resources.cpus, directory)
        yield
    finally:
        started = [p for root in _children() - before for p in (root, *_children(root))]
        ray.shutdown()
        _end(started)
        shutil.rmtree(directory, ignore_errors=True)


def _start_ray(cpus: int, directory: str) -> None:
    """Raises RoomFailed when its services do not come up, for which Ray gives them 30 s, whatever the machine does
    besides (`ray._private.node.Node`)."""
    try:
        with _in_groups_of_their_own():
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=directory,
            )
    except Exception as error:  # Ray's own have no narrower type
        raise RoomFailed(
            f"Ray did not start on this machine: {error} If that is busy (its load is {os.getloadavg()[0]:.0f}, on "
            f"{os.cpu_count()} cores), try again when it is not; `ray start --head --block` shows what is wrong"
        ) from error


@contextmanager
def _in_groups_of_their_own() -> Iterator[None]:
    """Services that Ray starts within do not get what a shell or a scheduler sends to the driver's process group. They
    would else end of its SIGTERM before the driver could commit, and the driver, which cannot do without them, would
    hang for a minute and be ended by Ray. (They end with the driver all the same: the kernel sees to that.)"""
    popen = ray_services.ConsolePopen
    ray_services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        ray_services.ConsolePopen = popen


def _children(of: psutil.Process | None = None) -> set[psutil.Process]:
    """Direct children of this process, or all descendants of another, which may have ended meanwhile."""
    try:
        return set(of.children(recursive=True) if of else psutil.Process().children())
    except psutil.NoSuchProcess:
        return set()


def _end(processes: list[psutil.Process]) -> None:
    """Waits until the cluster's processes are gone; those that stay are killed."""
    _, alive = psutil.wait_procs(processes, timeout=SHUTDOWN_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=SHUTDOWN_S)


def cluster_resources() -> Resources:
    """What the connected cluster has."""
    total = ray.cluster_resources()
    return Resources(
        nodes=sum(1 for node in ray.nodes() if node["Alive"]),
        cpus=int(total.get("CPU", 0)),
        gpus=int(total.get("GPU", 0)),
        memory_bytes=int(total.get("memory", 0)),
        source="the Ray cluster",
    )


def reserve(
    resources: Sequence[Mapping[str, float]],
    timeout_s: float,
    progress: Progress,
    ending: ExitStack,
    blocks: Sequence[int] = (),
) -> tuple[PlacementGroup, list[dict[str, Any]]]:
    """Places for actors with these Ray resources, all at once, packed on as few nodes as possible; and the options of
    each actor in its place. `ending` gives them back. `blocks`: how many, from the first on, are on one node together;
    those that are left go one by one. Raises BadInput when no node is large enough for a block."""
    blocks = [*blocks, *[1] * (len(resources) - sum(blocks))]
    bundles = [_together(resources[end - size : end]) for size, end in zip(blocks, accumulate(blocks), strict=True)]
    _refuse_unless_a_node_has([bundle for bundle, size in zip(bundles, blocks, strict=True) if size > 1])
    group = placement_group(bundles, strategy="PACK")
    ending.callback(remove_placement_group, group)
    waits.get_all(
        [group.ready()],
        who=[f"Ray to place {len(resources)} actors ({bundles})"],
        timeout_s=timeout_s,
        on_tick=progress,
    )
    places = [n for n, size in enumerate(blocks) for _ in range(size)]
    strategies = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n) for n in places]
    return group, [{**r, "scheduling_strategy": s} for r, s in zip(resources, strategies, strict=True)]


class PlacePool:
    """Places for actors with these Ray resources, which come and go. `ending` gives back those that are taken then.

    A place that `reserve` made cannot be given back to Ray without all others: it is kept for who comes next."""

    def __init__(self, resources: Mapping[str, float], ending: ExitStack) -> None:
        self._resources = resources
        self._groups: list[PlacementGroup] = []
        self._kept: list[dict[str, Any]] = []
        ending.callback(self._remove_all)

    def take(self) -> dict[str, Any]:
        """Ray's options of one actor more, which waits until there is a place."""
        if self._kept:
            return self._kept.pop()
        group = placement_group([_bundle(self._resources) or {"CPU": 0.001}])
        self._groups.append(group)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        return {**self._resources, "scheduling_strategy": strategy}

    def give_back(self, options: dict[str, Any]) -> None:
        """Nobody is at the place with these options any more."""
        group = options["scheduling_strategy"].placement_group
        if group in self._groups:
            self._groups.remove(group)
            remove_placement_group(group)
        else:
            self._kept.append(options)

    def _remove_all(self) -> None:
        for group in self._groups:
            remove_placement_group(group)


def has_place(options: Mapping[str, Any]) -> bool:
    """Whether Ray has the place of an actor with these options: it has none while a node is lost."""
    group = options["scheduling_strategy"].placement_group
    return bool(placement_group_table(group)["state"] == "CREATED")


def on_node(node: str) -> Any:
    """Ray's option `scheduling_strategy` of what shall be on the node with this id of Ray's, or nowhere."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def signal_processes(node: str, pids: Sequence[int], number: int) -> None:
    """Sends a signal to processes of a run on the node with Ray's id `node`; those that have ended are passed over."""
    if node == ray.get_runtime_context().get_node_id():
        _signal(pids, number)
        return
    sent = ray.remote(num_cpus=0, scheduling_strategy=on_node(node), max_retries=0)(_signal).remote(pids, number)
    waits.get(sent, who=f"a signal to processes on node {node}", timeout_s=REACH_S)


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _together(options: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One bundle for several actors: Ray never splits one over nodes."""
    bundles = [_bundle(each) for each in options]
    return {name: sum(bundle[name] for bundle in bundles) for name in bundles[0]}


def _refuse_unless_a_node_has(bundles: Sequence[Mapping[str, float]]) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for bundle in bundles:
        if not any(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes):
            most = {name: max(node.get(name, 0) for node in nodes) for name in bundle}
            raise BadInput(
                f"trainer.gpus_per_node asks for {dict(bundle)} on one node, of which no node has more than {most}; "
                "expected a number of shards that one node can hold: lower --trainer.gpus-per-node, or leave it out"
            )


def _bundle(options: Mapping[str, float]) -> dict[str, float]:
    named = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0)}
    return {name: amount for name, amount in named.items() if amount}
