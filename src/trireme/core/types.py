"""The types that cross rooms, and those of the verbs. Field names and defaults are Tinker's where it has the noun.

`Datum`, `ModelInput` and `TensorData`, what people make themselves, are in `trireme.core.datum`.

Shape suffixes used throughout the project: `_P` problems (groups) in a batch, `_G` rollouts in a group, `_T` tokens,
`_D` datums, `_M` micro-batches, `_R` data-parallel ranks, `_V` vocabulary, `_H` hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trireme.core.batch_codec import Packed, pack, unpack
from trireme.core.datum import Datum, ModelInput, TensorData
from trireme.core.datum import EncodedTextChunk as EncodedTextChunk

StopReason = Literal["length", "stop"]
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
    """How to sample one sequence. `max_tokens` none: as many as the context has room for. `temperature` 0: greedily.

    `stop`: what ends it, token ids or strings; the model's end-of-sequence token always does. A string ends it wherever
    it comes to stand in the text, with the token that completes it. Trainers match temperature only: the four fields
    after it change the distribution behind their back.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: Sequence[int | str] | str | None = None
    seed: int | None = None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """What of `stop` are token ids."""
        return tuple(int(end) for end in self._ends if not isinstance(end, str))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """What of `stop` are strings."""
        return tuple(end for end in self._ends if isinstance(end, str))

    @property
    def _ends(self) -> Sequence[int | str]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()


@dataclass(frozen=True)
class SampleRequest:
    """One sequence to sample. `route_key`: requests with the same key go to the same replica (prefix hits).

    `prompt_logprobs`: also the log-probability of each token of the prompt; `topk_prompt_logprobs` k: also the k
    likeliest tokens at each of its places.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    route_key: str
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs or self.topk_prompt_logprobs > 0


PromptLogprobs = list[float | None]
TopkPromptLogprobs = list[list[tuple[int, float]] | None]


@dataclass(frozen=True)
class SampledSequence:
    """What a replica sampled: `tokens` int32 [T] with the stop token included, `logprobs` float32 [T] of the
    processed distribution (temperature applied), and `spans` that cover [0, T) without gap or overlap.

    `prompt_logprobs`, `topk_prompt_logprobs`: if they were asked for, see `SampleResponse`.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    stop_reason: StopReason
    spans: tuple[VersionSpan, ...]
    prompt_logprobs: PromptLogprobs | None = None
    topk_prompt_logprobs: TopkPromptLogprobs | None = None


@dataclass(frozen=True)
class SampleResponse:
    """What a sampler answers: the sequences that were sampled for one prompt.

    `prompt_logprobs`: of each token of the prompt given those before it, at temperature 1; none for the first.
    `topk_prompt_logprobs`: the likeliest tokens at each place and their log-probabilities, likeliest first.
    """

    sequences: Sequence[SampledSequence]
    prompt_logprobs: PromptLogprobs | None = None
    topk_prompt_logprobs: TopkPromptLogprobs | None = None


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
        """Raises ValueError, which names the datum, when one has no tokens or other columns than the first."""
        if not data_D:
            raise ValueError("a batch needs at least one datum, got none")
        names = set(data_D[0].loss_fn_inputs)
        lengths_D = [d.model_input.length for d in data_D]
        for d, datum in enumerate(data_D):
            if set(datum.loss_fn_inputs) != names or not lengths_D[d]:
                raise ValueError(
                    f"datum {d} has {lengths_D[d]} tokens and the columns {', '.join(sorted(datum.loss_fn_inputs))}; "
                    f"expected at least one token, and the columns of datum 0: {', '.join(sorted(names))}"
                )
        return cls(
            tokens=np.concatenate([d.model_input.tokens for d in data_D]),
            offsets=np.concatenate([[0], np.cumsum(lengths_D)]).astype(np.int64),
            columns={name: np.concatenate([d.loss_fn_inputs[name].data for d in data_D]) for name in sorted(names)},
            temperatures=np.asarray([d.temperature for d in data_D], dtype=np.float32),
        )

    @classmethod
    def of(cls, data: Data) -> TokenBatch:
        """`data` itself if it is a batch already."""
        return data if isinstance(data, TokenBatch) else cls.from_datums(data)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels in the compact form of `trireme.core.batch_codec`."""
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


Data = TokenBatch | Sequence[Datum]
"""What the trainer's verbs take."""


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
    """`logprobs` float32 [T], in the order of the batch's tokens: the trainer's log-probability of each target. Datum d
    has those at `offsets[d]:offsets[d + 1]` (int64 [D + 1]).

    `metrics` are named `name:reduction`, reduction one of sum, max, min, mean (`trireme.run.metrics.reduce_metrics`).
    `suspects`: the datums whose loss, or its gradient by their log-probabilities, is not finite.
    `peak_s`: seconds that all of the trainer's GPUs would take for the model's arithmetic at their peak rate; 0 where
    that is not known.
    """

    logprobs: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.int64]
    metrics: Mapping[str, float]
    suspects: tuple[int, ...] = ()
    peak_s: float = 0.0

    @property
    def loss_fn_outputs(self) -> list[dict[str, TensorData]]:
        """Of each datum: its `logprobs`."""
        bounds = itertools.pairwise(self.offsets.tolist())
        return [{"logprobs": TensorData(self.logprobs[start:end])} for start, end in bounds]


@dataclass(frozen=True)
class OptimStepResponse:
    """`metrics`: `lr`, `grad_norm` (before clipping, of the normalised gradient)."""

    metrics: Mapping[str, float] = field(default_factory=dict)
