"""Converts the state of Tinker's protocol to rows of a store (`service.store`), and rows to that state.

Each row holds the newest state of one item. Its key says which:

    <session>, <session>:train:<n>, <session>:sample:<n>    a session, a model, a sampler
    <model or sampler>/<n>                                  a promise, until it is retired; its columns are the result
    <model or sampler>/<n>/work                             the request, until it is done
    <model>/<n>/step                                        a step of the trainer since the model's newest checkpoint

A change replaces rows in place. One transaction commits all rows of the change before the state in memory changes. A
loaded state has the promises, outcomes and numbers of requests of the stored one, and its sessions count as active at
the time of loading. The server then runs each request without an outcome again, unless the machine has booted since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from service.store import Row, Store
from service.tinker import bodies
from service.tinker.clients import ClientModel, ClientSampler, ClientSession
from service.tinker.codec import ForwardBackwardCall
from service.tinker.model_history import ModelHistory, Step
from service.tinker.owners import Caller
from service.tinker.promises import Failure, Outcome, Promise, SampleWork, Success
from trireme.core.datum import ModelInput
from trireme.core.types import SamplingParams

FORMAT = "tinker 3"
Change = Row | str
"""A row to add or to replace, or the key (`Row.owner`) of a row to remove."""
Stored = ClientSession | ClientModel | ClientSampler | Promise


def write(store: Store, changes: Sequence[Change]) -> None:
    """Makes all changes in one transaction. Raises StorageFailed; the store is then unchanged."""
    with store.transaction():
        for change in changes:
            if isinstance(change, Row):
                store.put(change)
            else:
                store.remove(change)


def row_of(thing: Stored) -> Row:
    """Returns the row with the newest state of an item: a session, model, sampler or promise."""
    match thing:
        case ClientSession():
            head = {"kind": "session", **asdict(thing.caller), "metadata": thing.metadata, "ended": thing.end_reason}
            return Row(thing.session_id, head)
        case ClientModel():
            failure = asdict(thing.failure) if thing.failure else None
            head = {"kind": "model", "next_seq": thing.next_seq, "ended": failure, "place": thing.history.place}
            return Row(thing.model_id, head)
        case ClientSampler():
            head = {"kind": "sampler", "target": thing.target, "retired": thing.retired}
            return Row(thing.sampler_id, head)
        case Promise():
            outcome, payload = _outcome_head(thing.outcome)
            head = {"kind": "promise", "losses": thing.losses, **outcome}
            return Row(thing.request_id, head, payload)


def work_row(promise: Promise) -> Row:
    """Returns the row with the work of a promise (an accepted request), from which the request can be run again."""
    work: Any = promise.work
    rest = b""
    match work:
        case ForwardBackwardCall():
            head = {}
            rest = work.encoded.SerializeToString()
        case SampleWork():
            head = {**vars(work), "params": asdict(work.params)}
            rest = head.pop("prompt").tokens.tobytes()
        case _:
            head = work.model_dump(exclude_defaults=True)
    return Row(work_key(promise.request_id), {"kind": "work", "is": type(work).__name__, "work": head}, rest)


def work_key(request_id: str) -> str:
    """Returns the key of the row with the work of a request."""
    return f"{request_id}/work"


def step_row(request_id: str, error: str) -> Row:
    """Returns the row which records that the trainer has done a request. `error`: why the request failed; "": it
    did not fail."""
    return Row(step_key(request_id), {"kind": "step", "error": error})


def step_key(request_id: str) -> str:
    """Returns the key of the row which records that the trainer has done a request."""
    return f"{request_id}/step"


@dataclass(eq=False)
class Contents:
    """The clients' sessions, models, samplers and promises of a store, by id, in the order in which they were made."""

    sessions: dict[str, ClientSession] = field(default_factory=dict)
    models: dict[str, ClientModel] = field(default_factory=dict)
    samplers: dict[str, ClientSampler] = field(default_factory=dict)
    promises: dict[str, Promise] = field(default_factory=dict)

    def read(self, rows: Iterable[Row], now: float) -> None:
        """Adds the items in `rows` to these contents. Rows hold no times: each session counts as last active at `now`,
        and an ended session as ended at `now`. Raises StorageFailed if a row is damaged."""
        works: dict[str, object] = {}
        errors: dict[str, str] = {}
        for row in rows:
            head = row.head
            session_id = row.owner.partition(":")[0]
            match head.pop("kind"):
                case "session":
                    caller = Caller(head.pop("owner"), head.pop("sees_all"))
                    end_reason = head.pop("ended")
                    ended_s = now if end_reason else None
                    self.sessions[session_id] = ClientSession(
                        session_id, now, caller, **head, end_reason=end_reason, ended_s=ended_s
                    )
                case "model":
                    if head["ended"]:
                        failure = Failure(**head["ended"])
                    else:
                        failure = None
                    history = ModelHistory(head["place"])
                    model = ClientModel(row.owner, session_id, head["next_seq"], failure=failure, history=history)
                    self.models[row.owner] = model
                    self.sessions[session_id].models.append(row.owner)
                case "sampler":
                    retired = tuple((first, last) for first, last in head.pop("retired"))
                    self.samplers[row.owner] = ClientSampler(row.owner, session_id, **head, retired=retired)
                    self.sessions[session_id].samplers.append(row.owner)
                case "promise":
                    outcome = _outcome_of(head, row.columns)
                    promise = Promise(row.owner, session_id, None, outcome, head["losses"])
                    self.promises[row.owner] = promise
                case "work":
                    works[row.owner] = _work_of(head["is"], head["work"], row.columns)
                case "step":
                    errors[row.owner.removesuffix("/step")] = head["error"]
        for promise in self.promises.values():
            if promise.outcome is None:
                promise.work = works[work_key(promise.request_id)]
                if promise.owner_id in self.models:
                    self.models[promise.owner_id].waiting[promise.number] = promise
        steps = [Promise(request_id, "", works[work_key(request_id)]) for request_id in errors]
        for step in sorted(steps, key=lambda step: step.number):
            model = self.models[step.owner_id]
            model.history = model.history.noted(Step(step.number, step.work, errors[step.request_id]), now)


def _work_of(kind: str, head: dict[str, Any], rest: bytes) -> Any:
    if kind == ForwardBackwardCall.__name__:
        return ForwardBackwardCall.of(rest)
    if kind == SampleWork.__name__:
        params = SamplingParams(**head.pop("params"))
        return SampleWork(prompt=ModelInput(np.frombuffer(rest, np.int32)), params=params, **head)
    return getattr(bodies, kind).model_validate(head)


def _outcome_head(outcome: Outcome | None) -> tuple[dict[str, object], bytes]:
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
