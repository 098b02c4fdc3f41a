"""What tests of the verbs of sessions share."""

from collections.abc import Sequence

from session_support import message_of

from orchestrator.advantages import WeightedTrajectory, lay_out
from orchestrator.trajectory import Trajectory, TrajectoryBuilder
from service.answering import AnsweredTurn
from service.requests import TurnRequest
from service.sessions.registry import SessionRegistry
from service.sessions.session import SessionExport
from trireme.core.types import SampledSequence
from trireme.renderers import Message

FIRST = message_of("user", "q0")


async def ask(service: SessionRegistry, request: TurnRequest, name: str = "s") -> AnsweredTurn:
    served = await service.turn(name, request)
    service.delivered(name, served.nodes)
    return served


def trajectory_of(export: SessionExport) -> Trajectory:
    builder = TrajectoryBuilder()
    for turn in export.turns:
        builder.ask(turn.prompt, follows=turn.follows)
        columns = turn.tokens, turn.logprobs, turn.spans, turn.stop_reason
        builder.answer(*columns, turn.reward, {}, {}, turn.delivered)
    return builder.finish(export.turns[-1].stop_reason)


def trained(export: SessionExport) -> list[float]:
    """Returns the log-probabilities of the tokens that count in the loss, in order: each of them names a token."""
    batch = lay_out([WeightedTrajectory(trajectory_of(export), 1.0, export.temperature)])
    return sorted(batch.columns["logprobs"][batch.columns["mask"] > 0].tolist())


def sampled(answers: Sequence[SampledSequence]) -> list[float]:
    return sorted(value for answer in answers for value in answer.logprobs.tolist())


async def export_of(service: SessionRegistry, name: str = "s") -> SessionExport:
    await service.end(name, "done")
    return service.export(name)


def answer_of(served: AnsweredTurn, number: int = 0) -> Message:
    return served.answers[number].message
