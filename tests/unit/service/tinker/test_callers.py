"""What belongs to one key's owner is closed to others, route by route; all routes of the app have a decision here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from tinker_posts import passing
from tinker_support import BASE_MODEL, DEADLINE_S, Served, tinker_server

from service.guard import Limits
from service.keys import ServiceKey, ServiceKeys
from service.tinker.app import make_tinker_app

ALICE, ALICES_OTHER, BOB, ADMIN = (
    ServiceKey("client", "tml-alice-0123456789", whose="alice"),
    ServiceKey("client", "tml-alice-9876543210", whose="alice"),
    ServiceKey("client", "tml-bob-0123456789"),
    ServiceKey("admin", "tml-admin-0123456789"),
)
KEYS = (ALICE, ALICES_OTHER, BOB, ADMIN)


@dataclass
class Things:
    served: Served
    session: str = ""
    model: str = ""
    sampler: str = ""

    def ask(self, key: ServiceKey, method: str, path: str, body: Any = None) -> httpx.Response:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        url = f"{self.served.url}{path if path.startswith('/') else f'/api/v1/{path}'}"
        return httpx.request(method, url, headers={"x-api-key": key.value}, timeout=DEADLINE_S, **content)

    def finish(self, key: ServiceKey, path: str, body: Any) -> Any:
        answer = self.ask(key, "POST", path, body)
        assert answer.status_code == 200, answer.text
        answer = self.ask(key, "POST", "retrieve_future", answer.json())
        return answer.json() if answer.headers["content-type"] == "application/json" else answer.content

    def begun(self, key: ServiceKey) -> str:
        return str(self.ask(key, "POST", "create_session", {"sdk_version": "0.38.0"}).json()["session_id"])

    def resumed(self, key: ServiceKey, path: str) -> Any:
        """Asks for a model that begins with a state, in a session of its own, which then ends."""
        session = self.begun(key)
        created = self.finish(key, "load_weights", {**creation(session), "path": path, "optimizer": True})
        self.ask(key, "POST", f"sessions/{session}/finish")
        return created

    @property
    def state(self) -> str:
        return f"tinker://{self.model}/weights/w"

    @property
    def saved(self) -> str:
        """The place of what Alice has saved for samplers, as the routes of runs have it."""
        return f"training_runs/{self.model}/checkpoints/sampler_weights/w"


def creation(session: str) -> dict[str, Any]:
    return {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL}


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Things]:
    with tinker_server(tmp_path_factory.mktemp("served"), keys=KEYS, places=4) as served:
        things = Things(served)
        things.session = things.begun(ALICE)
        things.model = things.finish(ALICE, "create_model", creation(things.session))["model_id"]
        for seq, path in enumerate(("save_weights", "save_weights_for_sampler", "save_weights_external"), 1):
            assert "path" in things.finish(ALICE, path, {"model_id": things.model, "seq_id": seq, "path": "w"})
        request = {"session_id": things.session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        things.sampler = things.ask(ALICE, "POST", "create_sampling_session", request).json()["sampling_session_id"]
        yield things


Request = Callable[[Things], tuple[str, str, Any, int]]


def post(path: str, body: Callable[[Things], Any], status: int = 404) -> Request:
    return lambda things: ("POST", path, body(things), status)


def at(method: str, path: Callable[[Things], str], body: Any = None, status: int = 404) -> Request:
    return lambda things: (method, path(things), body, status)


def of_model(things: Things, **options: Any) -> dict[str, Any]:
    return {"model_id": things.model, "seq_id": 4, **options}


SAMPLE = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}, "seq_id": 0}
CLOSED: dict[str, Request] = {
    "POST session_heartbeat": post("session_heartbeat", lambda t: {"session_id": t.session}, 410),
    "POST create_model": post("create_model", lambda t: {**creation(t.session), "model_seq_id": 1}),
    "POST load_weights": post("load_weights", lambda t: of_model(t, path=t.state, optimizer=True)),
    "POST get_info": post("get_info", of_model),
    "POST forward_backward": post("forward_backward", lambda t: passing(t.model, 4)),
    "POST optim_step": post("optim_step", lambda t: of_model(t, adam_params={})),
    "POST save_weights": post("save_weights", lambda t: of_model(t, path="x")),
    "POST save_weights_for_sampler": post("save_weights_for_sampler", lambda t: of_model(t, path="x")),
    "POST save_weights_external": post("save_weights_external", lambda t: of_model(t, path="x")),
    "POST create_sampling_session": post(
        "create_sampling_session",
        lambda t: {"session_id": t.session, "sampling_session_seq_id": 1, "base_model": BASE_MODEL},
    ),
    "POST join_sampling_session": post("join_sampling_session", lambda t: {"sampling_session_id": t.sampler}),
    "POST asample": post("asample", lambda t: {**SAMPLE, "sampling_session_id": t.sampler}),
    "POST retrieve_future": post("retrieve_future", lambda t: {"request_id": f"{t.model}/1"}),
    "POST retrieve_futures": post(
        "retrieve_futures", lambda t: {"target": {"sampling_session_id": t.sampler}, "timeout": 0.0}
    ),
    "GET samplers/{sampler_id}": at("GET", lambda t: f"samplers/{t.sampler}"),
    "GET training_runs/{model_id}": at("GET", lambda t: f"training_runs/{t.model}"),
    "GET training_runs/{model_id}/checkpoints": at("GET", lambda t: f"training_runs/{t.model}/checkpoints"),
    "DELETE training_runs/{model_id}/checkpoints/{kind}/{name}": at("DELETE", lambda t: t.saved, status=400),
    "PUT training_runs/{model_id}/checkpoints/{kind}/{name}/ttl": at(
        "PUT", lambda t: f"{t.saved}/ttl", {"ttl_seconds": 3600}, 400
    ),
    "POST training_runs/{model_id}/checkpoints/{kind}/{name}/publish": at(
        "POST", lambda t: f"{t.saved}/publish", status=400
    ),
    "DELETE training_runs/{model_id}/checkpoints/{kind}/{name}/publish": at(
        "DELETE", lambda t: f"{t.saved}/publish", status=400
    ),
    "POST copy_weights": post("copy_weights", lambda t: {"source_path": t.state, "destination_project_id": "p"}, 400),
    "POST weights_info": post("weights_info", lambda t: {"tinker_path": t.state}, 400),
    "GET training_runs/{model_id}/checkpoints/external_weights/{name}/external_weights_urls": at(
        "GET", lambda t: f"training_runs/{t.model}/checkpoints/external_weights/w/external_weights_urls", status=400
    ),
    "GET sessions/{session_id}": at("GET", lambda t: f"sessions/{t.session}"),
    "PUT sessions/{session_id}/project": at("PUT", lambda t: f"sessions/{t.session}/project", {"project_id": "p"}),
    "POST sessions/{session_id}/finish": at("POST", lambda t: f"sessions/{t.session}/finish"),
}
"""Of each route that names something a request that names what is Alice's, and its answer to others."""
ENDING = {route for route in CLOSED if route.startswith("DELETE")} | {
    "POST create_model",
    "POST sessions/{session_id}/finish",
    "POST training_runs/{model_id}/checkpoints/{kind}/{name}/publish",
}
"""Those behind which the others would be answered otherwise."""
LISTS = {
    "GET training_runs": "training_runs",
    "GET checkpoints": "checkpoints",
    "GET billing/usage/checkpoints/current": "data",
    "GET sessions": "sessions",
    "POST sessions/search": "sessions",
}
"""The routes of lists, which tell what is one's own, and where their answers have it."""
OPEN = {
    "POST client/config",
    "POST client/dynamic_config",
    "POST create_session",
    "POST telemetry",
    "GET healthz",
    "GET get_server_capabilities",
    "GET /signed/{until}/{signature}/{model_id}/{name}/{file:path}",
    *(f"{m} {p}" for m in ("GET", "POST") for p in ("audit", "billing/usage/events", "create_custom_loss")),
    *(f"{m} sessions/{{session_id}}/trace_export" for m in ("GET", "POST")),
}
"""The routes that tell nothing of anybody: those of all clients, those that are refused to all, and an address that is
signed."""


def test_each_route_has_a_decision(things: Things) -> None:
    app = make_tinker_app(things.served.server, ServiceKeys(KEYS), Limits(2**20, 5.0, None))
    routes = {
        f"{method} {route.path.removeprefix('/api/v1/')}"
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert len(app.routes) == len([one for one in app.routes if isinstance(one, APIRoute)])
    assert routes == {*CLOSED, *LISTS, *OPEN}


@pytest.mark.parametrize("route", CLOSED)
def test_what_is_another_owners_is_answered_as_what_is_not_there(things: Things, route: str) -> None:
    method, path, body, status = CLOSED[route](things)
    refused = things.ask(BOB, method, path, body)
    assert refused.status_code == status, refused.text

    def unknown(value: Any) -> Any:
        """The same request of an id that was never given out."""
        if isinstance(value, str):
            return value.replace(things.session, "0" * 32)
        if isinstance(value, bytes):
            return value.replace(things.session.encode(), b"0" * 32)
        return {name: unknown(item) for name, item in value.items()} if isinstance(value, dict) else value

    unheard_of = things.ask(BOB, method, unknown(path), unknown(body))
    assert unheard_of.status_code == status
    assert unheard_of.text == unknown(refused.text)


@pytest.mark.parametrize("key", [ALICES_OTHER, ADMIN], ids=["another key of the owner", "an admin key"])
@pytest.mark.parametrize("route", [route for route in CLOSED if route not in ENDING])
def test_it_is_open_to_the_owner_and_to_administrators(things: Things, key: Any, route: str) -> None:
    method, path, body, _ = CLOSED[route](things)
    answer = things.ask(key, method, path, body)
    assert answer.status_code in (200, 204), answer.text


@pytest.mark.parametrize("route", LISTS)
def test_lists_tell_what_is_ones_own(things: Things, route: str) -> None:
    method, _, path = route.partition(" ")

    def listed(key: ServiceKey, **query: Any) -> str:
        return things.ask(key, method, path, query if method == "POST" else None).json()[LISTS[route]]

    everyone = {"owner": {"type": "accessible"}} if method == "POST" else {}
    whole = listed(ALICE)
    assert whole
    assert listed(ALICES_OTHER) == whole
    if "usage" in path:
        assert listed(BOB, **everyone) == []
    else:
        assert things.session not in str(listed(BOB, **everyone))
    assert things.session in str(listed(ADMIN, **everyone)) or "usage" in path
    of_alice = {"owner": {"type": "user", "owner_urns": ["urn:trireme:key:alice"]}}
    assert method == "GET" or listed(BOB, **of_alice) == []


def test_a_refused_request_of_another_owner_takes_no_number(things: Things) -> None:
    """Else the model's next request would get the outcome of what someone else had asked for."""
    for body in (of_model(things, seq_id=999, adam_params={"beta1": 2}), of_model(things, seq_id=999)):
        assert things.ask(BOB, "POST", "optim_step", body).status_code in (400, 404)
    assert not things.served.server.state.accepted(things.model, 999)


def test_states_are_read_by_others_only_while_they_are_published(things: Things) -> None:
    place = things.saved.replace("sampler_weights", "weights")
    weights = f"tinker://{things.model}/sampler_weights/w"
    refused = things.resumed(BOB, things.state)
    assert "nothing is saved" in refused["error"]
    sampling = {"session_id": things.begun(BOB), "sampling_session_seq_id": 0, "model_path": weights}
    assert things.ask(BOB, "POST", "create_sampling_session", sampling).status_code == 400
    for path in (place, things.saved):
        assert things.ask(ALICE, "POST", f"{path}/publish").status_code == 204
    assert things.resumed(BOB, things.state)["type"] == "load_weights"
    assert things.ask(BOB, "POST", "create_sampling_session", sampling).status_code == 200
    copy = {"source_path": things.state, "destination_project_id": "p"}
    copied = things.ask(BOB, "POST", "copy_weights", copy).json()["tinker_path"]
    assert things.ask(BOB, "DELETE", place).status_code == 400, "it is read, and not changed"
    for path in (place, things.saved):
        assert things.ask(ALICE, "DELETE", f"{path}/publish").status_code == 204
    assert things.resumed(BOB, things.state) == {**refused}
    assert things.ask(BOB, "POST", "weights_info", {"tinker_path": copied}).status_code == 200, "the copy is Bob's"
    assert things.ask(ALICE, "POST", "weights_info", {"tinker_path": copied}).status_code == 400


def test_owners_are_known_after_a_restart(tmp_path: Path) -> None:
    """Those of sessions by the store, those of what is saved by its directory."""
    with tinker_server(tmp_path, keys=KEYS) as served:
        things = Things(served)
        session = things.begun(ALICE)
        model = things.finish(ALICE, "create_model", creation(session))["model_id"]
        things.finish(ALICE, "save_weights", {"model_id": model, "seq_id": 1, "path": "w"})
    with tinker_server(tmp_path, keys=KEYS) as served:
        things = Things(served, session, model)
        for key, status in ((ALICE, 200), (BOB, 404), (ADMIN, 200)):
            assert things.ask(key, "GET", f"sessions/{session}").status_code == status
            assert things.ask(key, "POST", "get_info", of_model(things)).status_code == status
            assert things.ask(key, "GET", f"training_runs/{model}").status_code == status
            assert things.ask(key, "POST", "retrieve_future", {"request_id": f"{model}/1"}).status_code == status
