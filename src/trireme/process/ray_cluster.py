"""Runs Ray for the time of a run, reserves places for its actors, and reaches processes on other nodes.

A place is a bundle of one of Ray's placement groups: cores and GPUs, reserved on a node for an actor, or for several
actors that must share the node.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import ParamSpec, TypeVar

import psutil
import ray
from ray._private import services as ray_services
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from trireme.config import CommonConfig
from trireme.core.actors import ActorOptions, ActorProxy, as_argument, place_gpus
from trireme.core.errors import RoomFailed, ServicesLost
from trireme.core.refusals import Refusal
from trireme.process import waits
from trireme.process.environ import Resources, cluster_address, keep_compiled_code
from trireme.process.faults import fault_point
from trireme.process.machine import VISIBLE, Node, this_machine
from trireme.process.private import private_directory
from trireme.process.worker_environment import WorkerEnvironment

Args = ParamSpec("Args")
Actor = TypeVar("Actor")
Method = TypeVar("Method", bound=Callable[..., object])
Progress = Callable[[list[str], float], None]
SharedGpus = tuple[str, str]
"""Ray's id of a node, and GPUs of that node as a value of CUDA_VISIBLE_DEVICES."""
log = logging.getLogger(__name__)

SHUTDOWN_S = 15.0
RAY_STARTS = 2
"""Attempts to start Ray. In the second one Ray's programs and libraries are in memory already."""

REACH_S = 5.0
PLACE_TICK_S = 1.0
SERVICES = ("gcs_server", "raylet")
"""Ray's processes without which no actor lives, as `ray._private.node.Node` calls them."""
OBITUARY = "A worker died or was killed"
"""Beginning of the page that Ray prints about each process that was killed."""


def _without_obituaries() -> None:
    """Keeps Ray from printing a page about each process that was killed (Ray has no option for this), and from printing
    the errors of calls whose results are no longer needed. The caller that waited for the process reports its death in
    one line."""
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    printed = ray._private.worker.print_to_stdstream

    def print_others(data: Mapping[str, Sequence[str]], ignore_prefix: bool) -> None:
        if not any(line.startswith(OBITUARY) for line in data["lines"]):
            printed(data, ignore_prefix)

    ray._private.worker.print_to_stdstream = print_others


@contextmanager
def ray_cluster(config: CommonConfig, local: Resources) -> Iterator[Resources]:
    """Context manager: connects to the cluster at `cluster_address`, and disconnects at the end of the `with` block. If
    there is no such address, starts Ray on this machine instead, with the cores of `local`, this machine's resources.
    At the end of the block it stops Ray, and leaves no processes and no files behind. Yields the resources of the
    cluster."""
    address = cluster_address(config)
    if address is None:
        _without_obituaries()
        with _local_cluster(local.cpus):
            yield local
        return
    with connected(address, config):
        yield cluster_resources(config.timeouts.start_s)


def cluster_resources(timeout_s: float) -> Resources:
    """Returns the machines of the cluster that this process has joined. Raises RoomFailed if a machine does not answer
    within `timeout_s` seconds."""
    return Resources(_nodes(timeout_s), "the Ray cluster")


@contextmanager
def connected(address: str, config: CommonConfig | None) -> Iterator[None]:
    """Context manager: connects to the running cluster at `address`, and disconnects at the end of the `with` block.
    The processes that this driver starts there get the environment variables and the code of a run of `config`; if
    `config` is None, they get neither. Raises BadInput if no cluster answers."""
    _without_obituaries()
    _refuse_unless_reachable(address)
    os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"  # else Ray refuses variables that a submitted job also sets
    if config:
        runtime_env = WorkerEnvironment.of(config, os.environ).runtime_env(os.environ)
    else:
        runtime_env = {}
    ray.init(address=address, log_to_driver=False, configure_logging=False, runtime_env=runtime_env)
    try:
        yield
    finally:
        ray.shutdown()


def _nodes(timeout_s: float) -> tuple[Node, ...]:
    """Returns the machines of the cluster with their resources. Asks all machines in parallel, with a short task on
    each node. The numbers of cores and GPUs are what Ray offers. If nodes do not answer, raises RoomFailed with their
    names."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    asking = [
        ray.remote(num_cpus=0, scheduling_strategy=on_node(node["NodeID"]))(this_machine).remote() for node in alive
    ]
    names = [f"node {node['NodeManagerAddress']}" for node in alive]
    owners = [f"{name}, asked what it has" for name in names]
    machines = waits.get_all(asking, owners=owners, timeout_s=timeout_s)
    return tuple(
        replace(
            machine,
            name=name,
            cpus=int(node["Resources"].get("CPU", 0)),
            num_gpus=int(node["Resources"].get("GPU", 0)),
            store_bytes=int(node["Resources"].get("object_store_memory", 0)),
            gpus=tuple(sorted(machine.gpus, key=lambda gpu: -gpu.free_bytes))[: int(node["Resources"].get("GPU", 0))],
            id=node["NodeID"],
        )
        for name, node, machine in zip(names, alive, machines, strict=True)
    )


def _refuse_unless_reachable(address: str) -> None:
    """Raises BadInput if `address` is host:port and nothing listens there; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdigit():  # "auto", "ray://...": Ray's own to resolve
        return
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise Refusal(
            f"cluster.address = {address}, where no Ray cluster answers ({error})",
            "the address of a running Ray cluster",
            "start one with `ray start --head`, or leave the key out to start one on this machine",
        ) from None


def check_services() -> None:
    """Raises ServicesLost if this process has started Ray's services and one of them has ended. If this process has
    joined a running cluster, does nothing."""
    exit_codes = _ended_services()
    if exit_codes:
        text = " and ".join(f"{kind} (exit code {code})" for kind, code in exit_codes.items())
        raise ServicesLost(f"Ray's services on this machine have ended, and all actors with them: {text}")


def _services() -> dict[str, subprocess.Popen[bytes]]:
    """Returns {name: process} of Ray's services that this process has started."""
    node = ray._private.worker._global_node
    started = node.all_processes if node else {}
    return {kind: info.process for kind in SERVICES for info in started.get(kind, ())}


def _ended_services() -> dict[str, int]:
    """Returns {name: exit code} of Ray's services that this process has started and that have ended."""
    return {kind: process.returncode for kind, process in _services().items() if process.poll() is not None}


def _remove(group: PlacementGroup) -> None:
    """Gives the places of `group` back to Ray, unless Ray's services have ended: then Ray would wait for a minute, and
    end this process."""
    if not _ended_services():
        remove_placement_group(group)


@contextmanager
def _local_cluster(cpus: int) -> Iterator[None]:
    """Context manager: starts Ray with `cpus` cores on this machine, and stops it at the end of the `with` block. If
    the block fails because Ray's services have ended, raises ServicesLost instead of the block's error."""
    before = _children()
    keep_compiled_code()  # TMPDIR ends with this block. (vLLM's own cache is in ~/.cache.)
    with private_directory() as directory:
        os.environ["TMPDIR"] = str(directory)  # for what actors and engines leave when they are killed (vLLM's sockets)
        try:
            _start_ray(cpus, f"{directory}/r")
            try:
                yield
            except ServicesLost:
                raise
            except (RoomFailed, RayError):
                check_services()
                raise
        finally:
            _end(before)


def _start_ray(cpus: int, directory: str) -> None:
    """Starts Ray with `cpus` cores and its files in `directory`. If that fails, tries a second time, then raises
    RoomFailed. (Ray gives its services 30 s to start, however busy the machine is: `ray._private.node.Node`.)

    The services get process groups of their own, so that signals to the driver's group do not reach them. Otherwise a
    SIGTERM would end the services before the driver could write a checkpoint. The driver would then hang for a minute,
    until Ray ended it. (The services still end with the driver: the kernel ensures that.)
    """
    fault_point("driver.cluster")
    popen = ray_services.ConsolePopen
    ray_services.ConsolePopen = partial(popen, process_group=0)
    quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    before = _children()
    try:
        for attempt in range(1, RAY_STARTS + 1):
            try:
                ray.init(address="local", num_cpus=cpus, _temp_dir=directory, **quiet)
                return
            except Exception as error:  # Ray's own have no narrower type
                load = f"its load is {os.getloadavg()[0]:.0f}, on {os.cpu_count()} cores"
                if attempt == RAY_STARTS:
                    raise RoomFailed(
                        f"Ray did not start on this machine in {RAY_STARTS} attempts: {error} If the machine is busy "
                        f"({load}), try again later; `ray start --head --block` shows what is wrong"
                    ) from error
                log.warning("Ray did not start on this machine (%s): %s It is started once more.", load, error)
                _end(before)
    finally:
        ray_services.ConsolePopen = popen


def _end(before: set[psutil.Process]) -> None:
    """Shuts Ray down. Kills processes that Ray started (children of this process that are not in `before`, and their
    descendants) if they have not ended after `SHUTDOWN_S` seconds."""
    started = [p for root in _children() - before for p in (root, *_children(root))]
    ray.shutdown()
    _, alive = psutil.wait_procs(started, timeout=SHUTDOWN_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=SHUTDOWN_S)


def _children(of: psutil.Process | None = None) -> set[psutil.Process]:
    """Returns the direct children of this process, or all descendants of the process `of`; none if `of` has ended."""
    try:
        return set(of.children(recursive=True) if of else psutil.Process().children())
    except psutil.NoSuchProcess:
        return set()


def reserve(
    resources: Sequence[ActorOptions],
    timeout_s: float,
    progress: Progress,
    ending: ExitStack,
    places: Sequence[int] = (),
) -> tuple[PlacementGroup, list[ActorOptions]]:
    """Reserves places for all actors together, in one placement group, on as few nodes as possible. `resources`: Ray's
    options with the resources of each actor. Returns the placement group, and for each actor its options with a
    scheduling strategy that puts the actor into its place. `ending` gives the places back to Ray. `progress` is called
    about once a second during the wait.

    `places`: the number of each actor's place, from 0; actors with the same number share a node. Empty: each actor has
    a place of its own. Raises BadInput if no node is large enough for a place of several actors, or for an actor with
    several GPUs; RoomFailed after `timeout_s` seconds.
    """
    places = places or range(len(resources))
    members: list[list[ActorOptions]] = [[] for _ in range(max(places) + 1)]
    for place, actor in zip(places, resources, strict=True):
        members[place].append(actor)
    bundles = [_bundle(actors) for actors in members]
    for bundle, actors in zip(bundles, members, strict=True):
        if max(map(_gpus, actors)) > 1:
            _refuse_unless_a_node_has(bundle, "inference.tensor_parallel")
        elif len(actors) > 1:
            _refuse_unless_a_node_has(bundle, "trainer.gpus_per_node")
    group = placement_group(bundles, strategy="PACK")
    ending.callback(_remove, group)
    owners = [f"Ray to place {len(resources)} actors ({bundles})"]
    waits.get_all([group.ready()], owners=owners, timeout_s=timeout_s, on_tick=progress)
    strategies = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n) for n in places]
    return group, [{**r, "scheduling_strategy": s} for r, s in zip(resources, strategies, strict=True)]


class PlacePool:
    """Reserves places for actors that are added later, and takes them back. `resources`: Ray's options with the
    resources of one actor. `ending` gives all places of the pool back to Ray.

    A place that `reserve` made can be given back to Ray only with its whole placement group, so the pool keeps it for
    the next actor.
    """

    def __init__(self, resources: ActorOptions, ending: ExitStack) -> None:
        self._resources = resources
        self._groups: list[PlacementGroup] = []
        self._free: list[ActorOptions] = []
        ending.callback(self._end)

    def _end(self) -> None:
        for group in self._groups:
            _remove(group)

    def take(self) -> ActorOptions:
        """Returns Ray's options for one more actor, in a free place of the pool or in a new place. An actor in a new
        place waits until the cluster has the resources free."""
        if self._free:
            return self._free.pop()
        group = placement_group([_bundle([self._resources]) or {"CPU": 0.001}])
        self._groups.append(group)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        return {**self._resources, "scheduling_strategy": strategy}

    def give_back(self, options: ActorOptions) -> None:
        """Takes back the place of an actor that has ended. A place that `reserve` made is kept for the next actor. A
        place that `take` made is given back to Ray. `options`: Ray's options of the actor, with its place."""
        group = options["scheduling_strategy"].placement_group
        if group in self._groups:
            self._groups.remove(group)
            remove_placement_group(group)
        else:
            self._free.append(options)

    @staticmethod
    def are_there(options_N: Sequence[ActorOptions]) -> list[bool]:
        """Returns for each actor True if its place is on a live node; False while a new place waits for resources, and
        after the place's node was lost. `options_N`: Ray's options of the N actors, with their places. Sends Ray one
        request for each placement group."""
        return [node is not None for node in actor_nodes(options_N)]


def nodes_of(options: Mapping[str, Sequence[ActorOptions]]) -> dict[str, list[str]]:
    """Returns {Ray's id of a node: rooms with actors on it}. `options`: {room: Ray's options of its actors}. Leaves out
    actors without a place on a live node."""
    rooms_by_node: dict[str, list[str]] = {}
    for room, actors in options.items():
        for node in {node: None for node in actor_nodes(actors) if node}:
            rooms_by_node.setdefault(node, []).append(room)
    return rooms_by_node


def actor_nodes(options_N: Sequence[ActorOptions]) -> list[str | None]:
    """Returns the node on which each actor's place is, as Ray's id of the node; None for a place that is not on a live
    node. `options_N`: Ray's options of the N actors, with their places."""
    strategies = [options["scheduling_strategy"] for options in options_N]
    groups = {strategy.placement_group.id: strategy.placement_group for strategy in strategies}
    tables = {name: placement_group_table(group) for name, group in groups.items()}
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    nodes = [
        tables[strategy.placement_group.id]["bundles_to_node_id"].get(strategy.placement_group_bundle_index)
        for strategy in strategies
    ]
    return [node if node in alive else None for node in nodes]


def await_places(options: Mapping[str, Sequence[ActorOptions]], timeout_s: float, progress: Progress) -> None:
    """Waits until each actor has a place on a live node, because nodes may have been lost after `reserve`. `options`:
    {room: Ray's options of its actors}. Calls `progress` once a second while a place is missing. Raises RoomFailed
    after `timeout_s` seconds."""
    started = time.monotonic()
    waited = 0.0
    while names := _without_place(options):
        if waited > timeout_s:
            raise RoomFailed(
                f"Ray did not find {' and '.join(names)} within {timeout_s:g} s (timeouts.place_s). Add a node to the "
                "cluster"
            )
        progress(names, waited)
        time.sleep(PLACE_TICK_S)
        waited = time.monotonic() - started


def _without_place(options: Mapping[str, Sequence[ActorOptions]]) -> list[str]:
    counts = {room: PlacePool.are_there(actors).count(False) for room, actors in options.items()}
    return [
        f"a place in the cluster for the {room} ({number} of {len(options[room])} actors)"
        for room, number in counts.items()
        if number
    ]


def create_actor(kind: Callable[Args, Actor], **options: object) -> Callable[Args, ActorProxy[Actor]]:
    """Returns a function that starts an actor of the class `kind` with the arguments of the class's constructor, and
    returns the actor's handle at once. `options`: Ray's options of the actor, at least one. Ignores the key `gpus`,
    which is no option of Ray."""
    options.pop("gpus", None)
    create: Callable[Args, ActorProxy[Actor]] = ray.remote(**options)(kind).remote
    return create


def in_group(name: str) -> Callable[[Method], Method]:
    """Returns a decorator for a method of an actor: Ray runs calls of the method in the actor's concurrency group
    `name`."""
    decorate: Callable[[Method], Method] = ray.method(concurrency_group=name)
    return decorate


def shared_gpus(options: ActorOptions) -> SharedGpus | None:
    """Asks Ray which GPUs an actor shares, and returns an argument for the actor's constructor, which Ray replaces by
    the answer. Returns None if `options`, Ray's options of the actor with its place, have no `gpus`.

    An actor cannot have a part of each of several GPUs. So actors that share GPUs have none of their own, and only
    their place has GPUs. A task that takes all of these for a moment learns which they are: always the same ones while
    the place is on the same node.
    """
    if "gpus" not in options:
        return None
    place = options["scheduling_strategy"]
    number = place.placement_group.bundle_specs[place.placement_group_bundle_index]["GPU"]
    # Ray's default ends the process of a task with GPUs after one call, so each actor would wait for a new process.
    task = ray.remote(num_cpus=0, num_gpus=number, max_calls=0, scheduling_strategy=place)(_visible_gpus)
    return as_argument(task.remote(options["gpus"]))


def _visible_gpus(numbers: Sequence[int]) -> SharedGpus:
    context = ray.get_runtime_context()
    ids = sorted(context.get_accelerator_ids()["GPU"], key=lambda name: (len(name), name))
    return context.get_node_id(), ",".join(ids[number] for number in numbers)


def see_own_gpus(shared: SharedGpus | None = None) -> None:
    """Makes this actor see its GPUs, and no others: the GPUs `shared`, or if that is None those that Ray has given it.
    Call it before CUDA starts. (Ray shows all GPUs of the node to an actor without GPUs.) Raises RoomFailed if `shared`
    names GPUs of another node."""
    if not ray.is_initialized():
        return  # this is no actor, but an object of a process without Ray
    context = ray.get_runtime_context()
    node, visible = shared or (context.get_node_id(), ",".join(context.get_accelerator_ids()["GPU"]))
    if node != context.get_node_id():
        raise RoomFailed("the node of this actor's place was lost after Ray had said which GPUs the place has")
    os.environ[VISIBLE] = visible


def on_node(node: str) -> object:
    """Returns a value of Ray's option `scheduling_strategy`: it places an actor on the node with the Ray id `node`, and
    on no other node."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def signal_processes(pids: Mapping[str, Sequence[int]], number: int) -> None:
    """Sends the signal `number` to processes on all nodes in parallel. `pids`: {Ray's id of a node: process ids on it}.
    Ignores processes that have ended, and nodes that do not answer within `REACH_S`."""
    local_node = ray.get_runtime_context().get_node_id()
    _signal(pids.get(local_node, ()), number)
    other_nodes = {node: those for node, those in pids.items() if node != local_node}
    sent = {
        ray.remote(num_cpus=0, scheduling_strategy=on_node(node), max_retries=0)(_signal).remote(those, number): node
        for node, those in other_nodes.items()
    }
    deadline = time.monotonic() + REACH_S
    while sent and (remaining_s := deadline - time.monotonic()) > 0:
        for reached in waits.ready(sent, remaining_s):
            del sent[reached]


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _refuse_unless_a_node_has(bundle: Mapping[str, float], key: str) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes):
        largest = {name: max(node.get(name, 0) for node in nodes) for name in bundle}
        raise Refusal(
            f"{key}, which needs {dict(bundle)} on one node, but no node has more than {largest}",
            "a number of processes that one node can hold",
            f"lower --{key.replace('_', '-')}, or leave it out",
        )


def _gpus(actor: ActorOptions) -> float:
    return place_gpus([actor])


def _bundle(actors: Sequence[ActorOptions]) -> dict[str, float]:
    """Returns the cores and GPUs of `actors` as one bundle, which Ray places on one node as a whole."""
    amounts = {"CPU": sum(actor.get("num_cpus", 0) for actor in actors), "GPU": place_gpus(actors)}
    return {name: amount for name, amount in amounts.items() if amount}
