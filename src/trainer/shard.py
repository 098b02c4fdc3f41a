"""One shard of the trainer: the verbs, on torch alone. `trainer.actor` puts it into a Ray actor.

All shards are called with the same arguments in the same order, but each with its own part of a batch. All compute the
same plan, from the lengths of all datums, and each takes its own micro-batches. A verb refuses bad input (provenance, a
wrong loss configuration, a fault in one rank's part) on every rank before the first pass, so the shards stay usable.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, set_seed

from trainer.adapters import Adapters, AdapterVerbs, first_adapter
from trainer.batch_checks import PublishedVersions, find_refusal, nonfinite_datums
from trainer.batching import MicroBatch, RankAssignment, ShardOutput, SummarizedOutput, plan
from trainer.compiled import trial_batches, why_uncompiled
from trainer.export import Buckets, companion_files, own_part, write_weights
from trainer.logprobs import token_logprobs
from trainer.lora import adapter_files, adapter_mode, adapter_sums, adapter_units, published_adapters
from trainer.losses import Metrics, backward, monitors, read_metrics, resolve_loss
from trainer.mesh import Mesh
from trainer.mfu import peak_flops, train_flops
from trainer.model import Sharding, freed_after, gathered_units, published_units, shard_sums
from trainer.passes import Passes, collect
from trainer.proof import prove_models
from trainer.state import Checkpointer, make_adam_state
from trainer.transfers import to_host
from trireme.checkpoint.files import FileRecord
from trireme.checkpoint.parts import CheckpointSource
from trireme.config import CommonConfig
from trireme.config.losses import LOSSES
from trireme.config.model_facts import ModelFacts
from trireme.core.batch import BatchPart, Summary, TokenBatch
from trireme.core.class_tensors import persistent_buffers
from trireme.core.errors import BadInput, NonFiniteGradient, TriremeError
from trireme.core.prefixes import Forest, Numbers
from trireme.core.refusals import Refusal
from trireme.core.transport import Endpoint, Sender, Session
from trireme.core.types import AdamParams, OptimStepResponse, Provenance, WeightIdentity, Which
from trireme.core.weights import (
    AFTER_CANARY,
    EXACT,
    ROUNDED,
    SHORTEST_CANARY,
    Adapter,
    Canary,
    Layout,
    PublishedWeights,
    TensorEntry,
    WeightsManifest,
    weights_digest,
)
from trireme.process import trace
from trireme.process.device import find_device
from trireme.process.faults import fault_point
from trireme.run.metrics import reduce_metrics
from trireme.transports.packing import lay_out

log = logging.getLogger(__name__)
SUMS_WHOLE = "gradients summed whole"
"""The name, among the names of buffers in a checkpoint, of a flag: true if the whole model stayed gathered over each
batch (`ShardMemory.whole`).
"""
ALLOCATOR_VARIABLES = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Environment variables with settings of PyTorch's allocator; the second is the older name."""
SQUARED_AT_ONCE = 2**22
"""Numbers of a gradient that are squared in float64 at the same time, which takes 8 bytes for each."""
CANARY_TOKENS = 16
"""For a model without experts: each token passes through all of its matrices, so these are enough for a mean that does
not depend on single tokens. More would cost time on CPUs, in trainer and replicas."""
TOKENS_OF_EXPERTS = 64
"""Enough for nearly all experts of a layer to be chosen (a token takes 8 of 128), and for a mean in which single
tokens, routed differently after rounding, count little."""


class Shard(AdapterVerbs):
    """One rank of the trainer: holds its part of the model, and has the methods ("verbs") that `TrainerHandle` calls.
    Constructing it joins the process group through `store`, loads this rank's part of the model and proves the model:
    collective.

    `sender` sends published weights to where replicas get them. `attempt` becomes part of the identity of all weights
    that are published. `replica_share`: the part of this rank's GPU, 0 to 1, that a replica takes. `offloads`: True if
    AdamW's moments leave the device's memory at each `free_memory` (and are not in it at first), until gradients are
    computed.
    """

    def __init__(
        self,
        config: CommonConfig,
        rank: int,
        store: dist.Store,
        sender: Sender,
        attempt: int = 1,
        replica_share: float = 0.0,
        offloads: bool = False,
    ) -> None:
        fault_point("trainer.start")
        self._config = config
        torch.use_deterministic_algorithms(config.deterministic)
        self._device = prepare_device(find_device(config, f"trainer shard {rank}"), os.environ)
        set_seed(config.seed)  # of torch, numpy and Python
        log.info("loading %s", config.model.name)
        facts = ModelFacts.of(config, required=True)
        assert facts is not None, "required"
        self._facts = facts
        self._mesh = Mesh(config, rank, store, self._device)
        self._sharding = Sharding(config, facts, self._mesh, replica_share)
        self._peak_flops = peak_flops(self._device, self._sharding.dtype)
        lora = config.trainer.lora
        name = config.model.name
        self._model = self._sharding.shard_model(name, name, lora if lora.on else None, config.lora_seed)
        limit = facts.max_position_embeddings
        self._max_seq_len = min(limit, config.model.max_seq_len or limit)
        self._canary_tokens = canary_tokens(facts.vocab_size, self._max_seq_len, experts=bool(facts.num_chosen))
        self._passes = Passes(self._sharding, self._device)
        first = first_adapter(config, self._mesh)
        self._reference = self._load_reference()
        models = [self._model, *([self._reference] if self._reference else [])]
        log.info("proving that the model is computed right")
        self.proof = prove_models(
            models, self._mesh, self._sharding, config.trainer.packing, config.trainer.shares_prefixes
        )
        self._layers_text = self._try_compiled() if self._sharding.compiles else ""
        parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._parameters = list(parameters.values())
        self._optimizer = torch.optim.AdamW(self._parameters, fused=True)
        self._offloads = offloads
        make_adam_state(self._optimizer, away=offloads)
        self._refreshed = self._refreshed_tensors()
        self._sums_whole = torch.tensor(self._sharding.whole)
        buffers = {SUMS_WHOLE: self._sums_whole, **({} if first else persistent_buffers(self._model))}
        base = first.base if first else None
        self._checkpointer = Checkpointer(
            config, self._mesh, parameters, self._optimizer, self._refreshed, base, buffers, away=offloads
        )
        if first:
            self._adapters = Adapters(self._model, parameters, self._optimizer, self._checkpointer, lora, first)
        sums = adapter_sums if first else shard_sums
        self._sums = sums(self._model, self._sharding.dtype, is_first=self._mesh.is_first)
        self._sender = sender
        self._attempt = attempt
        self._published = PublishedVersions(config.max_steps_off_policy)
        self._last: WeightIdentity | None = None  # what the sender sent last; None where that may have failed
        self._mesh.limit_collectives(config.timeouts.collective_s)
        log.info("ready")

    def _try_compiled(self) -> str:
        """Tries to compile the layers. Returns a line for the log that says that they are compiled, or why they are
        not. Raises BadInput if they cannot be compiled although `trainer.compile` is true. Collective."""
        log.info("compiling layers")
        required = self._config.trainer.compile is True
        tolerance = self.proof.model.tolerance
        most_tokens = self._config.trainer.micro_batch_tokens
        batches = trial_batches(self._facts.vocab_size, most_tokens, self._max_seq_len)
        reason = why_uncompiled(
            self._model, self._sharding, self._passes, self._mesh, batches, tolerance, whole=not required
        )
        if reason and required:
            raise Refusal(
                f"trainer.compile = true for {self.proof.architecture}: {reason}",
                "layers that compile, with the same results as uncompiled layers",
                "leave --trainer.compile out, or set it to false",
            )
        if reason:
            return f"layers are not compiled: {reason}"
        return "layers are compiled"

    def _load_reference(self) -> PreTrainedModel | None:
        """Returns the model of `trainer.kl.reference`, frozen and sharded like the policy; None if there is no
        reference, or if it is the policy's own base."""
        reference = self._config.kl_reference
        if reference is None or self._config.base_is_reference:
            return None
        assert reference.base_model is not None, "checked with the configuration"
        weights = reference.load_checkpoint_path or reference.base_model
        return self._sharding.shard_model(reference.base_model, weights).requires_grad_(False)

    def _refreshed_tensors(self) -> dict[str, Tensor]:
        """Returns {name: tensor} for the reference's tensors that `update_reference` overwrites, in the order of the
        policy's trained parameters; empty for a reference that never changes."""
        reference = self._config.kl_reference
        if reference is None or not reference.update_every:
            return {}
        if self._reference is None:  # the base with earlier adapters, at first with those that change nothing
            return {name: p.detach().clone() for name, p in self._model.named_parameters() if p.requires_grad}
        return dict(self._reference.named_parameters())

    def shown(self) -> tuple[str, str]:
        """Returns two texts for the log. The first has the result of the model's proof at the start, and notes on
        compiled layers, logits, memory, and the tensors whose checksums need a gather. The second names what the
        configuration asks for but the model cannot do: packed rows or shared prefixes ("" if there is nothing)."""
        texts = self.proof.text, self._layers_text, self._sharding.head, self._sharding.memory.text, self._sums.text
        return "; ".join(filter(None, texts)), self.proof.notice

    def forward_backward(
        self,
        data: BatchPart | TokenBatch,
        loss_fn: str,
        loss_fn_config: Mapping[str, float],
        provenance: Provenance | None,
        wants_logprobs: bool = True,
    ) -> ShardOutput:
        """Adds the gradient of the raw masked sum of the loss over the batch to the accumulated gradient. Returns the
        log-probabilities of the datums that this rank computed (none unless `wants_logprobs`), and metrics: `loss:sum`
        and the metrics of `trainer.losses`. If the loss of a computed datum, or its gradient, is not finite, also
        returns the datum's index in the batch.

        `data`: this rank's part, or the whole batch. Raises ProvenanceError for tokens or floors that are too old, and
        BadInput for an unknown loss, a missing column, or tokens outside the model's vocabulary.
        """
        fault_point("trainer.forward_backward")
        if provenance is not None:
            self._published.check(provenance)
        function, loss_config = resolve_loss(loss_fn, loss_fn_config)
        imported = loss_fn not in LOSSES
        part = self._checked(data, loss_fn)
        self._checkpointer.bring_moments_back()  # during the passes
        logprobs: list[tuple[MicroBatch, Tensor]] = []
        metrics: list[Metrics] = []
        finite: list[Tensor] = []
        micro_batches = self._micro_batches(part.forest)
        with (
            self._sharding.layout_of(self._model, micro_batches),
            self._sharding.accumulating(self._model) as next_pass,
            adapter_mode(self._model, dropout=True),
        ):
            for number, micro in enumerate(micro_batches, start=1):
                next_pass(number == len(micro_batches))
                columns = self._passes.columns(part, micro, imported=imported)
                p = self._passes.logprobs(self._model, part, micro, only_counted=not wants_logprobs)
                p.retain_grad()
                counts = self._passes.counts(part, micro)
                micro_loss = self._passes.on_rows(function, part, micro) if imported else function
                loss, loss_metrics, is_finite = backward(micro_loss, p, columns, loss_config, counts=counts)
                finite.append(is_finite)
                logprobs.append((micro, p.detach()))
                if not micro.filler:
                    watched: Metrics = monitors(p, columns) if "logprobs" in columns else {}
                    metrics.append({"loss:sum": loss, **watched, **loss_metrics})
        output = collect(logprobs, reduce_metrics(read_metrics(metrics)))
        suspects = () if to_host(torch.stack(finite)).all() else nonfinite_datums(part, output, function, loss_config)
        sizes = [micro.sizes(part.lengths) for micro in micro_batches if not micro.filler]
        tokens = sum(int(whole.sum()) for whole, _ in sizes)
        distinct = tokens - sum(int(shared.sum()) for _, shared in sizes)
        peak_s = self._peak_s(sizes)
        output = replace(output, suspects=suspects, peak_s=peak_s, tokens=tokens, distinct=distinct)
        if wants_logprobs:
            return output
        return replace(output, logprobs=output.logprobs[:0])

    def _peak_s(self, sizes: Sequence[tuple[Numbers, Numbers]]) -> float:
        """Returns this rank's share of `ForwardBackwardOutput.peak_s`: the seconds that the model's arithmetic for its
        micro-batches takes at a GPU's peak rate, divided by the number of ranks. `sizes`: the `MicroBatch.sizes` of
        each micro-batch."""
        frozen = self._config.trainer.lora.on
        flops = sum(train_flops(self._facts, whole, shared, frozen=frozen) for whole, shared in sizes)
        return flops / self._peak_flops / self._mesh.size

    @torch.no_grad()
    def forward(self, data: BatchPart | TokenBatch, which: Which = "policy") -> ShardOutput:
        """Computes the log-probabilities of the batch's `target_tokens` under the policy or the reference, without a
        gradient. Returns the log-probabilities of the datums that this rank computed. Raises BadInput if there is no
        reference to compute with, and for tokens outside the vocabulary."""
        part = self._checked(data)
        micro_batches = self._micro_batches(part.forest)
        with self._policy_or_reference(which) as model, self._sharding.layout_of(model, micro_batches):
            computed = [(micro, self._passes.logprobs(model, part, micro)) for micro in micro_batches]
        return collect(computed, {})

    def forward_summarized(self, part: BatchPart, which: Which, name: str, summarize: Summary) -> SummarizedOutput:
        """Computes log-probabilities as `forward` does, and adds them to the datums of `part` as the column `name`.
        Then calls `summarize` with these datums. Returns the log-probabilities and, for each datum that this rank
        computed, the K numbers that `summarize` returned."""
        output = self.forward(part, which)
        batch = part.batch
        logprobs = output.as_column(part)
        sums = summarize(replace(batch, columns={**batch.columns, name: logprobs}))
        return SummarizedOutput(np.asarray(output.datums, np.int64), logprobs, sums[:, part.places(output.datums)])

    def _checked(self, data: BatchPart | TokenBatch, loss_fn: str | None = None) -> BatchPart:
        """Returns `data` as this rank's part. Raises BadInput on all ranks if any rank refuses its own part.
        Collective."""
        part = BatchPart.of(data)
        self._mesh.agree(find_refusal(part, self._facts.vocab_size, loss_fn))
        return part

    @contextmanager
    def _policy_or_reference(self, which: Which) -> Iterator[PreTrainedModel]:
        """Context manager: yields the model that computes the policy or the reference within its `with` block. If the
        policy is the reference plus adapters, the policy's model computes both: for a fixed reference the adapters are
        off; for a reference that is updated they have the reference's values. Raises BadInput when there is no
        reference."""
        if which == "policy":
            yield self._model
        elif self._reference is not None:
            yield self._reference
        elif not self._config.base_is_reference:
            raise BadInput("no reference policy is loaded: set trainer.kl.coef and trainer.kl.reference.base_model")
        elif self._refreshed:
            self._checkpointer.keep()
            self._exchange_adapters()
            try:
                yield self._model
            finally:
                self._exchange_adapters()
        else:
            with adapter_mode(self._model, off=True):
                yield self._model

    def _exchange_adapters(self) -> None:
        """Swaps, in place, the values of the policy's adapters with the values of the reference's."""
        for parameter, other in zip(self._parameters, self._refreshed.values(), strict=True):
            before = parameter.clone()
            parameter.copy_(other)
            other.copy_(before)

    @torch.no_grad()
    def update_reference(self) -> None:
        """Copies the policy's trained parameters to the reference. Raises BadInput for a reference that does not
        change."""
        if not self._refreshed:
            raise BadInput(
                "this run has no reference that can change: set trainer.kl.coef > 0 and "
                "trainer.kl.reference.update_every > 0"
            )
        self._checkpointer.keep()
        for tensor, parameter in zip(self._refreshed.values(), self._parameters, strict=True):
            tensor.copy_(parameter)

    def optim_step(self, adam: AdamParams, normalizer: float) -> OptimStepResponse:
        """Divides the accumulated gradient by `normalizer`, clips its norm over all shards, and makes one AdamW update.

        Raises TriremeError without a gradient. If the gradient is not finite, drops it, updates nothing and raises
        NonFiniteGradient.
        """
        fault_point("trainer.optim_step")
        if not (math.isfinite(normalizer) and normalizer > 0):
            raise ValueError(f"the normalizer must be positive, got {normalizer}")
        gradients = [p.grad.to_local() for p in self._parameters if p.grad is not None]
        if not gradients:
            raise TriremeError("optim_step without a gradient: call forward_backward first")
        # Copies of a shard hold the same gradient, so only shards are summed.
        grad_norm = math.sqrt(self._mesh.sum_over_shards(sum_of_squares(gradients))) / normalizer
        if not math.isfinite(grad_norm):
            self._optimizer.zero_grad()
            raise NonFiniteGradient(
                f"the gradient norm is {grad_norm}; nothing was updated. Look at advantages and sampled logprobs of "
                "this batch (NaN, or ratios beyond float range: optim/ratio_max), at the learning rate (weights that "
                f"blew up in an earlier step), and at model.dtype, {self._sharding.dtype} (float16 overflows first)."
            )
        torch._foreach_mul_(gradients, min(1.0, adam.max_grad_norm / max(grad_norm, 1e-30)) / normalizer)
        self._optimizer.param_groups[0].update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        self._checkpointer.keep()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return OptimStepResponse({"lr": float(adam.learning_rate), "grad_norm": float(grad_norm)})

    def drop_gradients(self) -> None:
        """Discards the gradients that were accumulated since the last step of the optimiser."""
        self._optimizer.zero_grad()

    def reset_optimizer(self) -> None:
        """Sets AdamW's moments and its count of steps to 0, as at the start."""
        self._checkpointer.reset_moments()

    @cached_property
    def layout(self) -> Layout:
        """Says in which bucket, and where in it, each published tensor lies; the same on all ranks."""
        if self._adapter:
            shapes = published_adapters
        else:
            shapes = published_units
        return lay_out(shapes(self._model, self._sharding.dtype))

    def terms(self) -> tuple[tuple[int, ...], Endpoint | None]:
        """Returns what the trainer needs from this rank to offer a version to the replicas
        (`trireme.core.transport.Offer`): the sizes of the buckets in bytes, and the address at which replicas reach
        this rank's sender (None for a transport that does not send to a fixed group of replicas)."""
        return self.layout.sizes, self._sender.endpoint

    def publish_weights(self, version: int, session: Session | None = None) -> PublishedWeights:
        """Sends the weights in the inference dtype as `version`. `session` (`trireme.core.transport.Session`) names the
        replicas that are ready to receive the weights; None: replicas fetch the bytes later. Returns the manifest, and
        a source that has only this rank's part of the bytes; `trireme.core.transport.Transport.join` joins the parts of
        all ranks. Collective."""
        fault_point("trainer.publish")
        base = self._last
        self._last = None
        model = self._model
        dtype = self._sharding.dtype
        sums = self._sums.of_shard(self._device)
        if self._adapter:
            units = adapter_units(model, dtype, self._device)
        else:
            units = gathered_units(model, stay=self._sharding.weights_stay)  # for the canary
        share = self.layout.share(self._mesh.rank, self._mesh.size)
        with freed_after(model):
            part = self._sender.send(version, self.layout, self._sums.watching(units, share, sums), session)
            canary = compute_canary(model, dtype, self._canary_tokens, self._device)
        self._mesh.sum_over_ranks(sums)
        entries = self.layout.with_hashes({name: str(total) for name, total in self._sums.by_name(sums).items()})
        identity = WeightIdentity(self._attempt, version, weights_digest(entries, self._adapter))
        self._published.add(identity)
        self._last = identity
        return PublishedWeights(WeightsManifest(identity, entries, canary, self._adapter, base), part)

    def begin_free_memory(self) -> None:
        """With `offloads` begins to copy AdamW's moments to host memory, and does not wait: `free_memory` does."""
        if self._offloads:
            self._checkpointer.begin_to_put_moments_away()

    def free_memory(self) -> None:
        """Releases the GPU memory that PyTorch keeps from freed tensors, so that another process can use it. With
        `offloads` first moves AdamW's moments to host memory."""
        if self._offloads:
            self._checkpointer.put_moments_away()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def begin_save(self, path: Path) -> None:
        """Begins to save the current state (weights, AdamW's state, random generators) into directory `path`."""
        self._checkpointer.begin(path)

    def finish_save(self, path: Path) -> list[FileRecord]:
        """Waits until this rank's files in `path` are on the disk; returns their records. Call it from another thread
        than the other verbs.

        Raises StorageFailed, on all ranks, when one of them cannot write.
        """
        return self._checkpointer.finish(path)

    def load_state(
        self, path: Path, identities: Sequence[WeightIdentity], source: CheckpointSource | None = None
    ) -> str:
        """Loads the state saved in `path` by any number of shards; a node that does not see `path` reads from `source`.
        `identities`: the identities of the versions published before the save. Drops gradients.

        If memory and configuration allow it, gradients are then added in the same order as in the saved run, and the
        result is "". Otherwise the result is a message that says why the last bits of gradients may differ. Raises
        CheckpointInvalid, StorageFailed.
        """
        fault_point("trainer.load")
        self._checkpointer.load(path, source)
        self.drop_gradients()
        self._published = PublishedVersions(self._config.max_steps_off_policy, identities)
        notice = self._sharding.keep_whole(bool(self._sums_whole))
        self._sums_whole.fill_(self._sharding.whole)
        return notice

    def save_weights(
        self,
        path: Path,
        entries: Sequence[TensorEntry],
        buckets: Buckets,
        adapter: Adapter | None = None,
    ) -> list[FileRecord]:
        """Writes published weights into directory `path` in the Hugging Face layout, or peft's for an adapter, with
        configuration and tokenizer. Returns the records of the files. Of a whole model each rank writes its part
        (`trainer.export.write_weights`); an adapter is written by rank 0, whole. The tensors `entries` are read from
        `buckets`. `adapter`: the published adapter; None: the adapter in use, or the whole model if there are no
        adapters. Not collective; call it from another thread than the other verbs. Raises StorageFailed.

        If a save of the state is running, waits until it has ended. That save is more urgent, because the next
        optimiser step waits for it. Published weights do not change, so no step waits for this call.
        """
        self._checkpointer.wait_until_saved()
        fault_point("trainer.save_weights")
        files = self._companions
        adapter = adapter or self._adapter
        if adapter:
            files = {**files, **adapter_files(self._config.trainer.lora, adapter, self._config.model.name)}
            entries, buckets = own_part(entries, buckets, adapter.spec) if adapter.spec else (entries, buckets)
            return write_weights(path, entries, buckets, files, adapter=True)
        return write_weights(path, entries, buckets, files, rank=self._mesh.rank, size=self._mesh.size)

    @cached_property
    def _companions(self) -> dict[str, bytes]:
        """{name: contents} of the files that accompany published tensors: the tokenizer's and, for a whole model, its
        configuration."""
        model = None if self._adapter else self._model
        return companion_files(self._config.tokenizer_name, model, self._sharding.dtype)

    def rank_assignment(self) -> RankAssignment:
        """Returns the function that says which datums each rank computes."""
        share = self._config.trainer.shares_prefixes
        return RankAssignment(self._mesh.dp_size, self._facts.attention_length, share)

    def _micro_batches(self, forest: Forest) -> list[MicroBatch]:
        """Returns this rank's micro-batches of a batch. `forest`: the forest of the whole batch, over all ranks."""
        ranks = plan(
            forest,
            self.rank_assignment(),
            self._config.trainer.micro_batch_tokens,
            packed=self._sharding.packed,
            shares=self._sharding.shares,
        )
        return ranks[self._mesh.dp_rank]


def prepare_device(kind: str, environ: Mapping[str, str]) -> torch.device:
    """Returns the device of a shard, whose `kind` is "gpu" or "cpu". On a GPU, lets PyTorch's allocator grow and shrink
    its segments, unless the user has chosen settings of the allocator in `environ`. Packed micro-batches and chunks of
    logits have a new size each time; in segments of fixed sizes, what they free would be in pieces that fit nothing."""
    if kind == "cpu":
        return torch.device("cpu")
    if not ALLOCATOR_VARIABLES & environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # torch 2.13 has no public function
    return torch.device("cuda")


def sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the squares of all numbers of `gradients`, as a scalar in float64. In float32 the sum would
    depend on how the gradients are split over shards."""
    parts = (part for gradient in gradients for part in gradient.reshape(-1).split(SQUARED_AT_ONCE))
    return torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).square().sum()


def canary_tokens(vocab_size: int, max_seq_len: int, *, experts: bool) -> npt.NDArray[np.int32]:
    """Returns the canary's fixed sequence of tokens, int32 [T]; a model with `experts` gets a longer sequence. T leaves
    AFTER_CANARY tokens free below `max_seq_len`, because a replica samples more tokens after the sequence."""
    length = TOKENS_OF_EXPERTS if experts else CANARY_TOKENS
    position = np.arange(max(SHORTEST_CANARY, min(length, max_seq_len - AFTER_CANARY)), dtype=np.int64)
    return ((31 * position**2 + 17 * position + 3) % vocab_size).astype(np.int32)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # else compiled layers would be compiled again, for one short row
def compute_canary(
    model: PreTrainedModel, dtype: torch.dtype, tokens: npt.NDArray[np.int32], device: torch.device
) -> Canary:
    """Returns the canary, by which a replica proves that it uses the published weights: the log-probabilities of
    `tokens`, int32 [T], under the weights that `model` publishes, computed by the same code as in training. `dtype`:
    the dtype in which the model computes; it decides how far a replica's result may differ. Collective."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)[None]
    inputs = ids[:, :-1]
    targets = ids[:, 1:]
    with trace.span("canary"):
        logprobs = token_logprobs(model, inputs, targets, torch.ones(targets.shape, device=device))[0]
    return Canary(tokens, logprobs.cpu().numpy(), EXACT if dtype == torch.float32 else ROUNDED)
