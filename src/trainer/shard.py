"""One shard of the trainer: the verbs, on torch alone. `trainer.group` puts it into a Ray actor.

All shards of a process group are called with the same arguments in the same order; each computes the same plan and
takes its own micro-batches. What a verb refuses (provenance, a bad loss configuration) it refuses on every rank, before
the first collective, so that a refusal leaves the group usable.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from trainer.batching import DEFAULT_MICRO_BATCH_TOKENS, MicroBatch, ShardOutput, pad_rows, plan
from trainer.losses import COLUMNS, monitors, resolve_loss
from trainer.model import gathered_units, inference_dtype, load_source, shard_model, token_logprobs
from trainer.publish import Packer, Put, compute_canary
from trireme.config import Config
from trireme.errors import ProvenanceError, TriremeError
from trireme.faults import fault_point
from trireme.metrics import reduce_metrics
from trireme.types import AdamParams, OptimStepResponse, Provenance, TokenBatch, WeightIdentity
from trireme.weights import PublishedWeights, weights_digest

FILE_BYTES = 4 * 2**30
"""Size at which `save_weights` begins another file."""


def check_provenance(provenance: Provenance, published: list[WeightIdentity], max_steps_off_policy: int) -> None:
    """Raises ProvenanceError unless every token of the minibatch comes from weights that it may come from.

    `published` holds the last K + 1 identities, the newest last; the newest is the version that trains now. The step
    must be that version, each identity one of these, and no group's floor more than K steps back, or ahead.
    """
    version = published[-1].version if published else None
    if provenance.step != version:
        raise ProvenanceError(f"a batch of step {provenance.step} came while the trainer holds version {version}")
    for identity in provenance.identities:
        if identity not in published:
            known = ", ".join(map(str, published))
            raise ProvenanceError(
                f"step {provenance.step} has tokens of weights {identity} (attempt:version:digest), which are not "
                f"among the last {max_steps_off_policy + 1} published: {known}"
            )
    ages = provenance.step - provenance.floors
    for d in np.flatnonzero((ages > max_steps_off_policy) | (ages < 0)):
        raise ProvenanceError(
            f"datum {d} of step {provenance.step} has floor {provenance.floors[d]}, age {ages[d]}; "
            f"ages must be within 0 and max_steps_off_policy = {max_steps_off_policy}"
        )


class Shard:
    """One rank. Constructing it joins the process group through `store` and loads its part of the model: collective.

    `put` copies a packed bucket to where replicas can get it; only rank 0's is called.
    """

    def __init__(self, config: Config, rank: int, world_size: int, store: dist.Store, put: Put) -> None:
        fault_point("trainer.start")
        self._config = config
        self._rank = rank
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = inference_dtype(config.model.dtype, self._device)
        torch.manual_seed(config.seed)
        source = load_source(config.model.name, config.model.attn) if rank == 0 else None
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=max(config.timeouts.start_s, config.timeouts.step_s)),
        )
        self._model = shard_model(config.model.name, config.model.attn, source, self._device, self._dtype)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters)
        self._packer = Packer(put)
        self._attempt = 1
        self._published: deque[WeightIdentity] = deque(maxlen=config.orchestrator.max_steps_off_policy + 1)

    def forward_backward(
        self, batch: TokenBatch, loss_fn: str, loss_fn_config: Mapping[str, float], provenance: Provenance | None
    ) -> ShardOutput:
        """Adds the gradient of the raw masked sum over the batch. Metrics: `loss:sum` and those of `trainer.losses`.

        Raises ProvenanceError, BadInput (loss), ValueError (a column is missing).
        """
        fault_point("trainer.forward_backward")
        if provenance is not None:
            check_provenance(provenance, list(self._published), self._config.orchestrator.max_steps_off_policy)
        function, loss_config = resolve_loss(loss_fn, loss_fn_config)
        missing = [name for name in COLUMNS if name not in batch.columns]
        if missing:
            raise ValueError(f"loss {loss_fn} needs the columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}")
        logprobs, metrics = [], []
        micro_batches = self._micro_batches(batch)
        for micro in micro_batches:
            rows = self._rows(batch, micro)
            p = self._logprobs(batch, micro, rows)
            loss, loss_metrics = function(p, rows, loss_config)
            loss.backward()
            logprobs.append((micro, p.detach()))
            if not micro.filler:
                metrics.append({"loss:sum": float(loss.detach()), **loss_metrics, **monitors(p, rows)})
        return _output(batch, logprobs, reduce_metrics(metrics))

    @torch.no_grad()
    def forward(self, batch: TokenBatch) -> ShardOutput:
        """Log-probabilities of the batch's `target_tokens`, without gradient."""
        return _output(
            batch,
            [(micro, self._logprobs(batch, micro, self._rows(batch, micro))) for micro in self._micro_batches(batch)],
            {},
        )

    def optim_step(self, adam: AdamParams, normalizer: float) -> OptimStepResponse:
        """Divides the accumulated gradient by `normalizer`, clips its norm over all shards, and makes one AdamW update.

        Raises TriremeError when there is no gradient, or it is not finite; the gradient is dropped, nothing is updated.
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
            raise TriremeError(
                f"the gradient norm is {grad_norm}; nothing was updated. Look at advantages and sampled logprobs of "
                "this batch (NaN, or ratios beyond float range: optim/ratio_max), at the learning rate (weights that "
                f"blew up in an earlier step), and at model.dtype (now {self._dtype}; float16 overflows first)"
            )
        torch._foreach_mul_(gradients, min(1.0, adam.max_grad_norm / max(grad_norm, 1e-30)) / normalizer)
        self._optimizer.param_groups[0].update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        self._optimizer.step()
        self._optimizer.zero_grad()
        return OptimStepResponse({"lr": adam.learning_rate, "grad_norm": grad_norm})

    def publish_weights(self, version: int) -> PublishedWeights | None:
        """Packs the weights in the inference dtype and names them `version`; rank 0 returns them, the others None."""
        fault_point("trainer.publish")
        units = gathered_units(self._model)
        entries, buckets = self._packer.pack(units) if self._rank == 0 else _consume(units)
        canary = compute_canary(self._model, self._max_seq_len, self._device)
        identities = [WeightIdentity(self._attempt, version, weights_digest(entries))]
        dist.broadcast_object_list(identities, src=0, device=self._device)
        self._published.append(identities[0])
        return PublishedWeights(identities[0], entries, buckets, canary) if self._rank == 0 else None

    def save_weights(self, path: Path) -> None:
        """Writes the weights in the inference dtype, configuration and tokenizer in the Hugging Face layout.

        The directory opens with `from_pretrained` and `vllm serve`. Rank 0 writes; one file's tensors are in its host
        memory at a time.
        """
        if self._rank != 0:
            _consume(gathered_units(self._model))
            return
        path.mkdir(parents=True, exist_ok=True)
        _write_safetensors(path, gathered_units(self._model))
        self._model.config.dtype = self._dtype
        self._model.config.save_pretrained(path)
        if self._model.generation_config is not None:
            self._model.generation_config.save_pretrained(path)
        AutoTokenizer.from_pretrained(self._config.tokenizer_name).save_pretrained(path)

    @property
    def _max_seq_len(self) -> int:
        limits = (self._config.model.max_seq_len, self._config.inference.max_model_len)
        return min([self._model.config.get_text_config().max_position_embeddings, *(n for n in limits if n)])

    def _micro_batches(self, batch: TokenBatch) -> list[MicroBatch]:
        budget = self._config.trainer.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
        return plan(batch.lengths, dist.get_world_size(), budget)[self._rank]

    def _rows(self, batch: TokenBatch, micro: MicroBatch) -> dict[str, Tensor]:
        """The columns as [B, L] on the device; a filler's mask is 0 everywhere."""
        rows = {
            name: torch.from_numpy(pad_rows(column, batch.offsets, micro.datums)).to(self._device)
            for name, column in batch.columns.items()
        }
        if micro.filler and "mask" in rows:
            rows["mask"].zero_()
        return rows

    def _logprobs(self, batch: TokenBatch, micro: MicroBatch, rows: Mapping[str, Tensor]) -> Tensor:
        tokens = torch.from_numpy(pad_rows(batch.tokens, batch.offsets, micro.datums)).to(self._device)
        temperatures = torch.from_numpy(batch.temperatures[list(micro.datums)]).to(self._device)
        return token_logprobs(self._model, tokens.long(), rows["target_tokens"].long(), temperatures)

    def _global_norm(self, gradients: list[Tensor]) -> float:
        """Euclidean norm over all shards, accumulated in float64 so that it does not depend on their number."""
        squares = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]).square().sum()
        dist.all_reduce(squares)
        return math.sqrt(float(squares))


def _output(batch: TokenBatch, computed: list[tuple[MicroBatch, Tensor]], metrics: Mapping[str, float]) -> ShardOutput:
    datums = tuple(d for micro, _ in computed if not micro.filler for d in micro.datums)
    lengths = batch.lengths
    rows = [
        row[: lengths[d]]
        for micro, p in computed
        if not micro.filler
        for d, row in zip(micro.datums, p.cpu().numpy(), strict=True)
    ]
    return ShardOutput(datums, np.concatenate(rows) if rows else np.zeros(0, dtype=np.float32), metrics)


def _consume(units: Iterator[list[tuple[str, Tensor]]]) -> tuple[tuple[()], tuple[()]]:
    """Takes part in gathering every unit, and keeps nothing."""
    for _ in units:
        pass
    return (), ()


def _write_safetensors(path: Path, units: Iterator[list[tuple[str, Tensor]]]) -> None:
    """Files of about FILE_BYTES, each written before the next is gathered, and their index."""
    index: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    total = 0

    def write() -> None:
        file = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(pending, path / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(pending, file))
        pending.clear()

    for name, tensor in (named for unit in units for named in unit):
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > FILE_BYTES:
            write()
        pending[name] = tensor.cpu().clone()
        total += tensor.nbytes
    write()
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (path / "model.safetensors.index.json").write_text(json.dumps(content, indent=1))
