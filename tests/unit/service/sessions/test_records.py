"""Records come back from a store as they were. (What sessions make of them: test_registry_witness.py.)"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_support import LOOK, message_of

from service import store as stores
from service.sessions.records import (
    FORMAT,
    AnswersDelivered,
    RewardGiven,
    SessionEnded,
    SessionOpened,
    SessionRecord,
    TurnAnswered,
    decode,
    encode,
)
from service.sessions.tree import ROOT, SampledAnswer, TurnGiven
from service.store import Store
from trireme.core.types import VersionSpan, WeightIdentity

TEXT = st.text(st.characters(exclude_categories=()), max_size=5)  # with surrogates, which JSON can hold
WEIGHTS = st.builds(WeightIdentity, st.integers(0, 2), st.integers(0, 9), st.sampled_from(["9f3c", "d"]))
NAMES, TIMES, NODES = st.sampled_from(["a", "b"]), st.floats(0, 1e9), st.integers(0, 99)
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4).map(lambda tokens: np.asarray(tokens, np.int32))


@st.composite
def answers(draw: st.DrawFn) -> SampledAnswer:
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ends = np.cumsum(lengths).tolist()
    spans = tuple(
        VersionSpan(draw(WEIGHTS), end - length, end, draw(st.booleans()))
        for length, end in zip(lengths, ends, strict=True)
    )
    values = draw(st.lists(st.floats(-50, 0, width=32), min_size=ends[-1], max_size=ends[-1]))
    message = message_of("assistant", draw(TEXT))
    if draw(st.booleans()):
        calls = [{"name": "look", "arguments": {"é": [1, None]}}]
        message |= message_of("assistant", "", thinking=draw(TEXT), tool_calls=calls)
    tokens = np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), min_size=ends[-1], max_size=ends[-1])), np.int32)
    reason = draw(st.sampled_from(["stop", "length"]))
    return SampledAnswer(message, tokens, np.asarray(values, np.float32), spans, reason)


TURNS = st.builds(
    TurnGiven,
    st.sampled_from([ROOT, 3]),
    st.sampled_from([ROOT, 3]),
    st.tuples(TEXT.map(lambda text: message_of("user", text))),
    st.sampled_from([(), (LOOK,)]),
    TOKENS,
    st.lists(answers(), min_size=1, max_size=2).map(tuple),
    TEXT,
)
RECORDS: st.SearchStrategy[SessionRecord] = st.one_of(
    st.builds(SessionOpened, NAMES, TIMES, st.integers(-1, 9), st.floats(0, 2), TEXT, st.integers(0, 3)),
    st.builds(TurnAnswered, NAMES, TIMES, TURNS),
    st.builds(AnswersDelivered, NAMES, TIMES, st.lists(NODES).map(tuple)),
    st.builds(RewardGiven, NAMES, TIMES, st.floats(-1e9, 1e9), st.none() | NODES, st.just({"m": 0.5})),
    st.builds(SessionEnded, NAMES, TIMES, TEXT),
)


def plain(value: Any) -> Any:
    """Returns all that a record holds, as values that can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.tobytes()
    if dataclasses.is_dataclass(value):
        return type(value), [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


@settings(max_examples=60, deadline=None)
@given(st.lists(RECORDS, max_size=12), st.sampled_from(["ext4", "nfs4"]))
def test_records_are_read_as_they_were_written(records: list[SessionRecord], kind: str) -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patched:
        patched.setattr(stores, "file_system", lambda directory: kind)
        for first in (True, False):
            store = Store(Path(place), FORMAT)
            assert not store.open()
            if first:
                for record in records:
                    store.append(encode(record))
            assert [plain(decode(row)) for row in store.rows()] == [plain(record) for record in records]
            store.close()
