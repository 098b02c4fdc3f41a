"""Records come back from a store as they were."""

import tempfile
from collections.abc import Iterable
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
from service.sessions.session import SessionBook
from service.sessions.tree import ROOT, SampledAnswer, TurnGiven
from service.store import Store
from trireme.core.types import VersionSpan, WeightIdentity

TEXT = st.text(st.characters(exclude_categories=()), max_size=5)  # with surrogates, which JSON can hold
WEIGHTS = st.builds(WeightIdentity, st.integers(0, 2), st.integers(0, 9), st.sampled_from(["9f3c", "d"]))


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
        message |= message_of(
            "assistant", "", thinking=draw(TEXT), tool_calls=[{"name": "look", "arguments": {"é": [1, None]}}]
        )
    tokens = np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), min_size=ends[-1], max_size=ends[-1])), np.int32)
    return SampledAnswer(
        message, tokens, np.asarray(values, np.float32), spans, draw(st.sampled_from(["stop", "length"]))
    )


@st.composite
def histories(draw: st.DrawFn) -> list[SessionRecord]:
    """Records of two sessions, each of which may follow those before it."""
    records: list[SessionRecord] = []
    book = SessionBook()
    for number in range(draw(st.integers(1, 12))):
        name, at = draw(st.sampled_from(["a", "b"])), float(number)
        session = book.sessions.get(name)
        record: SessionRecord
        if session is None:
            record = SessionOpened(name, at, draw(st.integers(-1, 9)), 0.7, draw(TEXT))
        else:
            answer_nodes = [n for n in range(len(session.tree.nodes)) if session.is_answer(n)]
            kinds = ["turn", "end", "reward"] + ["deliver"] * bool(answer_nodes)
            kind = draw(st.sampled_from(kinds))
            if kind == "turn":
                follows = draw(st.sampled_from([ROOT, *answer_nodes]))
                record = TurnAnswered(
                    name,
                    at,
                    TurnGiven(
                        follows,
                        draw(st.sampled_from([ROOT, follows])),
                        (message_of("user", draw(TEXT)),),
                        (LOOK,) if follows == ROOT else (),
                        np.asarray(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)), np.int32),
                        tuple(draw(st.lists(answers(), min_size=1, max_size=2))),
                        draw(TEXT),
                    ),
                )
            elif kind == "deliver":
                record = AnswersDelivered(name, at, (draw(st.sampled_from(answer_nodes)),))
            elif kind == "reward":
                node = draw(st.sampled_from([None, *answer_nodes]))
                record = RewardGiven(name, at, draw(st.floats(-1e9, 1e9)), node, {"m": 0.5})
            else:
                record = SessionEnded(name, at, draw(TEXT))
        book.apply(record)
        records.append(record)
    return records


COLUMNS = ("parent", "branch", "start", "end", "follows", "first_weights", "children", "message", "spans", "turns")
COLUMNS += ("stop_reason", "delivered")
"""Of a node of a session's tree."""


def state_of(records: Iterable[SessionRecord]) -> dict[str, Any]:
    """Returns all that sessions hold, as values that can be compared."""
    book = SessionBook()
    for record in records:
        book.apply(record)
    return {
        name: {
            "opened": session.opened,
            "ended": session.end_record,
            "last": session.last,
            "rewards": session.rewards,
            "counts": vars(session.tree.counts),
            "nodes": [[getattr(node, name) for name in COLUMNS] for node in session.tree.nodes],
            "columns": [
                (branch.origin, branch.tokens[: branch.length].tolist(), branch.logprobs[: branch.length].tobytes())
                for branch in session.tree.branches
            ],
        }
        for name, session in book.sessions.items()
    }


@settings(max_examples=60, deadline=None)
@given(histories(), st.sampled_from(["ext4", "nfs4"]))
def test_records_are_read_as_they_were_written(records: list[SessionRecord], kind: str) -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patched:
        patched.setattr(stores, "file_system", lambda directory: kind)
        for first in (True, False):
            store = Store(Path(place), FORMAT)
            assert not store.open()
            if first:
                for record in records:
                    store.append(encode(record))
            assert state_of(decode(row) for row in store.rows()) == state_of(records)
            store.close()
