"""A tour of every public method of the client's classes, against the server.

The methods are found in the installed package. Each is called with what `tinker_calls` says, and works if the client
returns an answer that is right.
"""

import asyncio
import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import tinker
from tinker_calls import BY_CLIENT, CALLS, CLASSES, Call, Stage
from tinker_support import DEADLINE_S, Served


def methods() -> list[tuple[type, str]]:
    """Returns all public methods and properties of the client's classes."""
    pairs = []
    for owner in CLASSES:
        for name, member in inspect.getmembers(owner):
            if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                pairs.append((owner, name))
    return pairs


def sync_name(owner: type, name: str) -> str:
    """Returns the method whose twin `name` is, or `name` itself."""
    return f"{owner.__name__}.{name.removesuffix('_async')}"


def answer_of(stage: Stage, owner: type, name: str) -> tuple[Any, Call]:
    """Calls a method, and waits for all that it promises."""
    call, target = CALLS[sync_name(owner, name)], stage.of(owner)
    arguments, named = call.arguments(stage)
    member = getattr(target, name)
    answer = member(*arguments, **named) if callable(member) else member
    if inspect.iscoroutine(answer):
        answer = asyncio.run(_awaited(answer))
    if hasattr(answer, "result") and callable(answer.result):
        answer = answer.result(DEADLINE_S)
    return answer, call


async def _awaited(answer: Any) -> Any:
    return await asyncio.wait_for(answer, DEADLINE_S)


@dataclass(frozen=True)
class Outcome:
    method: str
    """The class and the name of the method that is called, without that of a twin."""
    name: str
    """Its own name."""
    refusal: str
    """What the server said; "": it works."""


SPOILS = (
    "ServiceClient.close",
    "ServiceClient.copy_weights",
    "ServiceClient.create_lora_training_client",
    "ServiceClient.create_training_client_from_state",
    "ServiceClient.create_training_client_from_state_with_optimizer",
    "TrainingClient.load_state",
    "TrainingClient.load_state_with_optimizer",
    "RestClient.assign_session_project",
    "RestClient.copy_weights",
    "RestClient.delete_checkpoint",
    "RestClient.delete_checkpoint_from_tinker_path",
)
"""After these a stage is not what it was: its model has ended, its state is gone."""
FIRST = ("TrainingClient.load_state", "TrainingClient.load_state_with_optimizer")
"""These are called on a new model."""


def tour(served: Served) -> list[Outcome]:
    """Calls all methods. Raises AssertionError for an answer that is not right."""
    stage, outcomes = Stage(served), []
    for owner, name in methods():
        method = sync_name(owner, name)
        if method in FIRST:
            stage = replaced(stage)
        outcomes.append(Outcome(method, name, refusal_of(stage, owner, name)))
        if method in SPOILS:
            stage = replaced(stage)
    replaced(stage)
    return outcomes


def refusal_of(stage: Stage, owner: type, name: str) -> str:
    """Calls one method, and returns how it was refused; "": it works."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated twins, experiments
            answer, call = answer_of(stage, owner, name)
            assert call.right(stage, answer), f"{owner.__name__}.{name} answered {answer!r}"
    except RuntimeError as error:
        message, refusal = BY_CLIENT.get(sync_name(owner, name), ("", ""))
        if not message or message not in str(error):
            raise
        return refusal
    except tinker.APIStatusError as error:
        body: Any = error.body
        return str(body["error"]["message"])
    return ""


def replaced(stage: Stage) -> Stage:
    """Ends the session of a stage, and returns another stage."""
    stage.service.close("success").result(DEADLINE_S)
    return Stage(stage.served)
