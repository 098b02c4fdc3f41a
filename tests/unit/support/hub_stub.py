"""A hub of models on loopback that speaks the part of the hub's HTTP that uploads use, by git-lfs and by Xet. Xet's
storage is a directory, for which hf_xet has a client of its own: nothing speaks the HTTP of a storage."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

TOKEN = "hf_" + "aB3" * 12


@dataclass
class StubHub:
    """The state of the hub, and what it was sent."""

    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """{ORG/NAME: {file: contents}}; of a file that went by Xet, its SHA-256."""
    private: dict[str, bool] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256, also those of a push that was interrupted."""
    puts: list[str] = field(default_factory=list)
    """The SHA-256 of each large file that was sent by git-lfs."""
    storage: str = ""
    """The address of the storage of large files that go by Xet."""
    hidden: set[str] = field(default_factory=set)
    """Repositories that exist and that the token may not see."""
    writers: set[str] = field(default_factory=lambda: {"me"})
    """Users and organizations whose repositories the token may write."""
    gone_after_puts: int | None = None
    """After so many `puts` the hub closes each connection without an answer; None: never."""
    loses_commits: bool = False
    """True: the hub closes the connection of each commit with large files."""
    broken: bool = False
    """True: each answer is 503."""

    @property
    def gone(self) -> bool:
        return self.gone_after_puts is not None and len(self.puts) >= self.gone_after_puts


@contextmanager
def stub_hub() -> Iterator[StubHub]:
    """Serves a StubHub for the time of the block."""
    hub = StubHub()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Prints nothing."""

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def answer(self, values: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
            data = values if isinstance(values, bytes) else json.dumps(values).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def error(self, status: int, message: str, code: str = "") -> None:
            headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
            self.answer({"error": message}, status, headers)

        def handle_request(self) -> None:
            data = self.body()
            path = urlsplit(self.path).path
            with lock:
                if hub.gone:
                    self.close_connection = True
                elif hub.broken:
                    self.error(503, "the hub is being repaired")
                elif path.startswith("/objects/"):  # its address is signed, so it needs no token
                    sha = path.removeprefix("/objects/")
                    assert hashlib.sha256(data).hexdigest() == sha
                    hub.objects[sha] = data
                    hub.puts.append(sha)
                    self.answer({})
                elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self.error(401, "Invalid credentials in Authorization header")
                else:
                    self.route(path, data)

        do_GET = do_HEAD = do_POST = do_PUT = handle_request

        def route(self, path: str, data: bytes) -> None:
            parts = path.strip("/").removeprefix("api/models/").split("/")
            name = "/".join(parts[:2]).removesuffix(".git")
            files = hub.repositories.get(name)
            if path == "/api/repos/create":
                asked = json.loads(data)
                name = f"{asked['organization']}/{asked['name']}"
                if asked["organization"] not in hub.writers:
                    self.error(403, f"You don't have the rights to create a model under {asked['organization']}")
                    return
                if name in hub.hidden:
                    self.error(409, "You already created this model repo")
                    return
                hub.repositories[name] = {".gitattributes": b""}
                hub.private[name] = asked.get("visibility") == "private"
                self.answer({"url": f"{hub.address}/{name}"})
            elif path == "/api/validate-yaml":
                self.answer({"errors": [], "warnings": []})
            elif files is None:
                self.error(404, "Repository not found", "RepoNotFound")
            elif "resolve" in parts:
                file = files["/".join(parts[4:])]
                etag = hashlib.sha1(file).hexdigest()
                self.answer(file, headers={"ETag": f'"{etag}"', "X-Repo-Commit": etag})
            elif "tree" in parts:
                oid = "0" * 40
                self.answer([{"type": "file", "path": file, "size": len(files[file]), "oid": oid} for file in files])
            elif "xet-write-token" in parts:
                self.answer({"accessToken": "of-the-storage", "exp": int(time.time()) + 3600, "casUrl": hub.storage})
            elif self.command == "GET":
                self.answer({"id": name, "sha": "0" * 40, "siblings": [{"rfilename": file} for file in files]})
            elif name.split("/")[0] not in hub.writers:
                self.error(403, f"You don't have the rights to write to {name}")
            elif "preupload" in parts:
                modes = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(data)["files"]
                ]
                self.answer({"files": modes})
            elif path.endswith("/objects/batch"):
                objects = json.loads(data)["objects"]
                for about in objects:
                    if about["oid"] not in hub.objects:
                        about["actions"] = {"upload": {"href": f"{hub.address}/objects/{about['oid']}"}}
                self.answer({"transfer": "basic", "objects": objects})
            else:
                assert "commit" in parts, path
                if hub.loses_commits and b'"lfsFile"' in data:
                    self.close_connection = True
                    return
                for line in map(json.loads, data.decode().splitlines()):
                    value = line["value"]
                    if line["key"] == "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    elif line["key"] == "lfsFile":
                        files[value["path"]] = hub.objects.get(value["oid"], value["oid"].encode())
                    elif line["key"] == "deletedFile":
                        del files[value["path"]]
                self.answer({"commitUrl": f"{hub.address}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
