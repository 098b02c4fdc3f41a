"""Tinker servers in processes of their own, which can be killed: the command's own function on rooms that are small.

Run as a program it imports everything once, and forks a server for each line that it reads: a directory and environment
variables, in JSON. It answers with the server's process id.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from waiting import wait_for

START_S = 60.0
ADDRESS = "address"
"""The file in which a server writes its address."""


def main() -> None:
    from tinker_support import serve_in_process

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets those that ended
    for line in sys.stdin:
        request = json.loads(line)
        if child := os.fork():
            print(child, flush=True)
            continue
        os.environ.update(request["environ"])
        serve_in_process(Path(request["directory"]), request["port"])
        os._exit(0)


@dataclass
class ServerProcess:
    pid: int
    url: str

    def kill(self) -> None:
        """Kills it, if it still runs, and waits for that."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        wait_for(lambda: not self.lives, "the end of the server")

    @property
    def lives(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()


@dataclass
class ServerStarter:
    process: subprocess.Popen[str]

    def start(self, directory: Path, port: int = 0, environ: Mapping[str, str] | None = None) -> ServerProcess:
        """Starts a server, and waits until it answers, or has ended."""
        request = {"directory": str(directory), "port": port, "environ": dict(environ or {})}
        assert self.process.stdin
        assert self.process.stdout
        (directory / ADDRESS).unlink(missing_ok=True)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        server = ServerProcess(int(self.process.stdout.readline()), "")
        until = time.monotonic() + START_S
        while server.lives and not server.url:
            assert time.monotonic() < until, "the server did not begin"
            with suppress(FileNotFoundError):
                server.url = (directory / ADDRESS).read_text()
            time.sleep(0.005)
        return server


@contextmanager
def server_starter() -> Iterator[ServerStarter]:
    """Has a program that starts servers; it ends with the block."""
    support = str(Path(__file__).parent)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([support, *filter(None, sys.path)])}
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            yield ServerStarter(process)
        finally:
            assert process.stdin
            process.stdin.close()


def patiently(ask: Any, seconds: float = START_S) -> Any:
    """Returns what `ask` returns, which is tried again while no server answers, as the client does."""
    until = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except httpx.TransportError:
            assert time.monotonic() < until, "no server answered"
            time.sleep(0.02)


if __name__ == "__main__":
    main()
