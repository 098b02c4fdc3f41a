"""The trainer as the driver sees it: one handle over all shards, each a Ray actor.

Importing this module imports neither torch nor transformers: each shard's process does, while the other rooms start.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError

from trainer.batching import ShardOutput, scatter_outputs
from trainer.custom import CustomLoss, surrogate
from trireme.checkpoint.files import FileRecord
from trireme.config import CommonConfig
from trireme.core.errors import NonFiniteGradient, RoomFailed
from trireme.core.sampler import Heartbeat
from trireme.core.transport import load_transport
from trireme.core.types import (
    AdamParams,
    Data,
    ForwardBackwardOutput,
    OptimStepResponse,
    Provenance,
    TokenBatch,
    WeightIdentity,
    Which,
)
from trireme.core.weights import PublishedWeights
from trireme.process import trace, waits
from trireme.process.faults import number_process
from trireme.process.logs import redirect
from trireme.process.priority import yield_to_others
from trireme.process.visible_gpus import seeing_own_gpus
from trireme.process.waits import Pending
from trireme.run.metrics import reduce_metrics

INQUEST_S = 3.0
"""How long, after a failure, the other shards are asked what they know of it."""

NAMED = 8
"""How many datums an error names."""

OWN_CODE = ("trainer/shard.py", "trainer/checkpoint.py")
"""Whose threads are of interest when a verb hangs."""


class ShardActor:
    """`trainer.shard.Shard` in a process of its own. Rank 0 hosts the store at which the ranks find each other."""

    def __init__(self, config: CommonConfig, rank: int, world_size: int, log_dir: Path | None, attempt: int) -> None:
        redirect(log_dir, f"trainer_{rank}")
        number_process(rank)
        trace.start(log_dir, f"trainer_{rank}", config.trace.max_mb)
        import trainer.shard  # noqa: F401  seconds of imports, spent while the other shards do the same

        self._config, self._rank, self._world_size, self._attempt = config, rank, world_size, attempt

    def rendezvous(self) -> tuple[str, int]:
        """Address of the store; on rank 0 only."""
        host = ray.util.get_node_ip_address()
        self._store = self._open_store(host, 0)
        return host, self._store.port

    def setup(self, address: tuple[str, int]) -> None:
        """Joins the others and loads the model: collective."""
        import torch

        from trainer.shard import Shard

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))

        interface = _interface_of(ray.util.get_node_ip_address())
        if interface:  # else gloo takes what the host's name resolves to, which other nodes may not reach
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        store = self._store if self._rank == 0 else self._open_store(*address)
        sender = load_transport(self._config.transport).make_sender(self._rank)
        self._shard = Shard(self._config, self._rank, self._world_size, store, sender, self._attempt)

    def _open_store(self, host: str, port: int) -> Any:
        from datetime import timedelta

        from torch.distributed import TCPStore

        timeout = timedelta(seconds=self._config.timeouts.start_s)
        return TCPStore(host, port, self._world_size, self._rank == 0, timeout, wait_for_workers=False)

    def forward_backward(
        self, batch: TokenBatch, loss_fn: str, loss_fn_config: Mapping[str, float], provenance: Provenance | None
    ) -> ShardOutput:
        with trace.span("forward_backward", tokens=len(batch.tokens)):
            return self._shard.forward_backward(batch, loss_fn, loss_fn_config, provenance)

    def forward(self, batch: TokenBatch, which: Which) -> ShardOutput:
        return self._shard.forward(batch, which)

    def update_reference(self) -> None:
        self._shard.update_reference()

    def optim_step(self, adam: AdamParams, normalizer: float) -> OptimStepResponse:
        with trace.span("optim"):
            return self._shard.optim_step(adam, normalizer)

    def publish_weights(self, version: int) -> PublishedWeights | None:
        with trace.span("publish", version=version):
            return self._shard.publish_weights(version)

    def load_state(self, path: Path, identities: Sequence[WeightIdentity]) -> None:
        self._shard.load_state(path, identities)

    def begin_save(self, path: Path) -> None:
        with trace.span("begin_save"):
            self._shard.begin_save(path)

    @ray.method(concurrency_group="save")
    def finish_save(self, path: Path, _begun: None) -> list[FileRecord]:
        """`_begun` is what `begin_save` returned: Ray calls this only when it has."""
        with trace.span("finish_save", "saving"):
            return self._shard.finish_save(path)

    @ray.method(concurrency_group="save")
    def save_weights(self, path: Path, published: PublishedWeights) -> list[FileRecord]:
        if self._config.checkpoint.async_save:
            yield_to_others()  # the threads of this group do nothing else
        timeout_s, who = self._config.timeouts.checkpoint_s, f"the bytes of version {published.identity.version}"
        with trace.span("save_weights", "saving weights"):
            opening = load_transport(self._config.transport).make_receiver().open(published.source)
            buckets = asyncio.run(waits.get_async(opening, who=who, timeout_s=timeout_s))
            return self._shard.save_weights(path, published.manifest.entries, buckets)

    @ray.method(concurrency_group="watch")
    def heartbeat(self) -> Heartbeat:
        """Answered even while a verb is under way."""
        return Heartbeat((os.getpid(),), ray.get_runtime_context().get_node_id())

    @ray.method(concurrency_group="watch")
    def stack(self) -> str:
        """Where the other threads that run Python are: answered even while a verb hangs in a collective."""
        here = sys._current_frames()
        frames = [frame for frame in here.values() if any(f.filename.endswith(OWN_CODE) for f in _summary(frame))]
        return "".join("".join(_summary(frame).format()) for frame in frames) or "(in no verb)\n"


def _summary(frame: Any) -> traceback.StackSummary:
    return traceback.extract_stack(frame)


def _interface_of(ip: str) -> str | None:
    """Name of the network interface that has the address `ip`."""
    return next((n for n, addresses in psutil.net_if_addrs().items() if any(a.address == ip for a in addresses)), None)


def blame(suspects: Sequence[Sequence[int]]) -> str:
    """Names the datums whose losses were not finite: `suspects` of each forward_backward since the last update.

    >>> blame([(3, 7), (), (0,)])
    'Not finite: the loss of datum 3, 7 of batch 0; datum 0 of batch 2.'
    """
    named = [
        f"datum {', '.join(map(str, data[:NAMED]))}{', ..' if len(data) > NAMED else ''} of batch {batch}"
        for batch, data in enumerate(suspects)
        if data
    ]
    return f"Not finite: the loss of {'; '.join(named)}." if named else "The loss of each datum was finite."


class TrainerHandle:
    """All shards. Every verb is collective and waits for all of them, at most `timeouts.step_s`.

    A shard that raises, dies or hangs ends the call with one RoomFailed that names it, with its traceback and its log;
    the group is of no use afterwards but for `stop`. What all shards refuse alike (ProvenanceError, BadInput, a
    gradient that is not finite) is raised as such, and leaves the group usable.
    """

    def __init__(
        self,
        actors_R: Sequence[Any],
        ready_R: Sequence[Any],
        timeout_s: float,
        load_timeout_s: float,
        log_dir: Path | None,
    ) -> None:
        self._actors_R = actors_R
        self._ready_R = ready_R
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._log_dir = log_dir
        self._suspects: list[tuple[int, ...]] = []  # of each forward_backward since the last update

    @classmethod
    def start(
        cls, config: CommonConfig, options_R: Sequence[Mapping[str, Any]], log_dir: Path | None, attempt: int = 1
    ) -> TrainerHandle:
        """Creates one actor per entry of `options_R` (options of Ray actors) and returns at once; see `ready_refs`."""
        actor = ray.remote(concurrency_groups={"watch": 1, "save": 2})(ShardActor)
        actors_R = [
            actor.options(**seeing_own_gpus(options)).remote(config, rank, len(options_R), log_dir, attempt)
            for rank, options in enumerate(options_R)
        ]
        address = actors_R[0].rendezvous.remote()
        ready_R = [shard.setup.remote(address) for shard in actors_R]
        return cls(actors_R, ready_R, config.timeouts.step_s, config.timeouts.checkpoint_s, log_dir)

    def ready_refs(self) -> tuple[list[Any], list[str]]:
        """References that resolve when the shards are ready, and their names."""
        return list(self._ready_R), [f"trainer shard {rank}" for rank in range(len(self._actors_R))]

    def forward_backward(
        self,
        data: Data,
        loss_fn: str,
        loss_fn_config: Mapping[str, float] | None = None,
        provenance: Provenance | None = None,
    ) -> ForwardBackwardOutput:
        """Accumulates the gradient of the raw masked sum of the loss over the data."""
        batch = TokenBatch.of(data)
        reference = ray.put(batch)
        outputs_R = self._call("forward_backward", reference, loss_fn, dict(loss_fn_config or {}), provenance)
        logprobs, metrics = scatter_outputs(batch, outputs_R), reduce_metrics([output.metrics for output in outputs_R])
        suspects = tuple(sorted(d for output in outputs_R for d in output.suspects))
        self._suspects.append(suspects)
        return ForwardBackwardOutput(logprobs, batch.offsets, metrics, suspects, sum(out.peak_s for out in outputs_R))

    def forward_backward_custom(self, data: Data, loss: CustomLoss) -> ForwardBackwardOutput:
        """Accumulates the gradient of a loss that is a function of all log-probabilities: see `trainer.custom`."""
        batch = TokenBatch.of(data)
        weighted, metrics = surrogate(batch, self.forward(batch).logprobs, loss)
        output = self.forward_backward(weighted, "cross_entropy")
        return replace(output, metrics={**output.metrics, **metrics})

    def forward(self, data: Data, which: Which = "policy") -> ForwardBackwardOutput:
        """Log-probabilities of the data's `target_tokens` under the policy or the reference, without a gradient."""
        batch = TokenBatch.of(data)
        logprobs = scatter_outputs(batch, self._call("forward", ray.put(batch), which))
        return ForwardBackwardOutput(logprobs, batch.offsets, {})

    def update_reference(self) -> None:
        """The reference becomes the policy as it is now; see `trainer.kl.reference.update_every`."""
        self._call("update_reference")

    def optim_step(self, adam_params: AdamParams, normalizer: float = 1.0) -> OptimStepResponse:
        """Divides the gradient by `normalizer` (1: the gradient of the sum), clips, updates.

        Raises NonFiniteGradient, which names the datums that are to blame; then nothing has changed.
        """
        suspects, self._suspects = self._suspects, []
        try:
            return self._call("optim_step", adam_params, normalizer)[0]
        except NonFiniteGradient as error:
            raise NonFiniteGradient(f"{error} {blame(suspects)}") from None

    def publish_weights(self, version: int) -> PublishedWeights:
        """Makes the weights available to replicas as `version`. The buckets live until the next call, or as long as the
        caller keeps what this returns."""
        return self._call("publish_weights", version)[0]

    def save_state(self, path: Path) -> Pending:
        """Begins to save weights, AdamW's state and random generators, as they are after the verbs called until now,
        into directory `path`, which all shards must see. Returns at once, and training may go on.

        What is pending gives the records of all files, or raises StorageFailed, which leaves the group usable.
        """
        begun_R = [actor.begin_save.remote(path) for actor in self._actors_R]
        saved_R = [actor.finish_save.remote(path, begun) for actor, begun in zip(self._actors_R, begun_R, strict=True)]
        return Pending(saved_R, self._names())

    def load_state(self, path: Path, identities: Sequence[WeightIdentity]) -> None:
        """Takes over what `save_state` wrote at `path`, also of another number of shards. `identities` are those of the
        last K + 1 versions published until then. Raises CheckpointInvalid."""
        self._call("load_state", path, tuple(identities), timeout_s=self._load_timeout_s)

    def save_weights(self, path: Path, published: PublishedWeights) -> Pending:
        """As `save_state`: begins to write `published` as a Hugging Face directory, on the node of shard 0."""
        return Pending([self._actors_R[0].save_weights.remote(path, published)], self._names()[:1])

    def heartbeats(self) -> dict[str, Callable[[], Any]]:
        """By its name in logs: what asks each shard for a Heartbeat, and gives a reference to the answer."""
        return {f"trainer_{rank}": actor.heartbeat.remote for rank, actor in enumerate(self._actors_R)}

    def stop(self) -> None:
        """Ends the shards' processes."""
        for actor in self._actors_R:
            ray.kill(actor, no_restart=True)

    def _names(self) -> list[str]:
        where = "" if self._log_dir is None else f" (log {self._log_dir}/trainer_{{rank}}.log)"
        return [f"trainer shard {rank}" + where.format(rank=rank) for rank in range(len(self._actors_R))]

    def _call(self, verb: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        refs_R = [getattr(actor, verb).remote(*args) for actor in self._actors_R]
        try:
            return waits.get_all(refs_R, who=self._names(), timeout_s=timeout_s or self._timeout_s)
        except RoomFailed as error:
            raise self._inquest(verb, error, refs_R) from error.__cause__

    def _inquest(self, verb: str, error: RoomFailed, refs_R: Sequence[Any]) -> RoomFailed:
        """What to report of a failed call: the death of a shard rather than the lost connection that others see, and
        for one that hangs, where each of them is."""
        if error.__cause__ is None:
            return RoomFailed(f"{verb}: {error}\n{''.join(self._whereabouts())}")
        if isinstance(error.__cause__, RayActorError):
            return error
        deadline = time.monotonic() + INQUEST_S
        for ref, name in zip(refs_R, self._names(), strict=True):
            try:
                waits.get(ref, who=name, timeout_s=max(deadline - time.monotonic(), 0.1))
            except RoomFailed as other:
                if isinstance(other.__cause__, RayActorError):
                    return other
        return error

    def _whereabouts(self) -> list[str]:
        refs_R = [actor.stack.remote() for actor in self._actors_R]
        deadline = time.monotonic() + INQUEST_S
        reports = []
        for rank, ref in enumerate(refs_R):
            who = f"trainer shard {rank}"
            try:
                stack = waits.get(ref, who=who, timeout_s=max(deadline - time.monotonic(), 0.1))
                reports.append(f"{who} is at:\n{stack}")
            except RoomFailed:
                reports.append(f"{who} does not answer at all: its process is stopped, or stuck outside Python\n")
        return reports
