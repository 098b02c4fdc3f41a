"""Computes micro-batches: the model's inputs, and its log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.batching import MicroBatch, Packed, Rows
from trainer.logprobs import token_logprobs
from trainer.losses import any_counts
from trainer.model import Sharding
from trireme.core.batch import BatchPart


class Passes:
    """Computes micro-batches of a rank's part of a batch, in padded rows or packed, according to `sharding.packed` at
    the time of the call."""

    def __init__(self, sharding: Sharding, device: torch.device) -> None:
        self._sharding = sharding
        self._device = device

    def rows(self, part: BatchPart, micro: MicroBatch) -> dict[str, Tensor]:
        """Returns the columns of the micro-batch's datums, and their tokens as `tokens`, as padded rows [B, L] on the
        device. In a filler, mask and weights are 0."""
        batch = part.batch
        layout = Rows(batch.offsets, part.places(micro.datums))
        columns = {**batch.columns, "tokens": batch.tokens}
        rows = {name: self._to_device(layout.pad(column)) for name, column in columns.items()}
        for name in ("mask", "weights"):
            if micro.filler and name in rows:
                rows[name].zero_()
        return rows

    @staticmethod
    def counts(part: BatchPart, micro: MicroBatch) -> bool:
        """Returns True if any token of the micro-batch has a mask or weight other than 0; False for a filler."""
        return not micro.filler and any_counts(part.batch.take(part.places(micro.datums)).columns)

    def logprobs(
        self, model: PreTrainedModel, part: BatchPart, micro: MicroBatch, rows: Mapping[str, Tensor]
    ) -> Tensor:
        """Returns the log-probabilities of the targets of the micro-batch's rows under `model`, float32 [B, L]; values
        at the padding have no meaning. `rows`: from `rows`."""
        batch = part.batch
        places = part.places(micro.datums)
        temperatures = batch.temperatures[places]
        ones = bool((temperatures == 1).all())
        if not self._sharding.packed:
            tokens = rows["tokens"].long()
            targets = rows["target_tokens"].long()
            if ones:
                of_rows = None
            else:
                of_rows = self._to_device(temperatures)[:, None].expand(tokens.shape)
            return token_logprobs(model, tokens, targets, of_rows)
        packed = Packed(batch.offsets, places)
        columns = batch.tokens, batch.columns["target_tokens"]
        tokens, targets = (self._to_device(column[packed.index])[None].long() for column in columns)
        if ones:
            temperature = None
        else:
            temperature = self._to_device(temperatures[packed.datum])[None]
        positions = self._to_device(packed.positions)
        bounds = {"cu_seq_lens_q": self._to_device(packed.starts), "max_length_q": packed.longest}
        p = token_logprobs(model, tokens, targets, temperature, position_ids=positions[None], **bounds)
        return p[0][self._to_device(packed.rows.index)]

    def _to_device(self, values: npt.NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(values)
        if self._device.type == "cuda":  # a copy of other memory waits until the device has done all that was begun
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)
