"""Converts the protocol's state to rows of a store (`service.store`) and back. A row has the newest state of one item.

    <session>, <session>:train:<n>, <session>:sample:<n>    a session, a model, a sampler
    <model or sampler>/<n>                                  a promise, until it is retired; its columns are the result
    <model or sampler>/<n>/work                             the request, until nobody has to do it any more
    <model>/<n>/step                                        the trainer has done it since the model's newest commit

A row is replaced in place. All rows that one change touches are committed at once, before the state is changed in
memory. A state that is loaded has the same promises with the same outcomes, and the same numbers that are never done
again. Its sessions count as heard of just now. Nothing runs in it: what had no outcome is done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import inf
from typing import Any

import numpy as np

from service.store import Row, Store
from service.tinker.adapters import AdapterWish
from service.tinker.asked import Creation, Loading, Saving, Unusable, Update
from service.tinker.clients import ClientModel, ClientSampler, ClientSession
from service.tinker.codec import ForwardBackwardCall
from service.tinker.history import ModelHistory, Step
from service.tinker.owners import Caller
from service.tinker.promises import Failure, Outcome, Promise, SampleWork, Success
from trireme.core.datum import ModelInput
from trireme.core.types import AdamParams, SamplingParams

FORMAT = "tinker 1"
Change = Row | str
"""A row that is added or replaced, or the owner of one that is removed."""
WORKS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in (Saving, Unusable)}


def write(store: Store, changes: Sequence[Change]) -> None:
    """Makes all changes at once. Raises StorageFailed; the store is then as before."""
    with store.transaction():
        for change in changes:
            if isinstance(change, Row):
                store.put(change)
            else:
                store.remove(change)


def session_row(session: ClientSession) -> Row:
    """Returns the row of a session."""
    head = {"owner": session.owner, "metadata": session.metadata, "ended": session.ended_s is not None}
    return Row(session.session_id, {"kind": "session", **head})


def model_row(model: ClientModel) -> Row:
    """Returns the row of a model."""
    head = {"next_seq": model.next_seq, "ended": model.ended, "place": model.history.place}
    return Row(model.model_id, {"kind": "model", **head})


def sampler_row(sampler: ClientSampler) -> Row:
    """Returns the row of a sampler."""
    head = {"target": sampler.target, "joined": sampler.joined, "retired": sampler.retired}
    return Row(sampler.sampler_id, {"kind": "sampler", **head})


def promise_row(promise: Promise) -> Row:
    """Returns the row of a promise."""
    head, payload = _outcome_head(promise.outcome)
    return Row(
        promise.request_id, {"kind": "promise", "place": promise.place, "losses": promise.losses, **head}, payload
    )


def work_row(promise: Promise) -> Row:
    """Returns the row of what is to be done for a promise."""
    head, rest = _work_head(promise.work)
    return Row(work_key(promise.request_id), {"kind": "work", "work": head}, rest)


def work_key(request_id: str) -> str:
    """Returns the owner of the row of a request."""
    return f"{request_id}/work"


def step_row(request_id: str, error: str) -> Row:
    """Returns the row that says that the trainer has done a request. `error`: why it failed."""
    return Row(step_key(request_id), {"kind": "step", "error": error})


def step_key(request_id: str) -> str:
    """Returns the owner of that row."""
    return f"{request_id}/step"


@dataclass(frozen=True)
class Contents:
    """All that a store has of clients, by their ids, in the order in which it was made."""

    sessions: dict[str, ClientSession] = field(default_factory=dict)
    models: dict[str, ClientModel] = field(default_factory=dict)
    samplers: dict[str, ClientSampler] = field(default_factory=dict)
    promises: dict[str, Promise] = field(default_factory=dict)


def contents(rows: Iterable[Row], now: float) -> Contents:
    """Reads rows, at the time `now`."""
    found = Contents()
    works: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for row in rows:
        head, session_id = row.head, row.owner.partition(":")[0]
        match head["kind"]:
            case "session":
                ended_s = now if head["ended"] else None
                found.sessions[session_id] = ClientSession(session_id, now, head["owner"], head["metadata"], ended_s)
            case "model":
                history = ModelHistory(head["place"])
                model = ClientModel(row.owner, session_id, head["next_seq"], ended=head["ended"], history=history)
                found.models[row.owner] = model
                found.sessions[session_id].models.append(row.owner)
            case "sampler":
                retired = tuple((first, last) for first, last in head["retired"])
                sampler = ClientSampler(row.owner, session_id, head["target"], head["joined"], retired)
                found.samplers[row.owner] = sampler
                found.sessions[session_id].samplers.append(row.owner)
            case "promise":
                outcome = _outcome_of(head, row.columns)
                promise = Promise(row.owner, session_id, None, outcome, head["place"], head["losses"])
                found.promises[row.owner] = promise
            case "work":
                works[row.owner] = _work_of(head["work"], row.columns)
            case "step":
                errors[row.owner.removesuffix("/step")] = head["error"]
    for promise in found.promises.values():
        owner = found.models.get(promise.owner_id) or found.samplers[promise.owner_id]
        if promise.outcome is None:
            promise.work = works[work_key(promise.request_id)]
        if isinstance(owner, ClientModel) and promise.outcome is None:
            owner.waiting[promise.number] = promise
        if isinstance(owner, ClientSampler) and promise.outcome:
            owner.answers[promise.number] = promise
    for done in sorted((Promise(each, "", works[work_key(each)]) for each in errors), key=lambda each: each.number):
        model = found.models[done.owner_id]
        model.history = model.history.noted(Step(done.number, done.work, errors[done.request_id]), now)
    return found


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


def _outcome_head(outcome: Outcome | None) -> tuple[dict[str, Any], bytes]:
    match outcome:
        case None:
            return {}, b""
        case Failure():
            return {"failure": asdict(outcome)}, b""
        case Success(bytes(payload)):
            return {"success": None}, payload
        case Success(payload):
            return {"success": payload}, b""


def _outcome_of(head: Mapping[str, Any], payload: bytes) -> Outcome | None:
    if "failure" in head:
        return Failure(**head["failure"])
    if "success" in head:
        return Success(payload if head["success"] is None else head["success"])
    return None
