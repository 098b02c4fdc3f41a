"""The types that cross rooms. Field names follow Tinker's where it has the noun.

Shape suffixes used throughout the project: `_P` problems (groups) in a batch, `_G` rollouts in a group, `_T` tokens,
`_D` datums, `_M` micro-batches, `_R` data-parallel ranks, `_V` vocabulary, `_H` hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trireme.wire import Packed, pack, unpack

StopReason = Literal["length", "stop"]
LossFnType = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
Which = Literal["policy", "reference"]
LossNormalization = Literal["token_mean", "sequence_mean", "sum"]


@dataclass(frozen=True, order=True)
class WeightIdentity:
    """Which weights: `version` training steps completed in `attempt`, with content `digest`.

    >>> str(WeightIdentity(1, 12, "9f3c"))
    '1:12:9f3c'
    """

    attempt: int
    version: int
    digest: str

    def __str__(self) -> str:
        return f"{self.attempt}:{self.version}:{self.digest}"

    @classmethod
    def parse(cls, label: str) -> WeightIdentity:
        """The identity that `str` printed. Raises ValueError for anything else."""
        attempt, version, digest = label.split(":")
        return cls(int(attempt), int(version), digest)


@dataclass(frozen=True)
class VersionSpan:
    """Tokens `start` (inclusive) to `end` (exclusive) of a sampled sequence came from `identity`. `mixed`: its weights
    read keys and values that older ones had computed (`inference.on_update = "keep_kv"`)."""

    identity: WeightIdentity
    start: int
    end: int
    mixed: bool = False


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one sequence. `stop` holds token ids; the end-of-sequence token of the model always stops."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class SampleRequest:
    """One sequence to sample. `route_key`: requests with the same key go to the same replica (prefix hits)."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    route_key: str


@dataclass(frozen=True)
class SampledSequence:
    """What a replica sampled: `tokens` int32 [T] with the stop token included, `logprobs` float32 [T] of the
    processed distribution (temperature applied), and `spans` that cover [0, T) without gap or overlap."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    stop_reason: StopReason
    spans: tuple[VersionSpan, ...]


@dataclass(frozen=True)
class ModelInput:
    """The tokens that a model reads: int32 [T]."""

    tokens: npt.NDArray[np.int32]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        return cls(np.asarray(tokens, dtype=np.int32))

    def to_ints(self) -> list[int]:
        return [int(t) for t in self.tokens]

    @property
    def length(self) -> int:
        return len(self.tokens)


LOSS_FN_INPUT_DTYPES: dict[str, np.dtype[Any]] = {
    "target_tokens": np.dtype(np.int32),
    "mask": np.dtype(np.float32),
    "logprobs": np.dtype(np.float32),
    "advantages": np.dtype(np.float32),
    "weights": np.dtype(np.float32),
    "clip_low_threshold": np.dtype(np.float32),
    "clip_high_threshold": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
}
"""Per-token columns that a datum may carry. `versions` is the version that sampled the token, -1 where none did."""


@dataclass(frozen=True)
class Datum:
    """One training sequence: `model_input` [T] and per-token `loss_fn_inputs`, each [T], aligned with the *targets*.

    Lists, arrays and CPU tensors are accepted and stored as numpy columns of the dtypes in `LOSS_FN_INPUT_DTYPES`.
    `temperature` is the one the tokens were sampled at; the trainer divides logits by it.
    Raises ValueError for an unknown column or one whose length is not T.

    >>> Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "mask": [0, 1]}).loss_fn_inputs["mask"]
    array([0., 1.], dtype=float32)
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, npt.NDArray[Any]]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        columns = {}
        for name, values in self.loss_fn_inputs.items():
            if name not in LOSS_FN_INPUT_DTYPES:
                raise ValueError(f"unknown loss_fn_inputs column {name!r}; known: {', '.join(LOSS_FN_INPUT_DTYPES)}")
            column = np.asarray(values, dtype=LOSS_FN_INPUT_DTYPES[name])
            if column.shape != (self.model_input.length,):
                raise ValueError(
                    f"column {name!r} has shape {column.shape}, expected ({self.model_input.length},) like model_input"
                )
            columns[name] = column
        object.__setattr__(self, "loss_fn_inputs", columns)


@dataclass(frozen=True)
class TokenBatch:
    """Datums as numpy columns, the form in which they cross to the trainer's shards through the object store.

    `tokens` int32 [T] is all inputs one after the other, datum d at `offsets[d]:offsets[d + 1]` (`offsets` int64
    [D + 1]); `columns` are [T] in the same order; `temperatures` float32 [D].
    """

    tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    columns: Mapping[str, npt.NDArray[Any]]
    temperatures: npt.NDArray[np.float32]

    @classmethod
    def from_datums(cls, data_D: Sequence[Datum]) -> TokenBatch:
        """Raises ValueError when the datums do not all carry the same columns, or there is none."""
        if not data_D:
            raise ValueError("a batch needs at least one datum, got none")
        names = set(data_D[0].loss_fn_inputs)
        if any(set(d.loss_fn_inputs) != names for d in data_D):
            raise ValueError("datums of one batch must carry the same loss_fn_inputs columns")
        lengths_D = [d.model_input.length for d in data_D]
        return cls(
            tokens=np.concatenate([d.model_input.tokens for d in data_D]).astype(np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths_D)]).astype(np.int64),
            columns={name: np.concatenate([d.loss_fn_inputs[name] for d in data_D]) for name in sorted(names)},
            temperatures=np.asarray([d.temperature for d in data_D], dtype=np.float32),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels in the compact form of `trireme.wire`."""
        packed = pack(self.tokens, self.offsets, self.columns)
        return _arrived, (self.tokens, self.offsets, packed, self.temperatures)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each datum, int64 [D]."""
        return np.diff(self.offsets)

    def datum(self, d: int) -> Datum:
        part = slice(int(self.offsets[d]), int(self.offsets[d + 1]))
        return Datum(
            ModelInput(self.tokens[part]),
            {name: column[part] for name, column in self.columns.items()},
            float(self.temperatures[d]),
        )


def _arrived(
    tokens: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    packed: Mapping[str, Packed],
    temperatures: npt.NDArray[np.float32],
) -> TokenBatch:
    return TokenBatch(tokens, offsets, unpack(tokens, offsets, packed), temperatures)


@dataclass(frozen=True)
class Provenance:
    """Which weights a minibatch came from: what the trainer checks before it trains.

    `floors` int32 [D] is the floor of each datum's group: the lowest version that any live replica had acknowledged
    when the group was dispatched. `identities` are all that its tokens name.
    """

    step: int
    floors: npt.NDArray[np.int32]
    identities: tuple[WeightIdentity, ...]


@dataclass(frozen=True)
class Minibatch:
    """What the trainer gets at once: the whole substep, or a part of it when streaming. `last`: ends its substep.
    `problems_D` names the problem of each datum."""

    batch: TokenBatch
    provenance: Provenance
    problems_D: tuple[str, ...]
    last: bool
    num_groups: int
    num_loss_tokens: int


@dataclass(frozen=True)
class AdamParams:
    """Parameters of one AdamW update (arXiv:1711.05101)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """`logprobs` float32 [T], in the order of the batch's tokens: the trainer's log-probability of each target.

    `metrics` are named `name:reduction`, reduction one of sum, max, min, mean (`trireme.metrics.reduce_metrics`).
    `suspects`: where the loss is not finite, the datums that made it so.
    """

    logprobs: npt.NDArray[np.float32]
    metrics: Mapping[str, float]
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True)
class OptimStepResponse:
    """`metrics`: `lr`, `grad_norm` (before clipping, of the normalised gradient)."""

    metrics: Mapping[str, float] = field(default_factory=dict)
