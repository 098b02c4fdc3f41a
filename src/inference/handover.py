"""How another replica finishes a request: what the request has so far, and what is left to sample.

    replica --Progress--> Handover: all that a request has, whichever replicas made it
                            |
                            +-- next_request: what is missing    +-- complete: the whole answer

Each replica is asked about once a second, and its progress is kept until the answer arrives. When it dies, at most that
second is lost. One that still answers gives up its requests with all that they have.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.core.errors import TriremeError
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity


@dataclass(frozen=True)
class Progress:
    """Some tokens of an unfinished request."""

    start: int
    """Number of the first of them."""
    tokens: npt.NDArray[np.int32]
    """int32 [T]"""
    logprobs: npt.NDArray[np.float32]
    """float32 [T]"""
    spans: tuple[VersionSpan, ...]
    """They cover [start, start + T) without gap or overlap."""

    @classmethod
    def of_state(
        cls, start: int, state: Any, kept_from: WeightIdentity | None, unproved: WeightIdentity | None
    ) -> Progress:
        """Reads the tokens from number `start` on from vLLM's RequestState, without those of weights `unproved`.

        `kept_from`: as for `inference.engine.sampled_sequence`.
        """
        begins = [(WeightIdentity.parse(label), begin) for label, begin in state.weight_version_starts]
        ends = [*(begin for _, begin in begins[1:]), state.detokenizer.num_output_tokens()]
        spans = tuple(
            VersionSpan(identity, max(begin, start), end, mixed=kept_from not in (None, identity))
            for (identity, begin), end in zip(begins, ends, strict=False)
            if identity != unproved and end > start
        )
        tokens = state.detokenizer.output_token_ids[start : spans[-1].end if spans else start]
        tables = state.logprobs_processor.logprobs[start:]
        logprobs = [table[token].logprob for table, token in zip(tables, tokens, strict=False)]
        return cls(start, np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32), spans)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def before(self, end: int) -> Progress:
        """Returns the tokens with numbers below `end`."""
        count = max(end - self.start, 0)
        spans = tuple(replace(span, end=min(span.end, end)) for span in self.spans if span.start < end)
        return Progress(self.start, self.tokens[:count], self.logprobs[:count], spans)


Outcome = SampledSequence | Progress | TriremeError
"""How a request ends on a replica: its answer; what it has, when it is given up there; why it cannot be sampled
anywhere."""
NOTHING = Progress(0, np.zeros(0, np.int32), np.zeros(0, np.float32), ())


class Handover:
    """Keeps what a request has so far. `next_request` gives it to another replica; then `add` takes the progress that
    this replica reports, in which its own first token has number 0."""

    def __init__(self, request: SampleRequest) -> None:
        self._request = request
        self._parts: list[Progress] = []
        self._base = 0

    def __len__(self) -> int:
        return self._parts[-1].end if self._parts else 0

    @property
    def known(self) -> int:
        """Number of tokens kept of the replica that works on the request now."""
        return len(self) - self._base

    def next_request(self) -> SampleRequest:
        """Returns the request for the next replica: the rest, after the tokens that are kept."""
        self._base = kept = len(self)
        if not kept:
            return self._request
        params = self._request.params
        return replace(
            self._request,
            prompt=(*self._request.prompt, *self._tokens.tolist()),
            params=replace(
                params,
                max_tokens=None if params.max_tokens is None else params.max_tokens - kept,
                seed=None if params.seed is None else seed_after(params.seed, kept),
            ),
        )

    def add(self, progress: Progress) -> None:
        """Keeps the replica's progress: replaces known tokens, ignores what would leave a gap."""
        part = _shifted(progress, self._base)
        if part.start > len(self) or not len(part.tokens):
            return
        self._cut(part.start)
        self._parts.append(part)

    def forget_last_replica(self) -> None:
        """Drops what the replica reported that works on the request now: it is not to be trusted."""
        self._cut(self._base)

    def forget_all(self) -> None:
        self._cut(0)

    def complete(self, rest: SampledSequence) -> SampledSequence:
        """Returns the whole answer: what was kept at `next_request`, and `rest`, which the replica answered."""
        self._cut(self._base)
        if not self._parts:
            return rest
        parts = [*self._parts, _shifted(Progress(0, rest.tokens, rest.logprobs, rest.spans), self._base)]
        spans: list[VersionSpan] = []
        for span in (span for part in parts for span in part.spans):
            if spans and (spans[-1].identity, spans[-1].mixed) == (span.identity, span.mixed):
                spans[-1] = replace(spans[-1], end=span.end)
            else:
                spans.append(span)
        given = len(self._request.prompt)
        return replace(
            rest,
            tokens=np.concatenate([part.tokens for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            spans=tuple(spans),
            prompt_logprobs=rest.prompt_logprobs and rest.prompt_logprobs[:given],
            topk_prompt_logprobs=rest.topk_prompt_logprobs and rest.topk_prompt_logprobs[:given],
        )

    @property
    def _tokens(self) -> npt.NDArray[np.int32]:
        return np.concatenate([part.tokens for part in self._parts])

    def _cut(self, end: int) -> None:
        while self._parts and self._parts[-1].end > end:
            last = self._parts.pop().before(end)
            if len(last.tokens):
                self._parts.append(last)


def _shifted(progress: Progress, by: int) -> Progress:
    spans = tuple(replace(span, start=span.start + by, end=span.end + by) for span in progress.spans)
    return replace(progress, start=progress.start + by, spans=spans)


def seed_after(seed: int, kept: int) -> int:
    """Returns the seed for the rest of a request of which `kept` tokens are there, 0 <= seed < 2^63. With the old one
    the rest would be drawn with the random numbers of its beginning."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{kept}".encode(), digest_size=8).digest()) >> 1
