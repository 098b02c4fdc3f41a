"""Runs slow functions in processes of their own: `await run_in_worker(function, *args, timeout_s=5)`.

    environment --run_in_worker--> Workers --one call at a time--> a process: `python -m orchestrator.workers`
                                      |
                                      +-- over its limit, dead, or cancelled: killed; the next call starts another

The orchestrator plays thousands of rollouts on one thread: a function that computes there for more than a few
milliseconds delays all of them (`perf/event_loop_lag`), and cannot be stopped. In a worker it can: a process that
exceeds its limit is killed, and its caller gets a WorkerTimeout.

The function and its arguments are pickled, so a module must hold the function by name; its result or exception comes
back. The limit counts from when the process has imported that module and is about to call the function. Waiting for a
free process counts only for the limit of the rollout.

A process gets only the environment variables in `PASSED_ON`: no API key and no token reaches code that grades what a
model wrote. That is no sandbox: it can read all that the user can.

A process ends with its caller: the orchestrator closes all of them, Linux kills them when it dies, and on other systems
they see the end of the socket.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

START_S = 60.0
"""Limit for a process to start, and to import the function."""
END_S = 10.0
MEMORY_BYTES = 4 * 2**30
"""Most memory that a worker may allocate; beyond it Python raises MemoryError there."""
PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_CACHE_HOME"),
    *("PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "*_NUM_THREADS"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Patterns of the environment variables that a process gets, to find programs, modules, models and the network."""
PR_SET_PDEATHSIG = 1
HEADER = struct.Struct("!Q")


class WorkerTimeout(Exception):
    """A call exceeded its limit; its process was killed."""


class WorkerDied(Exception):
    """The process of a call ended before the call."""


class Workers:
    """Holds at most `size` processes, started when they are needed. Belongs to one event loop."""

    def __init__(self, size: int) -> None:
        self._free = asyncio.Semaphore(size)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()

    async def run(self, function: Callable[..., T], *args: Any, timeout_s: float) -> T:
        """Returns `function(*args)`. Raises what it raises, WorkerTimeout, and WorkerDied."""
        name = f"{function.__module__}.{function.__qualname__}"
        request = pickle.dumps((function, *args))
        async with self._free:
            worker = self._idle.pop() if self._idle else await Worker.start()
            self._all.add(worker)
            try:
                succeeded, value = await worker.call(request, name, timeout_s)
            except BaseException:  # also cancelled: the answer is not awaited any more
                self._all.discard(worker)
                await worker.kill()
                raise
            self._idle.append(worker)
        if not succeeded:
            raise value
        return value

    async def close(self) -> None:
        """Ends all processes; running calls raise WorkerDied."""
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
        """Starts a process that waits for its first call."""
        ours, theirs = socket.socketpair()
        process = _process(theirs)
        return cls(process, *await asyncio.open_connection(sock=ours))

    async def call(self, request: bytes, name: str, timeout_s: float) -> tuple[bool, Any]:
        """Returns (True, the function's result), or (False, the exception that it raised)."""
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
        """Kills the process and waits for its end."""
        self._writer.close()
        self._process.kill()
        await asyncio.to_thread(self._process.wait, END_S)


def _process(connection: socket.socket) -> subprocess.Popen[bytes]:
    """Starts a process that serves `connection`, which is closed here. It finds modules where this one does, and on
    Linux ends with the thread of the event loop."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    with connection:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator.workers", str(connection.fileno()), str(os.getpid())],
            pass_fds=[connection.fileno()],
            env=passed_on() | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
        )


def passed_on(more: Sequence[str] = ()) -> dict[str, str]:
    """Returns the environment variables for code that grades, or is, what a model wrote: those of PASSED_ON, and of
    `more` patterns."""
    patterns = (*PASSED_ON, *more)
    return {name: value for name, value in os.environ.items() if any(fnmatchcase(name, p) for p in patterns)}


_current: Workers | None = None


@asynccontextmanager
async def workers(size: int) -> AsyncIterator[None]:
    """Gives `run_in_worker` `size` processes within the block. A run has them from start to end."""
    global _current
    _current = started = Workers(size)
    try:
        yield
    finally:
        _current = None
        await started.close()


async def run_in_worker(function: Callable[..., T], *args: Any, timeout_s: float) -> T:
    """Returns `function(*args)`, computed in another process for at most `timeout_s` seconds.

    Raises what the function raises, WorkerTimeout when it takes longer, WorkerDied when its process ends by itself.
    """
    if _current is None:
        raise RuntimeError(
            "run_in_worker outside a run: write `async with orchestrator.workers.workers(2): ...` around it"
        )
    return await _current.run(function, *args, timeout_s=timeout_s)


# ---- the process


def main(connection_fd: int, parent: int) -> None:
    """Answers calls, one after the other, until the socket ends, or on Linux until process `parent` has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends this process in order
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that
            sys.exit()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    with socket.socket(fileno=connection_fd) as connection, connection.makefile("rwb") as stream:
        while header := stream.read(HEADER.size):
            found, call = _caught(pickle.loads, stream.read(HEADER.unpack(header)[0]))  # imports the function
            _send(stream, b"")
            _send(stream, _pickled(*(_caught(*call) if found else (found, call))))


def _caught(function: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    """Returns (True, the result), or (False, the exception), for the caller in the other process."""
    try:
        return True, function(*args)
    except BaseException as error:
        error.add_note("in a worker process:\n" + "".join(traceback.format_exception(error)))
        return False, error


def _pickled(succeeded: bool, value: Any) -> bytes:
    """Returns an outcome as bytes; one that cannot be pickled, or is no Exception, as an error with the same text."""
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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
