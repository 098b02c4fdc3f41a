"""The doors of the service, the configuration and `SamplingParams` refuse what is outside of one table of bounds."""

import math
from typing import Annotated, Any

import pytest
from bounds_support import inside, outside
from pydantic import BaseModel, TypeAdapter, ValidationError

from service.dialects.chat import ChatRequest
from service.dialects.completions import CompletionRequest
from service.dialects.messages import MessagesRequest
from service.dialects.responses import ResponseRequest
from service.tinker.bodies import SamplingBody
from trireme.config.inference import SamplingConfig
from trireme.config.orchestrator import EvalConfig
from trireme.core.sampling_bounds import BOUNDS
from trireme.core.types import SamplingParams

DOORS: list[type[BaseModel]] = [ChatRequest, CompletionRequest, MessagesRequest, ResponseRequest, SamplingBody]
CONFIGURED: list[type[BaseModel]] = [SamplingConfig, EvalConfig]
PLACES = [(model, name) for model in (*DOORS, *CONFIGURED) for name in BOUNDS if name in model.model_fields]


def takes(model: type[BaseModel], name: str, value: float) -> bool:
    """Tells whether a field of a model takes a value."""
    field = model.model_fields[name]
    kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(("model", "name"), PLACES)
def test_every_door_and_the_configuration_refuse_what_is_outside(model: type[BaseModel], name: str) -> None:
    assert [value for value in (*outside(name).values(), -1000, 10**12) if takes(model, name, value)] == []
    assert takes(model, name, BOUNDS[name].largest)
    if model in DOORS:  # a run samples at no temperature that its trainer cannot divide by
        assert takes(model, name, inside(name)["least"])


@pytest.mark.parametrize("name", BOUNDS)
def test_sampling_params_refuse_what_is_outside(name: str) -> None:
    def params(value: float) -> SamplingParams:
        values: dict[str, Any] = {name: value}
        return SamplingParams(**values)

    for value in inside(name).values():
        assert getattr(params(value), name) == value
    for value in (*outside(name).values(), math.nan):
        with pytest.raises(ValueError, match=f"sampling with {name} = "):
            params(value)


def test_an_answer_of_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens = 0"):
        SamplingParams(max_tokens=0)
