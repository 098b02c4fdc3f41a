"""One shard of the trainer: the verbs, on torch alone. `trainer.handle` puts it into a Ray actor.

All shards of a process group are called with the same arguments in the same order; each computes the same plan and
takes its own micro-batches. What a verb refuses (provenance, a bad loss configuration) it refuses on every rank, before
the first collective, so that a refusal leaves the group usable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, set_seed

from trainer.batch_checks import check_columns, check_provenance, check_tokens, recent
from trainer.batching import MicroBatch, Packed, Rows, ShardOutput, plan
from trainer.culprits import culprits, is_finite
from trainer.device import device_of
from trainer.export import model_files, tokenizer_files, write_model
from trainer.logprobs import packed_logprobs, token_logprobs
from trainer.lora import adapter_files, adapter_units, adapters_off, dropping, exchanged, write_adapter
from trainer.losses import Metrics, monitors, resolve_loss
from trainer.mfu import device_peak, train_flops
from trainer.model import SHARD, Sharding, accumulating, gathered_units, load_source, shard_model
from trainer.publish import compute_canary
from trainer.state import Checkpointer, make_adam_state
from trireme.checkpoint.files import FileRecord
from trireme.config import CommonConfig
from trireme.config.model_facts import ModelFacts
from trireme.config.schema import ReferenceConfig
from trireme.core.base_digest import base_digest
from trireme.core.errors import BadInput, NonFiniteGradient, TriremeError
from trireme.core.transport import Sender
from trireme.core.types import AdamParams, OptimStepResponse, Provenance, TokenBatch, WeightIdentity, Which
from trireme.core.weights import Adapter, PublishedWeights, TensorEntry, WeightsManifest, weights_digest
from trireme.process.faults import fault_point
from trireme.run.metrics import reduce_metrics


class Shard:
    """One rank. Constructing it joins the process group through `store` and loads its part of the model: collective.

    `sender` sends published weights to where replicas get them. `attempt` becomes part of the identity of all weights
    that are published.
    """

    def __init__(
        self, config: CommonConfig, rank: int, world_size: int, store: dist.Store, sender: Sender, attempt: int = 1
    ) -> None:
        fault_point("trainer.start")
        self._config = config
        self._rank = rank
        torch.use_deterministic_algorithms(config.deterministic)
        self._device = device_of(config)
        set_seed(config.seed)  # of torch, numpy and Python
        facts = ModelFacts.of(config, required=True)
        assert facts is not None, "required"
        self._facts = facts
        source = load_source(config.model.name) if rank == 0 else None
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=max(config.timeouts.start_s, config.timeouts.step_s)),
        )
        self._sharding = Sharding.of(config, facts, self._device)
        lora = config.trainer.lora
        self._peak_flops = device_peak(self._device, self._sharding.dtype)
        self._model = shard_model(
            config.model.name, source, self._device, self._sharding, lora if lora.on else None, config.lora_seed
        )
        self._adapter = self._name_adapter() if lora.on else None
        other = config.kl_reference is not None and not config.base_is_reference
        self._reference = self._load_reference(config.kl_reference) if config.kl_reference and other else None
        parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._parameters = list(parameters.values())
        self._optimizer = torch.optim.AdamW(self._parameters, fused=True)
        make_adam_state(self._optimizer)
        self._refreshed = self._tensors_of_the_reference()
        self._checkpointer = Checkpointer(
            parameters,
            self._optimizer,
            self._refreshed,
            config.timeouts.checkpoint_s,
            config.checkpoint.async_save,
            self._device,
            self._adapter.base if self._adapter else None,
        )
        self._companions: dict[str, bytes] = {}
        self._sender = sender
        self._attempt = attempt
        self._published: list[WeightIdentity] = []

    def _load_reference(self, reference: ReferenceConfig) -> PreTrainedModel:
        """The model of `trainer.kl.reference`, frozen and sharded as the policy is."""
        assert reference.base_model is not None, "checked with the configuration"
        weights = reference.load_checkpoint_path or reference.base_model
        source = load_source(weights) if self._rank == 0 else None
        return shard_model(reference.base_model, source, self._device, self._sharding).requires_grad_(False)

    def _tensors_of_the_reference(self) -> dict[str, Tensor]:
        """Those that `update_reference` changes, in the order of the policy's; none where the reference stays."""
        reference = self._config.kl_reference
        if reference is None or not reference.update_every:
            return {}
        if self._reference is None:  # the base with the adapters that it had then, at first with those that do nothing
            return {name: p.detach().clone() for name, p in self._model.named_parameters() if p.requires_grad}
        return dict(self._reference.named_parameters())

    def _name_adapter(self) -> Adapter:
        """What the adapters belong to, the same on all ranks. Collective."""
        lora, digests = self._config.trainer.lora, [base_digest(self._config.model.name) if self._rank == 0 else ""]
        dist.broadcast_object_list(digests, src=0, device=self._device)
        assert lora.rank is not None
        return Adapter(digests[0], lora.rank, lora.alpha)

    def forward_backward(
        self, batch: TokenBatch, loss_fn: str, loss_fn_config: Mapping[str, float], provenance: Provenance | None
    ) -> ShardOutput:
        """Adds the gradient of the raw masked sum over the batch. Metrics: `loss:sum` and those of `trainer.losses`.

        Raises ProvenanceError; BadInput for an unknown loss, a missing column, tokens that are not the model's.
        """
        fault_point("trainer.forward_backward")
        if provenance is not None:
            check_provenance(provenance, self._published, self._config.max_steps_off_policy)
        function, loss_config = resolve_loss(loss_fn, loss_fn_config)
        check_tokens(batch, self._facts.vocab_size)
        check_columns(batch, loss_fn)
        logprobs, metrics, all_finite = [], [], True
        micro_batches = self._micro_batches(batch)
        with accumulating(self._model, self._sharding) as next_pass, dropping(self._model):
            for number, micro in enumerate(micro_batches, start=1):
                next_pass(number == len(micro_batches))
                rows = self._rows(batch, micro)
                p = self._logprobs(self._model, batch, micro, rows)
                p.retain_grad()
                loss, loss_metrics = function(p, rows, loss_config)
                loss.backward()
                all_finite = all_finite and is_finite(loss, p)
                logprobs.append((micro, p.detach()))
                if not micro.filler:
                    watched: Metrics = monitors(p, rows) if "logprobs" in rows else {}
                    metrics.append({"loss:sum": float(loss.detach()), **watched, **loss_metrics})
        output = self._output(batch, logprobs, reduce_metrics(metrics))
        return output if all_finite else replace(output, suspects=culprits(batch, output, function, loss_config))

    @torch.no_grad()
    def forward(self, batch: TokenBatch, which: Which = "policy") -> ShardOutput:
        """Log-probabilities of the batch's `target_tokens` under the policy or the reference, without gradient. Raises
        BadInput when there is no reference, and for tokens that are not the model's."""
        check_tokens(batch, self._facts.vocab_size)
        with self._policy_or_reference(which) as model:
            computed = [(m, self._logprobs(model, batch, m, self._rows(batch, m))) for m in self._micro_batches(batch)]
        return _collected(batch, computed, {})

    @contextmanager
    def _policy_or_reference(self, which: Which) -> Iterator[PreTrainedModel]:
        """The model to compute with, and that only within. Raises BadInput when there is no reference."""
        if which == "policy":
            yield self._model
        elif self._reference is not None:
            yield self._reference
        elif not self._config.base_is_reference:
            raise BadInput("no reference policy is loaded: set trainer.kl.coef and trainer.kl.reference.base_model")
        elif self._refreshed:
            self._checkpointer.keep()
            with exchanged(self._parameters, list(self._refreshed.values())):
                yield self._model
        else:
            with adapters_off(self._model):
                yield self._model

    @torch.no_grad()
    def update_reference(self) -> None:
        """The reference becomes the policy as it is now. Raises BadInput when it is one that stays."""
        if not self._refreshed:
            raise BadInput(
                "a reference that can change needs trainer.kl.coef and trainer.kl.reference.update_every > 0"
            )
        self._checkpointer.keep()
        for tensor, parameter in zip(self._refreshed.values(), self._parameters, strict=True):
            tensor.copy_(parameter)

    def optim_step(self, adam: AdamParams, normalizer: float) -> OptimStepResponse:
        """Divides the accumulated gradient by `normalizer`, clips its norm over all shards, and makes one AdamW update.

        Raises TriremeError when there is no gradient, NonFiniteGradient when it is not finite; then it is dropped, and
        nothing is updated.
        """
        fault_point("trainer.optim_step")
        if not (math.isfinite(normalizer) and normalizer > 0):
            raise ValueError(f"the normalizer must be positive, got {normalizer}")
        gradients = [p.grad.to_local() for p in self._parameters if p.grad is not None]
        if not gradients:
            raise TriremeError("optim_step without a gradient: call forward_backward first")
        grad_norm = self._global_norm(gradients) / normalizer
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
        return OptimStepResponse({"lr": adam.learning_rate, "grad_norm": grad_norm})

    def publish_weights(self, version: int) -> PublishedWeights | None:
        """Packs the weights in the inference dtype and names them `version`; rank 0 returns them, the others None."""
        fault_point("trainer.publish")
        how = self._sharding
        units = adapter_units(self._model, how.dtype, self._device) if self._adapter else gathered_units(self._model)
        entries, source = self._sender.send(units)
        canary = compute_canary(self._model, self._max_seq_len, self._device)
        identities = [WeightIdentity(self._attempt, version, weights_digest(entries, self._adapter))]
        dist.broadcast_object_list(identities, src=0, device=self._device)
        self._published = recent([*self._published, *identities], self._config.max_steps_off_policy)
        manifest = WeightsManifest(identities[0], entries, canary, self._adapter)
        return PublishedWeights(manifest, source) if self._rank == 0 else None

    def begin_save(self, path: Path) -> None:
        """Begins to save the state as it is now (weights, AdamW's state, random generators) into directory `path`."""
        self._checkpointer.begin(path)

    def finish_save(self, path: Path) -> list[FileRecord]:
        """Waits until this rank's files are on the disk. For another thread than that of the other verbs.

        Raises StorageFailed, on all ranks, when one of them cannot write.
        """
        return self._checkpointer.finish(path)

    def load_state(self, path: Path, identities: Sequence[WeightIdentity]) -> None:
        """Takes over the state saved in `path`, by any number of shards, and what was published until then: the
        identities of the last K + 1 versions. Raises CheckpointInvalid."""
        fault_point("trainer.load")
        self._checkpointer.load(path)
        self._published = list(identities)

    def save_weights(
        self, path: Path, entries: Sequence[TensorEntry], buckets: Sequence[npt.NDArray[np.uint8]]
    ) -> list[FileRecord]:
        """Writes published weights in the Hugging Face layout, or peft's, with configuration and tokenizer: not
        collective, and for another thread than that of the other verbs. Raises StorageFailed.

        A save of the state that is under way comes first: these do not change, and the next optimiser step does not
        wait for them."""
        self._checkpointer.wait_until_saved()
        fault_point("trainer.save_weights")
        config = self._config
        if self._adapter:
            self._companions = self._companions or {
                **tokenizer_files(config.tokenizer_name),
                **adapter_files(config.trainer.lora, self._adapter, config.model.name),
            }
            return write_adapter(path, entries, buckets, self._companions)
        self._companions = self._companions or {
            **tokenizer_files(config.tokenizer_name),
            **model_files(self._model, self._sharding.dtype),
        }
        return write_model(path, entries, buckets, self._companions)

    @property
    def _max_seq_len(self) -> int:
        limit: int = self._model.config.get_text_config().max_position_embeddings
        return min(limit, self._config.max_seq_len or limit)

    def _micro_batches(self, batch: TokenBatch) -> list[MicroBatch]:
        budget, by_attention = self._config.micro_batch_limit(self._max_seq_len), self._facts.attention_length
        size = self._config.trainer.micro_batch_size
        ranks = plan(batch.lengths, dist.get_world_size(), budget, by_attention, self._sharding.packed, size)
        return ranks[self._rank]

    def _rows(self, batch: TokenBatch, micro: MicroBatch) -> dict[str, Tensor]:
        """Inputs (`tokens`) and columns as [B, L] on the device; a filler's mask is 0 everywhere."""
        layout = Rows.of(batch.offsets, micro.datums)
        rows = {
            name: torch.from_numpy(layout.pad(column)).to(self._device)
            for name, column in (*batch.columns.items(), ("tokens", batch.tokens))
        }
        for name in ("mask", "weights"):
            if micro.filler and name in rows:
                rows[name].zero_()
        return rows

    def _logprobs(
        self, model: PreTrainedModel, batch: TokenBatch, micro: MicroBatch, rows: Mapping[str, Tensor]
    ) -> Tensor:
        """Of the rows' targets, [B, L]; what stands at the padding has no meaning."""
        if self._sharding.packed:
            return self._packed_logprobs(model, batch, micro)
        temperatures = torch.from_numpy(batch.temperatures[list(micro.datums)]).to(self._device)
        return token_logprobs(model, rows["tokens"].long(), rows["target_tokens"].long(), temperatures)

    def _packed_logprobs(self, model: PreTrainedModel, batch: TokenBatch, micro: MicroBatch) -> Tensor:
        packed = Packed.of(batch.offsets, micro.datums)
        tokens = batch.tokens[packed.index], batch.columns["target_tokens"][packed.index]
        temperatures = batch.temperatures[list(micro.datums)][packed.datum]
        inputs = (torch.from_numpy(values).to(self._device) for values in (*tokens, temperatures, packed.positions))
        ids, targets, temperature, positions = inputs
        p = packed_logprobs(model, ids.long(), targets.long(), temperature, positions, torch.from_numpy(packed.starts))
        return p[torch.from_numpy(packed.rows.index).to(self._device)]

    def _global_norm(self, gradients: list[Tensor]) -> float:
        """Euclidean norm over all shards, accumulated in float64 so that it does not depend on their number. Copies of
        a shard hold the same gradient."""
        squares = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]).square().sum()
        squares = squares.to(self._device)
        dist.all_reduce(squares, group=self._sharding.mesh.get_group(SHARD))
        return math.sqrt(float(squares))

    def _output(
        self, batch: TokenBatch, computed: list[tuple[MicroBatch, Tensor]], metrics: Mapping[str, float]
    ) -> ShardOutput:
        output = _collected(batch, computed, metrics)
        if self._peak_flops is None:
            return output
        flops = train_flops(self._facts, batch.lengths[list(output.datums)], frozen=self._config.trainer.lora.on)
        return replace(output, peak_s=flops / self._peak_flops / dist.get_world_size())


def _collected(
    batch: TokenBatch, computed: list[tuple[MicroBatch, Tensor]], metrics: Mapping[str, float]
) -> ShardOutput:
    datums = tuple(d for micro, _ in computed if not micro.filler for d in micro.datums)
    lengths = batch.lengths
    rows = [
        row[: lengths[d]]
        for micro, p in computed
        if not micro.filler
        for d, row in zip(micro.datums, p.cpu().numpy(), strict=True)
    ]
    return ShardOutput(datums, np.concatenate(rows) if rows else np.zeros(0, dtype=np.float32), metrics)
