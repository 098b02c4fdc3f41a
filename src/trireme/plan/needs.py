"""Adds up what each process of a run takes of its machine, and says whether it fits.

All figures are estimates. `GPU_TOLERANCE` and `HOST_TOLERANCE` are the only places that say how far off they may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from trireme.core.actors import ActorOptions, place_gpus
from trireme.core.refusals import Refusal
from trireme.plan.memory import GIB, GPU_ALLOWANCES
from trireme.process.machine import Gpu, Node

GPU_TOLERANCE = 1.15
HOST_TOLERANCE = 2.0
"""A run that needs more than this multiple of a machine's memory is refused; below, it only warns. On a GPU tensors are
counted, to about 15 %. On a host processes share much of the counted memory, or never touch it."""
ASSUMED_GPU = Gpu(80 * GIB, 80 * GIB)
"""The GPU that a plan assumes where no driver describes one."""
HOST_OF_CUDA_GIB = 2.5
"""Host memory of a process that uses CUDA, without tensors. It is an allowance: nothing was measured on a GPU."""
VERSIONS = "two versions of the weights"
"""The purpose of the memory for the newest version of the weights and the version before it in Ray's object store. A
machine with a replica has both versions whole, and the replica maps them; any other machine has the shares of its ranks
of the trainer."""
SAMPLER_WEIGHTS = "weights for samplers"
"""The purpose of the memory for the weights of the base and of `service.tinker.snapshots` samplers, which `trireme
serve` keeps in addition to the two versions."""
KV_CACHE = "its KV cache"
"""The purpose of a replica's GPU memory for keys and values."""
SERVICES_GIB = 0.4
"""Measured memory of Ray's services on a machine."""
KEPT_VERSIONS = 2
"""Versions that live at the same time: the newest, and the one before it, until all replicas have the newest."""
BUFFERS = 2
BUCKET_BYTES = 64 * 2**20
"""The number of buckets of published weights that a rank sends at the same time, and the bytes of a usual bucket
(`BUFFERS` and `BUCKET_BYTES` of `trireme.transports.packing`, which imports torch)."""
SLABS = 2
SLAB_BYTES = 64 * 2**20
"""The number of slabs through which a rank sends to replicas on its device, and the bytes of each (`SLABS` and
`SLAB_BYTES` of `trireme.transports.slabs`, which imports torch)."""


@dataclass(frozen=True)
class Need:
    """The memory that one actor needs, in bytes by purpose."""

    host: Mapping[str, int]
    """Bytes of its machine's memory, by purpose."""
    _: KW_ONLY
    gpu: Mapping[str, int] = field(default_factory=dict)
    """Bytes of memory on each of its GPUs, by purpose."""
    resting: Mapping[str, int] | None = None
    """The part of `gpu` that the actor keeps while it rests in a colocated run, by purpose; None: the actor never
    rests."""
    shared: Mapping[str, int] = field(default_factory=dict)
    """Bytes of memory that the actors of a machine share, by purpose: each purpose counts once for a machine."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the actor's part of memory that other actors have in `shared`, by purpose. The parts of a machine's
    actors add up; if an actor there has the same purpose in `shared`, these bytes include the parts."""
    gpu_share: float = 0.0
    """The share of all memory of each of its GPUs that must be free when it starts."""
    shm_free: int = 0
    """Bytes that must be free in its machine's /dev/shm when it starts."""

    def free_gpus(self, node: Node) -> int:
        """Returns how many GPUs of `node` have enough free memory for the actor to start. A GPU of unknown size counts
        as free."""
        return node.num_gpus - sum(gpu.free_bytes < self.gpu_share * gpu.memory_bytes for gpu in node.gpus)

    def room(self, node: Node, num_gpus: int) -> int:
        """Returns how many actors with this need, and with `num_gpus` GPUs each, fit into the free memory and GPUs of
        `node`."""
        actors = node.free_bytes // sum(self.host.values())
        if num_gpus:
            return min(actors, self.free_gpus(node) // num_gpus)
        return actors


@dataclass(frozen=True)
class NodeNeeds:
    """The needs of the actors on one machine, compared with its memory."""

    node: Node
    actors: Mapping[str, Need]
    """The needs of its actors by name."""
    gpu_users: Sequence[Sequence[str]]
    """For each GPU that the actors use, the names of the actors that use it."""

    @property
    def host(self) -> dict[str, int]:
        """Bytes of host memory that all actors and Ray need together, {purpose: bytes}."""
        totals = {"Ray": int(SERVICES_GIB * GIB)}
        for need in self.actors.values():
            for label, number in (*need.host.items(), *need.parts.items()):
                totals[label] = totals.get(label, 0) + number
        for need in self.actors.values():
            totals |= {label: max(number, totals.get(label, 0)) for label, number in need.shared.items()}
        return totals

    @property
    def gpu(self) -> dict[str, int]:
        """Bytes needed on the GPU that is filled most, {purpose: bytes}."""
        return max(self.phases.values(), key=_total, default={})

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """{name of an actor of the GPU that is filled most: {purpose: bytes}}: what all actors of this GPU hold there
        while this actor works. The others rest meanwhile, or work too if they never rest."""
        by_gpu = [self._phases({name: self.actors[name] for name in names}) for names in self.gpu_users]
        return max(by_gpu, key=lambda phases: max(map(_total, phases.values())), default={})

    @staticmethod
    def _phases(needs: Mapping[str, Need]) -> dict[str, dict[str, int]]:
        resting = {name: need.gpu if need.resting is None else need.resting for name, need in needs.items()}
        return {
            working: {
                label: number for part in {**resting, working: need.gpu}.values() for label, number in part.items()
            }
            for working, need in needs.items()
        }

    @property
    def beside_replicas(self) -> list[Need]:
        """The needs of the shards that share their GPUs with replicas."""
        needs = [self.actors[name] for names in self.gpu_users if len(names) > 1 for name in names]
        return [need for need in needs if not need.gpu_share]

    @property
    def phase_texts(self) -> list[str]:
        """A text for each actor of the GPU that is filled most: what all its actors hold on the GPU while this actor
        works. Empty if no actor ever rests."""
        if not any(need.resting is not None for need in self.actors.values()):
            return []
        return [f"while {name} works, {_parts_text(parts)}" for name, parts in self.phases.items()]

    def excess(self, *, hopeless: bool) -> list[str]:
        """Returns a sentence for each need that exceeds the machine's free memory or GPU memory; it lists the parts of
        the need, the largest first. `hopeless`: only needs whose excess is larger than the errors of the estimates."""
        gpu_times, host_times = (GPU_TOLERANCE, HOST_TOLERANCE) if hopeless else (1.0, 1.0)
        problems = []
        gpu = self.node.smallest_gpu
        if gpu:
            share = max((need.gpu_share for need in self.actors.values()), default=0.0)
            claimed = int(share * gpu.memory_bytes)
            free_text = f"a GPU of {self.node.name} has {_free_text(gpu)} free"
            if sum(self.gpu.values()) > gpu_times * gpu.free_bytes:
                problems.append(f"{free_text}, {_parts_text(self.gpu)}")
            elif claimed + (0 if hopeless else self._beside) > gpu.free_bytes:
                problems.append(
                    f"{free_text}, and vLLM starts only where {gib(claimed)} are: inference.gpu_memory_utilization = "
                    f"{share:g} of all, whatever inference.gpu_cache_gb is"
                )
        if sum(self.host.values()) > host_times * self.node.free_bytes:
            problems.append(f"{memory_text(self.node)}, {_parts_text(self.host)}")
        return problems

    @property
    def shm_free(self) -> int:
        """Bytes that must be free in the machine's /dev/shm when its actors start."""
        return max((need.shm_free for need in self.actors.values()), default=0)

    @property
    def _beside(self) -> int:
        """Bytes of a replica's GPU that are probably taken before vLLM measures the free memory: by the context of the
        replica's process, and by the state of a shard on the same GPU, which starts at the same time."""
        shards = [need.resting or need.gpu for need in self.beside_replicas]
        return GPU_ALLOWANCES["CUDA context"] + max((parts.get("state", 0) for parts in shards), default=0)

    @property
    def store_warning(self) -> str:
        """A warning if Ray's object store cannot hold all versions of the weights that live at the same time. "" if it
        can hold them."""
        samplers = self.host.get(SAMPLER_WEIGHTS, 0)
        stored = self.host.get(VERSIONS, 0) + samplers
        names = f"{VERSIONS}{f' and {SAMPLER_WEIGHTS}' * bool(samplers)}"
        if stored <= self.node.store_bytes:
            return ""
        return (
            f"{names} have {gib(stored)}, Ray's object store on {self.node.name} {gib(self.node.store_bytes)} "
            f"(of {gib(self.node.shm_bytes)} in /dev/shm): updates wait for a disk. Give it more with ray start "
            "--object-store-memory, and /dev/shm too"
        )

    @property
    def row(self) -> str:
        """A line of text with the needs and the machine's resources."""
        gpu, used = self.node.smallest_gpu, sum(self.gpu.values())
        text = f"{self.node.name}: about {gib(sum(self.host.values()))} of {gib(self.node.memory_bytes)} of memory"
        if used:
            if gpu:
                free_text = f"where {gib(gpu.free_bytes)} are free"
            else:
                free_text = "of unknown size"
            text += f", and {gib(used)} on the fullest GPU, {free_text}"
        return f"{text} ({', '.join(f'{label} {gib(n)}' for label, n in _largest(self.host))})"


def check_shm(machines: Sequence[NodeNeeds]) -> None:
    """Raises BadInput if a machine has less space in /dev/shm than its actors need when they start."""
    for machine in machines:
        if machine.shm_free > machine.node.shm_bytes:
            raise Refusal(
                f"{machine.node.name}, whose /dev/shm has a size of {gib(machine.node.shm_bytes)}",
                f"at least {gib(machine.shm_free)} free there, which vLLM needs to start a replica of several ranks",
                "`mount -o remount,size=1G /dev/shm` there (Docker: --shm-size 1g), or --inference.tensor-parallel 1",
            )


def memory_text(node: Node) -> str:
    """Returns a text such as "A has 16.00 GiB of memory", or "A has 3.10 GiB of 16.00 GiB of memory free" if a part of
    the memory is in use."""
    return f"{node.name} has {_free_text(node)} of memory{' free' * (node.free_bytes < node.memory_bytes)}"


def _free_text(of: Node | Gpu) -> str:
    if of.free_bytes < of.memory_bytes:
        of_all = f" of {gib(of.memory_bytes)}"
    else:
        of_all = ""
    return f"{gib(of.free_bytes)}{of_all}"


def _parts_text(parts: Mapping[str, int]) -> str:
    """Returns the total and its parts as text: "15.20 GiB are needed: weights 9.00 GiB, ..."."""
    listed = ", ".join(f"{label} {gib(number)}" for label, number in _largest(parts))
    return f"{gib(sum(parts.values()))} are needed: {listed}"


def _total(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def _largest(parts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Returns the (purpose, bytes) pairs that are not 0, the largest first."""
    return sorted(((label, n) for label, n in parts.items() if n), key=lambda part: -part[1])


def gib(number: int) -> str:
    """Returns `number` bytes as a text: "1.50 GiB"."""
    return f"{number / GIB:.2f} GiB"


def distribute(
    needs: Mapping[str, Need],
    options: Sequence[ActorOptions],
    places: Sequence[int],
    nodes: Sequence[Node],
    *,
    placed: Mapping[str, str],
) -> list[NodeNeeds]:
    """Assigns actors to machines. Returns the machines that have actors, each with the needs of its actors and only the
    GPUs that they take.

    `needs`: {actor: its need}; `options` and `places`: Ray's options of each actor and the number of its place, in the
    same order; actors with the same place share a machine; `placed`: {actor: Ray's id of its machine}. Actors that are
    not in `placed` are assumed to be on as few machines as possible. Ray will also place them on few machines, but
    chooses the machines in an order of its own, so the real places may differ.
    """
    members: dict[int, list[ActorOptions]] = {}
    for place, actor_options in zip(places, options, strict=True):
        members.setdefault(place, []).append(actor_options)
    bundles = [
        {"num_cpus": sum(actor["num_cpus"] for actor in actors), "num_gpus": place_gpus(actors)}
        for actors in members.values()
    ]
    node_of = dict(zip(members, _place(bundles, nodes), strict=True))
    ids = {node.id: n for n, node in enumerate(nodes) if node.id}
    at = {name: ids.get(placed.get(name, ""), node_of[place]) for name, place in zip(needs, places, strict=True)}
    machines = []
    for n, node in enumerate(nodes):
        actors = {name: need for name, need in needs.items() if at[name] == n}
        users: dict[tuple[object, int], list[str]] = {}  # by place, or by the actor alone, and number of the GPU
        for name, actor, place in zip(needs, options, places, strict=True):
            if name in actors:
                for number in range(int(actor["num_gpus"])):
                    users[(name, number)] = [name]
                for number in actor.get("gpus", ()):
                    users.setdefault((place, number), []).append(name)
        if actors:
            machines.append(NodeNeeds(replace(node, gpus=node.gpus[: len(users)]), actors, list(users.values())))
    return machines


def _place(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Node]) -> list[int]:
    """Returns for each of `bundles` the index of its node in `nodes`: the first node already used that has enough free
    cores and GPUs for the bundle, else the emptiest node. A bundle is what a block of actors needs, with the keys
    `num_cpus` and `num_gpus`."""
    free = [{"num_gpus": float(node.num_gpus), "num_cpus": float(node.cpus)} for node in nodes]
    places: list[int] = []
    used: dict[int, None] = {}
    for bundle in bundles:
        emptiest = sorted(range(len(nodes)), key=lambda n: (-free[n]["num_gpus"], -free[n]["num_cpus"]))
        order = [*used, *emptiest]
        # Where no node has room, as in a dry run elsewhere, the emptiest is as good as any.
        chosen = next(
            (n for n in order if all(free[n][resource] >= bundle[resource] for resource in bundle)), emptiest[0]
        )
        for resource in bundle:
            free[chosen][resource] -= bundle[resource]
        places.append(chosen)
        used[chosen] = None
    return places
