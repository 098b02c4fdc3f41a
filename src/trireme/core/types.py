"""The types that cross rooms, and the types of the rooms' methods. Field names and defaults are Tinker's where Tinker
has the type.

`Datum`, `ModelInput` and `TensorData`, which users make themselves, are in `trireme.core.datum`, batches of datums in
`trireme.core.batch`.

Shape suffixes used throughout the project: `_P` problems (groups) in a batch, `_G` rollouts in a group, `_T` tokens,
`_D` datums, `_M` micro-batches, `_R` data-parallel ranks, `_V` vocabulary, `_H` hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from trireme.core.batch import Batch
from trireme.core.batch import Data as Data
from trireme.core.batch import StoredBatch as StoredBatch
from trireme.core.batch import TokenBatch as TokenBatch
from trireme.core.datum import Datum as Datum
from trireme.core.datum import EncodedTextChunk as EncodedTextChunk
from trireme.core.datum import ModelInput as ModelInput
from trireme.core.datum import TensorData
from trireme.core.sampling_bounds import BOUNDS

StopReason = Literal["length", "stop"]
Which = Literal["policy", "reference"]


@dataclass(frozen=True, order=True)
class WeightIdentity:
    """Names one version of the weights.

    >>> str(WeightIdentity(1, 12, "9f3c"))
    '1:12:9f3c'
    """

    attempt: int  # the attempt that made it
    version: int  # training steps completed
    digest: str  # of the contents

    def __str__(self) -> str:
        return f"{self.attempt}:{self.version}:{self.digest}"

    @classmethod
    def parse(cls, label: str) -> WeightIdentity:
        """Returns the identity for the text that `str(identity)` made. Raises ValueError for any other text."""
        attempt, version, digest = label.split(":")
        return cls(int(attempt), int(version), digest)


@dataclass(frozen=True)
class VersionSpan:
    """A part of a sampled sequence that came from one version."""

    identity: WeightIdentity
    start: int  # first token
    end: int  # behind the last token
    mixed: bool = False  # older weights computed keys and values that it read (`inference.on_update = "keep_kv"`)


@dataclass(frozen=True)
class SamplingParams:
    """The parameters for sampling one sequence. The trainer reproduces only the temperature: top_p, top_k, min_p and
    repetition_penalty change the sampled distribution without the trainer's knowledge. Raises ValueError for a
    number outside `sampling_bounds.BOUNDS`, and if max_tokens is less than 1."""

    max_tokens: int | None = None  # None: as many as the context has room for
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: Sequence[int | str] | str | None = None
    """Token ids or strings that end the sequence, in addition to the model's end-of-sequence token. A string ends the
    sequence wherever it is in the text; the token that completes the string is the last one."""
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, bound in BOUNDS.items():
            value = getattr(self, name)
            if value not in bound:
                raise ValueError(f"sampling with {name} = {value:g}; expected a number {bound}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"sampling with max_tokens = {self.max_tokens}; expected at least 1, or None")

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token ids in `stop`."""
        return tuple(int(end) for end in self._ends if not isinstance(end, str))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings in `stop`."""
        return tuple(end for end in self._ends if isinstance(end, str))

    @property
    def _ends(self) -> Sequence[int | str]:
        if isinstance(self.stop, str):
            return (self.stop,)
        return self.stop or ()


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """A request for one sequence. Raises ValueError if the prompt does not consist of token ids."""

    request_id: str
    prompt: npt.NDArray[np.int32]
    """The token ids, [T]. Lists and tuples are accepted too, and cast."""
    params: SamplingParams
    route_key: str  # requests with the same key go to the same replica, for its prefix cache
    prompt_logprobs: bool = False  # also return the log-probability of each token of the prompt
    topk_prompt_logprobs: int = 0  # also return this many likeliest tokens at each place of the prompt
    began: WeightIdentity | None = None
    """The weights that sampled the first token of the conversation that the prompt continues; None: no token of it has
    been sampled. With `inference.on_update = "keep_kv"` keys and values in the prefix cache may come from weights as
    old as these."""
    adapter: str = ""
    """The name of the adapter to sample with, which the replicas have in addition to the updated weights; "": sample
    with the updated weights."""
    chat: bool = False
    """True: the request is a chat alongside a run, and an engine takes requests of the run first."""
    floor: int | None = None
    """The lowest version that the request may be sampled from; None: any version. A replica with a lower version
    refuses the request (`ReplicaBehind`)."""
    attempt: int = 0
    """The attempt to which `floor` belongs, set by the router. Weights of an earlier attempt are below `floor`, for any
    version of theirs."""

    def __post_init__(self) -> None:
        prompt = self.prompt
        if not isinstance(prompt, np.ndarray) or prompt.dtype != np.int32:
            object.__setattr__(self, "prompt", ModelInput(prompt).tokens)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs or self.topk_prompt_logprobs > 0


PromptLogprobs = list[float | None]
TopkPromptLogprobs = list[list[tuple[int, float]] | None]


@dataclass(frozen=True)
class SampledSequence:
    """A sequence of T tokens that a replica sampled."""

    tokens: npt.NDArray[np.int32]  # [T], the stop token included
    logprobs: npt.NDArray[np.float32]  # [T], of the processed distribution (temperature applied)
    stop_reason: StopReason
    spans: tuple[VersionSpan, ...]  # cover [0, T) without gap or overlap
    prompt_logprobs: PromptLogprobs | None = None  # if requested, as in `SampleResponse`
    topk_prompt_logprobs: TopkPromptLogprobs | None = None  # if requested, as in `SampleResponse`


@dataclass(frozen=True)
class SampleResponse:
    """The sequences that were sampled for one prompt."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: PromptLogprobs | None = None
    """The log-probability of each token of the prompt given all earlier tokens, at temperature 1; None for the first
    token."""
    topk_prompt_logprobs: TopkPromptLogprobs | None = None
    """For each token of the prompt the likeliest tokens at its place, as (token id, log-probability) pairs, likeliest
    first; None for the first token."""


@dataclass(frozen=True)
class Provenance:
    """Says which versions sampled the tokens of a minibatch. The trainer checks it before it trains on the
    minibatch."""

    step: int  # training steps completed before this one
    floors: npt.NDArray[np.int32]
    """[D], the floor of each datum's group: the lowest of the versions that live replicas had acknowledged when the
    group was dispatched."""
    identities: tuple[WeightIdentity, ...]  # all that the tokens name


@dataclass(frozen=True)
class Minibatch:
    """The data of one call to the trainer: a whole substep, or a part of a substep. A substep is trained on in parts so
    that training can begin before all of its groups have finished."""

    batch: Batch  # from an orchestrator in its own process one whose tokens stay in the object store
    provenance: Provenance
    problems_D: tuple[str, ...]  # the problem of each datum
    last: bool  # it ends its substep
    num_groups: int
    divisor: float  # what it adds to the divisor of its substep's gradient (`trireme.core.normalization`)


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
    """The result of a pass over a batch. After a pass with gradients over a `StoredBatch`, `logprobs` is empty and
    `offsets` is [0]: the log-probabilities stay with the parts of the batch."""

    logprobs: npt.NDArray[np.float32]  # [T], the trainer's log-probability of each target
    offsets: npt.NDArray[np.int64]  # [D + 1]; datum d is at `offsets[d]:offsets[d + 1]`
    metrics: Mapping[str, float]  # {name:reduction: value}, see `trireme.run.metrics.reduce_metrics`
    suspects: tuple[int, ...] = ()  # datums whose loss, or its gradient, is not finite
    peak_s: float = 0.0  # seconds of the model's arithmetic on all GPUs at their peak rate; 0: unknown
    tokens: int = 0  # of all datums of the batch
    distinct: int = 0  # of them that were computed: with shared prefixes fewer

    @property
    def loss_fn_outputs(self) -> list[dict[str, TensorData]]:
        """One dict for each datum: {"logprobs": the log-probabilities of its targets, float32 [tokens of the datum]}.
        This is the form that Tinker returns."""
        bounds = itertools.pairwise(self.offsets.tolist())
        return [{"logprobs": TensorData(self.logprobs[start:end])} for start, end in bounds]


@dataclass(frozen=True)
class OptimStepResponse:
    """The result of an optimiser step."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics `lr`, the learning rate, and `grad_norm`, the norm of the normalised gradient before clipping."""


@dataclass(frozen=True)
class StepSummary:
    """The result of a training step: its metrics, its groups, and records of some groups."""

    metrics: dict[str, float]
    trained: list[dict[str, object]]
    """The problem, index and floor of each group that was trained on, in the order in which the groups were taken."""
    records: list[str]
    """JSON texts that record some of the groups (`orchestrator.recorder`)."""
