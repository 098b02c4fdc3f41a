"""Makes the protocol's state from records, and records from the state: the few that a journal begins with.

A state that is made again has the same promises with the same outcomes, and the same numbers that are never done again.
Its sessions count as heard of just now. Nothing runs in it: what had no outcome is done again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

from service.tinker.history import ModelHistory, Step
from service.tinker.promises import ClientClone, ClientModel, ClientSampler, RetiredNumbers
from service.tinker.records import (
    AnswerKept,
    CloneJoined,
    ModelAsked,
    ModelCommitted,
    ModelOver,
    ModelStands,
    OutcomeKnown,
    Record,
    RoomsLost,
    SampleAsked,
    SamplerBegun,
    SamplerStands,
    SessionBegun,
    SessionOver,
    SessionTold,
    StepKept,
    TrainingAsked,
)
from service.tinker.state import ProtocolState

Histories = defaultdict[str, ModelHistory]
"""What the trainer has done for each model."""


def replay(state: ProtocolState, records: Iterable[Record], now: float) -> Histories:
    """Makes the state of `records`, at the time `now`, of a new one. Returns what the trainer did for each model."""
    histories = Histories(ModelHistory)
    for record in records:
        _apply(state, histories, record, now)
    state.take_settled()
    state.line_up()
    return histories


def _apply(state: ProtocolState, histories: Histories, record: Record, now: float) -> None:
    match record:
        case SessionBegun():
            state.begin_session(record.session, now, record.owner, record.metadata)
        case SessionTold():
            state.tell(record.session, record.metadata)
        case SessionOver():
            state.finish(record.session, now)
        case ModelAsked():
            state.create_model(record.session, record.seq, record.work)
        case TrainingAsked():
            state.train(record.model, record.seq, record.work)
        case ModelOver():
            state.end_model(record.model, record.why)
        case SamplerBegun():
            state.create_sampler(record.session, record.seq, record.target)
        case CloneJoined():
            state.join(record.sampler)
        case SampleAsked():
            state.sample(record.sampler, record.seq, record.work)
        case OutcomeKnown():
            _settle(state, histories, record, now)
        case RoomsLost():
            state.lose(state.promise(record.request))
        case ModelCommitted():
            histories[record.model].committed(record.place)
        case _:
            _stand(state, histories, record, now)


def _settle(state: ProtocolState, histories: Histories, record: OutcomeKnown, now: float) -> None:
    promise = state.promise(record.request)
    if (
        promise.outcome is not None
    ):  # the end of its model, which was replayed, has settled it; it may have been running
        promise.outcome = record.outcome
        return
    work = promise.work
    state.settle(promise, record.outcome)
    if promise.owner_id in state.samplers:
        state.completed(promise)
    else:
        state.step_on(promise, record.outcome)
        histories[promise.owner_id].note(promise.number, work, record.outcome, now)  # type: ignore[arg-type]


def _stand(state: ProtocolState, histories: Histories, record: Record, now: float) -> None:
    """Does what one of those records says with which a journal begins."""
    match record:
        case ModelStands():
            model_id = f"{record.session}:train:{record.seq}"
            below, above = record.retired
            retired = RetiredNumbers(below, set(above))
            model = ClientModel(model_id, record.session, record.next_seq, ended=record.ended, retired=retired)
            state.models[model_id] = model
            state.sessions[record.session].models.append(model_id)
            histories[model_id].place = record.place
        case SamplerStands():
            sampler_id = f"{record.session}:sample:{record.seq}"
            clones = {
                int(number): ClientClone(RetiredNumbers(below, set(above)), dropped, deque(completed))
                for number, (below, above, dropped, completed) in record.clones.items()
            }
            state.samplers[sampler_id] = ClientSampler(sampler_id, record.session, record.target, record.joined, clones)
            state.sessions[record.session].samplers.append(sampler_id)
        case StepKept(work=work):
            assert work is not None, "a step is some work"
            history = histories[record.model]
            history.began_s = now
            held = history.batch if record.held else history.steps
            held.append(Step(record.seq, work, record.error))
        case AnswerKept():
            state.make_promise(record.request, record.session, None, record.outcome)


def records_of(state: ProtocolState, histories: Histories) -> Iterator[Record]:
    """Yields the records from which `replay` makes `state` again."""
    for session in state.sessions.values():
        yield SessionBegun(session.session_id, session.owner, session.metadata)
        for model_id in session.models:
            yield from _model_records(state, state.models[model_id], histories[model_id])
        for sampler_id in session.samplers:
            yield _sampler_record(state.samplers[sampler_id])
    for promise in state.promises():
        owner_id, number = promise.owner_id, promise.number
        if promise.outcome is not None:
            yield AnswerKept(promise.request_id, promise.session_id, promise.outcome)
        elif owner_id in state.samplers:
            yield SampleAsked(owner_id, number, promise.work)  # type: ignore[arg-type]  # the state does not look
        elif number:
            yield TrainingAsked(owner_id, number, promise.work)  # type: ignore[arg-type]
    yield from (RoomsLost(request) for request in state.losses.elements())
    yield from (SessionOver(each.session_id) for each in state.sessions.values() if each.ended_s is not None)


def _model_records(state: ProtocolState, model: ClientModel, history: ModelHistory) -> Iterator[Record]:
    seq, retired = int(model.model_id.rpartition(":")[2]), model.retired
    creation = state.unsettled(f"{model.model_id}/0")
    if creation:
        yield ModelAsked(model.session_id, seq, creation.work)  # type: ignore[arg-type]
        if model.ended:
            yield ModelOver(model.model_id, model.ended)
        return
    numbers = (retired.below, sorted(retired.above))
    yield ModelStands(model.session_id, seq, model.next_seq, model.ended, numbers, history.place)
    if not model.ended:
        for held, steps in ((False, history.steps), (True, history.batch)):
            yield from (StepKept(model.model_id, step.seq, step.work, step.error, held) for step in steps)


def _sampler_record(sampler: ClientSampler) -> SamplerStands:
    seq = int(sampler.sampler_id.rpartition(":")[2])
    clones = {
        str(number): (clone.retired.below, sorted(clone.retired.above), clone.dropped, list(clone.completed))
        for number, clone in sampler.clones.items()
    }
    return SamplerStands(sampler.session_id, seq, sampler.target, sampler.joined, clones)
