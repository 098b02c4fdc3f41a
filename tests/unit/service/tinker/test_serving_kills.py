"""A Tinker server is killed at each of its fault points: its client sees a delay only.

The client posts each request until it is accepted, and asks for each result until it is there, as the real one does.
Its model, and all that it was told, are those of a server that was never killed.
"""

import re
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tinker_posts import passing, post, sampling
from tinker_process import ServerStarter, patiently, server_starter
from tinker_support import BASE_MODEL, DEADLINE_S

ROOT = Path(__file__).parents[4]
POINTS = {
    **dict.fromkeys(("tinker.ask", "tinker.asked"), 4),
    **dict.fromkeys(("tinker.train", "tinker.trained", "tinker.told"), 5),
    **dict.fromkeys(("tinker.save.kept", "tinker.begun"), 1),
    **dict.fromkeys(("tinker.commit", "tinker.commit.written", "tinker.commit.told"), 2),
    **dict.fromkeys(("tinker.sampled", "tinker.restore"), 2),
}
"""Every fault point, and the passage at which the server is killed."""
AT_START = ("tinker.begun", "tinker.restore")
"""Those of interest where a server starts after another one was killed."""


def test_every_fault_point_is_tried() -> None:
    points = set[str]()
    for file in (ROOT / "src/service/tinker").glob("*.py"):
        points |= set(re.findall(r'fault_point\("([\w.]+)"\)', file.read_text()))
    assert points == set(POINTS)


@pytest.fixture(scope="module")
def starter() -> Iterator[ServerStarter]:
    with server_starter() as starter:
        yield starter


@pytest.fixture(scope="module")
def expected(starter: ServerStarter, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a client is told by a server that is not killed."""
    return played(starter, tmp_path_factory.mktemp("whole"), {})


class PatientClient:
    """Posts and asks until there is an answer. It numbers as the real client does."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.results: list[Any] = []
        """All results, in the order of the requests."""

    def post(self, path: str, body: Any) -> httpx.Response:
        while True:
            answer: httpx.Response = patiently(partial(post, self._url, path, body))
            if answer.status_code not in (408, 503):
                return answer

    def ask(self, path: str, body: Any, *, twice: bool = False) -> str:
        """Posts a request, `twice` as after an answer that was lost; returns the id of its promise."""
        ids = {self.post(path, body).json()["request_id"] for _ in range(1 + twice)}
        assert len(ids) == 1, "a repeated post has the same promise"
        return str(ids.pop())

    def result(self, request_id: str) -> Any:
        answer = self.post("retrieve_future", {"request_id": request_id})
        assert answer.status_code == 200, answer.text
        content = answer.json() if answer.headers["content-type"] == "application/json" else answer.content
        self.results.append(content)
        return content


def play(url: str) -> list[Any]:
    """Trains for four steps, the parts of each batch in another order, with samples of each step's weights, and a
    state; returns all that was told, and the last state."""
    client = PatientClient(url)
    session = client.post("create_session", {"sdk_version": "0.38.0"}).json()["session_id"]
    request = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL}
    model = client.result(client.ask("create_model", request, twice=True))["model_id"]
    seq = 0
    for step in range(4):
        parts = [client.ask("forward_backward", passing(model, seq + n), twice=n == 2) for n in (2, 1)]
        body = {"model_id": model, "seq_id": seq + 3, "adam_params": {"learning_rate": 0.1}}
        parts.append(client.ask("optim_step", body, twice=True))
        sampling_weights = {"model_id": model, "seq_id": seq + 4, "sampling_session_seq_id": step, "kind": "snapshot"}
        parts.append(client.ask("save_weights_for_sampler", sampling_weights))
        for request_id in parts:
            client.result(request_id)
        sampler = client.results[-1]["sampling_session_id"]
        samples = [client.ask("asample", sampling(sampler, n), twice=True) for n in range(3)]
        for request_id in samples:
            client.result(request_id)
        state = {"model_id": model, "seq_id": seq + 5, "path": f"s{step}"}
        client.result(client.ask("save_weights", state))
        seq += 5
    session_free = [repr(result).replace(session, "SESSION") for result in client.results]
    assert client.post(f"sessions/{session}/finish", {}).status_code == 204
    return session_free


def played(
    starter: ServerStarter, directory: Path, environ: dict[str, str], first: dict[str, str] | None = None
) -> list[Any]:
    """Plays against a server that is started again whenever it ends. The first one has `first` beside
    `environ`."""
    port = free_port()
    settings = {"COMMIT_S": "0.0001", **environ}
    server = starter.start(directory, port, {**settings, **(first or {})})
    outcomes: list[Any] = []
    playing = threading.Thread(target=lambda: outcomes.append(play(f"http://127.0.0.1:{port}")), daemon=True)
    playing.start()
    try:
        until = time.monotonic() + 3 * DEADLINE_S
        while playing.is_alive():
            assert time.monotonic() < until, "the client waits for something that does not come"
            if not server.lives:
                server = starter.start(directory, port, settings)
            playing.join(0.01)
    finally:
        server.kill()
    (outcome,) = outcomes
    state = (next((directory / "runs").glob("*/weights/s3")) / "state.bin").read_bytes()
    return [*outcome, np.frombuffer(state).tolist()]


def free_port() -> int:
    """Returns a port that was free a moment ago: a server that is started again has to have the same one."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_point(point: str, starter: ServerStarter, tmp_path: Path, expected: list[Any]) -> None:
    once, directory = tmp_path / "once", tmp_path / "served"
    once.mkdir()
    directory.mkdir()
    fault, first = f"{point}@{POINTS[point]}=kill", {}
    environ = {"TRIREME_FAULTS": fault, "TRIREME_FAULT_ONCE": str(once)}
    if point in AT_START:
        first = {"TRIREME_FAULTS": "tinker.trained@13=kill"}
    if point == "tinker.restore":  # a server that has saved has little to restore
        environ["COMMIT_S"] = "60"
    assert played(starter, directory, environ, first=first) == expected
    assert fault in {path.name for path in once.iterdir()}, "it was killed there"


@pytest.mark.parametrize("faults", ["test.optim_step@2=lost", "test.sample@5=lost", "test.optim_step@1=lost"])
def test_a_room_is_lost(faults: str, starter: ServerStarter, tmp_path: Path, expected: list[Any]) -> None:
    """The command starts the rooms again, without an end of the server."""
    once, directory = tmp_path / "once", tmp_path / "served"
    once.mkdir()
    directory.mkdir()
    commit_s = "60" if faults.startswith("test.optim_step@2") else "0.0001"
    environ = {"TRIREME_FAULTS": faults, "TRIREME_FAULT_ONCE": str(once), "COMMIT_S": commit_s}
    assert played(starter, directory, environ) == expected
    assert [path.name for path in once.iterdir()] == [faults]
    assert len(list(directory.glob("started-*"))) == 1
