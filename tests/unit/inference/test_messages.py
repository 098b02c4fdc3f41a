"""What a router and a replica pack is what the other side unpacks."""

from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.handover import Outcome, Progress
from inference.messages import Reply, pack_requests, unpack_requests
from trireme.core.errors import BadInput, RoomFailed, TriremeError, WeightsRefused
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan, WeightIdentity

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=8).map(lambda tokens: np.asarray(tokens, np.int32))
IDENTITIES = st.builds(WeightIdentity, st.integers(1, 2), st.integers(0, 2), st.sampled_from(["d", "e"]))
STOPS = st.one_of(
    st.none(), st.text(max_size=3), st.lists(st.one_of(st.integers(0, 9), st.text(max_size=3)), max_size=2)
)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 99),
    temperature=st.sampled_from([0.0, 1.0]),
    top_p=st.sampled_from([0.5, 1.0]),
    stop=STOPS,
    seed=st.none() | st.integers(0, 2**63 - 1),
)
REQUESTS = st.builds(
    SampleRequest,
    request_id=st.text(max_size=5),
    prompt=TOKENS.filter(len),
    params=PARAMS,
    route_key=st.text(max_size=5),
    prompt_logprobs=st.booleans(),
    topk_prompt_logprobs=st.integers(0, 2),
    began=st.none() | IDENTITIES,
    chat=st.booleans(),
)


@st.composite
def sequences(draw: st.DrawFn, kind: type[SampledSequence] | type[Progress]) -> Any:
    """An answer or a progress. A broken replica may give another number of log-probabilities than of tokens."""
    tokens, logprobs = draw(TOKENS), draw(st.lists(st.floats(width=32), max_size=8))
    spans = tuple(
        draw(st.lists(st.builds(VersionSpan, IDENTITIES, *[st.integers(0, 9)] * 2, st.booleans()), max_size=3))
    )
    if kind is Progress:
        return Progress(draw(st.integers(0, 9)), tokens, np.asarray(logprobs, np.float32), spans)
    prompt_logprobs = draw(st.none() | st.just([None, -0.5]))
    likeliest = draw(st.none() | st.just([None, [(3, -0.5), (4, -1.5)]]))
    reason = draw(st.sampled_from(["stop", "length"]))
    return SampledSequence(tokens, np.asarray(logprobs, np.float32), reason, spans, prompt_logprobs, likeliest)


ERRORS = st.sampled_from([RoomFailed("too long"), BadInput("never"), WeightsRefused("canary")])
OUTCOMES = st.dictionaries(
    st.text(max_size=5), st.one_of(sequences(SampledSequence), sequences(Progress), ERRORS), max_size=6
)


def shown(value: Any) -> Any:
    """Returns what can be compared: types, values and the bits of arrays."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.tobytes()
    if isinstance(value, TriremeError):
        return type(value), str(value)
    if isinstance(value, SampleRequest | SampledSequence | Progress):
        return type(value), [(field.name, shown(getattr(value, field.name))) for field in fields(value)]
    return value


@settings(max_examples=20)
@given(st.lists(REQUESTS, max_size=4))
def test_requests_arrive_as_they_were_sent(requests: list[SampleRequest]) -> None:
    assert list(map(shown, unpack_requests(pack_requests(requests)))) == list(map(shown, requests))


@settings(max_examples=20)
@given(OUTCOMES, st.none() | ERRORS)
def test_outcomes_arrive_as_they_were_given(outcomes: dict[str, Outcome], failure: TriremeError | None) -> None:
    reply = Reply.unpack(Reply(list(outcomes.items()), failure).pack())
    assert {name: shown(outcome) for name, outcome in reply.outcomes} == {n: shown(o) for n, o in outcomes.items()}
    assert len(reply.outcomes) == len(outcomes)
    assert shown(reply.failure) == shown(failure)
