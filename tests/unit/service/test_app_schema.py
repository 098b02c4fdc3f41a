"""Requests that follow from the OpenAPI schema of the app (schemathesis): valid ones and invalid ones, to every route,
also of sessions that are there. No answer is an error of the service."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service_support import ADMIN, CLIENT, served

from service.routes import ROUTES

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
EXAMPLES, CORRECTIONS = 15, 12
START_S = 60.0
TRIED = [(route.method, route.path) for route in ROUTES if route.path != "/openapi.json"]
"""All but FastAPI's own route."""


@dataclass
class Running:
    url: str
    schema: Any


@contextmanager
def in_thread() -> Iterator[Running]:
    ready, servers, loop = threading.Event(), list[Running](), asyncio.new_event_loop()
    ending = asyncio.Event()

    async def serve() -> None:
        async with served("4", limit=10**6) as service:
            servers.append(Running(service.url, schemathesis.openapi.from_dict(service.app.openapi())))
            ready.set()
            await ending.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(START_S)
        yield servers[0]
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(START_S)
        loop.close()


def sessions(url: str) -> list[str]:
    """Returns a session with a turn, one that has ended, and one that is not there."""
    names = []
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=30) as client:
        for ends in (False, True):
            names.append(str(client.post("/sessions").json()["session"]))
            path = f"/sessions/{names[-1]}"
            body = {"model": "policy", "messages": QUESTION}
            assert client.post(f"{path}/v1/chat/completions", json=body).status_code == 200
            assert not ends or client.post(f"{path}/end").status_code == 200
    return [*names, "none"]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with in_thread() as service:
        yield service


def without(body: Any, path: Sequence[str]) -> bool:
    """Removes the part of a body that an error names, as a client would that does what the error says: else hardly any
    request came past the fields that are not supported. False: there is no such part."""
    for i, name in enumerate(path):
        key = int(name) if isinstance(body, list) and name.isdigit() else name
        if not (isinstance(body, dict) and key in body) and not (isinstance(body, list) and key in range(len(body))):
            return False
        inner = body[key]
        if i == len(path) - 1 or not without(inner, path[i + 1 :]):
            del body[key]
        return True
    return False


def operations(running: Running) -> dict[tuple[str, str], Any]:
    results = (operation.ok() for operation in running.schema.get_all_operations())
    return {(operation.method.upper(), operation.path): operation for operation in results}


def test_the_schema_has_every_route(running: Running) -> None:
    assert set(TRIED) == operations(running).keys()


@pytest.mark.parametrize(("method", "path"), TRIED)
def test_no_request_of_the_schema_makes_an_error_of_the_service(running: Running, method: str, path: str) -> None:
    operation = operations(running)[method, path]
    statuses: set[int] = set()
    names = sessions(running.url) if "{session}" in path else ["none"]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(
        case=operation.as_strategy(),
        session=st.sampled_from(names),
        key=st.sampled_from([ADMIN, ADMIN, CLIENT]),
        known_model=st.booleans(),
    )
    def check(case: Any, session: str, key: str, known_model: bool) -> None:
        if "session" in (case.path_parameters or {}):
            case.path_parameters["session"] = session
        if known_model and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "policy"
        for _ in range(CORRECTIONS):
            answer = case.call(base_url=running.url, headers={"Authorization": f"Bearer {key}"}, timeout=30)
            statuses.add(answer.status_code)
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            if answer.status_code < 400:
                break
            error = answer.json()["error"]
            assert error["message"]
            if not without(case.body, (error.get("param") or "").split(".")):
                break

    check()
    assert statuses
