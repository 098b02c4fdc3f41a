"""Runs programs in containers: `python code_service.py`.

PUT /<session> starts it, POST /<session> runs a program in it, DELETE /<session> ends it.
"""

import json
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LEASE_S, RUN_S = 600, 10
LIMITS = ["--network=none", "--memory=256m", "--pids-limit=64", "--cap-drop=all", "--read-only", "--user=nobody"]


class Containers:
    def put(self, session, _body):
        start = ["podman", "run", "--detach", "--rm", f"--name={session}", *LIMITS]
        subprocess.run([*start, "python:3.12-alpine", "sleep", str(LEASE_S)], check=True)

    def post(self, session, program):
        run = ["podman", "exec", "--interactive", session, "timeout", str(RUN_S), "python", "-"]
        return subprocess.run(run, input=program, capture_output=True, text=True, timeout=2 * RUN_S).stdout[:10_000]

    def delete(self, session, _body):
        subprocess.run(["podman", "rm", "--force", "--time=0", session])


class Handler(BaseHTTPRequestHandler):
    def answer(self):
        session, size = self.path.strip("/"), int(self.headers.get("Content-Length", 0))
        if not session.isalnum() or size > 100_000:
            self.send_error(400)
            return
        result = getattr(self.server.sessions, self.command.lower())(session, self.rfile.read(size).decode())
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(result).encode())

    do_PUT = do_POST = do_DELETE = answer


def serve(port, sessions):
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.sessions = sessions
    return server


if __name__ == "__main__":
    serve(8700, Containers()).serve_forever()
