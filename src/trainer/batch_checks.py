"""What a batch must be before it is trained on: of weights that were published, whole, and of the model's own tokens.

Every rank refuses the same, before the first collective: a refusal leaves the shards usable.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.losses import columns_of
from trireme.core.errors import BadInput, ProvenanceError
from trireme.core.types import Provenance, TokenBatch, WeightIdentity


def check_provenance(provenance: Provenance, published: list[WeightIdentity], max_steps_off_policy: int) -> None:
    """Raises ProvenanceError unless every token of the minibatch comes from weights that it may come from.

    `published` holds the identities of the last K + 1 versions (see `recent`), the newest last: the version that
    trains now. The step must be that version, each identity one of these, and no group's floor more than K steps back,
    or ahead.
    """
    version = published[-1].version if published else None
    if provenance.step != version:
        raise ProvenanceError(f"a batch of step {provenance.step} came while the trainer holds version {version}")
    for identity in provenance.identities:
        if identity not in published:
            known = ", ".join(map(str, published))
            raise ProvenanceError(
                f"step {provenance.step} has tokens of weights {identity} (attempt:version:digest), which are not "
                f"among those of the last {max_steps_off_policy + 1} versions published: {known}"
            )
    ages = provenance.step - provenance.floors
    for d in np.flatnonzero((ages > max_steps_off_policy) | (ages < 0)):
        raise ProvenanceError(
            f"datum {d} of step {provenance.step} has floor {provenance.floors[d]}, age {ages[d]}; "
            f"ages must be within 0 and max_steps_off_policy = {max_steps_off_policy}"
        )


def check_columns(batch: TokenBatch, loss_fn: str) -> None:
    """Raises BadInput when a column is missing that the loss needs, or a token has an advantage but mask 0."""
    needed = columns_of(loss_fn)
    missing = [name for name in needed if name not in batch.columns]
    if missing:
        raise BadInput(f"loss {loss_fn} needs the columns {', '.join(needed)}; missing: {', '.join(missing)}")
    if "advantages" not in needed:
        return
    stray = np.flatnonzero((batch.columns["mask"] == 0) & (batch.columns["advantages"] != 0))
    if len(stray):
        d = int(np.searchsorted(batch.offsets, stray[0], side="right")) - 1
        raise BadInput(
            f"datum {d} has an advantage of {batch.columns['advantages'][stray[0]]:g} on its token "
            f"{stray[0] - batch.offsets[d]}, whose mask is 0 ({len(stray)} such tokens in the batch); set both, or none"
        )


def check_tokens(batch: TokenBatch, vocab_size: int) -> None:
    """Raises BadInput unless there are targets, and all tokens are the model's."""
    if "target_tokens" not in batch.columns:
        raise BadInput(f"the column target_tokens is missing; there are: {', '.join(batch.columns) or 'none'}")
    for name, tokens in (("model_input", batch.tokens), ("target_tokens", batch.columns["target_tokens"])):
        strange = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
        if len(strange):
            d = int(np.searchsorted(batch.offsets, strange[0], side="right")) - 1
            raise BadInput(
                f"datum {d} has token {tokens[strange[0]]} in its {name}, at place {strange[0] - batch.offsets[d]}; "
                f"expected tokens from 0 to {vocab_size - 1}, the model's vocabulary"
            )


def recent(published: Sequence[WeightIdentity], max_steps_off_policy: int) -> list[WeightIdentity]:
    """Those of the last K + 1 versions, the newest being the last of `published`. After a resume its version has two
    identities: tokens sampled before it name the old attempt.

    >>> recent([WeightIdentity(1, 3, "a"), WeightIdentity(1, 4, "b"), WeightIdentity(2, 4, "b")], 0)
    [WeightIdentity(attempt=1, version=4, digest='b'), WeightIdentity(attempt=2, version=4, digest='b')]
    """
    return [identity for identity in published if identity.version >= published[-1].version - max_steps_off_policy]
