"""What one body can cost is bounded in every field of it."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from service.app import Service
from service.dialects import chat, completions, messages, responses
from service.dialects.wire import Body
from service.routes import ROUTES, add_routes
from service.tinker import bodies
from service.tinker.app import TinkerRoutes
from service.tinker.downloads import DownloadRoutes
from service.tinker.lists import SavedRoutes
from service.tinker.session_lists import SessionListRoutes

BOUNDS = {"maximum", "exclusiveMaximum", "const", "enum"}


class Anything:
    """Stands for what routes are made with; they are not called."""

    def __getattr__(self, name: str) -> Any:
        return self


def unbounded(schema: Any, place: str) -> Iterator[str]:
    """The places of whole numbers that may be as large as a client likes."""
    if isinstance(schema, dict):
        if schema.get("type") == "integer" and not schema.keys() & BOUNDS:
            yield place
        for name, part in schema.items():
            yield from unbounded(part, f"{place}/{name}")
    elif isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from unbounded(part, f"{place}/{number}")


def test_every_number_of_a_request_has_bounds() -> None:
    app, anything = FastAPI(), Anything()
    routes: Any
    for routes in (TinkerRoutes, SavedRoutes, SessionListRoutes):
        routes(anything).add(app)
    DownloadRoutes(anything, lambda: 0.0).add(app)  # type: ignore[arg-type]
    add_routes(app, ROUTES, Service(anything, anything))  # type: ignore[arg-type]
    schema = app.openapi()
    assert len(schema["components"]["schemas"]) > 40
    del schema["components"]["schemas"]["ValidationError"], schema["components"]["schemas"]["HTTPValidationError"]
    assert list(unbounded(schema, "")) == []
    assert list(unbounded({"a": [{"type": "integer", "minimum": 0}]}, "")) == ["/a/0"]


def slow_lists(schema: Any) -> Iterator[Any]:
    """The lists of a model of which every wrong item makes an error."""
    if isinstance(schema, dict):
        items = schema.get("items_schema", {})
        if schema.get("type") == "list" and not schema.get("fail_fast") and items.get("type", "any") != "any":
            yield items
        for part in schema.values():
            yield from slow_lists(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from slow_lists(part)


MODELS = [
    model
    for module in (bodies, chat, completions, messages, responses)
    for model in vars(module).values()
    if isinstance(model, type) and issubclass(model, BaseModel) and model is not BaseModel
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_million_wrong_items_make_one_error(model: type[BaseModel]) -> None:
    assert issubclass(model, Body), "it refuses a million of fields too"
    core: Any = model.__pydantic_core_schema__
    assert list(slow_lists(core)) == []
