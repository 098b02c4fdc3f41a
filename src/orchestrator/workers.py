"""What takes long, in processes of its own: `await run_in_worker(function, *args, timeout_s=5)`.

    environment --run_in_worker--> Workers --one call at a time--> a process: `python -m orchestrator.workers`
                                      |
                                      +-- over its limit, dead, no longer wanted: killed; the next call starts another

The orchestrator plays thousands of rollouts on one thread: whatever computes there for more than a few milliseconds
holds all of them up (`perf/event_loop_lag`), and can not be stopped. In a worker it can: a process that exceeds its
limit is killed, and its caller gets a WorkerTimeout.

The function and its arguments are pickled, so it is one that a module has by name; what it returns, or raises, comes
back. The limit counts from when the process has imported that module and is about to call it. To wait for a free
process does not count, except for the limit of the rollout.

Of the environment it gets `PASSED_ON` alone: no API key and no token, of Ray's or of anyone's, reaches code that grades
what a model wrote. That is no sandbox: it can read all that the user can.

A process ends with its caller: the orchestrator closes all of them, Linux kills them when it dies, and elsewhere they
find the end of the socket.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

START_S = 60.0
"""For a process to start, and to import what a function needs."""
END_S = 10.0
MEMORY_BYTES = 4 * 2**30
"""What a worker may allocate; beyond it Python raises MemoryError there."""
PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_CACHE_HOME"),
    *("PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "*_NUM_THREADS"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Patterns of the environment variables that a process gets: to find programs, modules, models and the network."""
PR_SET_PDEATHSIG = 1
HEADER = struct.Struct("!Q")


class WorkerTimeout(Exception):
    """A call exceeded its limit; its process was killed."""


class WorkerDied(Exception):
    """The process of a call ended in the middle of it."""


class Workers:
    """At most `size` processes, started when they are needed. Belongs to one event loop."""

    def __init__(self, size: int) -> None:
        self._places = asyncio.Semaphore(size)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()

    async def run(self, function: Callable[..., T], *args: Any, timeout_s: float) -> T:
        """What `function(*args)` returns. Raises what it raises, WorkerTimeout, and WorkerDied."""
        request = pickle.dumps((function.__module__, function.__qualname__, args))
        async with self._places:
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                succeeded, value = await worker.call(
                    request, f"{function.__module__}.{function.__qualname__}", timeout_s
                )
            except BaseException:  # also cancelled: nobody waits for the answer any more
                self._all.discard(worker)
                await worker.kill()
                raise
            self._idle.append(worker)
        if not succeeded:
            raise value
        return value

    async def _start(self) -> Worker:
        worker = await Worker.start()
        self._all.add(worker)
        return worker

    async def close(self) -> None:
        """Ends all processes; calls under way raise WorkerDied."""
        workers, self._all = self._all, set()
        self._idle.clear()
        await asyncio.gather(*(worker.kill() for worker in workers))


class Worker:
    """One process, and the socket to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls) -> Worker:
        """A process that waits for its first call."""
        ours, theirs = socket.socketpair()
        process = _process(theirs)
        return cls(process, *await asyncio.open_connection(sock=ours))

    async def call(self, request: bytes, name: str, timeout_s: float) -> tuple[bool, Any]:
        """Whether the function returned, and what it returned or raised."""
        self._writer.write(HEADER.pack(len(request)) + request)
        await self._receive(START_S, f"the start of a worker process for {name}")
        answer: tuple[bool, Any] = pickle.loads(await self._receive(timeout_s, f"{name} in a worker process"))
        return answer

    async def _receive(self, timeout_s: float, what: str) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                return await self._reader.readexactly(size)
        except TimeoutError:
            raise WorkerTimeout(f"{what} took longer than {timeout_s:g} s; the process was killed") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerDied(f"{what} did not end: the process died") from None

    async def kill(self) -> None:
        """Ends the process, and waits until it is gone."""
        self._writer.close()
        self._process.kill()
        await asyncio.to_thread(self._process.wait, END_S)


def _process(connection: socket.socket) -> subprocess.Popen[bytes]:
    """A process that serves `connection`, which is closed here. It finds modules where this one does. Started on the
    thread of the event loop, with which it ends on Linux."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    with connection:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator.workers", str(connection.fileno()), str(os.getpid())],
            pass_fds=[connection.fileno()],
            env=_passed_on(os.environ) | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
        )


def _passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if any(fnmatchcase(name, pattern) for pattern in PASSED_ON)}


_current: Workers | None = None


@asynccontextmanager
async def workers(size: int) -> AsyncIterator[None]:
    """Within the block `run_in_worker` has `size` processes. A run has them from start to end."""
    open_workers(size)
    try:
        yield
    finally:
        await close_workers()


def open_workers(size: int) -> None:
    """From here on `run_in_worker` has `size` processes."""
    global _current
    _current = Workers(size)


async def close_workers() -> None:
    """Ends them."""
    global _current
    ending, _current = _current, None
    if ending:
        await ending.close()


async def run_in_worker(function: Callable[..., T], *args: Any, timeout_s: float) -> T:
    """What `function(*args)` returns, computed in another process for at most `timeout_s` seconds.

    Raises what the function raises, WorkerTimeout when it takes longer, WorkerDied when its process ends by itself.
    """
    if _current is None:
        raise RuntimeError(
            "run_in_worker outside a run: write `async with orchestrator.workers.workers(2): ...` around it"
        )
    return await _current.run(function, *args, timeout_s=timeout_s)


# ---- the process


def serve(connection: socket.socket) -> None:
    """Answers calls, one after the other, until the socket ends."""
    with connection, connection.makefile("rwb") as stream:
        while header := stream.read(HEADER.size):
            found, call = _caught(_load, stream.read(HEADER.unpack(header)[0]))
            _send(stream, b"")
            _send(stream, _pickled(*(_caught(*call) if found else (found, call))))


def _load(request: bytes) -> tuple[Any, ...]:
    """The function of a call, and its arguments."""
    module, qualified_name, args = pickle.loads(request)
    found: Any = importlib.import_module(module)
    for name in qualified_name.split("."):
        found = getattr(found, name)
    return found, *args


def _caught(function: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    """Whatever a function does, its caller is told."""
    try:
        return True, function(*args)
    except BaseException as error:
        error.add_note("in a worker process:\n" + "".join(traceback.format_exception(error)))
        return False, error


def _pickled(succeeded: bool, value: Any) -> bytes:
    """An outcome as bytes; where it does not survive that, or is no Exception, as an error with the same text."""
    try:
        answer = pickle.dumps((succeeded, value))
        if succeeded or isinstance(pickle.loads(answer)[1], Exception):
            return answer
        what = "the process was asked to end"
    except Exception as error:
        what = f"cannot be sent back: {error}"
    shown = "".join(getattr(value, "__notes__", []))
    return pickle.dumps((False, RuntimeError(f"{type(value).__name__} {value!r}: {what}. {shown}")))


def _send(stream: Any, answer: bytes) -> None:
    stream.write(HEADER.pack(len(answer)) + answer)
    stream.flush()


def die_with(parent: int) -> None:
    """On Linux this process is killed as soon as `parent` has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that
            sys.exit()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends this process in order
    die_with(int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    serve(socket.socket(fileno=int(sys.argv[1])))
