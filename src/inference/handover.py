"""Lets another replica finish a request: collects the tokens so far, and makes a request for the missing rest.

    replica --Progress--> Handover: all tokens of a request, whichever replicas made them
                            |
                            +-- next_request: the missing rest   +-- complete: the whole answer

About once a second each replica reports its progress, which is kept until the answer arrives. When a replica dies, at
most that second is lost. A replica that still answers hands over its requests with all their tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from inference.engine import sampled_logprobs
from trireme.core.errors import TriremeError
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState


@dataclass(frozen=True)
class Progress:
    """Successive tokens of an unfinished request, with logprobs and version spans."""

    start: int
    """Number of the first of these tokens in the answer."""
    tokens: npt.NDArray[np.int32]
    """int32 [T]"""
    logprobs: npt.NDArray[np.float32]
    """float32 [T]"""
    spans: tuple[VersionSpan, ...]
    """The spans cover [start, start + T) without gap or overlap."""

    @classmethod
    def of_state(
        cls, start: int, state: RequestState, kept_from: WeightIdentity | None, unproved: WeightIdentity | None
    ) -> Progress:
        """Returns the tokens of a request from index `start` on, taken from `state`, vLLM's record of the request.
        Leaves out tokens sampled by `unproved` weights.

        `kept_from`: None unless `inference.on_update` is keep_kv. With keep_kv, the KV cache outlives updates:
        `kept_from` names the oldest weights that may have computed a part of the request's cache, and a span that was
        sampled by other weights is marked as mixed.
        """
        detokenizer = state.detokenizer
        logprobs_processor = state.logprobs_processor
        assert detokenizer is not None
        assert logprobs_processor is not None
        begins = [(WeightIdentity.parse(label), begin) for label, begin in state.weight_version_starts]
        ends = [*(begin for _, begin in begins[1:]), detokenizer.num_output_tokens()]
        spans = tuple(
            VersionSpan(identity, max(begin, start), end, mixed=kept_from not in (None, identity))
            for (identity, begin), end in zip(begins, ends, strict=False)
            if identity != unproved and end > start
        )
        tokens = detokenizer.output_token_ids[start : spans[-1].end if spans else start]
        logprobs = sampled_logprobs(logprobs_processor.logprobs, start, tokens)
        return cls(start, np.asarray(tokens, np.int32), logprobs, spans)


Outcome = SampledSequence | Progress | TriremeError
"""How a request ends on a replica: its answer (SampledSequence); its tokens so far, when the replica does not finish it
(Progress); or why no replica can sample it (TriremeError)."""
NOTHING = Progress(0, np.zeros(0, np.int32), np.zeros(0, np.float32), ())


class Handover:
    """Collects the tokens that replicas have reported for one request, so that another replica can finish it. Send the
    next replica the request that `next_request` returns, and give the replica's reports to `add`. A report numbers its
    tokens from the first token that this replica sampled. `on_progress` is called with all collected tokens after each
    `add`."""

    __slots__ = ("_base", "_on_progress", "_progress", "_request")

    def __init__(self, request: SampleRequest, on_progress: Callable[[Progress], None] | None = None) -> None:
        self._request = request
        self._on_progress = on_progress
        self._progress = NOTHING
        self._base = 0

    def __len__(self) -> int:
        return len(self._progress.tokens)

    @property
    def length(self) -> int:
        """The number of collected tokens that come from the replica at work now."""
        return len(self) - self._base

    @property
    def is_read(self) -> bool:
        """True if the caller reads the answer while it is sampled."""
        return self._on_progress is not None

    def next_request(self) -> SampleRequest:
        """Returns the request for the next replica: its prompt ends with the kept tokens, so only the rest is
        sampled."""
        self._base = length = len(self)
        if not length:
            return self._request
        params = self._request.params
        return replace(
            self._request,
            prompt=np.concatenate([self._request.prompt, self._progress.tokens]),
            params=replace(
                params,
                max_tokens=None if params.max_tokens is None else params.max_tokens - length,
                seed=None if params.seed is None else seed_after(params.seed, length),
            ),
        )

    def add(self, progress: Progress) -> None:
        """Adds a report of the replica at work. Its tokens replace the collected tokens from the report's first token
        on. Ignores a report that is empty or would leave a gap."""
        if self._base + progress.start <= len(self) and len(progress.tokens):
            self._progress = self._followed_by(progress)
            if self._on_progress:
                self._on_progress(self._progress)

    def forget_last_replica(self) -> None:
        """Drops all tokens that the replica at work has reported, because it cannot be trusted."""
        self._progress = self._followed_by(NOTHING)

    def complete(self, rest: SampledSequence) -> SampledSequence:
        """Returns the whole answer: the tokens that were reported before the last `next_request`, followed by `rest`,
        the answer to that request."""
        if not self._base:
            return rest
        whole = self._followed_by(Progress(0, rest.tokens, rest.logprobs, rest.spans))
        prompt_length = len(self._request.prompt)
        return replace(
            rest,
            tokens=whole.tokens,
            logprobs=whole.logprobs,
            spans=whole.spans,
            prompt_logprobs=rest.prompt_logprobs and rest.prompt_logprobs[:prompt_length],
            topk_prompt_logprobs=rest.topk_prompt_logprobs and rest.topk_prompt_logprobs[:prompt_length],
        )

    def _followed_by(self, progress: Progress) -> Progress:
        """Returns the kept tokens before the position at which `progress` begins, followed by the tokens of
        `progress`."""
        start = self._base + progress.start
        spans = [replace(span, end=min(span.end, start)) for span in self._progress.spans if span.start < start]
        for span in progress.spans:
            end = self._base + span.end
            if spans and (spans[-1].identity, spans[-1].mixed) == (span.identity, span.mixed):
                spans[-1] = replace(spans[-1], end=end)
            else:
                spans.append(replace(span, start=self._base + span.start, end=end))
        tokens = np.concatenate([self._progress.tokens[:start], progress.tokens])
        return Progress(0, tokens, np.concatenate([self._progress.logprobs[:start], progress.logprobs]), tuple(spans))


def seed_after(seed: int, length: int) -> int:
    """Returns the seed, 0 <= s < 2^63, for the rest of a request that has `length` tokens already. With `seed` itself
    the rest would be drawn with the same random numbers as the beginning."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{length}".encode(), digest_size=8).digest()) >> 1
