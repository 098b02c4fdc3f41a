"""A model proves itself before the first step: the trainer's ways to compute it agree with its own forward pass.

The model's own forward pass computes the log-probabilities of two short samples, one after the other; the trainer
computes them as padded rows, and packed into one row. Three more samples with common beginnings are computed in one row
in which each common beginning stands once (a "row of distinct tokens"). The name of an architecture decides nothing. A
model whose results differ in padded rows is refused. A model whose results differ only in a packed row is computed in
padded rows, and a model whose results differ only with shared prefixes computes each sequence whole; but if the
configuration asks for packed rows, or for shared prefixes, such a model is refused too.

Two models are tried in this way. The sharded model must agree within the rounding of the dtype in which it computes. A
small twin of the same configuration (`trainer.twin`) must agree in float32, where a wrong constant shows, with
attention windows that are shorter than the samples. Kinds of models that docs/models.md shows to be right
(`trainer.proved`) need no twin.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel

from trainer.attention import PACKED
from trainer.export import write_weights
from trainer.logprobs import add_token_logprobs, chosen_logprobs, token_logprobs
from trainer.mesh import Mesh
from trainer.model import Sharding, fsdp_units, gathered_units, load_source
from trainer.proved import IN_PAGE, ProvedType, proved_type
from trainer.shared_rows import HeadRows, SharedRow
from trainer.state import random_state, set_random_state
from trainer.twin import make_twin
from trireme.config.trainer import SharePrefixes
from trireme.core.errors import BadInput
from trireme.core.refusals import Refusal
from trireme.transports.packing import pack

LENGTHS = (13, 11)
"""Lengths of the two samples in tokens: more than a twin's attention windows and a convolution's kernel, few compared
with a training batch."""
BRANCHES = ((20, 0), (21, 10), (19, 6))
"""(length, shared) of three samples, in tokens: each sample begins with the first `shared` tokens of the sample before
it. Some prefixes and branches are longer than a twin's attention windows, others are shorter."""
MAGNIFIED = 30.0
"""Largest logit of a twin. Its hidden states are multiplied to reach it, so that soft caps and scales show."""
RELOADED = 1e-4
"""Largest difference, in nats, between a twin and its reloaded copy, both in float32."""
IN_TWIN = " (in a small twin of it, float32)"
INPUTS = slice(None, -1)
TARGETS = slice(1, None)

Packing = Literal["auto", "rows", "packed"]
T = TypeVar("T")


@dataclass(frozen=True)
class Agreement:
    """The largest differences, in nats, between log-probabilities of the same samples computed in different ways, and
    the tolerance for them."""

    tolerance: float
    """Largest difference that rounding explains."""
    rows: float
    """Between padded rows and each sample alone, computed by the model's own forward pass."""
    packed: float | None = None
    """Between one packed row and each sample alone; None if no packed row was tried, infinite if it cannot be
    computed."""
    leak: float = 0.0
    """Largest change of the second sample's log-probabilities in a packed row when the first sample changes."""
    future: float = 0.0
    """Largest change of earlier tokens' log-probabilities in a padded row when a later token changes."""
    error: str = ""
    """Why a packed row cannot be computed."""
    shared: float | None = None
    """Between one row in which each common prefix stands once and each sample alone; None if no such row was tried,
    infinite if it cannot be computed."""
    shared_leak: float = 0.0
    """Largest change of a sample's log-probabilities in such a row when another sample changes after their common
    prefix."""
    shared_error: str = ""
    """Why a row with shared prefixes cannot be computed."""

    @property
    def not_rows(self) -> str:
        """Why padded rows are computed wrong; "" if they are right."""
        if not self.future <= self.tolerance:
            return f"a token's log-probability moves by {self.future:.3g} when a later token changes"
        if not self.rows <= self.tolerance:
            return f"log-probabilities differ by {self.rows:.3g} from those of the model's own logits"
        return ""

    @property
    def not_packed(self) -> str:
        """Why packed rows are computed wrong; "" if they are right or were not tried."""
        if self.packed is None:
            return ""
        if self.error:
            return f"a packed row cannot be computed ({self.error})"
        if not self.leak <= self.tolerance:
            return f"a sample of a packed row moves by {self.leak:.3g} when the sample before it changes"
        if not self.packed <= self.tolerance:
            return f"log-probabilities of a packed row differ by {self.packed:.3g} from those of the samples alone"
        return ""

    @property
    def not_shared(self) -> str:
        """Why shared prefixes are computed wrong; "" if they are right or were not tried."""
        if self.shared is None:
            return ""
        if self.shared_error:
            return f"a row of distinct tokens cannot be computed ({self.shared_error})"
        if not self.shared_leak <= self.tolerance:
            return f"a sample of a row of distinct tokens moves by {self.shared_leak:.3g} when another one changes"
        if not self.shared <= self.tolerance:
            return (
                f"log-probabilities of a row of distinct tokens differ by {self.shared:.3g} from those of the samples "
                "alone"
            )
        return ""


@dataclass(frozen=True)
class Proof:
    """The layout in which a model is computed (packed or padded rows, with or without shared prefixes), and how far
    the layouts differed when they were tried at the start."""

    architecture: str
    packed: bool
    """True: rows are packed."""
    model: Agreement
    """The differences that the sharded model showed."""
    twin: Agreement | ProvedType | str
    """The differences that its small twin showed, or the result of docs/models.md for its kind of model; a text that
    says why there is no twin, if its configuration cannot be made small."""
    why_rows: str = ""
    """Why rows are padded although `trainer.packing` permits packed rows; empty otherwise."""
    shares: bool = False
    """True: prefixes are shared."""
    why_whole: str = ""
    """Why prefixes are not shared although `trainer.share_prefixes` permits that they are; empty otherwise."""
    kernel: str = ""
    """The kernel that computes packed rows; empty if there is none."""

    @property
    def text(self) -> str:
        """The result of the proof in one line, for the log."""
        layout = "packed" if self.packed else "padded"
        return (
            f"{self.architecture}: the trainer's log-probabilities are those of the model's own logits within "
            f"{self.model.rows:.1g}, rows are {layout}"
            + (f" and computed by {self.kernel}" if self.packed and self.kernel else "")
            + (", common prefixes can be computed once" if self.shares else "")
            + (f" (not tried on a small twin: {self.twin})" if isinstance(self.twin, str) else "")
        )

    @property
    def notice(self) -> str:
        """A text that names the layouts that the configuration allows but the model cannot have, with the reasons; ""
        if there are no such layouts."""
        notices = []
        if self.why_rows:
            notices.append(f"rows are padded, not packed: {self.why_rows}")
        if self.why_whole:
            notices.append(f"common prefixes are computed for each sequence: {self.why_whole}")
        return "; ".join(notices)


def prove_models(
    models: Sequence[PreTrainedModel], mesh: Mesh, sharding: Sharding, packing: Packing, share: SharePrefixes
) -> Proof:
    """Tests whether all `models` of a run (the policy first) can be computed in packed rows or only in padded rows, and
    whether they can be computed with shared prefixes. Sets `sharding` and the models to the layout that all models can
    have. Returns the policy's proof, with this layout.

    Weights and random generators do not change. Collective. Raises BadInput on all ranks, as `decide` does.
    """
    before = random_state(mesh.device)
    proofs = [_prove_model(model, mesh, sharding, packing, share) for model in models]
    packed = all(proof.packed for proof in proofs)
    sharding.lay_out(models, packed=packed, shares=all(proof.shares for proof in proofs))
    set_random_state(before)
    why_rows = next((proof.why_rows for proof in proofs if proof.why_rows), "")
    why_whole = next((proof.why_whole for proof in proofs if proof.why_whole), "")
    return replace(
        proofs[0],
        packed=sharding.packed,
        why_rows=why_rows,
        shares=sharding.shares,
        why_whole=why_whole,
        kernel=sharding.kernel,
    )


def _prove_model(
    model: PreTrainedModel, mesh: Mesh, sharding: Sharding, packing: Packing, share: SharePrefixes
) -> Proof:
    twin = _on_first(mesh, partial(_prove_kind, model.config, packed=sharding.packed, shares=sharding.shares))
    packed = sharding.packed and (isinstance(twin, str) or not twin.not_packed)
    shares = sharding.shares and (isinstance(twin, str) or not twin.not_shared)
    agreement = prove(model, mesh.device, sharding.dtype, packed=packed, shares=shares)
    name = type(model).__name__.removeprefix("FSDP")
    return _on_first(mesh, partial(decide, name, agreement, twin, packing=packing, share=share))


def _prove_kind(config: PretrainedConfig, *, packed: bool, shares: bool) -> Agreement | ProvedType | str:
    """Returns the result of the proof for the kind of model that `config` describes. If docs/models.md lists this kind,
    returns the result on that page. If not, builds a twin (a small model of this kind), proves it and returns its
    result, or a text that says why no twin can be built. `packed`: the result covers packed rows too; `shares`: it
    covers shared prefixes too."""
    proved = proved_type(config)
    if proved:
        return ProvedType(proved.not_packed if packed else "", proved.not_shared if shares else "")
    try:
        twin = make_twin(config)
    except BadInput as error:
        return str(error)
    return prove_twin(twin, packed=packed, shares=shares)


def _on_first(mesh: Mesh, compute: Callable[[], T]) -> T:
    """Calls `compute` on the first rank. Returns its result on all ranks, or raises its BadInput on all. Collective."""
    outcome: T | BadInput | None = None
    if mesh.is_first:
        try:
            outcome = compute()
        except BadInput as error:
            outcome = error
    outcome = mesh.broadcast_object(outcome)
    if isinstance(outcome, BadInput):
        raise outcome
    return cast("T", outcome)


def decide(
    architecture: str,
    model: Agreement,
    twin: Agreement | ProvedType | str,
    *,
    packing: Packing,
    share: SharePrefixes = "auto",
) -> Proof:
    """Returns the proof of a model, with its layout. `model`: the result of the sharded model. `twin`: the result of
    its twin (a small model of the same kind), or the result that docs/models.md lists for this kind, or why there is no
    twin. A layout is right if neither result shows a difference above the tolerance (see `Agreement`).

    If packed rows were tried and are right, rows are packed; else they are padded. If shared prefixes were tried and
    are right, prefixes are shared. Raises BadInput if padded rows are wrong. Also raises BadInput if `packing` requires
    packed rows, or `share` requires shared prefixes, and the required layout is wrong.
    """
    agreements: dict[str, Agreement | ProvedType] = {"": model}
    if not isinstance(twin, str):
        agreements[IN_TWIN if isinstance(twin, Agreement) else IN_PAGE] = twin
    for place, agreement in agreements.items():
        if agreement.not_rows:
            raise Refusal(
                f"{architecture}: {agreement.not_rows}{place}",
                "in padded rows the same log-probabilities as in the model's own forward pass, within "
                f"{agreement.tolerance:.2g}, which rounding explains",
                "train another model: the trainer would compute wrong probabilities for this one",
            )
    reason = next((agreement.not_packed + place for place, agreement in agreements.items() if agreement.not_packed), "")
    if reason and packing == "packed":
        raise Refusal(
            f"trainer.packing = packed for {architecture}: {reason}",
            "in a packed row the same log-probabilities as for each sample alone, except for rounding",
            "leave --trainer.packing out, or set it to rows",
        )
    whole = next((agreement.not_shared + place for place, agreement in agreements.items() if agreement.not_shared), "")
    if whole and share == "on":
        raise Refusal(
            f"trainer.share_prefixes = on for {architecture}: {whole}",
            "in a row of distinct tokens the same log-probabilities as for each sample alone, except for rounding",
            "leave --trainer.share-prefixes out, or set it to off",
        )
    packed = model.packed is not None and not reason
    shares = model.shared is not None and not whole
    return Proof(architecture, packed, model, twin, reason, shares, whole)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # else compiled layers would be compiled for the samples' shapes first
def prove(
    model: PreTrainedModel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    packed: bool,
    shares: bool = False,
    magnified: float | None = None,
) -> Agreement:
    """Computes the log-probabilities of short test samples twice: by the model's own forward pass, and in the trainer's
    layouts. Returns how far the two differ. `model` may be sharded; its passes compute in `dtype` on `device`.

    Padded rows are always tried. `packed`: also try a packed row. `shares`: also try a row in which each common prefix
    stands once. `magnified`: the hidden states are scaled so that the largest logit has this size; None: they are not
    scaled. Uses no gradients and no random numbers, and changes nothing. Collective for a sharded model. Raises
    BadInput when the model's own forward pass, or padded rows, cannot be computed.
    """
    config = model.config.get_text_config()
    samples = [_sample(config, number, length).to(device) for number, length in enumerate(LENGTHS)]
    later = _with_changed(samples[0], slice(-2, -1), config)
    other = _with_changed(samples[0], slice(None), config)
    with _refusing(model):
        largest = max(float(own_logits(model, sample).abs().max()) for sample in samples)
    with _multiplied(model, magnified / largest if magnified else 1.0):
        with _refusing(model):
            reference = [_chosen(own_logits(model, sample), sample) for sample in samples]
            first, last, second = _in_rows(model, [samples[0], later, samples[1]])
        if packed:
            in_one_row = _try_packed(model, samples, other, reference)
        else:
            in_one_row = {}
        if shares:
            in_one_row |= _try_shared(model, _branches(config, device))
    return Agreement(
        tolerance=rounding(dtype, magnified or largest, config.num_hidden_layers),
        rows=max(_distance(first, reference[0]), _distance(second, reference[1])),
        future=_distance(first[:-2], last[:-2]),
        **in_one_row,
    )


def rounding(dtype: torch.dtype, largest_logit: float, num_layers: int) -> float:
    """Returns how much the logprobs of two right implementations may differ, in nats: the larger of 1e-4 and
    4 u * largest_logit * sqrt(num_layers), with u the unit roundoff (2^-8 in bfloat16).

    The rounding errors of the layers add up like independent errors: their sum grows with the square root of the number
    of layers. The error of a logit is proportional to the size of the logits. Between bfloat16 and float32, for random
    Qwen3 models of 2 to 28 layers, the largest difference was 0.8 to 1.4 times u * largest_logit * sqrt(num_layers); a
    single layer's missing MLP moved the logprobs by 5 to 90 times as much.
    """
    return max(1e-4, 2 * torch.finfo(dtype).eps * largest_logit * math.sqrt(num_layers))


@contextmanager
def _refusing(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: if its `with` block raises any exception, raises a BadInput that says that a model of this class
    cannot be computed."""
    try:
        yield
    except Exception as error:  # each architecture fails in its own way
        raise Refusal(
            f"a model of the class {type(model).__name__}, which cannot be computed: {type(error).__name__}: {error}",
            "a causal language model whose forward pass takes token ids alone",
            "set model.name to another model",
        ) from error


def _try_packed(
    model: PreTrainedModel, samples: Sequence[Tensor], other: Tensor, reference: Sequence[Tensor]
) -> dict[str, Any]:
    """Tries packed rows. Returns {field: value} for the fields of an `Agreement` about packed rows. `reference`:
    log-probabilities of each sample alone; `other`: a copy of the first sample with all tokens changed. This change
    must not move the log-probabilities of the second sample."""
    try:
        with _attention(model):
            first, second = _in_one_row(model, samples)
            moved = _in_one_row(model, [other, samples[1]])[1]
    except Exception as error:  # each architecture fails in its own way
        return {"packed": math.inf, "error": f"{type(error).__name__}: {error}"}
    return {
        "packed": max(_distance(first, reference[0]), _distance(second, reference[1])),
        "leak": _distance(second, moved),
    }


@contextmanager
def _attention(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: within its `with` block, `model` has the attention of packed rows. After an error no layer is
    left gathered."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(PACKED)
        yield
    except Exception:
        for unit in fsdp_units(model):
            unit.reshard()
        raise
    finally:
        model.set_attn_implementation(before)


def _try_shared(model: PreTrainedModel, samples: Sequence[Tensor]) -> dict[str, Any]:
    """Tries shared prefixes. Returns {field: value} for the fields of an `Agreement` about shared prefixes. `samples`:
    three samples with the common beginnings of BRANCHES. The end of each sample is changed in turn; this must not move
    the log-probabilities of the other samples."""
    config = model.config.get_text_config()
    leaks = []
    try:
        reference = [_chosen(own_logits(model, sample), sample) for sample in samples]
        with _attention(model):
            computed = _with_shared_prefixes(model, samples)
            for number in range(len(samples)):
                changed = list(samples)
                changed[number] = _with_changed(samples[number], slice(max(s for _, s in BRANCHES), None), config)
                moved = _with_shared_prefixes(model, changed)
                pairs = zip(computed, moved, strict=True)
                leaks += [_distance(*pair) for other, pair in enumerate(pairs) if other != number]
    except Exception as error:  # each architecture fails in its own way
        return {"shared": math.inf, "shared_error": f"{type(error).__name__}: {error}"}
    distances = [_distance(*pair) for pair in zip(computed, reference, strict=True)]
    return {"shared": max(distances), "shared_leak": max(leaks)}


def _branches(config: PretrainedConfig, device: torch.device) -> list[Tensor]:
    """Returns three samples, int64 [T] each, with the lengths and the common beginnings of BRANCHES."""
    samples: list[Tensor] = []
    for number, (length, shared) in enumerate(BRANCHES):
        sample = _sample(config, number, length)
        if shared:
            sample[:shared] = samples[-1][:shared]
        samples.append(sample.to(device))
    return samples


def prove_twin(twin: PreTrainedModel, *, packed: bool, shares: bool) -> Agreement:
    """Proves a small twin (`trainer.twin`). First tests that Hugging Face opens the twin's published files as the same
    model (`prove_reload`). Then, with logits magnified to MAGNIFIED, measures how far the trainer's layouts differ from
    the twin's own forward pass (`prove`). Returns the result of `prove`. Raises BadInput as these two functions do."""
    prove_reload(twin)
    cpu = torch.device("cpu")
    return prove(add_token_logprobs(twin), cpu, torch.float32, packed=packed, shares=shares, magnified=MAGNIFIED)


@torch.no_grad()
def prove_reload(model: PreTrainedModel) -> None:
    """Writes a small model (float32, on the CPU) to files in its published form, opens the files with Hugging Face's
    transformers, and compares the log-probabilities of a sample under both models.

    Raises BadInput when tensors are missing or unknown in the files, or the log-probabilities differ.
    """
    entries, buckets = pack(gathered_units(model), np.copy)
    with tempfile.TemporaryDirectory() as directory:
        config = {"config.json": model.config.to_json_string(use_diff=False).encode()}
        write_weights(Path(directory), entries, buckets, config)
        opened = load_source(directory)
    sample = _sample(model.config.get_text_config(), 0, LENGTHS[0])
    with _refusing(model):
        distance = _distance(*(_chosen(own_logits(candidate, sample), sample) for candidate in (model, opened)))
    if not distance <= RELOADED:
        raise Refusal(
            f"{type(model).__name__}: its log-probabilities change by {distance:.3g} when it is saved, and opened "
            "again by Hugging Face's transformers",
            f"the same log-probabilities, within {RELOADED:g}",
            "train another model, or update transformers",
        )


def own_logits(model: PreTrainedModel, sample: Tensor) -> Tensor:
    """Returns the logits of the model's own forward pass after each token of `sample`, int64 [T], except the last:
    float32 [T - 1, V]."""
    logits: Tensor = model(input_ids=sample[None, :-1], use_cache=False).logits[0]
    return logits.float()


@contextmanager
def _multiplied(model: PreTrainedModel, factor: float) -> Iterator[None]:
    """Context manager: within its `with` block, the hidden states from which logits are computed are multiplied by
    `factor`. Tests of a twin use this, because its own logits are so small that errors in soft caps and scales would
    not show."""

    def multiply(_module: Any, _inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * factor
        return output

    decoder = model.get_decoder()  # part of the model's own pass and of ours, but some call their head by this name
    hook = (decoder if isinstance(decoder, PreTrainedModel) else model.base_model).register_forward_hook(multiply)
    try:
        yield
    finally:
        hook.remove()


def _sample(config: PretrainedConfig, number: int, length: int) -> Tensor:
    """Returns the tokens of sample `number`, int64 [T]. T is `length`, or the model's number of positions if that is
    smaller."""
    limit = getattr(config, "max_position_embeddings", None) or length
    place = torch.arange(min(length, limit) if limit > 0 else length)  # -1: XLNet has no limit
    return (31 * place**2 + 17 * place + 3 + 7 * number) % config.vocab_size


def _with_changed(sample: Tensor, places: slice, config: PretrainedConfig) -> Tensor:
    changed = sample.clone()
    changed[places] = (changed[places] + 1) % config.vocab_size
    return changed


def _chosen(logits: Tensor, sample: Tensor) -> Tensor:
    """Returns the log-probabilities of the tokens of `sample` after the first: [T - 1], from logits [T - 1, V]."""
    return logits.log_softmax(-1).gather(-1, sample[1:, None]).squeeze(-1)


def _in_rows(model: PreTrainedModel, samples: Sequence[Tensor]) -> list[Tensor]:
    """Returns the log-probabilities of each sample's tokens after the first, computed together as padded rows."""
    tokens, targets = (pad_sequence([s[part] for s in samples], batch_first=True) for part in (INPUTS, TARGETS))
    rows = token_logprobs(model, tokens, targets, torch.ones(tokens.shape, device=tokens.device))
    return [row[: len(sample) - 1] for row, sample in zip(rows, samples, strict=True)]


def _in_one_row(model: PreTrainedModel, samples: Sequence[Tensor]) -> list[Tensor]:
    """Returns the log-probabilities of each sample's tokens after the first, computed together in one packed row."""
    tokens, targets = (torch.cat([s[part] for s in samples])[None] for part in (INPUTS, TARGETS))
    lengths = [len(sample) - 1 for sample in samples]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=tokens.device)
    positions = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])[None]
    ones = torch.ones(tokens.shape, device=tokens.device)
    row = token_logprobs(
        model, tokens, targets, ones, position_ids=positions, cu_seq_lens_q=starts, max_length_q=max(lengths)
    )
    return list(row[0].split(lengths))


def _with_shared_prefixes(model: PreTrainedModel, samples: Sequence[Tensor]) -> list[Tensor]:
    """Returns the log-probabilities of each sample's tokens after the first, computed together in one row in which
    each common prefix stands once. BRANCHES says with which prefixes the samples begin."""
    tokens, targets = (torch.cat([s[part] for s in samples]) for part in (INPUTS, TARGETS))
    lengths = [len(sample) - 1 for sample in samples]
    offsets = np.asarray([0, *accumulate(lengths)], np.int64)
    row = SharedRow(offsets, np.arange(len(samples)), [shared for _, shared in BRANCHES])
    head = HeadRows.of(row, np.ones(len(samples), np.float32), None)

    def to_device(values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(tokens.device)

    chosen = to_device(head.chosen)
    p = chosen_logprobs(
        model,
        tokens[to_device(row.index)][None],
        targets[chosen],
        to_device(head.temperatures),
        to_device(head.hidden),
        head.bounds,
        **row.arguments(to_device),
    )
    return list(torch.zeros_like(p).index_put((chosen,), p).split(lengths))


def _distance(one: Tensor, other: Tensor) -> float:
    """Returns the largest absolute difference of two tensors; infinity if a difference is not finite."""
    difference = float((one - other).abs().max())
    if math.isfinite(difference):
        return difference
    return math.inf
