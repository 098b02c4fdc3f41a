"""A server in a process of its own that tells what its clients cost it, and clients that mean it no good."""

import asyncio
import multiprocessing as mp
import resource
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPResponse
from multiprocessing.connection import Connection
from pathlib import Path

from tinker_support import tinker_server

from service import ports
from trireme.process.collector import spare_collector

START_S, DEADLINE_S = 120.0, 60.0
PULSE_S = 0.002
MEGABYTE = 10**6
MOST_DATA = 4 * 10**9
"""Bytes that the server may take; beyond them it fails, and not the machine."""


@dataclass(frozen=True)
class Cost:
    """What a server used since it was last asked."""

    megabytes: float
    """By which its memory grew at most."""
    blocked_s: float
    """Seconds of the processor between two turns of its event loop, at most."""


class Pulse:
    """Measures how long an event loop is busy with one thing. It counts the processor's time: the machine may be busy
    with others."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def beat(self) -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(PULSE_S)
            self.longest_s = max(self.longest_s, time.thread_time() - before)


def _resident_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / MEGABYTE


def _serve(pipe: Connection, head_s: float) -> None:
    ports.HEAD_S = head_s
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_DATA, MOST_DATA))
    with tempfile.TemporaryDirectory() as directory, tinker_server(Path(directory)) as served:
        pulse = Pulse()
        loop = served.listener._loop
        assert loop
        asyncio.run_coroutine_threadsafe(pulse.beat(), loop)
        spare_collector()  # as `trireme serve` does
        pipe.send(int(served.url.rpartition(":")[2]))
        before = 0.0
        while pipe.recv():
            pipe.send(Cost(_resident_mb("VmHWM") - before, pulse.longest_s))
            Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on
            before = _resident_mb("VmRSS")
            pulse.longest_s = 0.0


@dataclass(frozen=True)
class Watched:
    port: int
    _pipe: Connection

    def cost(self) -> Cost:
        self._pipe.send(True)
        assert self._pipe.poll(DEADLINE_S)
        cost: Cost = self._pipe.recv()
        return cost

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)


@contextmanager
def watched_server(head_s: float = ports.HEAD_S) -> Iterator[Watched]:
    """Runs a Tinker server in a child. `head_s`: how long the head of a request may take."""
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=_serve, args=(theirs, head_s), daemon=True)
    process.start()
    try:
        assert ours.poll(START_S), f"the server did not start within {START_S:g} s"
        yield Watched(ours.recv(), ours)
        ours.send(False)
        process.join(DEADLINE_S)
    finally:
        process.kill()


def status_of(reply: bytes) -> int:
    """The status of an answer; 0: there was none."""
    return int(reply.split(b" ", 2)[1]) if reply.startswith(b"HTTP/1.1 ") else 0


def response_status(connection: socket.socket) -> int:
    """The status of one response, which is read with its whole body: head and body may come in pieces, and what is left
    of them would be taken for the next response of the connection."""
    response = HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


def read_to_the_end(connection: socket.socket) -> bytes:
    reply = b""
    with suppress(ConnectionError):
        while piece := connection.recv(65536):
            reply += piece
    return reply


def flood(connection: socket.socket, start: bytes, piece: bytes, size: int) -> int:
    """Sends pieces until there are `size` bytes of them, or the server has closed. Returns the bytes that it took."""
    sent = 0
    with suppress(ConnectionError):
        connection.sendall(start)
        while sent < size:
            connection.sendall(piece)
            sent += len(piece)
    return sent
