"""Checks of a batch: before it is trained on, and after its loss or gradient was not finite.

    ProvenanceError   the batch is of another step than the next one; a token was sampled by weights that were never
                      published, or by too old ones; a group's age is above the staleness bound
    BadInput          a token is not in the vocabulary; a column that the loss needs is missing; a token has an
                      advantage, but mask 0

Each of them ends the run. What a replica sampled, tokens and log-probabilities, is checked where it arrives, in
`orchestrator.rollout`. If a loss or a gradient is not finite, `nonfinite_datums` names the datums that made it so.
`docs/asynchrony.md` lists all reasons why a token is not trained on.

A rank sees its own part of a batch. If one rank refuses its part, all refuse, before the first pass (`Mesh.agree`), so
the shards stay usable after a refusal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from trainer.batching import ShardOutput
from trainer.losses import LossFn, any_counts, backward
from trireme.config.losses import find_loss
from trireme.core.batch import BatchPart
from trireme.core.errors import BadInput, ProvenanceError
from trireme.core.staleness import deadline
from trireme.core.types import Provenance, WeightIdentity


class PublishedVersions:
    """The identities of the newest `max_steps_off_policy` + 1 published versions, against which batches are checked.

    The version at which a run was resumed has two identities: tokens sampled before the resume name the old attempt.
    """

    def __init__(self, max_steps_off_policy: int, identities: Sequence[WeightIdentity] = ()) -> None:
        self._max_steps = max_steps_off_policy
        self._identities = list(identities)

    def add(self, newest: WeightIdentity) -> None:
        """Adds `newest`, the version just published, and drops the versions whose samples are now too old to train
        on."""
        identities = [*self._identities, newest]
        self._identities = [i for i in identities if deadline(i.version, self._max_steps) >= newest.version]

    def check(self, provenance: Provenance) -> None:
        """Raises ProvenanceError unless `provenance.step` is the newest version, every token was sampled by one of the
        versions in this object, and every group's age is from 0 to `max_steps_off_policy`."""
        if not self._identities:
            raise ProvenanceError(
                f"a batch of step {provenance.step} came, but the trainer has not published a version yet"
            )
        version = self._identities[-1].version
        if provenance.step != version:
            raise ProvenanceError(
                f"a batch of step {provenance.step} came, but the newest version of the trainer is {version}; expected "
                f"a batch of step {version}"
            )
        for identity in provenance.identities:
            if identity not in self._identities:
                published = ", ".join(map(str, self._identities))
                raise ProvenanceError(
                    f"step {provenance.step} has tokens of weights {identity} (attempt:version:digest), which are not "
                    f"among those of the last {self._max_steps + 1} versions published: {published}"
                )
        ages = provenance.step - provenance.floors
        for d in np.flatnonzero((ages > self._max_steps) | (ages < 0)):
            raise ProvenanceError(
                f"datum {d} of step {provenance.step} has floor {provenance.floors[d]}, age {ages[d]}; "
                f"ages must be from 0 to max_steps_off_policy = {self._max_steps}"
            )


def find_refusal(part: BatchPart, vocab_size: int, loss_fn: str | None = None) -> BadInput | None:
    """Returns the error with which to refuse `part`, None if `part` can be computed. It is refused for a token outside
    the vocabulary, for a missing column that the loss needs (without a loss: `target_tokens`), and for a token that has
    an advantage other than 0 although its mask is 0."""
    batch = part.batch
    if loss_fn:
        needed = find_loss(loss_fn).columns
    else:
        needed = ("target_tokens",)
    missing = [name for name in needed if name not in batch.columns]
    if missing:
        subject = f"loss {loss_fn}" if loss_fn else "a forward pass"
        return BadInput(f"{subject} needs the columns {', '.join(needed)}; missing: {', '.join(missing)}")
    for name, tokens in (("model_input", batch.tokens), ("target_tokens", batch.columns["target_tokens"])):
        place = _first_place(part, (tokens < 0) | (tokens >= vocab_size))
        if place:
            d, t, at = place
            return BadInput(
                f"datum {d} has token {tokens[at]} in its {name}, at place {t}; "
                f"expected tokens from 0 to {vocab_size - 1}, the model's vocabulary"
            )
    if "advantages" in needed:
        advantages = batch.columns["advantages"]
        place = _first_place(part, (batch.columns["mask"] == 0) & (advantages != 0))
        if place:
            d, t, at = place
            return BadInput(
                f"datum {d} has an advantage of {advantages[at]:g} on its token {t}, whose mask is 0; set both, or none"
            )
    return None


def _first_place(part: BatchPart, wrong: npt.NDArray[np.bool_]) -> tuple[int, int, int] | None:
    """Finds the first token where `wrong`, bool [T] over the tokens of `part`, is true. Returns its datum's number in
    the batch, its place in the datum and its place in `part`; None if `wrong` is false everywhere."""
    places = np.flatnonzero(wrong)
    if not len(places):
        return None
    offsets = part.batch.offsets
    d = int(np.searchsorted(offsets, places[0], side="right")) - 1
    return int(part.datums[d]), int(places[0] - offsets[d]), int(places[0])


def nonfinite_datums(
    part: BatchPart, output: ShardOutput, loss: LossFn, loss_config: Mapping[str, float]
) -> tuple[int, ...]:
    """Returns the indices in the batch of the datums of `output` whose loss, or its gradient with respect to the
    log-probabilities, is not finite.

    A batch's loss is a sum over sequences. If this sum is not finite, the loss of at least one datum is not finite
    either, unless only the sum overflows.
    """
    import torch

    nonfinite = []
    offsets = part.batch.offsets
    for (d, logprobs), n in zip(output.parts(part.lengths), part.places(output.datums), strict=True):
        p = torch.tensor(logprobs, requires_grad=True)
        columns = {
            name: torch.tensor(column[offsets[n] : offsets[n + 1]]) for name, column in part.batch.columns.items()
        }
        if not backward(loss, p, columns, loss_config, counts=any_counts(columns))[-1]:
            nonfinite.append(d)
    return tuple(nonfinite)
