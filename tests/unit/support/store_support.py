"""Object storage that enforces conditions: moto's server in this process, and runs that are kept there."""

from __future__ import annotations

import http.client
import json
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoint_support import append_rows, checkpoint
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from trireme.checkpoint.bucket import Bucket
from trireme.checkpoint.rows import ROW_FILES
from trireme.checkpoint.store import HEAD, CheckpointStore
from trireme.checkpoint.stored_run import StoredRun
from trireme.config import Config
from trireme.config.load import load
from trireme.process.faults import InjectedFault
from trireme.run.mirror import Mirror
from trireme.run.remote import RemoteRun
from trireme.run.rundir import RunDir

Answer = Callable[[dict[str, Any], Callable[..., Any]], Any]
FIXED = {"model": {"hidden_size": 64}, "loss": {"loss_fn": "ppo"}}


@dataclass
class Double:
    """A server of S3 on this machine, and what it does to requests."""

    url: str
    environment: dict[str, str]
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    ignores: tuple[str, ...] = ()
    """Conditions that it does not look at, as HTTP_IF_MATCH."""
    refuses: Callable[[str], bool] = lambda _request: False
    """Says of a method and path whether it answers 403."""
    busy: bool = False
    """It answers 503 to everything."""


@contextmanager
def double(host: str = "127.0.0.1", port: int = 0, bucket: str = "") -> Iterator[Double]:
    """Runs the server with one bucket, of a name of its own unless one is given; port 0 is any free one."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = DomainDispatcherApplication(create_backend_app)
    doubles: list[Double] = []

    def filtered(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        for server in doubles:
            server.requests.append(request)
            if server.busy:
                start_response("503 Service Unavailable", [("Content-Length", "0")])
                return [b""]
            if server.refuses(request):
                start_response("403 Forbidden", [("Content-Length", "0")])
                return [b""]
            for condition in server.ignores:
                environ.pop(condition, None)
        return app(environ, start_response)

    server = make_server(host, port, filtered, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        connection = http.client.HTTPConnection(host, server.server_port, timeout=30)
        bucket = bucket or f"runs-{secrets.token_hex(4)}"
        connection.request("PUT", f"/{bucket}")
        assert connection.getresponse().status == 200
        environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{server.server_port}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
        }
        doubles.append(Double(f"s3://{bucket}/group", environment))
        yield doubles[0]
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def config(url: str, local: Path, *flags: str) -> Config:
    required = ["--model.name", "./assets/tiny", "--env.id", "my.envs:Sort", "--orchestrator.batch-size", "2"]
    place = ["--run.output-dir", url, "--run.local-dir", str(local)]
    named = [] if "--run.name" in flags else ["--run.name", "r"]
    return load([*required, "--inference.sampling.max-tokens", "3", *place, *named, *flags], {}).config


def stored(url: str, name: str = "r") -> StoredRun:
    body = Bucket(f"{url}/{name}").read(HEAD)
    assert body
    return StoredRun.from_json(body[0])


def objects(url: str) -> dict[str, str | None]:
    """Returns {key: tag} of all objects below the URL."""
    bucket = Bucket(url)
    return {key: bucket.tag(key) for key in bucket.keys("r")}


class Driver:
    """A start of the run `r` on the machine whose disk is `local`: the run directory, HEAD taken over, and no thread:
    `mirror.bring` is called by the test."""

    def __init__(self, url: str, local: Path, *flags: str) -> None:
        self.lines: list[str] = []
        self.config = config(url, local, *flags)
        self.remote = RemoteRun(url, self.config, self.lines.append)
        self.run = RunDir.open(self.config, FIXED)
        self.notes: list[str] = []
        self.mirror: Mirror | None = None

    def claim(self) -> Driver:
        self.mirror = self.remote.claim(self.run, self.notes.append)
        self.run.checkout()
        return self

    def step(self, number: int, saved: bool = False) -> None:
        """Writes the rows of a step; then its checkpoint."""
        for name in ROW_FILES:
            append_rows(self.run.root / name, [{"step": number - 1, "attempt": self.run.start.attempt}])
        records = self.run.root / "rollouts"
        records.mkdir(exist_ok=True)
        (records / f"step_{number - 1:06d}.jsonl").write_text(json.dumps({"of": number - 1}) + "\n")
        if saved:
            checkpoint(CheckpointStore(self.run.root), number, self.run.start.attempt, secrets.token_hex(4))

    def bring(self) -> None:
        while not self.mirror.bring():
            pass

    def die(self) -> None:
        self.run.lock.close()


@contextmanager
def injected(point: str) -> Iterator[None]:
    """Has the fault at a point (`name@passage`) raised, which ends the block."""
    name, _, passage = point.partition("@")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRIREME_FAULTS", f"{name}@{passage or 1}=raise")
        patched.setattr("trireme.process.faults._passed", Counter())
        with pytest.raises(InjectedFault):
            yield


def rows(root: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (root / ROW_FILES[0]).read_text().splitlines()]


def everything(root: Path) -> dict[str, bytes]:
    """Returns {path: contents} of a directory."""
    return {
        os.path.join(directory, name): Path(directory, name).read_bytes()
        for directory, _, names in os.walk(root)
        for name in names
    }
