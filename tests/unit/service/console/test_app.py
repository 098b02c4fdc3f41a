"""The routes of the console through a test client: what they tell, who may call them, and what they never serve."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from console_support import ATTACK, STEPS, encoded, make_live_run, reader_of
from fastapi.routing import APIRoute
from service_support import ADMIN, CLIENT, served
from starlette.testclient import TestClient
from supervision_support import driven

from service.console.app import HEADERS
from service.console.run_reader import RunReader
from service.console.standalone import make_console_app
from service.keys import ServiceKey, new_key
from service.routes import CONSOLE_ROUTES, ROUTES, caller_of


def client_of(
    root: Path, *keys: ServiceKey, peer: tuple[str, int] = ("127.0.0.1", 50000), reader: RunReader | None = None
) -> TestClient:
    app = make_console_app(reader or reader_of(root), list(keys))
    return TestClient(app, base_url="http://127.0.0.1", client=peer, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_live_run(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture
def root(finished_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def client(root: Path) -> Iterator[TestClient]:
    with client_of(root) as client:
        yield client


def answer_of(client: TestClient, route: str, /, **query: Any) -> Any:
    reply = client.get(f"/console/api/{route}", params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(client: TestClient, route: str, status: int, /, **query: Any) -> str:
    reply = client.get(f"/console/api/{route}", params=query)
    assert reply.status_code == status, reply.text
    return str(reply.json()["error"]["message"])


def test_how_the_run_and_its_parts_are(client: TestClient, root: Path) -> None:
    run = answer_of(client, "run")
    assert (run["run"], run["step"], run["target"]) == ("run", STEPS, "8")
    assert run["headline"].endswith("not started")
    assert "the driver was killed" in run["standing"]
    assert [(part["name"], part["health"]) for part in run["parts"]] == [
        ("inference_0", "healthy"),
        ("inference_1", "dead"),
        ("trainer_0", "healthy"),
    ]
    assert ["perf/tokens_per_s", 100.0] in run["rooms"]["inference"]
    assert [incident["part"] for incident in run["incidents"]] == ["inference_1"]
    assert dict(run["facts"])["directory"] == str(root)


def test_a_live_run_goes_on_and_its_new_rows_are_seen(client: TestClient, root: Path) -> None:
    with driven(root):
        assert "running, process" in answer_of(client, "run")["headline"]
        with (root / "metrics.jsonl").open("a") as rows:
            rows.write(json.dumps({"step": STEPS, "reward/total": 0.9}) + "\n" + '{"step": 5, "rew')
        assert answer_of(client, "run")["step"] == STEPS + 1


def test_curves_and_ages(client: TestClient) -> None:
    curves = answer_of(client, "curves")
    panels = {panel["title"]: panel["curves"] for panel in curves["panels"]}
    (reward,) = panels["Reward"]
    assert (reward["name"], reward["points"]) == ("mean reward", [[s + 1, s / 10] for s in range(STEPS)])
    assert [point[0] for point in reward["smooth"]] == [s + 1 for s in range(STEPS)]
    assert {curve["name"] for curve in panels["Age of what was trained on"]} == {"mean of groups", "mean of tokens"}
    assert curves["ages"] == {"counts": [[0, 5], [1, 3]], "bound": 2}
    assert answer_of(client, "curve", name="reward/total")["curves"][0]["points"] == panels["Reward"][0]["points"]
    assert answer_of(client, "curve", name="no such metric")["curves"] == []


def test_rollouts_token_by_token(client: TestClient) -> None:
    assert answer_of(client, "rollouts") == {"steps": [3, 2, 1, 0], "older": 0}
    assert [group["why"] for group in answer_of(client, "groups", step=3)["groups"]] == ["best", "worst"]
    group = answer_of(client, "group", step=3, group=1)
    assert [rollout["reward"] for rollout in group["rollouts"]] == [1.0, 0.0]
    page = answer_of(client, "rollout", step=3, group=1, rollout=0)
    observed, sampled = page["pieces"]
    assert observed["text"] == "Sort: 21\n"
    assert (sampled["texts"], sampled["versions"]) == (["1", "2"], [[3, 1], [4, 1]])
    assert sampled["logprobs"] == [-0.01, -0.03]
    assert (page["step"], page["floor"], page["next"]) == (3, 3, None)


def test_sessions_token_by_token(client: TestClient) -> None:
    listed = answer_of(client, "sessions")
    assert {session["session"]: session["reason"] for session in listed["sessions"]} == {
        "open-one": None,
        "ended-one": "by its harness",
    }
    tree = answer_of(client, "session", name="open-one")
    kinds = [(node["node"], node["parent"], node["kind"]) for node in tree["nodes"]]
    assert kinds == [(0, -1, "prompt"), (1, 0, "answer"), (2, 0, "answer"), (3, 1, "prompt"), (4, 3, "answer")]
    assert [node["node"] for node in tree["nodes"] if node.get("delivered")] == [1]
    assert tree["nodes"][4]["reward"] == 0.5
    page = answer_of(client, "node", name="open-one", node=4)
    assert [piece["kind"] for piece in page["pieces"]] == ["observed", "sampled", "observed", "sampled"]
    assert page["pieces"][1]["versions"] == [[3, 1], [4, 1]]
    assert "".join(page["pieces"][3]["texts"]) == "same"


def test_without_a_tokenizer_tokens_are_numbers_and_texts_those_of_the_records(root: Path) -> None:
    with client_of(root, reader=RunReader(root, None)) as client:
        _, sampled = answer_of(client, "rollout", step=3, group=0, rollout=1)["pieces"]
        assert (sampled["text"], sampled["tokens"]) == (ATTACK, encoded(ATTACK))
        assert "texts" not in sampled


def test_logs_are_read_from_their_end(client: TestClient) -> None:
    listed = {(log["attempt"], log["name"]) for log in answer_of(client, "logs")}
    assert listed == {(1, "trainer_0"), (1, "inference_0")}
    last = answer_of(client, "log", attempt=1, name="inference_0")
    assert last["text"].endswith("line 19999\n")
    assert len(last["text"]) <= 64 << 10
    before = answer_of(client, "log", attempt=1, name="inference_0", end=last["start"])
    lines = (before["text"] + last["text"]).splitlines()
    assert lines == [f"line {i}" for i in range(20_000 - len(lines), 20_000)]


@pytest.mark.parametrize(
    "missing", ["STATUS", "metrics.jsonl", "trained.jsonl", "trace", "logs", "rollouts", "sessions"]
)
def test_whatever_is_missing_the_rest_is_told(root: Path, missing: str) -> None:
    shutil.rmtree(root / missing) if (root / missing).is_dir() else (root / missing).unlink()
    with client_of(root) as client:
        for name in ("run", "curves", "timeline", "rollouts", "sessions", "logs"):
            answer_of(client, name)


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with client_of(tmp_path) as client:
        run = answer_of(client, "run")
        assert (run["step"], run["parts"], run["incidents"]) == (0, [], [])
        assert "has not begun" in run["standing"]
        assert answer_of(client, "curves")["panels"] == []
        assert answer_of(client, "timeline") is None
        assert answer_of(client, "rollouts")["steps"] == []
        assert answer_of(client, "sessions")["sessions"] == []
        assert answer_of(client, "logs") == []


def test_a_run_in_object_storage_says_that_this_is_its_local_directory(root: Path) -> None:
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | {"run": {"output_dir": "s3://bucket/runs"}}))
    with client_of(root) as client:
        place = dict(answer_of(client, "run")["facts"])["kept in"]
    assert place == "s3://bucket/runs; this page shows what its directory on this machine has"


def test_the_table_has_every_route(root: Path) -> None:
    routes = [route for route in make_console_app(reader_of(root), []).routes if isinstance(route, APIRoute)]
    pairs = {(method, route.path.replace(":path", "")) for route in routes for method in route.methods - {"HEAD"}}
    assert pairs == {(route.method, route.path) for route in CONSOLE_ROUTES}
    assert {route.method for route in CONSOLE_ROUTES} == {"GET"}, "it only reads"
    for route in CONSOLE_ROUTES:
        assert caller_of(route.method, route.path) == route.caller


def test_with_a_key_only_that_opens_it(root: Path) -> None:
    admin, client_key = new_key("admin"), new_key("client")
    with client_of(root, admin, client_key, peer=("10.0.0.7", 1)) as client:
        assert client.get("/console/").status_code == 200, "the page asks for the key"
        for value in (None, "", "tr-admin-wrong", admin.value[:-1], admin.value + "x", client_key.value):
            headers = {"authorization": f"Bearer {value}"} if value is not None else {}
            reply = client.get("/console/api/run", headers=headers)
            assert reply.status_code in (401, 403), value
            assert str(root) not in reply.text
        assert client.get("/console/api/run", headers={"authorization": f"Bearer {admin.value}"}).status_code == 200
        assert client.get(f"/console/api/run?key={admin.value}").status_code == 401, "addresses end up in logs"


LOOPBACK, ELSEWHERE = "127.0.0.1", "10.0.0.7"
STRANGE_NAMES = ("evil.example", "evil.example:8090", "localhost.evil.example", ELSEWHERE, "", "[::2]:80")
"""The name of a page elsewhere can be made to lead to this machine."""
OWN_NAMES = ("localhost", "localhost:9", "127.0.0.1:8090", "[::1]:8090")


@pytest.mark.parametrize(
    ("keys", "peer", "headers", "status"),
    [
        ([new_key("admin")], LOOPBACK, {}, 401),
        ([], ELSEWHERE, {}, 401),
        ([], LOOPBACK, {"x-forwarded-for": ELSEWHERE}, 401),
        *(([], LOOPBACK, {"host": name}, 403) for name in STRANGE_NAMES),
        *(([], LOOPBACK, {"host": name}, 200) for name in OWN_NAMES),
    ],
)
def test_without_its_key_it_is_open_to_this_machine_alone_and_if_it_has_none(
    root: Path, keys: list[ServiceKey], peer: str, headers: dict[str, str], status: int
) -> None:
    with client_of(root, *keys, peer=(peer, 1)) as client:
        reply = client.get("/console/api/run", headers=headers)
    assert reply.status_code == status
    assert status != 403 or "to do: " in reply.json()["error"]["message"]


def test_a_look_changes_no_file(client: TestClient, root: Path) -> None:
    def stand() -> dict[str, tuple[int, int]]:
        # sqlite's readers note in the memory that they share with the writer how far they read: no data is in there.
        files = [f for f in sorted(root.rglob("*")) if not f.name.endswith("-shm")]
        return {str(f): (f.stat().st_mtime_ns, f.stat().st_size) for f in files}

    before = stand()
    test_sessions_token_by_token(client)
    test_rollouts_token_by_token(client)
    for name in ("run", "curves", "timeline", "logs"):
        answer_of(client, name)
    assert stand() == before


@pytest.mark.parametrize(
    "path",
    ["../config.json", "..%2fconfig.json", "%2e%2e/config.json", "....//config.json", "/etc/passwd", "%00", "app.py"],
)
def test_no_path_leads_out_of_the_page(client: TestClient, path: str) -> None:
    for prefix in ("/console/files/", "/console/", "/console/api/", "/console/files/charts.js/"):
        reply = client.get(prefix + path)
        assert reply.status_code in (401, 403, 404), (prefix, reply.text[:100])


@pytest.mark.parametrize(
    "name", ["../../config", "../../../etc/passwd", "/etc/passwd", "trainer_0.log", "", "trainer_0\0", "*", "a" * 299]
)
def test_a_log_is_one_of_the_list(client: TestClient, root: Path, name: str) -> None:
    (root / "config.log").write_text("secret")
    assert "expected: one that logs/" in refusal(client, "log", 404, attempt=1, name=name)


def test_a_link_out_of_the_run_is_no_log(client: TestClient, root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.log"
    secret.write_text("secret")
    (root / "logs" / "attempt_1" / "link.log").symlink_to(secret)
    os.mkfifo(root / "logs" / "attempt_1" / "pipe.log")
    assert {log["name"] for log in answer_of(client, "logs")} == {"trainer_0", "inference_0"}
    refusal(client, "log", 404, attempt=1, name="link")
    refusal(client, "log", 404, attempt=1, name="pipe")


@pytest.mark.parametrize(
    ("name", "status", "query"),
    [
        ("groups", 404, {"step": 77}),
        ("group", 404, {"step": 3, "group": 2}),
        ("rollout", 404, {"step": 3, "group": 0, "rollout": 2}),
        ("session", 404, {"name": "../open-one"}),
        ("node", 404, {"name": "open-one", "node": 5}),
        ("groups", 400, {"step": "../3"}),
        ("groups", 400, {"step": -1}),
        ("groups", 400, {}),
        ("log", 400, {"attempt": 1, "name": "trainer_0", "end": -1}),
        ("log", 400, {"attempt": 1, "name": "a" * 301}),
        ("timeline", 400, {"steps": 1000}),
        ("rollout", 400, {"step": 3, "group": 0, "rollout": 0, "start": 1 << 60}),
    ],
)
def test_what_is_not_there_is_refused_in_words(client: TestClient, name: str, status: int, query: Any) -> None:
    message = refusal(client, name, status, **query)
    if status == 400:
        assert message.startswith("`query.")
    else:
        assert "given: " in message
        assert "expected: " in message


def test_every_answer_allows_own_files_alone(client: TestClient) -> None:
    for path in ("/console/", "/console/api/run", "/console/files/console.js", "/console/api/log", "/console/files/no"):
        reply = client.get(path)
        for name, value in HEADERS.items():
            assert reply.headers[name] == value, path
    assert "unsafe" not in HEADERS["content-security-policy"]
    assert "*" not in HEADERS["content-security-policy"]


async def test_the_port_of_a_service_has_the_console_for_admin_keys(tmp_path: Path) -> None:
    """A client's key does not open it, and no more do the key of a session and none, although this is loopback."""
    root = make_live_run(tmp_path / "run")
    async with served("4", run=reader_of(root)) as service:
        routes = [route for route in service.app.routes if hasattr(route, "methods")]
        pairs = {(method, r.path.replace(":path", "")) for r in routes for method in r.methods - {"HEAD"}}
        assert pairs == {(route.method, route.path) for route in (*ROUTES, *CONSOLE_ROUTES)}
        opened = await service.client.post("/sessions", json={}, headers={"Authorization": f"Bearer {ADMIN}"})
        assert opened.status_code == 200
        assert "script-src 'self'" in (await service.client.get("/console/")).headers["content-security-policy"]
        for route in CONSOLE_ROUTES:
            for key in ("none", CLIENT, opened.json()["key"]) if "/api/" in route.path else ():
                reply = await service.client.get(route.path, headers={"Authorization": f"Bearer {key}"})
                assert reply.status_code in (401, 403), (route.path, key)
        admin = {"Authorization": f"Bearer {ADMIN}"}
        run = await service.client.get("/console/api/run", headers=admin)
        assert (run.status_code, run.json()["run"]) == (200, "run")
        wrong = await service.client.get("/console/api/groups?step=x", headers=admin)
        assert wrong.status_code == 400
        missing = await service.client.get("/console/api/session?name=none", headers=admin)
        assert missing.status_code == 404
