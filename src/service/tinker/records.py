"""Records: all that happens to sessions, models, samplers and promises, as values and as bytes.

The protocol's state follows from its records alone, in order. A running server writes one before it does what the
record says; one that reads a journal does the same again, so that both come to the same state. Some records are written
only where a journal is begun anew (`service.tinker.replaying`): they say what many others said before.

A record's bytes are a head in JSON, with its length before it, and then the bytes of a request or of a result, if it
has such.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

import numpy as np

from service.tinker.adapters import AdapterWish
from service.tinker.asked import Creation, Loading, Saving, Unusable, Update, Work
from service.tinker.codec import ForwardBackwardCall
from service.tinker.owners import Caller
from service.tinker.promises import Failure, Outcome, SampleWork, Success
from trireme.core.datum import ModelInput
from trireme.core.finite_json import to_json
from trireme.core.types import AdamParams, SamplingParams

HEAD = struct.Struct("<I")


@dataclass(frozen=True)
class SessionBegun:
    """A client began."""

    session: str
    owner: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class SessionTold:
    """A client said more of its session."""

    session: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class SessionOver:
    """A session has ended."""

    session: str


@dataclass(frozen=True)
class ModelAsked:
    """A model was asked for."""

    session: str
    seq: int
    work: Work | None


@dataclass(frozen=True)
class TrainingAsked:
    """A request of a model was accepted."""

    model: str
    seq: int
    work: Work | None


@dataclass(frozen=True)
class ModelOver:
    """A model cannot be trained any more."""

    model: str
    why: str


@dataclass(frozen=True)
class SamplerBegun:
    """A sampling session began."""

    session: str
    seq: int
    target: str


@dataclass(frozen=True)
class CloneJoined:
    """A clone of a sampler asked for its number."""

    sampler: str


@dataclass(frozen=True)
class SampleAsked:
    """A sample was accepted."""

    sampler: str
    seq: int
    work: SampleWork | None


@dataclass(frozen=True)
class OutcomeKnown:
    """A request was done, or refused."""

    request: str
    outcome: Outcome


@dataclass(frozen=True)
class RoomsLost:
    """Rooms were lost while they worked on a request, which may be the cause."""

    request: str


@dataclass(frozen=True)
class ModelCommitted:
    """The server has saved for itself what a model is before its request `seq`."""

    model: str
    seq: int
    place: str
    """The directory, by its name."""


@dataclass(frozen=True)
class ModelStands:
    """A model, as it stood when the journal was begun anew."""

    session: str
    seq: int
    next_seq: int
    ended: str
    retired: tuple[int, Sequence[int]]
    place: str
    """The directory of its newest commit; "": none."""


@dataclass(frozen=True)
class StepKept:
    """A request of a model that the trainer has done since the model's newest commit."""

    model: str
    seq: int
    work: Work | None
    error: str
    """Why it failed; "": it did not."""
    held: bool
    """Its gradient is held: there was no update since."""


@dataclass(frozen=True)
class SamplerStands:
    """A sampler, as it stood then."""

    session: str
    seq: int
    target: str
    joined: int
    clones: Mapping[str, tuple[int, Sequence[int], int, Sequence[str]]]
    """Of each clone what is retired, how many completions are not listed, and those that are."""


@dataclass(frozen=True)
class AnswerKept:
    """A promise that had its outcome then."""

    request: str
    session: str
    outcome: Outcome


Record = (
    SessionBegun
    | SessionTold
    | SessionOver
    | ModelAsked
    | TrainingAsked
    | ModelOver
    | SamplerBegun
    | CloneJoined
    | SampleAsked
    | OutcomeKnown
    | RoomsLost
    | ModelCommitted
    | ModelStands
    | StepKept
    | SamplerStands
    | AnswerKept
)
KINDS = {kind.__name__: kind for kind in Record.__args__}
WORKS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in (Saving, Unusable)}


def encode(record: Record) -> bytes:
    """Returns the bytes of a record."""
    head: dict[str, Any] = {each.name: getattr(record, each.name) for each in fields(record)}
    rest = b""
    if head.get("work") is not None:
        head["work"], rest = _work_head(head["work"])
    if isinstance(outcome := head.get("outcome"), Success | Failure):
        head["outcome"], rest = _outcome_head(outcome)
    said = to_json({"kind": type(record).__name__, **head}).encode()
    return b"".join([HEAD.pack(len(said)), said, rest])


def decode(payload: bytes) -> Record:
    """Returns the record of what `encode` made."""
    (length,) = HEAD.unpack_from(payload)
    head, rest = json.loads(payload[HEAD.size : HEAD.size + length]), payload[HEAD.size + length :]
    kind = KINDS[head.pop("kind")]
    if head.get("work") is not None:
        head["work"] = _work_of(head["work"], rest)
    if "outcome" in head:
        head["outcome"] = _outcome_of(head["outcome"], rest)
    if "retired" in head:
        head["retired"] = tuple(head["retired"])
    made: Record = kind(**head)
    return made


def _work_head(work: Any) -> tuple[dict[str, Any], bytes]:
    match work:
        case ForwardBackwardCall():
            return {"is": "ForwardBackwardCall"}, bytes(work.encoded.SerializeToString())
        case SampleWork():
            head = {each.name: getattr(work, each.name) for each in fields(work) if each.name != "prompt"}
            return {"is": "SampleWork", **head, "params": asdict(work.params)}, work.prompt.tokens.tobytes()
        case Update():
            return {"is": "Update", **asdict(work.adam)}, b""  # a norm that is infinite becomes null
        case _:
            return {"is": type(work).__name__, **asdict(work)}, b""


def _work_of(head: dict[str, Any], rest: bytes) -> Any:
    match head.pop("is"):
        case "ForwardBackwardCall":
            return ForwardBackwardCall.of(rest)
        case "SampleWork":
            params = SamplingParams(**head.pop("params"))
            return SampleWork(prompt=ModelInput(np.frombuffer(rest, np.int32)), params=params, **head)
        case "Update":
            adam = AdamParams(**{name: inf if value is None else value for name, value in head.items()})
            return Update(adam)
        case "Creation":
            wish = head.pop("wish")
            caller = Caller(**head.pop("caller"))
            return Creation(**head, wish=AdapterWish(**wish) if wish else None, caller=caller)
        case "Loading":
            caller = Caller(**head.pop("caller"))
            return Loading(**head, caller=caller)
        case kind:
            return WORKS[kind](**head)


def _outcome_head(outcome: Outcome) -> tuple[dict[str, Any], bytes]:
    if isinstance(outcome, Failure):
        return asdict(outcome), b""
    if isinstance(outcome.payload, bytes):
        return {}, outcome.payload
    return {"payload": outcome.payload}, b""


def _outcome_of(head: dict[str, Any], rest: bytes) -> Outcome:
    if "error" in head:
        return Failure(**head)
    return Success(head.get("payload", rest))
