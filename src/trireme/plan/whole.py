"""The plan of any run, worked out before anything starts. A plan has a part for each room; the parts share the
machines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table
from rich.text import Text

from trireme.config.installed import check_build, package_versions
from trireme.config.model_facts import ModelFacts
from trireme.config.run import READ_BYTES_PER_S
from trireme.config.schema import CommonConfig
from trireme.core.actors import ActorOptions
from trireme.core.refusals import Refusal
from trireme.core.transport import DEFAULT
from trireme.plan.needs import (
    GPU_TOLERANCE,
    HOST_TOLERANCE,
    KV_CACHE,
    NodeNeeds,
    check_shm,
    distribute,
    gib,
    memory_text,
)
from trireme.plan.part import Part
from trireme.plan.suggestions import suggestions
from trireme.process.environ import Resources, cluster_address
from trireme.process.worker_environment import travels_text

C = TypeVar("C", bound=CommonConfig)
T = TypeVar("T")
ORDER = (
    *(
        "trainer",
        "orchestrator",
        "inference",
        "service",
        "resources",
        "placement",
        "packages",
        "travels",
        "model",
        "adapters",
    ),
    *("data", "steps", "tokens", "memory", "machines", "staleness", "in flight", "each update", "evaluation"),
    *("checkpoints", "start", "recovery", "written to", "warning"),
)
"""The rows of a plan, in the order in which they are printed."""
SHORT = (
    "trainer",
    "orchestrator",
    "inference",
    "service",
    "placement",
    "model",
    "data",
    "steps",
    "tokens",
    "written to",
    "warning",
)
"""The rows that a start prints; a dry run, and a start with --verbose, print all."""
SUGGESTIONS = 3
"""The most suggestions that a refusal has."""
SHARED_GPU_UTILIZATION = 0.5
"""The largest share of a GPU that a replica may take if the trainer has the same GPU."""
SUGGESTED_UTILIZATION = 0.4
"""The share of such a GPU that a plan suggests for a replica."""
BUFFER_LEAVES = 0.9
"""The share of the KV cache that must be left if arriving weights have a second buffer on the replica's GPU. An
estimate: nothing was measured on a GPU."""
LEAST_SAVING = 0.1
"""The share of its estimated seconds that a sampling phase must save for AdamW's moments to leave the GPU. The
estimates are coarse."""
TURNS = frozenset({"trainer", "inference"})
"""The rooms that can take turns on the same devices. With `placement = auto` they do so only in a run with an
orchestrator."""

PartKind = Callable[[Any, ModelFacts | None, Resources], Part]
"""A class or function that makes a part of a plan from the configuration, the sizes of the model and the machines."""


@dataclass(frozen=True)
class Plan:
    """The parts of a run, what they need of the machines, where their actors probably are, and the warnings and rows
    that a start or a dry run prints."""

    config: CommonConfig
    """The configuration of the run."""
    facts: ModelFacts | None
    """Sizes of the model; None if they are unknown, in a dry run without a hub."""
    resources: Resources
    """The machines."""
    kinds: Sequence[PartKind]
    """For each part of the run, the class or function that makes it."""
    run_dir: Path | None = None
    """The run directory; None if there is none yet, in a dry run."""
    notes: Sequence[str] = ()
    """Warnings of the checks of the configuration."""
    verbose: bool = False
    """True: a start prints all rows."""
    placed: Mapping[str, str] = field(default_factory=dict)
    """Ray's id of the machine of each actor, once Ray has placed them."""

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of the run; the parts that hold a model come first."""
        parts = [kind(self.config, self.facts, self.resources) for kind in self.kinds]
        models = _models(parts)
        gpus = self.resources.gpus
        alone = self.on_gpus and gpus < 2 and models == [1, 1]
        halves = alone and all(part.may_share_gpu for part in parts)
        rooms = {part.room for part in parts}
        lacks_gpus = self.on_gpus and models[:1] == models[1:] and models[0] <= max(1, gpus) < sum(models)
        in_need = lacks_gpus and not halves and "orchestrator" in rooms
        chosen = self._placement == "colocated" or (self._placement == "auto" and in_need)
        colocated = chosen and rooms >= TURNS
        shares = (self.on_gpus and colocated) or halves
        parts = [replace(part, shares_gpu=shares, colocated=colocated) for part in parts]
        if self.on_gpus and rooms >= TURNS and not self.config.trainer.lora.on:  # vLLM copies adapters from the host
            on_gpu = self._receives_on_gpu
            offers = "orchestrator" in rooms  # another loop offers no versions to replicas
            way = DEFAULT
            if offers and self.config.encoding != "delta" and (models == [1, 1] or not shares):
                way = self._way(shares=shares, on_gpu=on_gpu)
            parts = [replace(part, receives_on_gpu=on_gpu, auto_transport=way) for part in parts]
        if shares:
            return _in_fewer_seconds(parts)
        return parts

    @property
    def _receives_on_gpu(self) -> bool:
        """True if a version that arrives at a replica has a second buffer on each of its GPUs. `inference.receive_on`
        says this. Its value auto means gpu if the GPUs have room for the buffer, and the replica keeps at least
        BUFFER_LEAVES of its KV cache."""
        configured = getattr(self.config, "inference").receive_on  # noqa: B009  it has one
        if configured != "auto":
            return bool(configured == "gpu")
        host, gpu = (self._receiving_on(place) for place in ("host", "gpu"))
        leaves = 0 < BUFFER_LEAVES * host._cache_bytes <= gpu._cache_bytes
        return leaves and all(
            machine.node.smallest_gpu is None or sum(machine.gpu.values()) <= machine.node.smallest_gpu.free_bytes
            for machine in gpu.machines
        )

    def _receiving_on(self, place: str) -> Plan:
        inference = getattr(self.config, "inference").model_copy(update={"receive_on": place})  # noqa: B009  it has one
        return replace(self, config=self.config.model_copy(update={"inference": inference}))

    def _way(self, *, shares: bool, on_gpu: bool) -> str:
        """Returns the meaning of the value auto of `inference.transport` for whole weights on GPUs. `shares`: trainer
        and replica share a GPU; `on_gpu`: versions are received on GPUs. On several machines it is the object store,
        because only changes to the weights may pass the network then."""
        if shares and on_gpu:
            return "ipc"
        if shares or len(self.resources.nodes) > 1:
            return DEFAULT
        return "broadcast"

    @property
    def _cache_bytes(self) -> int:
        """Bytes of KV cache on GPUs; 0 if the sizes of the model are unknown."""
        return sum(need.gpu.get(KV_CACHE, 0) for part in self.parts for need in part.needs or [])

    @property
    def _placement(self) -> str:
        """The configured `placement`: "auto", "split" or "colocated". It is "split" for a command without replicas.
        "auto" becomes "split" if `inference.on_update` is keep_kv, because replicas drop their KV caches when they
        sleep."""
        placement: str = getattr(self.config, "placement", "split")
        if placement == "auto" and getattr(self.config, "inference").on_update == "keep_kv":  # noqa: B009  it has one
            return "split"
        return placement

    @property
    def colocated(self) -> bool:
        """True if trainer and replicas take turns on the same devices."""
        return any(part.colocated for part in self.parts)

    @property
    def taken_share(self) -> float:
        """The share, 0 to 1, of a shard's GPU that a replica takes while the shard trains; 0 if no replica uses that
        GPU."""
        return next(part.taken_share for part in self.parts if part.room == "trainer")

    @property
    def offloads(self) -> bool:
        """True if AdamW's moments leave the GPU during sampling phases."""
        return any(part.saved_s for part in self.parts)

    @property
    def actor_names(self) -> list[str]:
        """The name of each actor, part after part."""
        return [name for part in self.parts for name in part.actors]

    @property
    def on_gpus(self) -> bool:
        """True if models compute on GPUs."""
        return self.resources.compute_on_gpus(self.config)

    def resolved(self, config: C) -> C:
        """Returns `config` with the values that the machines and the model decide: `cluster.device` instead of auto,
        `timeouts.start_s` with the time to read the model, and the sections that each part decides. Rooms and their
        callers get this configuration."""
        device = "gpu" if self.on_gpus else "cpu"
        sections: dict[str, object] = {"cluster": config.cluster.model_copy(update={"device": device})}
        sections["timeouts"] = config.timeouts.model_copy(update={"start_s": self.start_s})
        for part in self.parts:
            sections |= part.decided()
        return config.model_copy(update=sections)

    @property
    def start_s(self) -> float:
        """Seconds within which all rooms must have started."""
        return self.config.start_deadline_s(self.facts)

    @property
    def start_text(self) -> str:
        """Returns a text about the two parts of `start_s`: `timeouts.start_s`, and the time to read the model."""
        configured_s = self.config.timeouts.start_s
        rate = f"{READ_BYTES_PER_S / 1e6:g} MB/s"
        reading_s = self.start_s - configured_s
        return f"timeouts.start_s = {configured_s:g} s, and {reading_s:.0f} s to read the model at {rate}"

    @property
    def _processes(self) -> int:
        """Number of processes that compute, the orchestrator among them."""
        return sum(len(part.actors) * part.ranks for part in self.parts)

    @property
    def _widest(self) -> int:
        """The largest number of processes in one place; they are all on one node."""
        ranks = [part.ranks for part in self.parts for _ in part.actors]
        processes: Counter[int] = Counter()
        for place, number in zip(self.places, ranks, strict=True):
            processes[place] += number
        return max(processes.values())

    @property
    def shares_gpu(self) -> bool:
        """True if each GPU of the run is used by a shard and by a rank of a replica: in turns, or because the machines
        have just one."""
        return any(part.shares_gpu for part in self.parts)

    @property
    def gpus_needed(self) -> int:
        """Number of GPUs without which the run cannot start."""
        if self.on_gpus:
            if self.shares_gpu:
                return max(_models(self.parts))
            return sum(_models(self.parts))
        return 0

    @property
    def threads(self) -> int:
        """Number of threads for each process that computes: its share of the cores, at least 1; 1 in a deterministic
        run."""
        if self.config.deterministic:  # how a sum is split over threads decides its last bits
            return 1
        return max(1, self.resources.cpus // self._processes)

    @property
    def cpus_per_process(self) -> float:
        """Ray's num_cpus for one process that computes. If there are enough cores, it is 1. Otherwise it is so small
        that each actor finds a node with room for all its processes, however the cores are spread over the nodes. For
        this, the cores are divided into at least n * w more shares than there are processes (n: number of nodes; w:
        processes of the largest place). So while a place has no node yet, more than n * w shares are free, and some
        node has at least w of them."""
        resources = self.resources
        nodes = len(self.resources.nodes)
        widest = self._widest
        if resources.cpus >= self._processes + (widest - 1) * (nodes - 1):
            return 1.0
        return math.floor(100 * resources.cpus / (self._processes + nodes * widest)) / 100

    @property
    def options(self) -> list[ActorOptions]:
        """Ray's options (num_cpus, num_gpus, gpus, runtime_env) of each actor, in the order of `actor_names`."""
        return [self._options(part, number) for part in self.parts for number in range(len(part.actors))]

    def _options(self, part: Part, number: int = 0) -> ActorOptions:
        """Returns Ray's options of actor `number` of `part`."""
        options: ActorOptions = {"num_cpus": round(part.ranks * self.cpus_per_process, 2), "num_gpus": 0.0}
        if self.shares_gpu and part.size_key:
            first = number * part.ranks % self._shared_block
            options["gpus"] = list(range(first, first + part.ranks))
        elif self.on_gpus and part.size_key:
            options["num_gpus"] = float(part.ranks)
        if part.size_key and cluster_address(self.config) is not None:
            # Processes of a cluster that is started here inherit them. Else AdamW of offloaded weights had one thread.
            options["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": str(self.threads)}}
        return options

    @property
    def added_replica_options(self) -> ActorOptions:
        """Ray's options of a replica that is added to a live run. If the run is on CPUs and has started Ray by itself,
        num_cpus is 0, because the run's actors may have taken all cores."""
        is_alone = cluster_address(self.config) is None and not self.on_gpus
        options = self._options(self._replicas)
        if is_alone:
            options["num_cpus"] = 0.0
        return options

    @property
    def _replicas(self) -> Part:
        """The part of the replicas. Only for a run that has replicas."""
        return next(part for part in self.parts if part.room == "inference")

    @property
    def places(self) -> list[int]:
        """The number of each actor's place, from 0, in the order of `actor_names`. Actors with the same number are on
        one node: a block of shards; if GPUs are shared, these shards and the replicas that have the same GPUs."""
        places: list[int] = []
        for part in self.parts:
            if self.shares_gpu and part.size_key:
                first = 0
                block = self._shared_block
            else:
                first = max(places, default=-1) + 1
                block = part.block
            places += [first + number * part.ranks // block for number in range(len(part.actors))]
        return places

    @property
    def _shared_block(self) -> int:
        """Number of GPUs of a place whose actors share GPUs. It is a multiple of `block` of trainer and replicas."""
        return math.lcm(*(part.block for part in self.parts if part.size_key))

    def by_room(self, values: Sequence[T]) -> dict[str, list[T]]:
        """Splits `values`, one for each actor in the order of `actor_names`. Returns {room: values of its actors}."""
        remaining = iter(values)
        return {part.room: list(islice(remaining, len(part.actors))) for part in self.parts}

    @cached_property
    def machines(self) -> list[NodeNeeds]:
        """The machines with the actors that are probably on each; empty if the sizes of the model are unknown."""
        all_needs = [part.needs for part in self.parts]
        if None in all_needs:
            return []
        needs = dict(
            zip(self.actor_names, (need for part_needs in all_needs for need in part_needs or ()), strict=True)
        )
        # In a cluster it is not known before which of its machines must have that much free.
        certain = self.placed or cluster_address(self.config) is None
        nodes = (self.resources if certain else self.resources.emptied).nodes
        return distribute(needs, self.options, self.places, nodes, placed=self.placed)

    @property
    def _fullest(self) -> NodeNeeds | None:
        """The machine with the GPU that is filled most; None if the sizes of the model are unknown."""
        return max(self.machines, key=lambda machine: sum(machine.gpu.values()), default=None)

    def shortages(self, *, hopeless: bool) -> list[str]:
        """Returns a sentence for each shortage of memory on a machine. `hopeless`: only shortages that are too large to
        be an error of the estimates."""
        return [text for machine in self.machines for text in machine.excess(hopeless=hopeless)]

    def check_resources(self) -> None:
        """Raises BadInput in these cases: the run is colocated, but its trainer and replicas cannot take turns
        (`turns_refusal`); the run needs more GPUs than there are; a replica needs more GPUs than one node has; the
        run has more processes than Ray can place on the cores; it needs far more memory than there is; it needs more
        space in /dev/shm than a machine has; it has replicas, and the installed build of vLLM is not for its devices.
        Too few cores, and somewhat too little memory, only give warnings.

        If no cluster is joined, memory that other programs and runs use counts as taken. In a cluster it counts as
        taken only once actors are placed; before that, all memory counts as free.
        """
        self._check_places()
        check_shm(self.machines)
        short = self.shortages(hopeless=True)
        if short:
            flags = "; or ".join(suggestions(self)[:SUGGESTIONS])
            if flags:
                do = f"cheapest first: {flags}"
            else:
                do = "take a smaller model, or larger machines"
            if not replace(self, resources=self.resources.emptied).shortages(hopeless=True):
                do += "; or end what else runs there, or wait for its end (`ps aux --sort=-rss | head`, `nvidia-smi`)"
            raise Refusal(
                "; ".join(short),
                "a plan that fits. These are estimates, so a run is refused only above "
                f"{GPU_TOLERANCE:g} times the memory of a GPU or {HOST_TOLERANCE:g} times the memory of a machine",
                do,
            )

    def check_replicas(self, target: int, added: int) -> None:
        """Raises BadInput if the machines cannot hold `target` replicas, by the estimates of memory and the number of
        GPUs. `added`: how many of these replicas have to start. Also raises BadInput if hosts and GPUs have too little
        free memory to start them. Too few free cores are no reason to raise: a replica then waits for a node. Also
        raises BadInput if trainer and replicas share GPUs, because no GPU is left for another replica."""
        if self.shares_gpu:
            raise Refusal(
                f"{count(target, 'replica')}, {added} of them new, in a run whose trainer and replicas share GPUs",
                "no new replica, because each GPU has one shard and one rank of a replica",
                "start a new run, with other numbers of shards and replicas",
            )
        inference = getattr(self.config, "inference")  # noqa: B009  only runs with replicas are scaled
        config = self.config.model_copy(update={"inference": inference.model_copy(update={"replicas": target})})
        larger = replace(self, config=config, resources=self.resources.emptied)  # what is taken may be this run's
        larger.check_resources()
        short = larger.shortages(hopeless=False)
        nodes = self.resources.nodes
        num_gpus = self._replicas.ranks if self.on_gpus else 0
        for need in (self._replicas.needs or ())[:1]:
            if added > sum(need.room(node, num_gpus) for node in nodes):
                text = f"{added} of them have to start, and need {gib(sum(need.host.values()))} of memory each, where "
                text += "; ".join(map(memory_text, nodes))
                if num_gpus:
                    text += f", and {count(num_gpus, 'GPU')} each with {need.gpu_share:.1%} of its memory free, as "
                    text += f"{sum(map(need.free_gpus, nodes))} of the {self.resources.gpus} are"
                short.append(text)
        if short:
            raise Refusal(
                f"{count(target, 'replica')}: {'; '.join(short)}",
                f"a number that fits into the memory of {self.resources.source}, by the estimates of the plan",
                "ask for fewer replicas, end other programs there, add nodes to a cluster, or start a new run with a "
                "lower --inference.memory-gb",
            )

    @property
    def turns_refusal(self) -> Refusal | None:
        """The error if the run is colocated on GPUs but its trainer and replicas cannot take turns there; None if they
        can. They cannot if the numbers of shards and of the replicas' ranks differ, if no nodes have as many GPUs as
        must be together, or if the transport sends between GPUs."""
        if not (self.colocated and self.on_gpus):
            return None
        shards, ranks = _models(self.parts)
        sizes = " and ".join(part.size_text for part in self.parts if part.size_key)
        if shards != ranks:
            parallel = self._replicas.ranks if shards % self._replicas.ranks == 0 else 1
            return Refusal(
                f"placement = colocated on GPUs with {sizes}",
                f"as many ranks of replicas as shards, because each GPU has one of both: {shards}, not {ranks}",
                f"--inference.replicas {shards // parallel} --inference.tensor-parallel {parallel}, or "
                "--placement split",
            )
        together = self._shared_block
        fitting = sum(node.num_gpus // together for node in self.resources.nodes)
        if shards // together > fitting and shards <= self.resources.gpus:
            return Refusal(
                f"placement = colocated with {sizes}, whose actors need {together} GPUs on one node, "
                f"{shards // together} times",
                f"nodes with as many GPUs; {self.resources.source} has {fitting} times {together} GPUs on one node",
                "lower --inference.tensor-parallel or --trainer.gpus-per-node, or use larger nodes",
            )
        if self.config.transport == "broadcast" or (shards > 1 and self.config.transport == "ipc"):
            return Refusal(
                f"placement = colocated on {count(shards, 'GPU')} with inference.transport = {self.config.transport}",
                "object_store, or on one GPU ipc: NCCL does not send from a GPU to the same GPU, and ipc brings "
                "weights to one replica of one rank",
                "leave --inference.transport out",
            )
        return None

    def _check_places(self) -> None:
        if self.turns_refusal:
            raise self.turns_refusal
        holders = [part for part in self.parts if part.size_key]
        keys = " or ".join(f"--{part.size_key}" for part in holders)
        sizes = " and ".join(part.size_text for part in holders)
        resources = self.resources
        limit = 100 * resources.cpus - len(resources.nodes) * self._widest
        if self.cpus_per_process <= 0:
            raise Refusal(
                f"{sizes}, in all {self._processes} processes",
                f"at most {limit}, which is a hundred for each core of {resources.source}",
                f"lower {keys}, or use a larger cluster",
            )
        gpus = max(node.num_gpus for node in resources.nodes)
        ranks = max(part.ranks for part in self.parts)
        if self.on_gpus and gpus < ranks <= resources.gpus:
            raise Refusal(
                f"inference.tensor_parallel = {ranks}, which needs {ranks} GPUs on one node",
                f"at most {gpus}, the number of GPUs of the largest node of {resources.source}",
                "lower --inference.tensor-parallel, or use larger nodes",
            )
        if self.gpus_needed <= self.resources.gpus:
            if any(part.room == "inference" for part in self.parts):
                check_build(on_gpus=self.on_gpus)
            return
        ways = [f"lower {keys}", "use a larger cluster", "--cluster.device cpu"]
        models = _models(self.parts)
        if models == [1, 1] and self.resources.gpus == 1:
            ways.insert(0, f"let both share it: --inference.gpu-memory-utilization {SUGGESTED_UTILIZATION:g}")
        if len(models) == 2 and models[0] <= self.resources.gpus and models[0] % self._replicas.ranks == 0:
            replicas = models[0] // self._replicas.ranks
            flags = "--placement colocated" + f" --inference.replicas {replicas}" * (models[0] != models[1])
            ways.insert(0, f"let them take turns: {flags}")
        raise Refusal(
            f"{sizes}, which need {self.gpus_needed} GPUs",
            f"at most {resources.gpus} GPUs, which is what {resources.source} has",
            "; or ".join(ways),
        )

    @property
    def warnings(self) -> list[str]:
        """Sentences about settings that work, but are slower or probably have too little memory."""
        resources = self.resources
        source = self.resources.source
        texts = [*self.notes, *(text for part in self.parts for text in part.warnings)]
        if self.gpus_needed > resources.gpus:
            texts.append(
                f"needs {count(self.gpus_needed, 'GPU')}, {source} has {resources.gpus}: "
                "start it where they are, or give --cluster.address"
            )
        models = sum(_models(self.parts))
        if models > resources.cpus and not self.on_gpus:
            texts.append(f"{models} processes compute on {resources.cpus} cores of {source}: it works, slower")
        texts += [f"too little memory, by an estimate: {text}" for text in self.shortages(hopeless=False)]
        texts += [text for machine in self.machines if (text := machine.store_warning)]
        return texts

    def rows(self) -> list[tuple[str, str]]:
        """Returns the rows of the plan as (name of the row, text) pairs. If several parts have a text for the same row,
        their texts are joined."""
        if self.colocated and self.on_gpus:
            share = "one GPU each, in turns"
        elif self.colocated:
            share = "CPU in turns"
        elif self.shares_gpu:
            share = "half a GPU each, shared"
        elif self.on_gpus:
            share = "one GPU each"
        else:
            share = "CPU"
        device_text = f"{share}, {count(self.threads, 'thread')} each"
        texts: dict[str, str] = {}
        for label, text in [*self._common_rows(), *(row for part in self.parts for row in part.rows(device_text))]:
            texts[label] = f"{texts[label]}; {text}" if label in texts else text
        return [*sorted(texts.items(), key=lambda row: ORDER.index(row[0])), *(("warning", w) for w in self.warnings)]

    def render(self, *, whole: bool) -> Table:
        """Returns the plan as a table for rich: all rows if `whole`, else the rows that matter most."""
        table = Table.grid(padding=(0, 2))
        for label, text in (row for row in self.rows() if whole or row[0] in SHORT):
            table.add_row(Text(label), Text(text), style="yellow" if label == "warning" else None)
        return table

    def _common_rows(self) -> list[tuple[str, str]]:
        run = self.config.run
        resources = self.resources
        if self.on_gpus:
            needs = f"needs {count(self.gpus_needed, 'GPU')}, "
        else:
            needs = ""
        directory = self.run_dir or f"{run.output_dir}/{run.name or self.config.default_name('<8 hex>')}"
        return [
            (
                "resources",
                f"{needs}{resources.source} has {resources.gpus} GPUs, {count(resources.cpus, 'core')}, "
                f"{gib(resources.memory_bytes)} of memory on {count(len(resources.nodes), 'node')}; models compute on "
                f"{'GPU' if self.on_gpus else 'CPU'}s",
            ),
            *([("placement", self._placement_text())] if self.colocated or (self.shares_gpu and self.machines) else []),
            ("packages", ", ".join(f"{name} {number}" for name, number in package_versions().items())),
            *([("travels", travels_text(self.config))] if cluster_address(self.config) else []),
            ("model", self._model_text()),
            ("checkpoints", self._checkpoints_text()),
            *([("machines", "; ".join(machine.row for machine in self.machines))] if self.machines else []),
            ("start", f"all rooms are ready within {self.start_s:,.0f} s ({self.start_text})"),
            ("recovery", self._recovery_text()),
            (
                "written to",
                f"{directory}: config.json, metrics.jsonl, trained.jsonl, STATUS, checkpoints/, logs/, trace/",
            ),
        ]

    def _placement_text(self) -> str:
        """Returns a text about a run whose trainer and replicas have the same devices: how and why they share them, the
        GPU memory that this needs, and the GPU memory that the other placement would need."""
        if self.colocated:
            why = ""
            if self._placement == "auto":
                why = f" (placement = auto: a split needs {count(sum(_models(self.parts)), 'GPU')})"
            phases = self._fullest.phase_texts if self._fullest else []
            texts = [f"colocated{why}: the replicas sleep while the trainer trains", *phases]
        else:
            texts = [f"split, on the same GPU: {self._gpu_text()}"]
        return "; ".join([*texts, *self._other_texts()])

    def _other_texts(self) -> list[str]:
        """Returns a text about the same run in the other placement: its flags, and the GPU memory that it would need.
        Returns an empty list if that placement is not possible on GPUs, or if the sizes of the model are unknown."""
        if not (self.machines and self.shares_gpu) or self.turns_refusal:
            return []
        inference = getattr(self.config, "inference")  # noqa: B009  it has one
        trainer = self.config.trainer
        share = inference.gpu_memory_utilization
        sizes = ""
        if self.colocated:
            placement = "split"
            if self.gpus_needed == 1 and self.resources.gpus < 2:
                share = min(share, SUGGESTED_UTILIZATION)
            elif self.resources.gpus < 2 * self.gpus_needed:  # half of the GPUs for each room
                if trainer.shards % 2 or inference.replicas % 2:
                    return []
                trainer = trainer.model_copy(update={"shards": trainer.shards // 2})
                inference = inference.model_copy(update={"replicas": inference.replicas // 2})
                sizes = f" --trainer.shards {trainer.shards} --inference.replicas {inference.replicas}"
        elif inference.on_update == "keep_kv" or self.config.transport == "broadcast":
            return []
        else:
            placement = "colocated"
            share = type(inference).model_fields["gpu_memory_utilization"].default
        inference = inference.model_copy(update={"gpu_memory_utilization": share})
        changes = {"placement": placement, "trainer": trainer, "inference": inference}
        other = replace(self, config=self.config.model_copy(update=changes))
        flags = f"--placement {placement}{sizes} --inference.gpu-memory-utilization {share:g}"
        return [f"with {flags}: {other._gpu_text()}"]

    def _gpu_text(self) -> str:
        """Returns a text about the fullest GPU: the bytes that are needed (in a colocated run, in each phase), whether
        they are free, and the size of the KV cache. Only for a run that has replicas and a model of known sizes."""
        machine = self._fullest
        assert machine is not None
        needed = sum(machine.gpu.values())
        if self.colocated:
            phases = [f"{gib(sum(parts.values()))} while {name} works" for name, parts in machine.phases.items()]
        else:
            phases = [gib(needed)]
        gpu = machine.node.smallest_gpu
        if gpu is None:
            fit = "on a GPU of unknown size"
        elif needed > gpu.free_bytes:
            fit = f"{gib(needed - gpu.free_bytes)} more than are free"
        else:
            fit = "; ".join(self.shortages(hopeless=False)) or "it fits"
        cache = max(need.gpu[KV_CACHE] for need in self._replicas.needs or ())
        return ", ".join([*phases, fit, f"KV cache {gib(cache)}"])

    def _model_text(self) -> str:
        facts = self.facts
        if facts is None:
            return f"{self.config.model.name}: model not reachable, sizes unknown"
        tied = "tied" if facts.tied_embeddings else "untied"
        return (
            f"{facts.name}: {facts.architecture}, {facts.num_parameters:,} parameters ({facts.num_layers} layers, "
            f"hidden {facts.hidden_size}, vocabulary {facts.vocab_size}, {tied} embeddings), "
            f"sequences of at most {self.config.seq_limit(facts)} tokens"
        )

    def _checkpoints_text(self) -> str:
        options = self.config.checkpoint
        if options.every:
            when = f"every {count(options.every, 'step')} and at the end"
        else:
            when = "at the end"
        if options.keep_every:
            rest = f", every {options.keep_every}th for good"
        else:
            rest = ""
        if options.async_save:
            how = "while training continues"
        else:
            how = "while training waits"
        return f"{when}, {how}; the newest {options.keep_last} are kept{rest}; Ctrl-C and SIGTERM write one too"

    def _recovery_text(self) -> str:
        options = self.config.cluster
        if not options.max_restarts:
            return "no part that dies is started again: the run fails then"
        often = f"at most {count(options.max_restarts, 'time')} in {options.restart_window_s:,g} s"
        return f"a part that dies is started again, {often}; a shard costs the steps since the newest checkpoint"


def _in_fewer_seconds(parts: Sequence[Part]) -> list[Part]:
    """Returns `parts`, which share GPUs, with their `taken_share` and `saved_s`: AdamW's moments leave a GPU for a
    sampling phase if this saves more seconds than it takes, by LEAST_SAVING of the phase."""
    staying, leaving = (_on_shared_gpus([replace(part, saved_s=saved_s) for part in parts]) for saved_s in (0.0, 1.0))
    staying_s, leaving_s = (sum(part.turn_s for part in variant) for variant in (staying, leaving))
    if leaving_s < (1 - LEAST_SAVING) * staying_s:
        return [replace(part, saved_s=staying_s - leaving_s) for part in leaving]
    return staying


def _on_shared_gpus(parts: Sequence[Part]) -> list[Part]:
    return [replace(part, taken_share=_taken_by_others(part, parts)) for part in parts]


def _taken_by_others(part: Part, parts: Sequence[Part]) -> float:
    """Returns the share of a GPU that the other parts' actors take while the actor of `part` works."""
    neighbours = [other for other in parts if other.room != part.room]
    if part.colocated:
        return sum(sum(other.resting.values()) for other in neighbours) / part.gpu_bytes
    return max(other.gpu_share for other in neighbours)


def _models(parts: Sequence[Part]) -> list[int]:
    """Returns the number of processes that hold a model (or a part of one) in each room that has such processes."""
    return [len(part.actors) * part.ranks for part in parts if part.size_key]


def count(number: int, noun: str) -> str:
    """Returns the number with its noun, in the plural unless it is 1: "1 step", "2 steps"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
