"""The trainer's handle in the driver: all verbs over all shards. Each shard is a Ray actor.

Importing this module imports neither torch nor transformers: each shard's process imports them, while the other rooms
start.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, cast

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import RayActorError

from trainer.actor import ShardActor
from trainer.batching import scatter_outputs, scatter_sums
from trainer.losses import (
    POLICY,
    CustomLoss,
    mean_log_ratios,
    resolve_loss,
    sum_log_ratios,
    surrogate,
    with_sequence_ratios,
)
from trireme.checkpoint.files import FileRecord
from trireme.checkpoint.parts import CheckpointSource
from trireme.config import CommonConfig
from trireme.config.losses import find_loss
from trireme.core.actors import ActorOptions, ActorProxy, Ref, as_argument
from trireme.core.batch import Assign, Batch, BatchPart, Data, StoredBatch, Summary, TokenBatch
from trireme.core.errors import RoomFailed, TriremeError
from trireme.core.sampler import Heartbeat
from trireme.core.transport import TRIALS, Endpoint, Offer, Session, load_transport
from trireme.core.types import (
    AdamParams,
    ForwardBackwardOutput,
    OptimStepResponse,
    Provenance,
    WeightIdentity,
    Which,
)
from trireme.core.weights import AdapterSpec, PublishedWeights
from trireme.process import waits
from trireme.process.ray_cluster import create_actor, shared_gpus
from trireme.process.waits import Pending
from trireme.run.metrics import reduce_metrics

if TYPE_CHECKING:
    from trainer.shard import Shard

GIVERS = 4
"""Threads of a shard that serve buckets."""
SENDING_SHARE = 0.5
"""The part of `timeouts.collective_s` after which the sending of a version is given up: a shard that waits for a
replica keeps the other shards waiting in the next gather, whose time limit must not be exceeded by this wait."""
STOP_S = 2.0
"""Time limit, at the end, for writing what is left of the shards' traces."""
INQUEST_S = 3.0
"""Time limit, after a failure, for asking the other shards about it."""
COLLECTIVE_TIMEOUT = re.compile(r"timed out|timeout", re.IGNORECASE)
"""Matches the error of a rank whose collective has timed out while it waited for other ranks."""
Value = TypeVar("Value")
Args = TypeVarTuple("Args")
PROGRESS_S = 30.0
"""Seconds between lines about a call that takes long."""


class _VerbNames:
    """Stands in for the class `Shard` where only the names of its methods are needed, because the module of `Shard`
    imports torch. Every attribute is its own name as a string, which `ShardActor.call` takes."""

    def __getattr__(self, name: str) -> str:
        return name


VERBS = cast("type[Shard]", _VerbNames())
"""The names of the shards' verbs: `VERBS.forward` is "forward", but for mypy and editors the method of `Shard`."""


class TrainerHandle:
    """Calls all shards of the trainer together. Every verb is collective. A verb waits for all shards, at most
    `timeouts.step_s`; only `save_state` and `save_weights` return at once.

    A shard that raises, dies or hangs ends the call with one RoomFailed that names the shard, with its traceback and
    its log; afterwards only `stop` works. An error that all shards raise together (ProvenanceError, BadInput,
    NonFiniteGradient) leaves the trainer usable.
    """

    def __init__(
        self,
        config: CommonConfig,
        actors_R: Sequence[ActorProxy[ShardActor]],
        ready_R: Sequence[Ref[None]],
        log_dir: Path | None,
        attempt: int = 1,
        offer: Callable[[Offer], Session] | None = None,
        offered_s: float = math.inf,
    ) -> None:
        """`actors_R`: the shards' actors; `ready_R`: references that resolve once the shards are set up.

        `offer`: asks the replicas to receive a version while the trainer sends it, and returns a
        `trireme.core.transport.Session`, which names the replicas that are ready. Only transports that send to a fixed
        group of replicas use it. Without `offer`, or if no replica is ready, replicas fetch the bytes on demand.
        `offered_s`: the seconds after which sending is abandoned, limited to SENDING_SHARE of a collective's time
        limit.
        """
        self._timeouts = config.timeouts
        self._actors_R = actors_R
        self._ready_R = ready_R
        if log_dir is None:
            log_hint = ""
        else:
            log_hint = f" (log {log_dir}/trainer_{{rank}}.log)"
        self._names_R = [f"trainer shard {rank}" + log_hint.format(rank=rank) for rank in range(len(actors_R))]
        self._transport = load_transport(config.transport)
        self._attempt = attempt
        self._terms_R: list[tuple[tuple[int, ...], Endpoint | None]] = []  # of offers, by each shard
        self._offering = offer
        self._sessions = 0
        self._offered_s = min(offered_s, SENDING_SHARE * self._timeouts.collective_s)
        self._assign: Assign | None = None
        self._has_adapters = config.trainer.lora.on
        self._adapter = ""  # the one in use

    @classmethod
    def start(
        cls,
        config: CommonConfig,
        options_R: Sequence[ActorOptions],
        log_dir: Path | None,
        attempt: int = 1,
        offer: Callable[[Offer], Session] | None = None,
        offered_s: float = math.inf,
        taken_share: float = 0.0,
        offloads: bool = False,
    ) -> TrainerHandle:
        """Creates one actor for each entry of `options_R`, Ray's actor options for each rank of the mesh. Does not wait
        for the actors: see `ready_refs`. `taken_share`: the share of each shard's GPU that a replica takes while the
        shard trains. `offloads`: the argument of `Shard`. Other arguments as in the constructor."""
        if len(options_R) != config.trainer.mesh.processes:
            raise ValueError(f"{config.trainer.mesh} needs options for each process, got {len(options_R)}")
        groups = {"watch": 1, "save": 2, "give": GIVERS}
        actors_R = [
            create_actor(ShardActor, concurrency_groups=groups, **options)(
                config, rank, log_dir, attempt, taken_share, offloads, shared_gpus(options)
            )
            for rank, options in enumerate(options_R)
        ]
        address = actors_R[0].rendezvous.remote()
        ready_R = [shard.setup.remote(as_argument(address)) for shard in actors_R]
        return cls(config, actors_R, ready_R, log_dir, attempt, offer, offered_s)

    def ready_refs(self) -> tuple[list[Ref[object]], list[str]]:
        """Returns references that resolve when the shards are ready, and the shards' names."""
        return list(self._ready_R), [f"trainer shard {rank}" for rank in range(len(self._actors_R))]

    def shown(self) -> tuple[str, str]:
        """Returns two texts for the log. The first has the result of the model's proof at the start (`trainer.proof`),
        and notes on compiled layers, memory, and the tensors whose checksums need a gather. The second names what the
        configuration asks for but the model cannot do, such as packed rows ("" if there is nothing)."""
        text, notice = self._call(VERBS.shown)[0]
        return text, notice

    def forward_backward(
        self,
        data: Data,
        loss_fn: str,
        loss_fn_config: Mapping[str, float] | None = None,
        provenance: Provenance | None = None,
    ) -> ForwardBackwardOutput:
        """Adds the gradient of the raw masked sum of the loss over `data` to the accumulated gradient. Returns
        log-probabilities (none if `data` is a `StoredBatch`), metrics, and the numbers of the datums whose loss is not
        finite. With `provenance`, raises ProvenanceError for tokens or floors that are too old.

        The loss gspo takes one more forward pass if a sequence has several datums, because no shard sees all of these.
        """
        batch = self._stored(data)
        is_stored = isinstance(data, StoredBatch)
        if _looks_at_sequences(loss_fn, batch):
            _, parameters = resolve_loss(loss_fn, loss_fn_config or {})
            batch, sums = self._summarized(batch, "policy", POLICY, partial(sum_log_ratios, config=parameters))
            batch = batch.mapped(partial(with_sequence_ratios, mean_N=mean_log_ratios(batch.sequences, sums)))
        outputs_R = self._call_with(
            batch, VERBS.forward_backward, loss_fn, dict(loss_fn_config or {}), provenance, not is_stored
        )
        metrics = reduce_metrics([output.metrics for output in outputs_R])
        suspects = tuple(sorted(d for output in outputs_R for d in output.suspects))
        peak_s = sum(out.peak_s for out in outputs_R)
        tokens = sum(out.tokens for out in outputs_R)
        distinct = sum(out.distinct for out in outputs_R)
        if is_stored:
            logprobs = np.zeros(0, np.float32)
            offsets = np.zeros(1, np.int64)
        else:
            logprobs = scatter_outputs(batch, outputs_R)
            offsets = batch.offsets
        return ForwardBackwardOutput(logprobs, offsets, metrics, suspects, peak_s, tokens, distinct)

    def forward_backward_custom(self, data: Data, loss: CustomLoss) -> ForwardBackwardOutput:
        """Adds the gradient of `loss`, a function of all datums and their log-probabilities (`trainer.losses`), to the
        accumulated gradient. The returned metrics include those of `loss`. The loss is computed in this process, so the
        datums of a `StoredBatch` are fetched here."""
        if isinstance(data, StoredBatch):
            batch = data.whole(self._fetch)
        else:
            batch = TokenBatch.of(data)
        weighted, metrics = surrogate(batch, self.forward(batch).logprobs, loss)
        output = self.forward_backward(weighted, "cross_entropy")
        return replace(output, metrics={**output.metrics, **metrics})

    def forward(self, data: Data, which: Which = "policy") -> ForwardBackwardOutput:
        """Computes the log-probabilities of the `target_tokens` of `data` under the policy or the reference, and
        returns them, float32 in the order of the batch's tokens. Computes no gradient."""
        batch = self._stored(data)
        logprobs = scatter_outputs(batch, self._call_with(batch, VERBS.forward, which))
        return ForwardBackwardOutput(logprobs, batch.offsets, {})

    def forward_summarized(
        self, data: Batch, which: Which, name: str, summarize: Summary
    ) -> tuple[StoredBatch, npt.NDArray[np.float64]]:
        """Computes the log-probabilities of the `target_tokens` of `data` under the policy or the reference (`which`).
        They stay in the object store: the returned batch refers to them as its column `name`. Also returns K numbers
        about each datum, float64 [K, D], which `summarize` computes from the datum and this column."""
        return self._summarized(self._stored(data), which, name, summarize)

    def _summarized(
        self, batch: StoredBatch, which: Which, name: str, summarize: Summary
    ) -> tuple[StoredBatch, npt.NDArray[np.float64]]:
        outputs_R = self._call_with(batch, VERBS.forward_summarized, which, name, summarize)
        stored = batch.with_column(name, [output.column for output in outputs_R])
        return stored, scatter_sums(len(batch), outputs_R)

    def _stored(self, data: Data) -> StoredBatch:
        """Returns `data` as a batch that is cut into one part for each shard. A `StoredBatch` is returned unchanged.
        Other data is in this process and is cut here; each shard's part then travels with the call."""
        if isinstance(data, StoredBatch):
            return data
        self._assign = self._assign or self._call(VERBS.rank_assignment)[0]
        batch = TokenBatch.of(data)
        return StoredBatch.store(batch.find_forest(), batch.sequences, batch.take, self._assign)

    def _fetch(self, reference: Ref[Value], owner: str) -> Value:
        return waits.get(reference, owner=f"{owner} (a part of a batch)", timeout_s=self._timeouts.step_s)

    def update_reference(self) -> None:
        """Copies the policy's weights to the reference (`trainer.kl.reference.update_every`). Raises BadInput for a
        reference that never changes."""
        self._call(VERBS.update_reference)

    def optim_step(self, adam_params: AdamParams, normalizer: float = 1.0) -> OptimStepResponse:
        """Divides the accumulated gradient by `normalizer` (1: the gradient of the sum), clips its norm, and updates
        the weights once. Returns metrics: the learning rate and the norm.

        If the gradient is not finite, raises NonFiniteGradient, updates nothing and drops the gradient. The datums to
        look at are the `suspects` that `forward_backward` returned.
        """
        return self._call(VERBS.optim_step, adam_params, normalizer)[0]

    def drop_gradients(self) -> None:
        """Discards the gradients that were accumulated since the last step of the optimiser."""
        self._call(VERBS.drop_gradients)

    def reset_optimizer(self) -> None:
        """Sets AdamW's moments and its count of steps to 0, as at the start; the weights stay."""
        self._call(VERBS.reset_optimizer)

    def add_adapter(self, name: str, spec: AdapterSpec, start: Path | None = None) -> None:
        """Adds another LoRA adapter, `name`, on all shards (`trainer.adapters`). Without `start` it changes nothing at
        first. With `start`, a directory in peft's form that all shards must see, its values are read from there. Raises
        BadInput for an adapter that the model cannot have."""
        self._call(VERBS.add_adapter, name, spec, start)

    def use_adapter(self, name: str) -> None:
        """Makes all verbs work with the adapter `name`, in the state in which it was left: weights, AdamW's state and
        gradients. "" names the adapter that the model began with. Does nothing if `name` is in use. Raises BadInput
        for an unknown name."""
        if name != self._adapter:
            self._call(VERBS.use_adapter, name)
            self._adapter = name

    def drop_adapter(self, name: str) -> None:
        """Forgets the adapter `name`; if it is in use, the adapter "" is used from then on. Raises BadInput for "" and
        for an unknown name."""
        if name == self._adapter:
            self.use_adapter("")
        self._call(VERBS.drop_adapter, name)

    def publish_weights(self, version: int) -> PublishedWeights:
        """Makes the current weights available to replicas as `version`, and returns their manifest and source. The
        bytes live as long as the caller keeps the result."""
        session = self._session(version)
        published_R = self._call(VERBS.publish_weights, version, session)
        parts_R = [published.source for published in published_R]
        return replace(published_R[0], source=self._transport.join(parts_R), session=session)

    def begin_free_memory(self) -> None:
        """Begins the part of `free_memory` that takes long, while the weights are published. The next verb that changes
        the state makes it useless."""
        self._call(VERBS.begin_free_memory)

    def free_memory(self) -> None:
        """Releases the GPU memory that PyTorch keeps from freed tensors, so that the replicas there can use it. If the
        plan says so, AdamW's moments wait in host memory until the next `forward_backward`."""
        self._call(VERBS.free_memory)

    def _session(self, version: int) -> Session | None:
        """Offers `version` to the replicas. Returns the `Session` for sending it: the replicas that are ready to
        receive, and the seconds that are left. Returns None if a shard does not send to a fixed group of replicas, or
        if the handle has no `offer`."""
        if self._sessions <= TRIALS:  # until then a shard may cease to send
            self._terms_R = self._call(VERBS.terms)
        sizes = self._terms_R[0][0]
        endpoints_R = tuple(endpoint for _, endpoint in self._terms_R if endpoint)
        if self._offering is None or len(endpoints_R) < len(self._terms_R):
            return None
        started = time.monotonic()
        session = self._offering(Offer(self._attempt, version, sizes, endpoints_R, self._offered_s))
        self._sessions += bool(session.members)
        return replace(session, left_s=max(started + self._offered_s - time.monotonic(), 0.0))

    def save_state(self, path: Path) -> Pending[FileRecord]:
        """Begins to save weights, AdamW's state and random generators into directory `path`, in the state after all
        earlier calls. Each shard writes its own files, at this path on its node. Does not wait; training may continue.

        `wait` of the result waits until all files are on the disk and returns their records, or raises StorageFailed,
        which leaves the trainer usable.
        """
        begun_R = self._begin(VERBS.begin_save, path)
        saved_R = [
            actor.finish_save.remote(path, as_argument(begun))
            for actor, begun in zip(self._actors_R, begun_R, strict=True)
        ]
        return Pending(saved_R, self._names_R)

    def load_state(
        self, path: Path, identities: Sequence[WeightIdentity], source: CheckpointSource | None = None
    ) -> str:
        """Loads the state that `save_state` saved at `path`, with any number of shards. Nodes that do not see `path`
        read from `source`. `identities`: the versions that were published before the save and may still be trained on.
        Drops gradients. Returns a message for the log ("" if none). Raises CheckpointInvalid, StorageFailed."""
        refs_R = self._begin(VERBS.load_state, path, tuple(identities), source)
        return self._wait("load_state", refs_R, self._timeouts.checkpoint_s)[0]

    def save_weights(self, path: Path, published: PublishedWeights) -> Pending[FileRecord]:
        """Begins to write the weights `published` into directory `path` in the Hugging Face layout (peft's for an
        adapter). Each shard writes the part that it stores for receivers, at this path on its node; shard 0 writes all
        of an adapter. Does not wait; `wait` of the result returns the records of the files, or raises StorageFailed."""
        self._transport.lease(published.source)  # which the shards end
        ranks = range(len(self._actors_R))
        if self._has_adapters:
            owners = {0: list(ranks)}
        else:
            owners = {rank: [rank] for rank in ranks}
        saved = [self._actors_R[rank].save_weights.remote(path, published, owners[rank]) for rank in owners]
        return Pending(saved, [self._names_R[rank] for rank in owners])

    def heartbeats(self) -> dict[str, Callable[[], Ref[Heartbeat]]]:
        """Returns {shard's name in logs: a function that asks the shard for its Heartbeat and returns a Ray reference
        to it}."""
        return {f"trainer_{rank}": actor.heartbeat.remote for rank, actor in enumerate(self._actors_R)}

    def stop(self) -> None:
        """Ends the shards' processes. Shards that have started first write what is left of their traces; this waits for
        them at most STOP_S seconds."""
        started = zip(self._actors_R, self._ready_R, self._names_R, strict=True)
        written = {name: actor.end_trace.remote() for actor, ready, name in started if waits.ready({ready: name}, 0)}
        with suppress(TriremeError):  # a shard is dead or hangs
            waits.get_all(list(written.values()), owners=list(written), timeout_s=STOP_S)
        for actor in self._actors_R:
            ray.kill(actor, no_restart=True)

    # ---- calls of all shards, and who is to blame when one does not answer

    def _call(self, verb: Callable[[Shard, *Args], Value], *args: *Args) -> list[Value]:
        return self._wait(str(verb), self._begin(verb, *args))

    def _begin(self, verb: Callable[[Shard, *Args], Value], *args: *Args) -> list[Ref[Value]]:
        return [actor.call.remote(str(verb), *args) for actor in self._actors_R]

    def _call_with(
        self, batch: StoredBatch, verb: Callable[[Shard, BatchPart, *Args], Value], *args: *Args
    ) -> list[Value]:
        """Calls `verb` on all shards, each with its own part of `batch` and then `args`. Returns the results in order
        of rank."""
        parts_R = zip(self._actors_R, batch.parts_R, strict=True)
        return self._wait(str(verb), [actor.call.remote(str(verb), part, *args) for actor, part in parts_R])

    def _wait(self, verb: str, refs_R: Sequence[Ref[Value]], timeout_s: float | None = None) -> list[Value]:
        report = waits.LongWait(verb.replace("_", " "), PROGRESS_S)
        try:
            return waits.get_all(
                refs_R, owners=self._names_R, timeout_s=timeout_s or self._timeouts.step_s, on_tick=report
            )
        except RoomFailed as error:
            raise self._inquest(verb, error, refs_R) from error.__cause__

    def _inquest(self, verb: str, error: RoomFailed, refs_R: Sequence[Ref[object]]) -> RoomFailed:
        """Finds out why `verb` failed with `error`, and returns the error to report. Waits a short time for the calls
        of the other shards. If a shard is dead, the error names it instead of the shards that lost the connection to
        it. After a hang, the error has the stack trace of each shard. After a collective that timed out, it has the
        stack traces of the shards that still do not answer. `refs_R`: the references to the results of the calls, by
        rank."""
        if error.__cause__ is None:
            return RoomFailed(f"{verb}: {error}\n{''.join(self._whereabouts(range(len(refs_R))))}")
        if isinstance(error.__cause__, RayActorError):
            return error
        answers = self._ask(dict(enumerate(refs_R)))
        failures = {rank: answer for rank, answer in answers if isinstance(answer, RoomFailed)}
        dead = next((f for f in failures.values() if isinstance(f.__cause__, RayActorError)), None)
        if dead:
            return dead
        hung = [rank for rank, failure in failures.items() if failure.__cause__ is None]
        if not hung or not COLLECTIVE_TIMEOUT.search(str(getattr(error.__cause__, "cause", ""))):
            return error
        limit = f"timeouts.collective_s = {self._timeouts.collective_s:g}"
        return RoomFailed(f"{verb}: a collective exceeded {limit}. {error}\n{''.join(self._whereabouts(hung))}")

    def _whereabouts(self, ranks: Sequence[int]) -> Iterator[str]:
        """Yields a text for each of these ranks: the shard's stack trace, or that the shard does not answer."""
        for rank, stack in self._ask({rank: self._actors_R[rank].stack.remote() for rank in ranks}):
            silent = "does not answer at all: its process is stopped, or stuck outside Python\n"
            if isinstance(stack, RoomFailed):
                state = silent
            else:
                state = f"is at:\n{stack}"
            yield f"trainer shard {rank} {state}"

    def _ask(self, refs: Mapping[int, Ref[Value]]) -> Iterator[tuple[int, Value | RoomFailed]]:
        """Waits for the references `refs`, {rank: reference}, INQUEST_S seconds in all. Yields (rank, answer) for each
        rank; the answer is a RoomFailed if the call failed or did not end in time."""
        deadline = time.monotonic() + INQUEST_S
        for rank, ref in refs.items():
            try:
                yield rank, waits.get(ref, owner=self._names_R[rank], timeout_s=max(deadline - time.monotonic(), 0.1))
            except RoomFailed as error:
                yield rank, error


def _looks_at_sequences(loss_fn: str, batch: Batch) -> bool:
    """Returns True if the loss needs all tokens of a sequence and some sequence of `batch` has several datums."""
    return find_loss(loss_fn).per_sequence and len(np.unique(batch.sequences)) < len(batch)
