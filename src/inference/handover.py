"""What an unfinished request has so far, and how another replica goes on with it.

    replica --Progress--> Kept: all that a request has, whichever replicas made it
                            |
                            +-- rest: the request for what is missing    +-- joined: the whole answer

A replica is asked about once a second, and what it says is kept until the answer is there; when it dies, at most that
second is lost. One that can still speak gives up its requests with all that they have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.core.errors import TriremeError
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan, WeightIdentity


@dataclass(frozen=True)
class Progress:
    """Tokens of an unfinished request from number `start` on: `tokens` int32 [T], `logprobs` float32 [T], and `spans`
    that cover [start, start + T) without gap or overlap."""

    start: int
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[VersionSpan, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def before(self, end: int) -> Progress:
        """Its tokens with numbers below `end`."""
        count = max(end - self.start, 0)
        return Progress(self.start, self.tokens[:count], self.logprobs[:count], spans_before(self.spans, end))

    def moved(self, by: int) -> Progress:
        """The same tokens, numbered `by` higher."""
        spans = tuple(replace(span, start=span.start + by, end=span.end + by) for span in self.spans)
        return replace(self, start=self.start + by, spans=spans)


Outcome = SampledSequence | Progress | TriremeError
"""What becomes of a request on a replica: its answer; what it has, when it is given up there; why it can not be sampled
anywhere."""
NOTHING = Progress(0, np.zeros(0, np.int32), np.zeros(0, np.float32), ())


def spans_before(spans: Sequence[VersionSpan], end: int) -> tuple[VersionSpan, ...]:
    return tuple(replace(span, end=min(span.end, end)) for span in spans if span.start < end)


def made_since(start: int, state: Any, kept_from: WeightIdentity | None, unproved: WeightIdentity | None) -> Progress:
    """What vLLM's RequestState has from token number `start` on, but for tokens of weights that are not proved.

    `kept_from`: as for `inference.engine.sampled_sequence`.
    """
    begins = [(WeightIdentity.parse(label), begin) for label, begin in state.weight_version_starts]
    num_tokens = state.detokenizer.num_output_tokens()
    ends = [*(begin for _, begin in begins[1:]), num_tokens]
    spans = tuple(
        VersionSpan(identity, max(begin, start), end, mixed=kept_from not in (None, identity))
        for (identity, begin), end in zip(begins, ends, strict=False)
        if identity != unproved and end > start
    )
    until = spans[-1].end if spans else start
    tokens = state.detokenizer.output_token_ids[start:until]
    logprobs = [at[token].logprob for at, token in zip(state.logprobs_processor.logprobs[start:], tokens, strict=False)]
    return Progress(start, np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32), spans)


def prefilled_tokens(states: Iterable[Any]) -> int:
    """Tokens, prompt and answer, of the requests whose whole prompt has been prefilled; of vLLM's RequestStates.

    Those are the requests that have made a token. So one that only waits in the queue is left out, and one whose prompt
    is prefilled in chunks until the last of them. One that vLLM has preempted for want of space counts: it does not say
    which, and has all of it to prefill again too.
    """
    made = ((state.prompt_len, state.detokenizer.num_output_tokens()) for state in states)
    return sum(prompt + answer for prompt, answer in made if answer)


class Kept:
    """What a request has so far. `begin` says that another replica goes on with it; then `add` takes what that one
    says, numbered as it counts."""

    def __init__(self, request: SampleRequest) -> None:
        self._request = request
        self._parts: list[Progress] = []
        self._base = 0

    def __len__(self) -> int:
        return self._parts[-1].end if self._parts else 0

    @property
    def known(self) -> int:
        """How many tokens of the replica that works on it now are kept."""
        return len(self) - self._base

    def begin(self) -> SampleRequest:
        """What the next replica is to be asked for: the rest, after what is kept."""
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
        """Keeps what the replica in charge says. What is known is replaced; what would leave a gap is passed over."""
        part = progress.moved(self._base)
        if part.start > len(self) or not len(part.tokens):
            return
        self._cut(part.start)
        self._parts.append(part)

    def forget(self) -> None:
        """What the replica in charge said is not to be trusted."""
        self._cut(self._base)

    def forget_all(self) -> None:
        self._cut(0)

    def joined(self, rest: SampledSequence) -> SampledSequence:
        """The whole answer: what was kept when `begin` was called, and `rest`, which the replica made of it."""
        self._cut(self._base)
        if not self._parts:
            return rest
        shifted = (replace(span, start=span.start + self._base, end=span.end + self._base) for span in rest.spans)
        given = len(self._request.prompt)
        return replace(
            rest,
            tokens=np.concatenate([self._tokens, rest.tokens]),
            logprobs=np.concatenate([*(part.logprobs for part in self._parts), rest.logprobs]),
            spans=merged([*(span for part in self._parts for span in part.spans), *shifted]),
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


def seed_after(seed: int, kept: int) -> int:
    """Seed of the rest of a request of which `kept` tokens are there, 0 <= seed < 2^63: with the same one, the rest
    would be drawn with the random numbers that its beginning was drawn with."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{kept}".encode(), digest_size=8).digest()) >> 1


def merged(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Spans one after the other; neighbours that say the same become one."""
    found: list[VersionSpan] = []
    for span in spans:
        if found and (found[-1].identity, found[-1].mixed) == (span.identity, span.mixed):
            found[-1] = replace(found[-1], end=span.end)
        else:
            found.append(span)
    return tuple(found)
