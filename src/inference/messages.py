"""Several requests, or several outcomes, as one message between a router and a replica: columns, packed into bytes.

    requests:  name, number of tokens .. of each; all their tokens in one array
    outcomes:  name, number of tokens, stop reason, version spans .. of each; all their tokens in one array, and all
               log-probabilities in another

A call of an actor costs half a millisecond, and each array and object in it some microseconds more. Columns that no
request or outcome of a message uses are left out. Bytes travel as they are; Ray would serialise anything else.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, fields
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from inference.handover import Outcome, Progress
from trireme.core.errors import TriremeError
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan, WeightIdentity

Columns = dict[str, list[Any]]
Span = tuple[int, int, int, bool]
"""Number of its identity in the message, start, end, mixed."""

REQUEST_FIELDS = [each for each in fields(SampleRequest) if each.name not in ("prompt", "params")]
ANSWER_FIELDS = [each for each in fields(SampledSequence) if each.name not in ("tokens", "logprobs", "spans")]
params_of: Callable[[SamplingParams], tuple[Any, ...]] = attrgetter(*(each.name for each in fields(SamplingParams)))


def pack_requests(requests: Sequence[SampleRequest]) -> bytes:
    prompts = [request.prompt for request in requests]
    params = [params_of(request.params) for request in requests]
    message = (list(map(len, prompts)), _joined(prompts, np.int32), params, _columns(requests, REQUEST_FIELDS))
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def unpack_requests(message: bytes) -> list[SampleRequest]:
    """Returns the requests of a message."""
    lengths, tokens, params, columns = pickle.loads(message)
    return [
        SampleRequest(prompt=prompt, params=SamplingParams(*values), **row)
        for prompt, values, row in zip(_parts(tokens, np.int32, lengths), params, _rows(columns, params), strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Reply:
    """A replica's answer to a caller."""

    outcomes: Sequence[tuple[str, Outcome]] = ()
    """Names of requests, and how they ended."""
    failure: TriremeError | None = None
    """Why the replica must be used no more."""

    def pack(self) -> bytes:
        answers = {name: outcome for name, outcome in self.outcomes if isinstance(outcome, SampledSequence)}
        progress = {name: outcome for name, outcome in self.outcomes if isinstance(outcome, Progress)}
        errors = [(name, outcome) for name, outcome in self.outcomes if isinstance(outcome, TriremeError)]
        ordered: list[SampledSequence | Progress] = [*answers.values(), *progress.values()]
        identities: dict[WeightIdentity, int] = {}
        message = (
            [*answers, *progress],
            ([len(each.tokens) for each in ordered], [len(each.logprobs) for each in ordered]),
            _joined([each.tokens for each in ordered], np.int32),
            _joined([each.logprobs for each in ordered], np.float32),
            [[_span(span, identities) for span in each.spans] for each in ordered],
            [(each.attempt, each.version, each.digest) for each in identities],
            _columns(list(answers.values()), ANSWER_FIELDS),
            [each.start for each in progress.values()],
            errors,
            self.failure,
        )
        return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)

    @classmethod
    def unpack(cls, message: bytes) -> Reply:
        names, sizes, tokens, logprobs, labelled, labels, columns, starts, errors, failure = pickle.loads(message)
        identities = [WeightIdentity(*label) for label in labels]
        spans = [tuple(VersionSpan(identities[n], *rest) for n, *rest in each) for each in labelled]
        made = list(zip(_parts(tokens, np.int32, sizes[0]), _parts(logprobs, np.float32, sizes[1]), spans, strict=True))
        answers, progress = made[: len(made) - len(starts)], made[len(made) - len(starts) :]
        outcomes: list[Outcome] = [
            SampledSequence(tokens=of, logprobs=own, spans=spans_of, **row)
            for (of, own, spans_of), row in zip(answers, _rows(columns, answers), strict=True)
        ]
        outcomes += [Progress(start, *each) for start, each in zip(starts, progress, strict=True)]
        return cls([*zip(names, outcomes, strict=True), *errors], failure)


def _span(span: VersionSpan, identities: dict[WeightIdentity, int]) -> Span:
    return identities.setdefault(span.identity, len(identities)), span.start, span.end, span.mixed


def _columns(objects: Sequence[Any], of: Iterable[Field[Any]]) -> Columns:
    """Returns {field: its values}, without fields that have their default everywhere."""
    columns = {each.name: list(map(attrgetter(each.name), objects)) for each in of}
    defaults = {each.name: each.default for each in of}
    return {name: values for name, values in columns.items() if values.count(defaults[name]) != len(values)}


def _rows(columns: Columns, objects: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the columns' values for each of the objects."""
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)] or [{} for _ in objects]


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> bytes:
    return np.concatenate(parts, dtype=dtype, casting="same_kind").tobytes() if parts else b""


def _parts(joined: bytes, dtype: npt.DTypeLike, lengths: Sequence[int]) -> list[npt.NDArray[Any]]:
    """Returns the arrays that were joined: views, which cannot be written to."""
    whole = np.frombuffer(joined, dtype)
    return [whole[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
