"""Records: all events of sessions, as values and as rows of a store.

A session's state follows from its records alone, in order. A running service and a service that reads a store after a
restart apply the same records by the same code, so that they come to the same sessions. When a session is forgotten its
rows are removed.

A row has a head in JSON, and then the columns of numbers that the head counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from service.sessions.tree import SampledAnswer, TurnGiven
from service.store import Row
from trireme.core.types import VersionSpan, WeightIdentity

FORMAT = "sessions 1"
"""The name and number of the format of these rows, which their store names."""


@dataclass(frozen=True)
class SessionOpened:
    """A session was opened."""

    session: str
    at: float
    """Seconds of the registry's clock."""
    floor: int
    """The floor of the session: no token of the session is of an older version."""
    temperature: float
    """The temperature at which all answers are sampled."""
    problem: str = ""
    """The name of the agent's task; "": it has none."""
    attempt: int = 0
    """The attempt of the run that made the version `floor`."""


@dataclass(frozen=True, eq=False)
class TurnAnswered:
    """A request was answered: the turn with its answers."""

    session: str
    at: float
    turn: TurnGiven


@dataclass(frozen=True)
class AnswersDelivered:
    """The client has received the answers `nodes`."""

    session: str
    at: float
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class RewardGiven:
    """A reward from the session's owner, for an answer or for the whole session. A later record for the same answer, or
    for the session, replaces this one."""

    session: str
    at: float
    value: float
    node: int | None = None
    """The answer; None: the whole session."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionEnded:
    """A session has ended: no turn may begin after this record."""

    session: str
    at: float
    reason: str


SessionRecord = SessionOpened | TurnAnswered | AnswersDelivered | RewardGiven | SessionEnded
PLAIN = {kind.__name__: kind for kind in (SessionOpened, AnswersDelivered, RewardGiven, SessionEnded)}


def encode(record: SessionRecord) -> Row:
    """Returns a record as a row of the session store. The row's `owner` is the session's name."""
    if not isinstance(record, TurnAnswered):
        return Row(record.session, {"kind": type(record).__name__, **vars(record)})
    columns: list[npt.NDArray[np.generic]] = [record.turn.prompt]
    for answer in record.turn.answers:
        columns += [answer.tokens, answer.logprobs]
    return Row(record.session, _turn_head(record), b"".join(column.tobytes() for column in columns))


def decode(row: Row) -> SessionRecord:
    """Returns the record in a row that `encode` made."""
    head = dict(row.head)
    kind = head.pop("kind")
    if kind == TurnAnswered.__name__:
        return _turn_of(head, row.columns)
    if "nodes" in head:
        head["nodes"] = tuple(head["nodes"])
    record: SessionRecord = PLAIN[kind](**head)
    return record


def _turn_head(record: TurnAnswered) -> dict[str, object]:
    turn = record.turn
    return {
        "kind": TurnAnswered.__name__,
        "session": record.session,
        "at": record.at,
        "follows": turn.follows,
        "parent": turn.parent,
        "messages": turn.messages,
        "tools": turn.tools,
        "prompt": len(turn.prompt),
        "asked": turn.options,
        "answers": [
            {
                "message": answer.message,
                "tokens": len(answer.tokens),
                "spans": [[str(span.identity), span.start, span.end, span.mixed] for span in answer.spans],
                "stop_reason": answer.stop_reason,
            }
            for answer in turn.answers
        ],
    }


def _turn_of(head: Mapping[str, Any], columns: bytes) -> TurnAnswered:
    lengths = [head["prompt"], *(answer["tokens"] for answer in head["answers"] for _column in range(2))]
    prompt, *arrays = np.split(np.frombuffer(columns, np.int32), np.cumsum(lengths)[:-1])
    answers = tuple(
        SampledAnswer(
            answer["message"],
            tokens,
            logprobs.view(np.float32),
            tuple(
                VersionSpan(WeightIdentity.parse(label), start, end, mixed)
                for label, start, end, mixed in answer["spans"]
            ),
            answer["stop_reason"],
        )
        for answer, tokens, logprobs in zip(head["answers"], arrays[::2], arrays[1::2], strict=True)
    )
    messages = tuple(head["messages"])
    tools = tuple(head["tools"])
    turn = TurnGiven(head["follows"], head["parent"], messages, tools, prompt, answers, head["asked"])
    return TurnAnswered(head["session"], head["at"], turn)
