"""The Ray actor of one trainer shard.

Importing this module imports neither torch nor transformers: the actor's process does, while the other rooms start.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import ray

from trainer.batching import SummarizedOutput
from trireme.checkpoint.files import FileRecord
from trireme.config import CommonConfig, Config
from trireme.core.actors import Ref, remote_method
from trireme.core.batch import StoredPart
from trireme.core.sampler import Heartbeat
from trireme.core.transport import load_transport
from trireme.core.weights import PublishedWeights
from trireme.process import trace, waits
from trireme.process.environ import redirect_output, yield_to_others
from trireme.process.faults import number_process
from trireme.process.interfaces import choose_interface, listen
from trireme.process.ray_cluster import SharedGpus, in_group, see_own_gpus
from trireme.transports.kept_versions import KeptVersions

if TYPE_CHECKING:
    from torch.distributed import TCPStore

Value = TypeVar("Value")
BEHIND_ENGINES = 6
"""How much the nice value of a shard on CPUs rises in a run: with an engine on its core it gets a fifth of the core. An
answer's tokens come one after the other, so an engine that waits for a core delays the step; a shard only has to be
ready when the next batch is. Gain: a tenth of the rollouts/s of whole_job (docs/internals/benchmarks.md)."""
OWN_CODE = ("trainer/shard.py", "trainer/state.py")
"""Files of the verbs. `stack` shows the threads that run in them."""

SPANS: dict[str, Callable[..., AbstractContextManager[object]]] = {
    "forward_backward": lambda part, *_: trace.span("forward_backward", tokens=int(part.lengths.sum())),
    "optim_step": lambda *_: trace.span("optim"),
    "publish_weights": lambda version, *_: trace.span("publish", version=version),
    "begin_save": lambda _: trace.span("begin_save"),
}
"""{verb: a function that makes the verb's span in the trace from its arguments}; other verbs have no span."""


def niceness(config: CommonConfig) -> int:
    """Returns how much the nice value of a shard's process rises: BEHIND_ENGINES in a run on CPUs, else 0. Launching
    kernels late would leave a GPU idle."""
    if isinstance(config, Config) and config.cluster.device == "cpu":
        return BEHIND_ENGINES
    return 0


class ShardActor:
    """The Ray actor of one shard: runs `trainer.shard.Shard` in a process of its own. Rank 0 hosts the TCPStore through
    which the ranks find each other."""

    def __init__(
        self,
        config: CommonConfig,
        rank: int,
        log_dir: Path | None,
        attempt: int,
        replica_share: float,
        offloads: bool,
        gpus: SharedGpus | None = None,
    ) -> None:
        see_own_gpus(gpus)
        redirect_output(log_dir, f"trainer_{rank}")
        number_process(rank)
        trace.start(log_dir, f"trainer_{rank}", config.trace.max_mb)
        import trainer.shard  # noqa: F401  takes seconds, which all shards spend at the same time

        self._config = config
        self._rank = rank
        self._attempt = attempt
        self._replica_share = replica_share
        self._offloads = offloads

    @remote_method
    def rendezvous(self) -> tuple[str, int]:
        """Opens the store through which the ranks find each other, and returns its (host, port). Called on rank 0 only.
        The store listens only at this node's address in the Ray cluster, which is 127.0.0.1 in a cluster started on
        this machine."""
        host = ray.util.get_node_ip_address()
        listening = listen(host, self._config.cluster.port_range)
        self._store = self._open_store(host, listening.getsockname()[1], listening.detach())
        return host, self._store.port

    @remote_method
    def setup(self, address: tuple[str, int]) -> None:
        """Joins the process group through rank 0's store at `address`, and loads this rank's part of the model.
        Collective."""
        import torch

        from trainer.shard import Shard

        os.nice(niceness(self._config))  # before there are threads: each takes the value of the thread that starts it
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
        choose_interface(address[0])
        if self._rank == 0:
            store = self._store
        else:
            store = self._open_store(*address)
        transport = load_transport(self._config.transport)
        processes = self._config.trainer.mesh.processes
        delta = self._config.encoding == "delta"
        self._sender = transport.make_sender(self._rank, processes, self._config.cluster.port_range, delta=delta)
        self._shard = Shard(
            self._config, self._rank, store, self._sender, self._attempt, self._replica_share, self._offloads
        )

    def _open_store(self, host: str, port: int, listening: int | None = None) -> TCPStore:
        """Returns a TCPStore for `host` and `port`. With `listening`, the file descriptor of a listening socket, this
        process hosts the store, and the store owns the socket. Without it, this process connects to a store that
        another process hosts."""
        from datetime import timedelta

        from torch.distributed import TCPStore

        timeout = timedelta(seconds=self._config.timeouts.start_s)
        hosts = listening is not None
        return TCPStore(host, port, None, hosts, timeout, wait_for_workers=False, master_listen_fd=listening)

    @remote_method
    def call(self, verb: str, *args: Any) -> Any:
        """Calls the method `verb` of `Shard` and returns its result. Calls run one at a time. An argument that refers
        to a part of a batch is fetched first. The log-probabilities of a SummarizedOutput stay in the object store:
        the result has a reference to them."""
        arguments = [arg.opened(self._fetch) if isinstance(arg, StoredPart) else arg for arg in args]
        with SPANS[verb](*arguments) if verb in SPANS else nullcontext():
            result = getattr(self._shard, verb)(*arguments)
        if isinstance(result, SummarizedOutput):
            return replace(result, column=ray.put(result.column))
        return result

    def _fetch(self, reference: Ref[Value], owner: str) -> Value:
        label = f"{owner} (a part of a batch)"
        with trace.span("fetch_part"):
            return waits.get(reference, owner=label, timeout_s=self._config.timeouts.step_s)

    @remote_method
    @in_group("save")
    def finish_save(self, path: Path, _begun: None) -> list[FileRecord]:
        """Waits until the save into `path` is on the disk; returns the records of this rank's files. `_begun`, the
        result of `begin_save`, is not used: it makes Ray start this call only after `begin_save`."""
        with trace.span("finish_save", "saving"):
            return self._shard.finish_save(path)

    @remote_method
    @in_group("save")
    def save_weights(self, path: Path, published: PublishedWeights, owners: Sequence[int]) -> list[FileRecord]:
        """Fetches the buckets of `published` that the shards `owners` store, writes them into directory `path` and
        returns the records of the files. The caller has taken a lease on the bytes; this call releases it for these
        shards."""
        if self._config.checkpoint.async_save:
            yield_to_others()  # the threads of this group only save
        timeout_s = self._config.timeouts.checkpoint_s
        label = f"the bytes of version {published.identity.version}"
        transport = load_transport(self._config.transport)
        manifest = published.manifest
        size = self._config.trainer.mesh.processes
        numbers = sorted({entry.bucket for entry in manifest.entries if entry.bucket % size in owners})
        try:
            with trace.span("save_weights", "saving weights"):
                opening = transport.open(published.source, numbers)
                buckets = asyncio.run(waits.get_async(opening, owner=label, timeout_s=timeout_s))
                stored = dict(zip(numbers, buckets, strict=True))
                return self._shard.save_weights(path, manifest.entries, stored, manifest.adapter)
        finally:
            transport.release(published.source, owners)

    @remote_method
    @in_group("give")
    def bucket(self, version: int, number: int) -> npt.NDArray[np.uint8]:
        """Returns bucket `number` of this rank's share of `version`, as bytes. Can be called while a verb runs. Raises
        WeightsGone if this rank no longer has the version."""
        return self._versions.bucket(version, number)

    @remote_method
    @in_group("give")
    def lease(self, version: int) -> None:
        """Keeps this rank's share of the bytes of `version` until `release`. Raises WeightsGone if this rank no longer
        has the version."""
        self._versions.lease(version)

    @remote_method
    @in_group("give")
    def release(self, version: int) -> None:
        self._versions.release(version)

    @property
    def _versions(self) -> KeptVersions:
        from trireme.transports.sending import BroadcastSender

        assert isinstance(self._sender, BroadcastSender), "no other transport's source names this actor"
        return self._sender.versions

    @remote_method
    @in_group("watch")
    def heartbeat(self) -> Heartbeat:
        """Returns this process's id and Ray node. Can be called while a verb runs."""
        return Heartbeat((os.getpid(),), ray.get_runtime_context().get_node_id())

    @remote_method
    @in_group("watch")
    def end_trace(self) -> None:
        """Writes what is left of this process's trace, and ends the trace."""
        trace.stop()

    @remote_method
    @in_group("watch")
    def stack(self) -> str:
        """Returns the stack traces of the threads that are running code in the files OWN_CODE. Can be called while a
        verb hangs in a collective."""
        stacks = [traceback.extract_stack(frame) for frame in sys._current_frames().values()]
        verb_stacks = [stack for stack in stacks if any(frame.filename.endswith(OWN_CODE) for frame in stack)]
        return "".join("".join(stack.format()) for stack in verb_stacks) or "(in no verb)\n"
