"""Checks of a batch: before it is trained on, and after its loss or gradient was not finite.

Every rank refuses the same batch before the first collective, so the shards stay usable after a refusal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from trainer.batching import ShardOutput
from trainer.losses import LossFn, backward
from trireme.config.losses import find_loss
from trireme.core.errors import BadInput, ProvenanceError
from trireme.core.types import Provenance, TokenBatch, WeightIdentity


class PublishedVersions:
    """The identities of the newest `max_steps_off_policy` + 1 published versions.

    After a resume its version has two identities: tokens sampled before it name the old attempt.
    """

    def __init__(self, max_steps_off_policy: int, identities: Sequence[WeightIdentity] = ()) -> None:
        self._max_steps = max_steps_off_policy
        self._identities = list(identities)

    def add(self, newest: WeightIdentity) -> None:
        """Adds the version that trains now, and drops those that became too old."""
        oldest = newest.version - self._max_steps
        self._identities = [i for i in (*self._identities, newest) if i.version >= oldest]

    def check(self, provenance: Provenance) -> None:
        """Raises ProvenanceError unless the step is the newest version, every token comes from a version in here, and
        every group's floor is 0 to `max_steps_off_policy` steps back."""
        version = self._identities[-1].version if self._identities else None
        if provenance.step != version:
            raise ProvenanceError(f"a batch of step {provenance.step} came while the trainer holds version {version}")
        for identity in provenance.identities:
            if identity not in self._identities:
                known = ", ".join(map(str, self._identities))
                raise ProvenanceError(
                    f"step {provenance.step} has tokens of weights {identity} (attempt:version:digest), which are not "
                    f"among those of the last {self._max_steps + 1} versions published: {known}"
                )
        ages = provenance.step - provenance.floors
        for d in np.flatnonzero((ages > self._max_steps) | (ages < 0)):
            raise ProvenanceError(
                f"datum {d} of step {provenance.step} has floor {provenance.floors[d]}, age {ages[d]}; "
                f"ages must be within 0 and max_steps_off_policy = {self._max_steps}"
            )


def check_batch(batch: TokenBatch, vocab_size: int, loss_fn: str | None = None) -> None:
    """Raises BadInput unless all tokens are in the vocabulary and the columns are those that the loss needs (without a
    loss: the targets); and when a token has an advantage but mask 0."""
    needed = find_loss(loss_fn).columns if loss_fn else ("target_tokens",)
    missing = [name for name in needed if name not in batch.columns]
    if missing:
        who = f"loss {loss_fn}" if loss_fn else "a forward pass"
        raise BadInput(f"{who} needs the columns {', '.join(needed)}; missing: {', '.join(missing)}")
    for name, tokens in (("model_input", batch.tokens), ("target_tokens", batch.columns["target_tokens"])):
        place = _first_place(batch, (tokens < 0) | (tokens >= vocab_size))
        if place:
            d, t, at, _ = place
            raise BadInput(
                f"datum {d} has token {tokens[at]} in its {name}, at place {t}; "
                f"expected tokens from 0 to {vocab_size - 1}, the model's vocabulary"
            )
    if "advantages" in needed:
        advantages = batch.columns["advantages"]
        place = _first_place(batch, (batch.columns["mask"] == 0) & (advantages != 0))
        if place:
            d, t, at, count = place
            raise BadInput(
                f"datum {d} has an advantage of {advantages[at]:g} on its token {t}, whose mask is 0 ({count} such "
                "tokens in the batch); set both, or none"
            )


def _first_place(batch: TokenBatch, wrong: npt.NDArray[np.bool_]) -> tuple[int, int, int, int] | None:
    """Returns datum, place in the datum and place in the batch of the first token that is `wrong`, and the number of
    such tokens; None if there is none."""
    found = np.flatnonzero(wrong)
    if not len(found):
        return None
    d = int(np.searchsorted(batch.offsets, found[0], side="right")) - 1
    return d, int(found[0] - batch.offsets[d]), int(found[0]), len(found)


def nonfinite_datums(
    batch: TokenBatch, output: ShardOutput, loss: LossFn, loss_config: Mapping[str, float]
) -> tuple[int, ...]:
    """Returns the datums of `output` whose own loss, or its gradient by their log-probabilities, is not finite.

    A loss is a sum over sequences: if it is not finite, that of a datum is not, unless only the sum overflows.
    """
    import torch

    found = []
    for d, place, logprobs in output.parts(batch):
        p = torch.tensor(logprobs, requires_grad=True)
        columns = {name: torch.tensor(column[place]) for name, column in batch.columns.items()}
        if not backward(loss, p, columns, loss_config)[-1]:
            found.append(d)
    return tuple(found)
