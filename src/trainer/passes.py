"""Computes micro-batches: the model's inputs, its log-probabilities, and their return to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.batching import FlatTokens, MicroBatch, ShardOutput
from trainer.logprobs import chosen_logprobs
from trainer.losses import DATUM, UNREAD, LossFn, any_counts, counted_tokens, on_rows
from trainer.model import Sharding
from trainer.shared_rows import HeadRows, SharedRow
from trainer.transfers import to_device, to_host
from trireme.core.batch import BatchPart
from trireme.core.prefixes import Numbers


class Passes:
    """Computes micro-batches of a rank's part of a batch. If a micro-batch shares prefixes, it is one row in which each
    common prefix stands once. Else it is one packed row or padded rows, according to `sharding.packed` at the time of
    the call. Log-probabilities and columns are flat in each case: they have the T tokens of the micro-batch's datums,
    one datum after the other (`FlatTokens`)."""

    def __init__(self, sharding: Sharding, device: torch.device) -> None:
        self._sharding = sharding
        self._device = device

    def columns(self, part: BatchPart, micro: MicroBatch, *, imported: bool = False) -> dict[str, Tensor]:
        """Returns {name: column} for the micro-batch's datums, each [T] on the device: the columns that losses read,
        and DATUM, the number of each token's datum. `imported`: the loss is the user's, so all columns are returned,
        and the datums' tokens as `tokens`."""
        batch = part.batch
        flat = FlatTokens(batch.offsets, part.places(micro.datums))
        if imported:
            columns = {**batch.columns, "tokens": batch.tokens}
        else:
            columns = {name: column for name, column in batch.columns.items() if name not in UNREAD}
        on_device = {name: self._to_device(column[flat.index]) for name, column in columns.items()}
        return {**on_device, DATUM: self._to_device(flat.datum.astype(np.int32))}

    def on_rows(self, loss: LossFn, part: BatchPart, micro: MicroBatch) -> LossFn:
        """Returns a loss that takes the micro-batch's flat tokens and calls `loss`, a loss of the user's, with padded
        rows."""
        flat = FlatTokens(part.batch.offsets, part.places(micro.datums))
        return on_rows(loss, self._to_device(flat.places), flat.shape)

    @staticmethod
    def counts(part: BatchPart, micro: MicroBatch) -> bool:
        """Returns True if any token of the micro-batch has a mask or weight other than 0; False for a filler
        (`MicroBatch.filler`)."""
        return not micro.filler and any_counts(part.batch.take(part.places(micro.datums)).columns)

    def logprobs(
        self, model: PreTrainedModel, part: BatchPart, micro: MicroBatch, only_counted: bool = False
    ) -> Tensor:
        """Returns the log-probabilities of the targets of the micro-batch's tokens under `model`, float32 [T].
        `only_counted`: targets whose mask or weight is 0 are not computed and get 0; at least one target is computed,
        because each micro-batch takes part in the backward pass."""
        if micro.shared:
            return self._shared_logprobs(model, part, micro, only_counted)
        batch = part.batch
        datums = part.places(micro.datums)
        flat = FlatTokens(batch.offsets, datums)
        chosen = np.arange(len(flat.index))
        if only_counted:
            counted = np.flatnonzero(counted_tokens(batch.columns)[flat.index])
            chosen = counted if len(counted) else chosen[:1]
        sequences: dict[str, Any] = {}
        if self._sharding.packed:
            tokens = self._to_device(batch.tokens[flat.index])[None]
            in_model = chosen
            sequences = {
                "position_ids": self._to_device(flat.positions)[None],
                "cu_seq_lens_q": self._to_device(flat.starts),
                "max_length_q": flat.longest,
            }
        else:
            tokens = self._to_device(flat.pad(batch.tokens))
            in_model = flat.places[chosen]
        p = chosen_logprobs(
            model,
            tokens.long(),
            self._to_device(batch.columns["target_tokens"][flat.index[chosen]]).long(),
            self._temperatures(batch.temperatures[datums][flat.datum[chosen]]),
            self._to_device(in_model),
            **sequences,
        )
        return self._flat(p, chosen, len(flat.index))

    def _shared_logprobs(
        self, model: PreTrainedModel, part: BatchPart, micro: MicroBatch, only_counted: bool
    ) -> Tensor:
        """Computes the same as `logprobs`, for a micro-batch whose datums share prefixes."""
        batch = part.batch
        places = part.places(micro.datums)
        row = SharedRow(batch.offsets, places, micro.shared)
        if only_counted:
            counted = counted_tokens(batch.columns)[row.flat_index]
        else:
            counted = None
        head = HeadRows.of(row, batch.temperatures[places], counted)
        p = chosen_logprobs(
            model,
            self._to_device(batch.tokens[row.index])[None].long(),
            self._to_device(batch.columns["target_tokens"][row.flat_index[head.chosen]]).long(),
            self._temperatures(head.temperatures),
            self._to_device(head.hidden),
            head.bounds,
            **row.arguments(self._to_device),
        )
        return self._flat(p, head.chosen, len(row.path))

    def _temperatures(self, values: npt.NDArray[np.float32]) -> Tensor | None:
        """Returns temperatures on the device; None if all are 1."""
        if (values == 1).all():
            return None
        return self._to_device(values)

    def _flat(self, p: Tensor, chosen: Numbers, count: int) -> Tensor:
        """Returns float32 [count] with the values `p` at the places `chosen`, and 0 elsewhere."""
        return p.new_zeros(count).index_copy(0, self._to_device(chosen), p)

    def _to_device(self, values: npt.NDArray[np.generic]) -> Tensor:
        return to_device(values, self._device)


def collect(computed: Sequence[tuple[MicroBatch, Tensor]], metrics: Mapping[str, float]) -> ShardOutput:
    """Joins `computed` and `metrics` into the shard's output. `computed`: pairs of a micro-batch and its
    log-probabilities [T]. Leaves out fillers (`MicroBatch.filler`). Waits for the device once."""
    counted = [(micro, p) for micro, p in computed if not micro.filler]
    datums = tuple(d for micro, _ in counted for d in micro.datums)
    if not datums:
        return ShardOutput((), np.zeros(0, np.float32), metrics)
    return ShardOutput(datums, to_host(torch.cat([p for _, p in counted])), metrics)
